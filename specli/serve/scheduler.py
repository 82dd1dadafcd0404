"""The engine's thread: which requests have a slot, and what it does next.

A turn: those whose clients have gone leave; waiting ones get free slots, first come first served; one round over all
answers under way; then a part of the prompts that are not evaluated yet, as long as ``pace`` allows, so that a long
prompt never stalls the others. Verification and prompts are separate passes: a pass over many rows goes through other
kernels, which would change the answers that share it, and its time would tell the controller nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count

from specli.decode import Decoder
from specli.errors import DeadEnd, EngineError, QueueFull, SpecError, TimedOut, Unavailable
from specli.events import Event, Failed, Finished, FinishReason, RoundDone
from specli.prefix import KeptPrefix
from specli.request import Request, Running
from specli.serve.job import Job
from specli.serve.metrics import Metrics
from specli.serve.pace import Pace, Window
from specli.session import Session, new_sequence
from specli.stats import Stats
from specli.text import TextStream

LOGGER = logging.getLogger("specli.serve")
N_ROUNDS_TOLD = 1000  # after which the controller's record of decisions begins anew
SLA_EVERY_S = 10.0  # between two looks at the bounds
N_FAILED = 3  # failed passes, of different requests, after which it is asked whether the engine works at all


@dataclass(slots=True)
class _Slot:
    """A place for one answer. ``used``: the turn that it was last used in; ``n_counted``: rounds in the metrics."""

    index: int
    kept: KeptPrefix
    used: int = 0
    job: Job | None = None
    running: Running | None = None
    stats: Stats | None = None
    n_counted: int = 0


@dataclass(slots=True)
class _Failures:
    """Passes of one kind that failed since one worked. ``of``: whose; who is among them says nothing new."""

    n: int = 0
    of: set[object] = field(default_factory=set)

    def add(self, whose: set[object]) -> None:
        """Count a pass, unless the fault may be with who failed before."""
        if self.of.isdisjoint(whose):
            self.n += 1
            self.of |= whose

    def clear(self) -> None:
        """One worked."""
        self.n = 0
        self.of.clear()


class Scheduler:
    """Makes answers for jobs, ``n_sequences`` of the session's target at a time. ``start`` it, ``stop`` it.

    ``clock`` is the one of the events' marks.
    """

    def __init__(
        self,
        session: Session,
        metrics: Metrics,
        pace: Pace,
        n_queue: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session, self._metrics, self._pace, self._n_queue, self._clock = session, metrics, pace, n_queue, clock
        self._is_stopping = self._is_killed = False
        engine, drafter = session.engine, session.drafter
        self._decoder = Decoder(
            engine,
            session.verifier,
            session.model.piece,
            drafter,
            session.speculation.k if drafter else 0,
            cancelled=lambda: self._is_killed,
            clock=clock,
        )
        self._slots = [_Slot(i, KeptPrefix(engine, drafter, LOGGER.info, i)) for i in range(engine.n_sequences)]
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="specli-engine", daemon=True)
        self._turn = self._n_rounds = 0
        self._request_ids = count(1)
        self._failed_prompts, self._failed_rounds = _Failures(), _Failures()
        self._answer_s = Window()
        self._sla_checked_s = 0.0
        self._broken: dict[str, bool] = {}
        self.failure: str | None = None  # why nothing can be answered any more

    # -- from any thread

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def stop(self, *, now: bool = False) -> None:
        """Finish what was accepted, or with ``now`` drop it, and end the thread."""
        with self._changed:
            self._is_stopping = True
            self._is_killed |= now
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue all of ``jobs`` or none. Raises ``QueueFull`` or ``Unavailable``."""
        with self._changed:
            if self.failure is not None:
                raise Unavailable(f"the engine has failed: {self.failure}; restart the server")
            if self._is_stopping:
                raise Unavailable("the server is stopping")
            n_free = sum(slot.job is None for slot in self._slots)
            n_waiting = sum(not job.is_cancelled for job in self._waiting)
            if n_waiting + len(jobs) > self._n_queue + n_free:
                answer_s = self._answer_s.mean(self._clock())
                raise QueueFull(n_waiting, self._pace.wait_s(n_waiting, len(self._slots), answer_s))
            request = next(self._request_ids)
            for job in jobs:
                job.request = request
            self._waiting.extend(jobs)
            self._changed.notify()

    def wake(self) -> None:
        """Something was cancelled."""
        with self._changed:
            self._changed.notify()

    @property
    def n_running(self) -> int:
        """Answers that have a slot."""
        return sum(slot.job is not None for slot in self._slots)

    @property
    def n_waiting(self) -> int:
        """Answers that wait for one."""
        return len(self._waiting)

    def drop_caches(self) -> None:
        """Forget what the slots hold, once the scheduler has stopped."""
        for slot in self._slots:
            slot.kept.drop()

    def exposition(self) -> bytes:
        """What ``/metrics`` says."""
        now_s, engine = self._clock(), self._session.engine
        n_held = sum(engine.n_past(slot.index) for slot in self._slots)
        self._metrics.observe_failure(self.failure is not None)
        self._metrics.observe_load(self.n_running, self.n_waiting, n_held / (engine.n_ctx * len(self._slots)))
        return self._metrics.expose(now_s, self._pace.p95(now_s), self._pace.broken(now_s))

    # -- in the engine's thread

    def _work(self) -> None:
        try:
            while self.failure is None and self._wait():
                self._take_turn()
        except Exception as error:  # a fault of ours: say so, answer nobody any more, leave the process up to tell
            LOGGER.exception("the engine's thread failed")
            self._give_up(f"{type(error).__name__}: {error}")
        if self._is_killed:
            self._fail_all(Unavailable("the server was stopped"))

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self.failure = reason
        self._fail_all(EngineError(f"the engine has failed: {reason}"))

    def _fail_all(self, error: SpecError) -> None:
        with self._changed:
            jobs = [*self._waiting, *(slot.job for slot in self._slots if slot.job is not None)]
            self._waiting.clear()
        for slot in self._slots:
            self._count_unfinished(slot)
            slot.job = slot.running = slot.stats = None
        for job in jobs:
            self._metrics.refuse(_kind(error))
            job.fail(error)

    def _wait(self) -> bool:
        """Sleep while there is nothing to do; whether to go on."""
        with self._changed:
            while not self._is_killed:
                if self._waiting or any(slot.job for slot in self._slots):
                    return True
                if self._is_stopping:
                    return False
                self._changed.wait()
        return False

    def _take_turn(self) -> None:
        self._turn += 1
        self._drop_departed()
        self._admit()
        self._round()
        self._feed()
        is_idle = self.n_running == self.n_waiting == 0  # nobody would look before the next request
        if is_idle or self._clock() - self._sla_checked_s >= SLA_EVERY_S:
            self._look_at_sla()

    def _drop_departed(self) -> None:
        now_s = self._clock()
        with self._changed:
            left = [job for job in self._waiting if job.is_cancelled or job.deadline_s <= now_s]
            for job in left:
                self._waiting.remove(job)
        for gone in left:
            if gone.is_cancelled:
                self._count_departed(gone)
            else:
                error = TimedOut("the request waited for a slot until its time was over")
                _log(error)
                self._metrics.refuse("timeout")
                self._pace.observe_answer(now_s, now_s - gone.arrived_s, None)
                gone.fail(error)
        for slot in self._slots:
            if slot.job is None or slot.running is None:
                continue
            if slot.job.is_cancelled:
                self._handle(slot, list(self._decoder.finish(slot.running, "cancelled")))
            elif slot.job.deadline_s <= now_s:
                self._fail(slot, TimedOut("the answer was not finished in time"))

    def _count_departed(self, job: Job) -> None:
        """Of a job that was cancelled before its answer was begun."""
        now_s = self._clock()
        self._metrics.observe_answer(Stats(), job.arrived_s, now_s, has_left=job.has_left)
        if job.has_left:
            self._pace.observe_departure(now_s, now_s - job.arrived_s)

    def _admit(self) -> None:
        """Give free slots to waiting jobs, in the order that they came."""
        while True:
            n_active = self.n_running
            with self._changed:
                is_possible = bool(self._waiting) and n_active < len(self._slots)
                is_possible = is_possible and self._pace.may_admit(n_active, self._clock())
                job = self._waiting.popleft() if is_possible else None
            if job is None:
                return
            if job.is_cancelled:
                self._count_departed(job)
                continue
            self._begin(self._best_slot(job), job)

    def _best_slot(self, job: Job) -> _Slot:
        """The free slot whose cache shares most with the prompt, else the one that was used longest ago.

        A cache of which less than half would be kept is left to whoever comes back for it.
        """
        free = [slot for slot in self._slots if slot.job is None]
        shared = {slot.index: slot.kept.n_shared(job.prompt) if job.reuse else 0 for slot in free}
        going_on = [slot for slot in free if 2 * shared[slot.index] > self._session.engine.n_past(slot.index)]
        if going_on:
            return max(going_on, key=lambda slot: (shared[slot.index], -slot.used))
        return min(free, key=lambda slot: slot.used)

    def _begin(self, slot: _Slot, job: Job) -> None:
        slot.job, slot.used, slot.stats, slot.n_counted = job, self._turn, Stats(slot.index), 0
        job.slot, job.started_s = slot.index, self._clock()
        self._metrics.observe_start(job.started_s - job.arrived_s)
        state = new_sequence(slot.index, job.prompt, job.seed, job.verifier)
        try:
            if not job.reuse:
                slot.kept.drop()
            if not job.reuse and job.seed is not None and self.n_running == 1:
                for other in self._slots:  # of a shared cache even what nobody uses moves the logits a little
                    other.kept.drop()
            n_known = slot.kept.open(state)
            request = Request(
                state, job.arrived_s, job.max_tokens, job.end_ids, job.stops, True, n_known, job.n_logprobs
            )
            slot.running = Running(request, TextStream(self._decoder.piece, job.stops))
            self._handle(slot, list(self._decoder.begin(slot.running)))
        except SpecError as error:
            self._fail(slot, error)

    def _round(self) -> None:
        decoding = [slot for slot in self._slots if slot.running is not None and not slot.running.is_feeding]
        if not decoding:
            return
        started_s, jobs = self._clock(), [slot.job for slot in decoding if slot.job is not None]
        try:
            events = list(self._decoder.round([slot.running for slot in decoding if slot.running is not None]))
        except SpecError as error:
            for slot in decoding:
                self._fail(slot, error)
            self._note_round(jobs, [error], is_whole=True)
            return
        for event in events:
            if isinstance(event, RoundDone):
                emitted = sum(part.emitted for part in event.sequences)
                self._pace.observe_round(len(decoding), emitted, event.at_s - started_s, event.at_s)
                self._metrics.observe_round(event, self._state(event))
        for slot in decoding:
            own = [event for event in events if isinstance(event, RoundDone) or event.sequence == slot.index]
            self._handle(slot, own)
        if events:
            self._note_round(jobs, [event.error for event in events if isinstance(event, Failed)], is_whole=False)
        self._n_rounds += 1
        if self._n_rounds % N_ROUNDS_TOLD == 0 and self._session.controller is not None:
            self._session.controller.begin_answer()

    def _note_round(self, jobs: Sequence[Job], errors: Sequence[Exception], *, is_whole: bool) -> None:
        """A round for ``jobs`` is over; ``is_whole``: it failed as such, so a draft model may have failed in it."""
        broken = [error for error in errors if _is_broken(error)]
        if not is_whole and len(broken) < len(jobs):
            self._failed_rounds.clear()
        elif broken:
            whose: set[object] = {job.request for job in jobs}
            has_draft = self._session.speculation.drafter.startswith("draft")
            if has_draft:  # no pass of the target clears it: clients that ask the same again may not make up three
                whose |= {tuple(job.prompt) for job in jobs}
            n_rows = min(self._decoder.k_max + 1, self._session.engine.n_rows_max)
            self._suspect(self._failed_rounds, whose, broken[-1], n_rows, is_certain=is_whole and has_draft)

    def _suspect(
        self, failures: _Failures, whose: set[object], error: Exception, n_rows: int, *, is_certain: bool = False
    ) -> None:
        """A pass failed. Give up once ``N_FAILED`` did that had nothing in common, and a harmless one fails too.

        ``n_rows``: of that one. ``is_certain``: it would prove nothing, as another engine may be the broken one.
        """
        failures.add(whose)
        if failures.n < N_FAILED or self._is_killed:
            return
        if is_certain or not self._works(n_rows, is_prompt=failures is self._failed_prompts):
            LOGGER.error("the engine has failed for good: %s; restart the server", error)
            self._give_up(str(error))
        else:
            LOGGER.warning("passes for %d requests failed one after the other, but the engine works", N_FAILED)
            failures.clear()

    def _works(self, n_rows: int, *, is_prompt: bool) -> bool:
        """Whether the target can evaluate what is nobody's, the way that ``is_prompt`` says, on a slot that is free."""
        engine = self._session.engine
        free = [slot for slot in self._slots if slot.job is None]
        slot = min(free, key=lambda slot: engine.n_past(slot.index))
        with suppress(SpecError):
            return slot.kept.evaluates(self._session.model.bos, n_rows, interruptible=is_prompt)
        return False

    def _state(self, outcome: RoundDone) -> str:
        """What the controller did; without one, whether anything was drafted."""
        session = self._session
        if session.controller is not None:
            return session.controller.record.state
        if not any(part.proposed for part in outcome.sequences):
            return "off"
        return "n-gram" if session.speculation.drafter == "n-gram" else "draft"

    def _feed(self) -> None:
        """Evaluate a part of the prompts, the oldest first; behind a failure, the others have the next turn."""
        feeding = [slot for slot in self._slots if slot.running is not None and slot.running.is_feeding]
        n_decoding = sum(slot.running is not None for slot in self._slots) - len(feeding)
        engine = self._session.engine
        feeding.sort(key=lambda slot: slot.used)
        is_whole = self._session.settings.exact  # where a prompt's cuts must not depend on the load
        left = engine.n_batch if is_whole else self._chunk(n_decoding, feeding)
        for slot in feeding:
            while left > 0 and (running := slot.running) is not None and running.is_feeding:
                n_before, busy_s = engine.n_past(slot.index), engine.busy_s
                try:
                    events = list(self._decoder.feed(running, engine.n_batch if is_whole else left))
                except SpecError as error:
                    whose: set[object] = {slot.job.request if slot.job is not None else None}
                    self._fail(slot, error)
                    if _is_broken(error):
                        self._suspect(self._failed_prompts, whose, error, 1)
                    return
                if len(running.state.tokens) > running.n_prompt:  # before its last part no number is looked at
                    self._failed_prompts.clear()
                n_fed = engine.n_past(slot.index) - n_before
                left -= max(1, n_fed)
                self._pace.observe_chunk(n_fed, engine.busy_s - busy_s)
                self._metrics.observe_prefill(engine.busy_s - busy_s)
                self._handle(slot, events)

    def _chunk(self, n_decoding: int, feeding: Sequence[_Slot]) -> int:
        """Prompt tokens of this turn."""
        engine = self._session.engine
        if not feeding or feeding[0].job is None:
            return engine.n_batch
        oldest, job = feeding[0], feeding[0].job
        n_left = len(job.prompt) - engine.n_past(oldest.index)
        return self._pace.chunk(n_decoding, engine.n_batch, n_left, self._clock() - job.arrived_s)

    def _handle(self, slot: _Slot, events: Sequence[Event]) -> None:
        """Pass one answer's events on, and free its slot behind the last one."""
        job, stats = slot.job, slot.stats
        if job is None or stats is None or not events:
            return
        for event in events:
            if isinstance(event, Failed):
                self._fail(slot, event.error if isinstance(event.error, SpecError) else EngineError(str(event.error)))
                return
            stats.observe(event)
        reason = next((event.reason for event in events if isinstance(event, Finished)), None)
        self._count_rounds(slot, stats, slot.running.text.n_open if slot.running is not None and reason is None else 0)
        if reason is not None:
            self._end(slot, job, stats, reason)  # the slot is free before its client knows
        job.deliver(events)

    def _count_rounds(self, slot: _Slot, stats: Stats, n_open: int = 0) -> None:
        """Count an answer's rounds, but for those that a stop string may take back: its last ``n_open`` tokens."""
        settled = stats.settled(slot.n_counted, n_open)
        slot.n_counted += len(settled)
        self._metrics.observe_settled(settled, self._clock())

    def _count_unfinished(self, slot: _Slot) -> None:
        """Count what there is of an answer that ends before its time."""
        if slot.stats is not None and slot.job is not None:
            self._count_rounds(slot, slot.stats)
            self._metrics.observe_tokens(slot.stats)

    def _end(self, slot: _Slot, job: Job, stats: Stats, reason: FinishReason) -> None:
        now_s = self._clock()
        has_left = reason == "cancelled" and job.has_left
        self._metrics.observe_answer(stats, job.arrived_s, now_s, has_left=has_left)
        if reason != "cancelled":
            self._pace.observe_answer(now_s, stats.ttft_s, stats.tpot_ms)
            self._answer_s.add(now_s, now_s - (job.started_s or now_s))
        elif has_left and stats.ttft_s is None:
            self._pace.observe_departure(now_s, now_s - job.arrived_s)
        self._release(slot)

    def _release(self, slot: _Slot) -> None:
        running, slot.job, slot.running, slot.stats = slot.running, None, None, None
        slot.used = self._turn
        if running is not None:
            self._decoder.release(running.request)

    def _fail(self, slot: _Slot, error: SpecError) -> None:
        """End one answer; what its cache holds is not trusted."""
        job = slot.job
        _log(error)
        self._count_unfinished(slot)
        if slot.stats is not None and job is not None:
            now_s, ttft_s = self._clock(), slot.stats.ttft_s
            self._pace.observe_answer(now_s, now_s - job.arrived_s if ttft_s is None else ttft_s, slot.stats.tpot_ms)
        self._metrics.refuse(_kind(error))
        slot.running = None
        self._release(slot)
        with suppress(EngineError):  # it would hide the failure
            slot.kept.drop()
        if job is not None:
            job.fail(error)

    def _look_at_sla(self) -> None:
        """Say in the log when a bound begins or ceases to be broken."""
        self._sla_checked_s = now_s = self._clock()
        p95_ms = dict(zip(("ttft", "tpot"), self._pace.p95(now_s), strict=True))
        for name, is_broken in self._pace.broken(now_s).items():
            if is_broken == self._broken.get(name, False):
                continue
            self._broken[name] = is_broken
            bound_ms = self._pace.sla.ttft_ms if name == "ttft" else self._pace.sla.tpot_ms
            verb = "is broken" if is_broken else "is kept again"
            if p95_ms[name] is None:
                LOGGER.warning("the bound on %s was broken; no answer of the last minute tells more", name.upper())
            else:
                shown = (name.upper(), verb, p95_ms[name], bound_ms)
                LOGGER.warning("the bound on %s %s: p95 %.0f ms, asked %.0f ms", *shown)


def _log(error: SpecError) -> None:
    """Why an answer failed, without a word of it; what a request brought on itself is no news."""
    kind = _kind(error)
    if kind == "engine":
        LOGGER.error("an answer failed: %s", error)
    elif kind == "timeout":
        LOGGER.warning("an answer failed: %s", error)


def _is_broken(error: Exception) -> bool:
    """Whether a pass, or the numbers of it, failed; what allows no token was judged by sound ones."""
    return isinstance(error, EngineError) and not isinstance(error, DeadEnd)


def _kind(error: SpecError) -> str:
    """As what the metrics count it. What allows no token is asked for by the request."""
    if isinstance(error, TimedOut):
        return "timeout"
    if isinstance(error, Unavailable):
        return "unavailable"
    return "invalid" if isinstance(error, DeadEnd) else "engine"
