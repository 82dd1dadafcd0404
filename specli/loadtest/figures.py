"""Records become figures. Pure; undefined is None.

    TTFT        due -> first text, ms. Due is when a closed loop sends, and the scheduled arrival of an open one.
    TPOT        (last - first text) / (n - 1), ms per token; n is of the server's usage
    ITL         gap between pieces of text, ms: per piece, and per token (the gap shared out over the piece's tokens)
    E2E         due -> last text, ms
    throughput  tokens that arrived in the steady window / its seconds; requests that ended well in it likewise
    goodput     share of the measured requests that ended well and inside the bounds, and how many such ended per second

A load that was cut short, with measured requests unfinished, has no goodput and is neither inside nor outside the
bounds: the answers that are missing are the slow ones. It has no tokens per second and no mean of requests in flight
either: what arrived of an answer that was cut off has no usage. One that was given up because nothing worked has 0.

Latencies are of the requests that were due in the window, those included that ended after it. How many tokens a piece
of text holds no server tells: a request's tokens are shared out over its pieces by their events where these are as
many as its tokens, else by their characters. Intervals are of order statistics (distribution-free, 95%).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from specli.bench.statistics import CONFIDENCE, quantiles
from specli.loadtest.records import Record, StepRun

LEVELS = (0.50, 0.95, 0.99)
ENOUGH = 100  # values, below which a 99th percentile is the slowest few
INSIDE = 0.95  # of the requests, for a load to be inside the bounds
_TAIL = (1 - CONFIDENCE) / 2


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles of ``n`` values, ms; intervals where the values are independent and enough."""

    n: int
    p50: float
    p95: float
    p99: float
    p50_interval: tuple[float, float] | None = None
    p95_interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: what was drawn (None: a file's prompts) and what the server counted, means."""

    asked: float | None
    counted: float | None


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a good answer keeps to, ms; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def keeps(self, record: Record) -> bool | None:
        """Whether ``record`` is inside; None where nobody can tell (a bound on TPOT, and no usage)."""
        if self.ttft_ms is None and self.tpot_ms is None:
            return None
        if record.error is not None:
            return False
        first = ttft_ms(record)
        if self.ttft_ms is not None and (first is None or first > self.ttft_ms):
            return False
        if self.tpot_ms is None:
            return True
        if record.output_tokens is None:
            return None
        per_token = tpot_ms(record)
        return per_token is None or per_token <= self.tpot_ms  # one token has no TPOT to be too long


@dataclass(frozen=True)
class Figures:
    """One load. ``load``: requests in flight, or requests/s (``is_open``). Shares as fractions."""

    load: float
    is_open: bool
    n_measured: int
    n_ok: int
    n_unfinished: int
    n_cut: int
    errors: Mapping[str, int]
    said: Mapping[str, str]  # of each kind of error, the first message
    window_s: float
    in_flight: float | None
    ttft_ms: Latency | None
    tpot_ms: Latency | None
    itl_burst_ms: Latency | None
    itl_token_ms: Latency | None
    e2e_ms: Latency | None
    input_tokens: Lengths
    output_tokens: Lengths
    output_tok_s: float | None
    requests_s: float | None
    goodput: float | None
    goodput_s: float | None
    has_usage: bool
    proposed: int | None = None
    accepted: int | None = None
    acceptance_of: str | None = None  # metrics, or answers
    lag_ms: float | None = None
    rows: Sequence[Sequence[object]] = field(default=(), repr=False)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed tokens."""
        return self.accepted / self.proposed if self.proposed and self.accepted is not None else None

    @property
    def is_inside(self) -> bool | None:
        """Whether this load is inside the bounds; None where nobody can tell."""
        return None if self.goodput is None else self.goodput >= INSIDE

    @property
    def has_majority(self) -> bool:
        """Whether half of the requests or more succeeded."""
        return self.n_ok > 0 and 2 * self.n_ok >= self.n_measured


def figures(
    run: StepRun, load: float, is_open: bool, bounds: Bounds, scraped: tuple[int, int] | None = None
) -> Figures:
    """What ``run`` comes to. ``scraped``: proposed and accepted tokens by the server's metrics."""
    start, end = run.started_s, run.ended_s
    window_s = max(0.0, end - start) if start is not None and end is not None else 0.0
    measured = [record for record in run.records if record.is_measured]
    ok = [record for record in measured if record.error is None]
    ended = [r for r in run.records if r.error is None and start is not None and end and start <= r.ended_s <= end]
    failed = [record for record in measured or run.records if record.error is not None]
    proposed, accepted, source = _acceptance(run.records, scraped)
    counted = [r for r in run.records if r.error is None]
    has_usage = any(record.output_tokens is not None for record in counted)
    return Figures(
        load=load,
        is_open=is_open,
        n_measured=len(measured),
        n_ok=len(ok),
        n_unfinished=run.n_unfinished,
        n_cut=run.n_cut,
        errors=dict(Counter(str(record.error) for record in failed).most_common()),
        said={str(record.error): record.message for record in reversed(failed)},
        window_s=window_s,
        in_flight=_in_flight(run, window_s),
        ttft_ms=latency(ttft_ms(record) for record in ok),
        tpot_ms=latency(tpot_ms(record) for record in ok),
        itl_burst_ms=latency((gap for record in ok for gap in burst_gaps_ms(record)), independent=False),
        itl_token_ms=latency((gap for record in ok for gap in token_gaps_ms(record)), independent=False),
        e2e_ms=latency(e2e_ms(record) for record in ok),
        input_tokens=_lengths((r.asked_input, r.prompt_tokens) for r in ok),
        output_tokens=_lengths((r.asked_output, r.output_tokens) for r in ok),
        output_tok_s=_tokens_in(run, counted) / window_s if window_s and has_usage and not run.is_cut else None,
        requests_s=len(ended) / window_s if window_s else None,
        goodput=_goodput(run, bounds),
        goodput_s=None if run.is_cut else _rate([bounds.keeps(record) for record in ended], bounds, window_s),
        has_usage=has_usage,
        proposed=proposed,
        accepted=accepted,
        acceptance_of=source,
        lag_ms=run.lag_ms,
        rows=[_row(record, start or 0.0) for record in measured],
    )


# -- of one request


def ttft_ms(record: Record) -> float | None:
    """Due to first text."""
    return None if record.first_s is None else 1000 * (record.first_s - record.due_s)


def e2e_ms(record: Record) -> float | None:
    """Due to last text."""
    return None if record.last_s is None else 1000 * (record.last_s - record.due_s)


def tpot_ms(record: Record) -> float | None:
    """Milliseconds per token after the first; undefined for one token, and without usage."""
    n = record.output_tokens
    if n is None or n < 2 or record.first_s is None or record.last_s is None:
        return None
    return 1000 * (record.last_s - record.first_s) / (n - 1)


def burst_gaps_ms(record: Record) -> list[float]:
    """From each piece of text to the next."""
    return [1000 * (after.at_s - before.at_s) for before, after in pairwise(record.bursts)]


def token_gaps_ms(record: Record) -> Iterator[float]:
    """Per token after the first piece: the gap before its piece, shared out over the piece's tokens."""
    gap_s, last_s = 0.0, record.first_s
    for burst, n in zip(record.bursts, burst_tokens(record), strict=True):
        assert last_s is not None
        gap_s += burst.at_s - last_s
        last_s = burst.at_s
        if n and burst is not record.bursts[0]:
            yield from [1000 * gap_s / n] * n
            gap_s = 0.0


def burst_tokens(record: Record) -> list[int]:
    """Tokens of each piece of text, which add up to the usage; all 0 without one."""
    n_events = sum(burst.n_events for burst in record.bursts)
    n = record.output_tokens or 0
    weights = [burst.n_events if abs(n_events - n) <= 1 else burst.n_chars for burst in record.bursts]
    ends = [round(n * part / sum(weights)) for part in np.cumsum(weights)]
    return [end - start for start, end in pairwise([0, *ends])]


# -- of many


def latency(values: Iterable[float | None], *, independent: bool = True) -> Latency | None:
    """Percentiles of what is defined; None of nothing."""
    defined = sorted(value for value in values if value is not None)
    found = quantiles(defined, LEVELS)
    if found is None:
        return None
    middle, high, highest = found
    p50, p95 = (quantile_interval(defined, level) if independent else None for level in LEVELS[:2])
    return Latency(len(defined), middle, high, highest, p50, p95)


def quantile_interval(ordered: Sequence[float], level: float) -> tuple[float, float] | None:
    """The 95% interval of a quantile: between two of the ``ordered`` values; None where there are too few.

    So many of n values lie below the quantile as a binomial variable says, whatever their distribution.
    """
    n = len(ordered)
    k = np.arange(n + 1)
    logs = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)])
    below = np.cumsum(np.exp(logs + k * math.log(level) + (n - k) * math.log1p(-level)))  # P(at most k below)
    low = int(np.searchsorted(below, _TAIL, side="right"))
    high = int(np.searchsorted(below, 1 - _TAIL)) + 1
    return (ordered[low - 1], ordered[high - 1]) if low >= 1 and high <= n else None


