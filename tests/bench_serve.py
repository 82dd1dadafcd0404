"""Figures of ``specli serve`` for the README: throughput by answers at a time, what a long prompt does to others."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from specli.bench.statistics import percentile_interval
from specli.bench.workloads import built_in
from specli.chat import Message
from specli.config import ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.serve.scheduler import Scheduler
from specli.session import Session
from tests.bench_hindsight import breadth_first
from tests.serving import Answer, Recorder, answer, serving

AT_A_TIME = (1, 2, 4, 8)
WORKLOADS = ("chat", "rewrite", "extract", "story")
N_TIMES = 3  # answers per place, and some more, since the last ones do not fill all places
N_MORE = 8
LONG_PROMPT = 1500  # tokens
HEAD = "| answers at a time | plain | speculative | speculative ÷ plain | acceptance |\n|---|---|---|---|---|"


def load(target: Path, draft: Path, n_sequences: int) -> Session:
    """Target and draft with a context for each of ``n_sequences`` answers."""
    options = ModelOptions(path=target, n_ctx=2048, n_sequences=n_sequences)
    return Session(Settings(options, ModelOptions(path=draft), SamplingOptions(temperature=0), SpeculationOptions()))


def prompts(session: Session) -> list[list[int]]:
    """Token ids of the built-in prompts, one of each kind of work in turn."""
    return [session.chat_ids([Message("user", prompt.text)]) for prompt in breadth_first(WORKLOADS)]


def closed_loop(session: Session, n: int, n_predict: int, *, speculate: bool) -> tuple[float, float | None]:
    """Answers ``n`` at a time, the more the larger ``n``: tokens per second of rounds that hold ``n``, and acceptance.

    Only those: how few are left at the end of such a run depends on which answers end together.
    """
    places, done, recorder = threading.Semaphore(n), list[Answer](), Recorder(session)
    with serving(session, speculate=speculate, recorder=recorder) as scheduler:
        for prompt in prompts(session)[: N_TIMES * n + N_MORE]:
            places.acquire()
            one = answer(session, prompt, n_predict)
            one.then = places.release
            scheduler.submit([one.job])
            done.append(one)
        for one in done:
            one.wait()
    full = [outcome for outcome in recorder.rounds if len(outcome.sequences) == n]
    seconds = sum(outcome.draft_s + outcome.verify_s + outcome.host_s for outcome in full)
    parts = [part for outcome in full for part in outcome.sequences]
    proposed = sum(part.proposed for part in parts)
    acceptance = sum(part.accepted for part in parts) / proposed if proposed else None
    return sum(part.emitted for part in parts) / seconds, acceptance


def throughput(target: Path, draft: Path, n_predict: int, n_turns: int) -> Iterator[str]:
    """Rows: throughput against one plain answer at a time, medians of ``n_turns`` in turn, 95% intervals of ratios."""
    found: dict[tuple[int, bool], list[float]] = {(n, is_on): [] for n in AT_A_TIME for is_on in (False, True)}
    acceptance: dict[int, list[float]] = {n: [] for n in AT_A_TIME}
    with load(target, draft, max(AT_A_TIME)) as session:
        for n in AT_A_TIME:  # the controller learns this machine first
            closed_loop(session, n, n_predict, speculate=True)
        for turn in range(n_turns):
            for n in AT_A_TIME:
                for is_on in (False, True) if turn % 2 else (True, False):
                    rate, accepted = closed_loop(session, n, n_predict, speculate=is_on)
                    found[n, is_on].append(rate)
                    if is_on and accepted is not None:
                        acceptance[n].append(accepted)
    base = found[1, False]
    for n in AT_A_TIME:
        share = f"{statistics.median(acceptance[n]):.0%}" if acceptance[n] else "–"
        columns = [_ratio(found[n, False], base), _ratio(found[n, True], base), _ratio(found[n, True], found[n, False])]
        yield f"| {n} | {columns[0]} | {columns[1]} | {columns[2]} | {share} |"


def _ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """The median of paired ratios and its bootstrapped 95% interval."""
    ratios = np.array(over) / np.array(under)
    rng = np.random.default_rng(0)
    medians = np.median(ratios[rng.integers(len(ratios), size=(4000, len(ratios)))], axis=1)
    low, high = percentile_interval(medians, len(ratios)) if len(ratios) > 1 else (np.nan, np.nan)
    return f"{np.median(ratios):.2f} ({low:.2f}–{high:.2f})"


def stalls(target: Path, draft: Path) -> Iterator[str]:
    """What a long prompt does to four answers under way: gaps between their bursts, with chunks and without."""
    with load(target, draft, 5) as session:
        for name, is_chunked in (("in turn with them (default)", True), ("first (`--no-chunked-prefill`)", False)):
            worst, usual = [], []
            for _ in range(5):
                with serving(session, chunked=is_chunked) as scheduler:
                    gaps = _gaps(session, scheduler)
                usual.append(statistics.median(gaps))
                worst.append(float(np.quantile(gaps, 0.99)))
            times = statistics.median(p99 / middle for p99, middle in zip(worst, usual, strict=True))
            middle_ms, worst_ms = 1000 * statistics.median(usual), 1000 * statistics.median(worst)
            yield (
                f"a prompt of {LONG_PROMPT:,} tokens {name}: gaps between bursts of four other answers, median "
                f"{middle_ms:.0f} ms, p99 {worst_ms:.0f} ms, {times:.1f} × the median"
            )


def _gaps(session: Session, scheduler: Scheduler) -> list[float]:
    """Seconds between bursts of four answers, while a long prompt comes in."""
    others = [answer(session, prompt, 160) for prompt in prompts(session)[:4]]
    scheduler.submit([one.job for one in others])
    while any(len(one.at_s) < 20 for one in others):
        time.sleep(0.02)
    text = " ".join(prompt.text for prompt in built_in(WORKLOADS))
    ids = session.text_ids(text)
    long = answer(session, (ids * (LONG_PROMPT // len(ids) + 1))[:LONG_PROMPT], 8)
    scheduler.submit([long.job])
    for one in (*others, long):
        one.wait()
    return [gap for one in others for gap in np.diff(one.at_s).tolist()]
