"""One load, held until it is measured: warm-up, the steady window, and the answers that are still on their way.

A closed loop keeps exactly so many requests in flight: each is followed at once by another, but for a short pause
after a failure, lest a server that refuses is asked thousands of times a second. An open loop sends each request when
it arrives, however many are in flight; one that was due in the window is sent however late this machine is.

A server that is full refuses at once and answers late: refusals say nothing before what was under way has ended too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specli.config import MOST_IN_FLIGHT
from specli.loadtest.arrivals import poisson
from specli.loadtest.prompts import Ask
from specli.loadtest.records import Record, StepRun
from specli.loadtest.window import Extent, SteadyWindow

TICK_S = 0.05
_TICKS_SHOWN = 5  # from one showing of the progress to the next, which costs time that is being measured
AFTER_FAILURE_S = 0.1
HOPELESS = 8  # failures in a row, at least, before it is asked whether anything works


class Asker(Protocol):
    """What a step needs of the client."""

    async def ask(self, ask: Ask, due_s: float | None, is_measured: bool) -> Record:
        """Send and wait for the end."""


@dataclass(frozen=True, slots=True)
class Step:
    """A load: requests in flight, or requests/s; and how long it is held."""

    load: float
    is_open: bool
    extent: Extent
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Watch:
    """What a load test tells and asks: the fraction of the step (None: warming up), whether to stop."""

    progress: Callable[[str, float | None], None] = lambda _label, _fraction: None
    stopped: Callable[[], bool] = lambda: False
    deadline_s: float | None = None  # on time.monotonic

    def is_over(self) -> bool:
        """Whether the user or the clock wants an end."""
        return self.stopped() or (self.deadline_s is not None and time.monotonic() > self.deadline_s)


async def run_step(asker: Asker, step: Step, asks: Iterator[Ask], watch: Watch, label: str = "") -> StepRun:
    """Run ``step`` to its end, or until ``watch`` is over, when what is in flight is dropped."""
    running = _Running(asker, step, asks)
    loop = asyncio.create_task(running.open_loop() if step.is_open else running.closed_loop())
    lags: list[float] = []
    stopped = False
    watch.progress(label, None)
    while not loop.done():
        before_s = time.monotonic()
        await asyncio.wait([loop], timeout=TICK_S)
        now_s = time.monotonic()
        lags.append(max(0.0, now_s - before_s - TICK_S))
        running.window.tick(now_s)
        if not loop.done() and len(lags) % _TICKS_SHOWN == 0:
            watch.progress(label, running.window.fraction(now_s))
        if watch.is_over() and not loop.done():
            stopped = True
            running.window.close(now_s)
            break
    await _end(loop)
    window = running.window
    window.close(time.monotonic())
    records = tuple(sorted(running.records, key=lambda record: record.due_s))
    n_unfinished = window.n_measured - sum(record.is_measured for record in records)
    lag_ms = 1000 * float(np.quantile(lags, 0.99)) if lags else None
    return StepRun(
        records,
        window.started_s,
        window.ended_s,
        n_unfinished,
        lag_ms,
        stopped=stopped,
        hopeless=running.is_hopeless,
        n_cut=running.n_in_flight,
    )


async def _end(loop: asyncio.Task[None]) -> None:
    """Wait for a loop that is done; cancel one that is not. An error in it is ours, and is raised."""
    if not loop.done():
        loop.cancel()
    await asyncio.wait([loop])
    if not loop.cancelled() and (error := loop.exception()) is not None:
        raise error


class _Running:
    def __init__(self, asker: Asker, step: Step, asks: Iterator[Ask]) -> None:
        self._asker, self._step, self._asks = asker, step, asks
        self.records: list[Record] = []
        self.window = SteadyWindow(step.extent, time.monotonic())
        self.is_hopeless = False
        self._has_success = False
        self._n_failed = 0  # since the last success
        self._in_flight: set[int] = set()
        self._hopes: set[int] | None = None  # what was in flight when patience ran out, and has not ended
        self._slots = asyncio.Semaphore(MOST_IN_FLIGHT)

    @property
    def n_in_flight(self) -> int:
        """Requests that were sent and have not ended; once the loop has, those that were cut off."""
        return len(self._in_flight)

    async def closed_loop(self) -> None:
        """As many workers as requests in flight."""
        await self._all([asyncio.create_task(self._worker()) for _ in range(int(self._step.load))])

    async def _worker(self) -> None:
        while (is_measured := self.window.take(time.monotonic())) is not None:
            record = await self._one(None, is_measured)
            if record.error is not None:
                await asyncio.sleep(AFTER_FAILURE_S)

    async def open_loop(self) -> None:
        """A task for each arrival."""
        tasks: set[asyncio.Task[None]] = set()
        offsets_s = poisson(self._step.load, np.random.default_rng([self._step.seed, 2]))
        arrivals = (self.window.begun_s + offset_s for offset_s in offsets_s)
        due_s = next(arrivals)
        try:
            while await self._wait_until(due_s) and (is_measured := self.window.take(due_s)) is not None:
                task = asyncio.create_task(self._arrived(due_s, is_measured))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due_s = next(arrivals)
        except asyncio.CancelledError:
            while due_s < time.monotonic() and self.window.take(due_s) is not None:  # was due: is unfinished
                due_s = next(arrivals)
            for task in tasks:
                task.cancel()
            raise
        await self._all(list(tasks))

    async def _wait_until(self, due_s: float) -> bool:
        """False when the window ended first."""
        while (left_s := due_s - time.monotonic()) > 0:
            if self.window.ended_s is not None:
                return False
            await asyncio.sleep(min(left_s, TICK_S))
        await asyncio.sleep(0)  # one that is late lets go first what came before it, and an end that is wanted
        return True

    async def _arrived(self, due_s: float, is_measured: bool) -> None:
        async with self._slots:
            await self._one(due_s, is_measured)

    async def _one(self, due_s: float | None, is_measured: bool) -> Record:
        ask = next(self._asks)
        self._in_flight.add(ask.index)
        record = await self._asker.ask(ask, due_s, is_measured)
        self._in_flight.discard(ask.index)
        self.records.append(record)
        if record.error is None:
            self._has_success, self._n_failed, self._hopes = True, 0, None
            self.window.note_success(record.ended_s)
        else:
            self._note_failure(record)
        return record

    def _note_failure(self, record: Record) -> None:
        """Give up where nothing ever worked; a server that no longer works is warm enough, and measured as it is."""
        self._n_failed += 1
        patience = max(HOPELESS, 0 if self._step.is_open else 2 * int(self._step.load))
        if self._hopes is None and self._n_failed >= patience:
            self._hopes = set(self._in_flight)
        if self._hopes is None:
            return
        self._hopes.discard(record.index)
        if self._hopes:
            return
        if self._has_success:
            self.window.begin(record.ended_s)
        else:
            self.is_hopeless = True
            self.window.close(record.ended_s)

    async def _all(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for ``tasks``; cancelled, cancel them."""
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