def _lengths(pairs: Iterable[tuple[int | None, int | None]]) -> Lengths:
    found = list(pairs)
    asked = [a for a, _ in found if a is not None]
    counted = [c for _, c in found if c is not None]
    return Lengths(*(float(np.mean(values)) if values else None for values in (asked, counted)))


def _tokens_in(run: StepRun, records: Sequence[Record]) -> int:
    """Tokens that arrived in the window, by usage shared out over the pieces."""
    start, end = run.started_s, run.ended_s
    if start is None or end is None:
        return 0
    return sum(
        n
        for record in records
        for burst, n in zip(record.bursts, burst_tokens(record), strict=True)
        if start <= burst.at_s <= end
    )


def _in_flight(run: StepRun, window_s: float) -> float | None:
    """Requests in flight, mean over the window (of those that ended)."""
    start, end = run.started_s, run.ended_s
    if start is None or end is None or not window_s or run.is_cut:
        return None
    return sum(max(0.0, min(r.ended_s, end) - max(r.sent_s, start)) for r in run.records) / window_s


def _goodput(run: StepRun, bounds: Bounds) -> float | None:
    """Share of the measured requests inside ``bounds``; None where nobody can tell."""
    if run.n_unfinished:
        return None
    kept = [bounds.keeps(record) for record in run.records if record.is_measured or run.hopeless]
    return None if not kept or None in kept else sum(map(bool, kept)) / len(kept)


