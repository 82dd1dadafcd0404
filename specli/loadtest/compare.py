"""Two kept load tests: what became better at each load that both measured, with intervals where requests allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from specli.bench.statistics import N_RESAMPLES, Array, Estimate, percentile_interval
from specli.errors import ConfigError
from specli.loadtest.figures import ROW, quantile_interval

# What is compared: name, column of a request (None: a figure of the step), quantile.
_LATENCIES = (("ttft_p95", "ttft_ms", 0.95), ("tpot_p50", "tpot_ms", 0.50), ("e2e_p95", "e2e_ms", 0.95))
_RATES = (("output_tok_s", "output_tok_s"), ("requests_s", "requests_s"))
_NOTED = ("url", "model", "server", "version", "specli", "machine")


@dataclass(frozen=True, slots=True)
class Change:
    """One load of both files. Ratios are better / worse: above 1 the new one is faster, or does more.

    ``ratios``: by name, None where a file lacks the figure.
    """

    load: float
    is_open: bool
    ratios: Mapping[str, Estimate | None]
    goodput: tuple[float | None, float | None]  # old, new

    def as_dict(self) -> dict[str, object]:
        """JSON types only."""
        return {
            "concurrency": None if self.is_open else int(self.load),
            "rate": self.load if self.is_open else None,
            **{f"{name}_ratio": None if r is None else asdict(r) for name, r in self.ratios.items()},
            "goodput_old": self.goodput[0],
            "goodput_new": self.goodput[1],
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """``changes`` of the loads that both files have; ``notes`` on what else differs."""

    changes: tuple[Change, ...]
    notes: tuple[str, ...]


def compare(old: Mapping[str, object], new: Mapping[str, object]) -> Comparison:
    """Compare two loaded files. Raises ``ConfigError`` when no load is in both, or a file is damaged."""
    try:
        before = {_load(step): step for step in _steps(old)}
        both = [(before[_load(step)], step) for step in _steps(new) if _load(step) in before]
        changes = tuple(_change(*steps) for steps in both)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"--compare got a file that is damaged ({error!r}); measure again") from error
    if not changes:
        raise ConfigError("--compare got load tests without a common load (concurrency, rate); nothing to compare")
    notes = (*_notes(old, new), *_only_in_one(old, new), *(note for steps in both for note in _unfinished(*steps)))
    return Comparison(changes, notes)


def _change(old: Mapping[str, object], new: Mapping[str, object]) -> Change:
    ratios: dict[str, Estimate | None] = {}
    for name, column, level in _LATENCIES:
        ratios[name] = _latency_ratio(_column(old, column), _column(new, column), level)
    for name, key in _RATES:
        was, now = (_rate(step, key) for step in (old, new))
        ratios[name] = Estimate(now / was) if was and now is not None else None
    is_open, load = _load(new)
    return Change(load, is_open, ratios, (_float(old["goodput"]), _float(new["goodput"])))


def _latency_ratio(old: Sequence[float], new: Sequence[float], level: float, seed: int = 0) -> Estimate | None:
    """Old / new of a quantile, with its interval by resampling the requests of each file.

    No interval below 6 requests for a median and 72 for a p95, where a quantile of one file has none either
    (``quantile_interval``): all of fewer requests lie below the true p95 in more than 2.5% of files (0.95**71 = 2.6%),
    and what is resampled never leaves their range.
    """
    if not old or not new:
        return None
    was, now = (float(np.quantile(values, level)) for values in (old, new))
    if not now or not was:
        return None
    if any(quantile_interval(sorted(values), level) is None for values in (old, new)):
        return Estimate(was / now)
    rng = np.random.default_rng(seed)
    before, after = (_resampled(values, level, rng) for values in (old, new))
    return Estimate(was / now, *percentile_interval(before / np.maximum(after, 1e-9), min(len(old), len(new))))


def _resampled(values: Sequence[float], level: float, rng: np.random.Generator) -> Array:
    """A quantile of each of ``N_RESAMPLES`` resamples: ``(N_RESAMPLES,)``.

    Without drawing them: the k-th smallest of n places drawn is that of n uniform variables, a beta variable.
    """
    ordered: Array = np.sort(np.asarray(values, dtype=np.float64))
    n = len(ordered)
    k = math.ceil(level * n)
    places: Array = n * rng.beta(k, n - k + 1, size=N_RESAMPLES)
    drawn: Array = ordered[places.astype(int)]
    return drawn


def _column(step: Mapping[str, object], name: str) -> list[float]:
    """A column of the requests that ended well."""
    rows, at, error = step["requests"], ROW.index(name), ROW.index("error")
    if not isinstance(rows, list):
        raise TypeError("requests are no list")
    return [float(row[at]) for row in rows if row[error] is None and row[at] is not None]


def _steps(document: Mapping[str, object]) -> list[Mapping[str, object]]:
    found = document["steps"]
    return [step for step in found if isinstance(step, Mapping)] if isinstance(found, list) else []


def _load(step: Mapping[str, object]) -> tuple[bool, float]:
    rate = step["rate"]
    return (True, float(str(rate))) if rate is not None else (False, float(str(step["concurrency"])))


def _float(value: object) -> float | None:
    return None if value is None else float(str(value))


def _rate(step: Mapping[str, object], key: str) -> float | None:
    """Per second. Of a load that was cut short no tokens: earlier versions counted without the answers under way."""
    return None if key == "output_tok_s" and step.get("unfinished_requests") else _float(step[key])


def _notes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for name in _NOTED:
        was, now = (_plain(document.get(name)) for document in (old, new))
        if was != now:
            yield f"{name} was {was} and is {now}"
    before, after = (_mapping(document.get("settings")) for document in (old, new))
    for name in after:
        if before.get(name) != after.get(name):
            yield f"{name} was {_plain(before.get(name))} and is {_plain(after.get(name))}"


def _only_in_one(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    """Loads that only one file measured."""
    before, after = ([_load(step) for step in _steps(document)] for document in (old, new))
    for name, own, other in (("old", before, after), ("new", after, before)):
        for load in own:
            if load not in other:
                yield f"{_load_words(*load)} is only in the {name} one"


def _load_words(is_open: bool, load: float) -> str:
    return f"{load:g} requests/s" if is_open else f"concurrency {load:g}"


def _unfinished(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for name, step in (("old", old), ("new", new)):
        n = step.get("unfinished_requests")
        if n:
            words = _load_words(*_load(new))
            left = f"{words}: the {name} one left {n} requests unfinished"
            yield f"{left}; its latencies are of the faster ones, its tokens/s are unknown"


def _plain(value: object) -> object:
    """The machine by its processor."""
    return value.get("cpu") if isinstance(value, Mapping) else value


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
