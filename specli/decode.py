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
from specli.errors import Cancelled, ConfigError, ContextOverflow, DeadEnd, RollbackUnsupported
from specli.events import (
    Event,
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
from specli.sampling import log_probabilities
from specli.text import TextStream
from specli.verify import Verifier


@dataclass(frozen=True, slots=True)
class Decoder:
    """Everything a round needs.

    ``piece`` gives a token's bytes, ``k_max`` bounds the draft, ``cancelled`` is asked before each batch, ``clock``
    returns seconds.
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
                yield from self._prefill(running)
            while active := [running for running in active if running.finish is None]:
                if self.cancelled():
                    for running in active:
                        yield from self._finish(running, "cancelled")
                    return
                yield from self._round(active)
        finally:
            for request in requests:
                with suppress(RollbackUnsupported):  # it would hide the failure that is under way
                    self._rewind(request.state)
                if self.drafter is not None and not request.is_kept:
                    self.drafter.forget(request.state)

    def _prefill(self, running: Running) -> Iterator[Event]:
        """Evaluate what the cache lacks of the prompt, in the same chunks with and without a draft; emit a token."""
        request, state = running.request, running.state
        prompt, n_ctx = state.tokens[:], self.engine.n_ctx
        _check_prompt(prompt, n_ctx)
        if self.drafter is not None:
            self.drafter.commit(state, prompt[request.n_known :])
        if request.max_tokens == 0:
            yield from self._finish(running, "length")
            return
        busy_s, n_reused = self.engine.busy_s, self.engine.n_past(state.id)
        try:
            rows = self._feed(state)
        except Cancelled:
            yield from self._finish(running, "cancelled")
            return
        verdict = self.verifier.verify(EMPTY, rows, state)
        spans = self._commit(running, [verdict.next_token], n_accepted=0)
        prefill_s = self.engine.busy_s - busy_s
        done = PrefillDone(state.id, len(prompt), request.accepted_at_s, self.clock(), prefill_s, n_reused)
        logprobs = self._logprobs(running, rows)
        yield done
        yield from logprobs
        yield from self._emit(running, spans)

    def _feed(self, state: SequenceState) -> Rows:
        """Evaluate what the target's cache lacks of ``state``; the last token's row, float32 ``(1, n_vocab)``."""
        while True:
            if self.cancelled():
                raise Cancelled("stopped before the first token")
            start = self.engine.n_past(state.id)
            chunk = state.tokens[start : start + self.engine.n_batch]
            is_last = start + len(chunk) == len(state.tokens)
            evaluation = self.engine.evaluate([Slice(state.id, chunk, start, int(is_last))], interruptible=True)
            if is_last:
                return evaluation.rows[0]

    def _round(self, active: Sequence[Running]) -> Iterator[Event]:
        started_s, draft_busy_s, target_busy_s = self.clock(), self._draft_busy_s(), self.engine.busy_s
        try:
            drafts = self._propose(active)
        except Cancelled:
            return  # the loop ends every sequence at its next turn
        slices = [running.to_verify(draft) for running, draft in zip(active, drafts, strict=True)]
        evaluation = self.engine.evaluate(slices)
        counts, texts, logprobs = [], [], list[Logprobs]()
        for running, draft, rows in zip(active, drafts, evaluation.rows, strict=True):
            try:
                verdict = self.verifier.verify(draft, rows, running.state)
            except DeadEnd:  # somewhere on the draft's way: the next token by itself may still have one
                verdict = self.verifier.verify(EMPTY, rows[:1], running.state)
            tokens = [*draft.ids[: verdict.n_accepted], verdict.next_token]
            texts.append(self._commit(running, tokens, verdict.n_accepted))
            logprobs += self._logprobs(running, rows)
            n_kept = running.n_last
            n_judged = len(draft) if running.finish is None else min(len(draft), n_kept)  # none behind a cut
            counts.append(SequenceRound(running.state.id, n_judged, min(verdict.n_accepted, n_kept), n_kept))
        at_s, draft_s, verify_s = (
            self.clock(),
            self._draft_busy_s() - draft_busy_s,
            self.engine.busy_s - target_busy_s,
        )
        host_s = at_s - started_s - draft_s - verify_s
        outcome = RoundDone(tuple(counts), at_s, draft_s, verify_s, host_s)
        if self.drafter is not None:
            self.drafter.observe(outcome)
        yield outcome
        yield from logprobs
        for running, spans in zip(active, texts, strict=True):
            yield from self._emit(running, spans)

    def _propose(self, active: Sequence[Running]) -> list[Draft]:
        budgets = [self._budget(running, len(active)) for running in active]
        if self.drafter is None or not any(budgets):
            return [EMPTY] * len(active)
        return self.drafter.propose([running.state for running in active], budgets)

    def _budget(self, running: Running, n_active: int) -> int:
        """The longest draft that fits the context, the tokens left to emit, the batch, and ``k_max``."""
        n_cached = len(running.state.tokens) - 1
        left = running.n_left
        k = min(self.k_max, self.engine.n_ctx - n_cached - 1, self.engine.n_batch // n_active - 1)
        k = min(k, self.engine.n_rows_max // n_active - 1)
        return max(0, k if left is None else min(k, left - 1))

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
            yield from self._finish(running, running.finish)

    def _finish(self, running: Running, reason: FinishReason) -> Iterator[Event]:
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

    def _logprobs(self, running: Running, rows: Rows) -> list[Logprobs]:
        """Of the tokens that were just committed, one per row; none where nobody asked."""
        n, state = running.request.n_logprobs, running.state
        committed = state.tokens[len(state.tokens) - running.n_last :]
        return [] if n is None else [Logprobs(state.id, log_probabilities(rows, committed, n))]

    def _draft_busy_s(self) -> float:
        return 0.0 if self.drafter is None else self.drafter.busy_s


def _check_prompt(prompt: Sequence[int], n_ctx: int) -> None:
    if not prompt:
        raise ConfigError("the prompt is empty (0 tokens), at least one token was expected; give one with -p or -f")
    if len(prompt) > n_ctx:
        raise ContextOverflow(f"the prompt has {len(prompt)} tokens, the context holds {n_ctx}; shorten it or raise -c")