def _rate(kept: Sequence[bool | None], bounds: Bounds, window_s: float) -> float | None:
    if not window_s or None in kept or (bounds.ttft_ms is None and bounds.tpot_ms is None):
        return None
    return sum(map(bool, kept)) / window_s


def _acceptance(
    records: Sequence[Record], scraped: tuple[int, int] | None
) -> tuple[int | None, int | None, str | None]:
    """Proposed, accepted, and who said so: the metrics, or else the answers themselves."""
    if scraped is not None:
        return (*scraped, "metrics")
    told = [(r.proposed, r.accepted) for r in records if r.proposed is not None and r.accepted is not None]
    if not told:
        return None, None, None
    return sum(p for p, _ in told), sum(a for _, a in told), "answers"


ROW = ("due_s", "ttft_ms", "tpot_ms", "e2e_ms", "input_tokens", "output_tokens", "error")


def _row(record: Record, start_s: float) -> list[object]:
    """What a kept file has of each measured request, in the order of ``ROW``."""
    times = [ttft_ms(record), tpot_ms(record), e2e_ms(record)]
    rounded = [None if value is None else round(value, 3) for value in times]
    return [round(record.due_s - start_s, 4), *rounded, record.prompt_tokens, record.output_tokens, record.error]


def few(latencies: Iterable[Latency | None]) -> int | None:
    """The smallest number of values behind a 99th percentile, when that is too few for one."""
    counts = [found.n for found in latencies if found is not None]
    return min(counts) if counts and min(counts) < ENOUGH else None
