"""The one decode loop.

A round: every active sequence proposes, the target evaluates one batch, each draft is verified, caches are rolled
back, events are emitted.

Invariant before each round: the target's cache holds exactly ``len(tokens) - 1`` tokens; the last one is evaluated
together with the draft. An accepted run is committed one token at a time, so EOS, stop strings and limits fall where
plain decoding puts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from specli.drafters.base import EMPTY, Draft, Drafter, SequenceState
from specli.engine.base import Engine, Rows, Slice
from specli.errors import Cancelled, DeadEnd, RollbackUnsupported, SpecError
from specli.events import (
    Event,
    Failed,
    Finished,
    FinishReason,
    Logprobs,
    PrefillDone,
    Provenance,
    RoundDone,
    SequenceRound,
    Span,
    Text,
)
from specli.request import Request, Running
from specli.text import TextStream
from specli.verify import Verifier


@dataclass(frozen=True, slots=True)
class Decoder:
    """Everything a round needs.

    ``verifier`` judges every sequence that brings none of its own. ``piece`` gives a token's bytes, ``k_max`` bounds
    the draft, ``cancelled`` is asked before each batch, ``clock`` returns seconds.

    ``run`` is the whole way of a few requests. A server takes the steps by itself: ``begin``, ``feed`` until the prompt
    is in the cache, ``round`` with all that are so far, ``finish`` to end one early, ``release`` in the end.
    """

    engine: Engine
    verifier: Verifier
    piece: Callable[[int], bytes]
    drafter: Drafter | None = None
    k_max: int = 0
    cancelled: Callable[[], bool] = lambda: False
    clock: Callable[[], float] = time.perf_counter

    def run(self, requests: Sequence[Request]) -> Generator[Event, None, None]:
        """Generate for all ``requests`` together. Closing the generator early, or an error, leaves the caches right."""
        active = [Running(request, TextStream(self.piece, request.stops)) for request in requests]
        try:
            for running in active:
                yield from self.begin(running)
                while running.is_feeding:
                    yield from self.feed(running, self.engine.n_batch)
            while active := [running for running in active if running.finish is None]:
                if self.cancelled():
                    for running in active:
                        yield from self.finish(running, "cancelled")
                    return
                for event in self.round(active):
                    if isinstance(event, Failed):
                        raise event.error
                    yield event
        finally:
            for request in requests:
                self.release(request)

    def begin(self, running: Running) -> Iterator[Event]:
        """Take a prompt in. Raises ``ConfigError`` (empty) or ``ContextOverflow``."""
        request, state = running.request, running.state
        request.check_fits(self.engine.n_ctx)
        if self.drafter is not None:
            self.drafter.commit(state, state.tokens[request.n_known :])
        running.n_reused = self.engine.n_past(state.id)
        if request.max_tokens == 0:
            yield from self.finish(running, "length")

    def feed(self, running: Running, n_most: int) -> Iterator[Event]:
        """Evaluate the next ``n_most`` tokens of the prompt in one pass; behind its last one, emit a token.

        The same chunks with and without a draft.
        """
        request, state, engine = running.request, running.state, self.engine
        start, busy_s = engine.n_past(state.id), engine.busy_s
        chunk = state.tokens[start : start + min(n_most, engine.n_batch)]
        is_last = start + len(chunk) == len(state.tokens)
        try:
            if self.cancelled():
                raise Cancelled("stopped before the first token")
            rows = engine.evaluate([Slice(state.id, chunk, start, int(is_last))], interruptible=True).rows[0]
        except Cancelled:
            yield from self.finish(running, "cancelled")
            return
        running.prefill_s += engine.busy_s - busy_s
        if not is_last:
            return
        verdict = (state.verifier or self.verifier).verify(EMPTY, rows, state)
        n_prompt, spans = len(state.tokens), self._commit(running, verdict.emitted(EMPTY), n_accepted=0)
        logprobs = running.logprobs(rows)
        yield PrefillDone(state.id, n_prompt, request.accepted_at_s, self.clock(), running.prefill_s, running.n_reused)
        yield from logprobs
        yield from self._emit(running, spans)

    def round(self, active: Sequence[Running]) -> Iterator[Event]:
        """Propose, verify, roll back, once for all of ``active``. A sequence that fails alone is told by ``Failed``."""
        started_s, draft_busy_s, target_busy_s = self.clock(), self._draft_busy_s(), self.engine.busy_s
        try:
            drafts = self._propose(active)
        except Cancelled:
            return  # the loop ends every sequence at its next turn
        slices = [running.to_verify(draft) for running, draft in zip(active, drafts, strict=True)]
        evaluation = self.engine.evaluate(slices)
        counts, told, failed = list[SequenceRound](), list[tuple[Running, list[Span], list[Logprobs]]](), list[Failed]()
        for running, draft, rows in zip(active, drafts, evaluation.rows, strict=True):
            try:
                count, spans = self._settle(running, draft, rows)
            except SpecError as error:
                failed.append(Failed(running.state.id, error))
                counts.append(SequenceRound(running.state.id, 0, 0, 0))
                continue
            counts.append(count)
            told.append((running, spans, running.logprobs(rows)))
        at_s = self.clock()
        draft_s, verify_s = self._draft_busy_s() - draft_busy_s, self.engine.busy_s - target_busy_s
        outcome = RoundDone(tuple(counts), at_s, draft_s, verify_s, at_s - started_s - draft_s - verify_s)
        if self.drafter is not None:
            self.drafter.observe(outcome)
        yield outcome
        for running, spans, logprobs in told:
            yield from logprobs
            yield from self._emit(running, spans)
        yield from failed

    def finish(self, running: Running, reason: FinishReason) -> Iterator[Event]:
        """The end of a sequence; also before its time."""
        if spans := running.text.finish():
            yield Text(running.state.id, tuple(spans))
        is_cut = running.text.stop is not None
        running.finish = reason = "stop" if is_cut else reason  # the text's end may have completed a stop string
        generated = running.state.tokens[running.n_prompt :]
        n_kept = running.text.n_kept if is_cut else len(generated)
        n_cut = len(generated) - n_kept
        yield Finished(
            running.state.id, reason, tuple(generated[:n_kept]), self.clock(), n_cut=n_cut, stop=running.text.stop
        )

    def release(self, request: Request) -> None:
        """Leave the caches right behind a sequence, however it ended."""
        with suppress(RollbackUnsupported):  # it would hide the failure that is under way
            self._rewind(request.state)
        if self.drafter is not None and not request.is_kept:
            self.drafter.forget(request.state)

    def _settle(self, running: Running, draft: Draft, rows: Rows) -> tuple[SequenceRound, list[Span]]:
        """Judge one sequence's draft and commit what stands."""
        verifier = running.state.verifier or self.verifier
        try:
            verdict = verifier.verify(draft, rows, running.state)
        except DeadEnd as end:  # on the draft's way: what leads there is judged, and the next round says so
            if end.n_drafted == 0:
                raise
            draft = draft.first(end.n_drafted)
            verdict = verifier.verify(draft, rows[: len(draft)], running.state)
        spans = self._commit(running, verdict.emitted(draft), verdict.n_accepted)
        n_kept = running.n_last
        n_judged = len(draft) if running.finish is None else min(len(draft), n_kept)  # none behind a cut
        return SequenceRound(running.state.id, n_judged, min(verdict.n_accepted, n_kept), n_kept), spans

    def _propose(self, active: Sequence[Running]) -> list[Draft]:
        if self.drafter is None:
            return [EMPTY] * len(active)
        budgets = [running.room(self.engine, self.k_max, len(active)) for running in active]
        return self.drafter.propose([running.state for running in active], budgets)

    def _commit(self, running: Running, tokens: Sequence[int], n_accepted: int) -> list[Span]:
        """Append ``tokens`` one at a time until something ends the sequence; then roll the caches back to match."""
        state, request, spans = running.state, running.request, list[Span]()
        n_before = len(state.tokens)
        for i, token in enumerate(tokens):
            state.tokens.append(token)
            if token in request.end_ids:
                running.finish = "eos"
            else:
                provenance = Provenance.DRAFT if i < n_accepted else Provenance.TARGET
                spans += running.text.push(token, provenance)
                running.finish = running.limit_reached(self.engine.n_ctx)
            if running.finish is not None:
                break
        committed = state.tokens[n_before:]
        running.n_last = len(committed)
        self._rewind(state)
        if self.drafter is not None:
            self.drafter.commit(state, committed)
        return spans

    def _rewind(self, state: SequenceState) -> None:
        """Drop what the target's cache holds beyond all committed tokens but the last."""
        n_valid = max(0, len(state.tokens) - 1)
        if self.engine.n_past(state.id) > n_valid:
            self.engine.rollback(state.id, n_valid)

    def _emit(self, running: Running, spans: list[Span]) -> Iterator[Event]:
        if spans:
            yield Text(running.state.id, tuple(spans))
        if running.finish is not None:
            yield from self.finish(running, running.finish)

    def _draft_busy_s(self) -> float:
        return 0.0 if self.drafter is None else self.drafter.busy_s
