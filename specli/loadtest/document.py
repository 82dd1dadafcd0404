"""A load test as JSON: what -o json prints and --save keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specli.bench import files
from specli.errors import ConfigError
from specli.loadtest.figures import ROW, Figures, Latency, few
from specli.loadtest.search import Found

FORMAT = 1
KIND = "load test"


@dataclass(frozen=True)
class LoadReport:
    """A finished load test. ``circumstances``: date, version, server, machine, settings; JSON types only.

    ``ending``: done, time (the budget's) or interrupted. ``found`` of --find-sla.
    """

    circumstances: Mapping[str, object]
    steps: Sequence[Figures]
    ending: str
    n_planned: int | None  # steps; None: a search
    elapsed_s: float
    found: Found | None = None
    bounds_words: str = ""  # "TTFT 500 ms and TPOT 50 ms"; empty: no bounds
    notes: Sequence[str] = ()

    @property
    def words(self) -> list[str]:
        """What it comes to, a sentence a line; nothing where no bounds were given."""
        if not self.bounds_words:
            return []
        steps = sorted(self.steps, key=lambda step: step.load)
        judged = [step for step in steps if step.is_inside is not None]
        if not judged:
            return [f"nobody can tell what is inside {self.bounds_words}: {_why_unknown(steps)}"]
        inside = [step for step in judged if step.is_inside]
        if not inside:
            least = judged[0]
            share = f"{100 * (least.goodput or 0.0):.0f}% of requests within {self.bounds_words}"
            which = "no load" if len(judged) == len(steps) else "no load that can be judged"
            return [f"{which} is inside the bounds: {load_words(least)} has {share}"]
        best = inside[-1]
        kind = "highest load" if self.found is not None else "highest measured load"
        share = f"{100 * (best.goodput or 0.0):.0f}% of requests within {self.bounds_words}"
        lines = [f"{kind} inside the bounds: {load_words(best)} ({share}; {rate_words(best)})"]
        if self.found is not None and self.found.outside is None and self.ending == "done":
            flag = "--rate" if best.is_open else "--concurrency"
            lines.append(f"it is the highest that was looked at; {flag} with a higher end looks further")
        return lines

    @property
    def remarks(self) -> list[str]:
        """What a reader should know of the figures."""
        lines = []
        if self.ending != "done":
            why = {"time": "the time was up", "interrupted": "it was interrupted"}[self.ending]
            planned = "" if self.n_planned is None else f" of {self.n_planned}"
            lines.append(f"{len(self.steps)}{planned} loads were begun when {why}; figures are of what was done")
        for step in self.steps:
            if step.n_unfinished:
                doubt = ", and so is whether it is inside the bounds" if self.bounds_words else ""
                which = f"{load_words(step)}: {step.n_unfinished} of {step.n_measured + step.n_unfinished} requests"
                faster = "latencies are of the others, the faster ones; tokens/s are unknown"
                lines.append(f"{which} were unfinished; {faster}{doubt}")
            elif step.n_cut:
                lines.append(
                    f"{load_words(step)}: {step.n_cut} requests of the warm-up were cut off; tokens/s are unknown"
                )
            n = sum(step.errors.values())
            if n:
                kinds = ", ".join(f"{kind} ({count})" for kind, count in step.errors.items())
                kind, said = next(((k, step.said[k]) for k in step.errors if step.said.get(k)), ("", ""))
                lines.append(f"{load_words(step)}: {n} failed: {kinds}{f'; {kind}: {said}' if said else ''}")
            if step.n_measured and not step.has_majority:
                lines.append(f"{load_words(step)}: only {step.n_ok} of {step.n_measured} requests succeeded")
        fewest = few(latency for step in self.steps for latency in (step.ttft_ms, step.tpot_ms))
        if fewest is not None:
            lines.append(f"a p99 of fewer than 100 requests (here from {fewest} on) is little more than the slowest")
        return [*lines, *self.notes]

    @property
    def failure(self) -> str | None:
        """Why these are no figures of a server that works, in one line: most requests failed, at every load."""
        if any(step.has_majority for step in self.steps):
            return None
        best = max(self.steps, key=lambda step: step.n_ok / max(1, step.n_measured))
        kind, n = next(iter(best.errors.items()), ("", 0))
        said = f" ({best.said[kind]})" if best.said.get(kind) else ""
        why = f"; {n} gave {kind}{said}" if n else ""
        return (
            f"--url {self.circumstances.get('url')}: at no load did half of the requests succeed; at best "
            f"{best.n_ok} of {best.n_measured}, at {load_words(best)}{why}"
        )

    def as_dict(self) -> dict[str, object]:
        """JSON types only; undefined figures are None."""
        return {
            "format": FORMAT,
            "kind": KIND,
            **self.circumstances,
            "ended": self.ending,
            "elapsed_s": self.elapsed_s,
            "find_sla": None if self.found is None else {"best": self.found.best, "outside": self.found.outside},
            "request_columns": list(ROW),
            "steps": [{**step_dict(step), "requests": [list(row) for row in step.rows]} for step in self.steps],
            "verdict": self.words,
            "notes": self.remarks,
        }

    def lines(self) -> Iterator[dict[str, object]]:
        """One object per load, each with the circumstances."""
        for step in self.steps:
            yield {**self.circumstances, **step_dict(step)}


def load_words(step: Figures) -> str:
    """A load for people."""
    return f"{step.load:g} requests/s" if step.is_open else f"concurrency {step.load:g}"


def _why_unknown(steps: Sequence[Figures]) -> str:
    """Why no load can be judged."""
    if any(step.n_unfinished for step in steps):
        return "requests were unfinished"
    return "the server gives no usage" if any(step.n_measured for step in steps) else "nothing was measured"


def rate_words(step: Figures) -> str:
    """What a load brings."""
    parts = [(step.output_tok_s, "output tokens/s"), (step.requests_s, "requests/s")]
    return ", ".join(f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}" for value, unit in parts if value)


def step_dict(step: Figures) -> dict[str, object]:
    """All figures of a load; units in the names, shares as fractions."""
    return {
        "concurrency": None if step.is_open else int(step.load),
        "rate": step.load if step.is_open else None,
        "measured_requests": step.n_measured,
        "good_requests": step.n_ok,
        "unfinished_requests": step.n_unfinished,
        "errors": dict(step.errors),
        "window_s": step.window_s,
        "mean_in_flight": step.in_flight,
        "ttft_ms": _latency(step.ttft_ms),
        "tpot_ms": _latency(step.tpot_ms),
        "itl_burst_ms": _latency(step.itl_burst_ms),
        "itl_token_ms": _latency(step.itl_token_ms),
        "e2e_ms": _latency(step.e2e_ms),
        "input_tokens": {"asked": step.input_tokens.asked, "counted": step.input_tokens.counted},
        "output_tokens": {"asked": step.output_tokens.asked, "counted": step.output_tokens.counted},
        "output_tok_s": step.output_tok_s,
        "requests_s": step.requests_s,
        "goodput": step.goodput,
        "goodput_requests_s": step.goodput_s,
        "proposed": step.proposed,
        "accepted": step.accepted,
        "acceptance_rate": step.acceptance_rate,
        "acceptance_of": step.acceptance_of,
        "client_lag_ms": step.lag_ms,
    }


def _latency(found: Latency | None) -> dict[str, object] | None:
    if found is None:
        return None
    ends = {"p50": found.p50_interval, "p95": found.p95_interval}
    intervals = {f"{name}_interval": None if end is None else list(end) for name, end in ends.items()}
    return {"n": found.n, "p50": found.p50, "p95": found.p95, "p99": found.p99, **intervals}


# -- files -------------------------------------------------------------------------------------------------------------


def is_load_test(path: Path) -> bool:
    """Whether ``path`` is a kept load test; False for anything else, unreadable files too."""
    try:
        return files.read(path).get("kind") == KIND
    except ConfigError:
        return False


def load(path: Path) -> dict[str, object]:
    """A load test that was saved. Raises ``ConfigError`` for anything else."""
    return files.load(
        path, KIND, FORMAT, lambda found: found.get("kind") == KIND and isinstance(found.get("steps"), list)
    )
