"""Two kept load tests: what became better at each load that both measured, with intervals where requests allow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from specli.bench.statistics import CONFIDENCE, Estimate
from specli.errors import ConfigError
from specli.load.figures import ROW

N_RESAMPLES = 1000
FEW = 6  # requests, below which nothing is resampled
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
    return Comparison(changes, tuple(_notes(old, new)))


def _change(old: Mapping[str, object], new: Mapping[str, object]) -> Change:
    ratios: dict[str, Estimate | None] = {}
    for name, column, level in _LATENCIES:
        ratios[name] = _latency_ratio(_column(old, column), _column(new, column), level)
    for name, key in _RATES:
        was, now = _float(old[key]), _float(new[key])
        ratios[name] = Estimate(now / was) if was and now is not None else None
    is_open, load = _load(new)
    return Change(load, is_open, ratios, (_float(old["goodput"]), _float(new["goodput"])))


def _latency_ratio(old: Sequence[float], new: Sequence[float], level: float, seed: int = 0) -> Estimate | None:
    """Old / new of a quantile, with the interval of a percentile bootstrap over requests."""
    if not old or not new:
        return None

    def quantile(values: Sequence[float]) -> Callable[[np.random.Generator], float]:
        array = np.asarray(values)
        return lambda rng: float(np.quantile(array[rng.integers(len(array), size=len(array))], level))

    was, now = (float(np.quantile(values, level)) for values in (old, new))
    if not now or not was:
        return None
    if min(len(old), len(new)) < FEW:
        return Estimate(was / now)
    rng, before, after = np.random.default_rng(seed), quantile(old), quantile(new)
    ratios = [before(rng) / max(after(rng), 1e-9) for _ in range(N_RESAMPLES)]
    low, high = np.quantile(ratios, [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return Estimate(was / now, float(low), float(high))


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


def _notes(old: Mapping[str, object], new: Mapping[str, object]) -> Iterator[str]:
    for name in _NOTED:
        was, now = (_plain(document.get(name)) for document in (old, new))
        if was != now:
            yield f"{name} was {was} and is {now}"
    before, after = (_mapping(document.get("settings")) for document in (old, new))
    for name in after:
        if before.get(name) != after.get(name):
            yield f"{name} was {_plain(before.get(name))} and is {_plain(after.get(name))}"


def _plain(value: object) -> object:
    """The machine by its processor."""
    return value.get("cpu") if isinstance(value, Mapping) else value


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}
