"""A smaller model as drafter: its own engine, a lazy cache, one batch per step for all sequences.

The cache holds a prefix of the committed tokens, at most all but the last, and lags behind while nobody drafts; the
next proposal first feeds what is missing. Rejected tokens leave it by rollback, so nothing is evaluated twice
(llama.cpp's own loop feeds every verified batch through the draft again).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specli.drafters.base import EMPTY, Choice, Chooser, Draft, SequenceState
from specli.engine.base import Engine, Row, Slice, roll_back_or_clear
from specli.events import RoundDone
from specli.sampling import Distribution, State, top_probability

SHORT_FEED = 32  # tokens that no interrupt need cut short: looking for one takes 7% of a short pass


class Pacer(Protocol):
    """Says how far a draft is worth growing, from confidences only. ``controller.Controller`` is one."""

    def begin_pass(self, n_chains: int) -> None:
        """A pass for ``n_chains`` sequences, each of which then has its turn."""

    def begin_turn(self) -> None:
        """The next sequence of the pass."""

    def may_draw(self, confidences: Sequence[float], confidence: float) -> bool:
        """Whether to draw the token whose row shows ``confidence``, behind tokens of ``confidences``."""

    def may_step(self, confidences: Sequence[float]) -> bool:
        """Whether to make another pass behind tokens of ``confidences``."""

    def take(self, k: int) -> None:
        """``k`` more tokens were drawn."""


class _Chain:
    """The draft of one sequence while it grows."""

    def __init__(self, state: SequenceState, chooser: Chooser, budget: int) -> None:
        self.state, self.chooser, self.budget = state, state.verifier or chooser, budget
        self.ids: list[int] = []
        self.distributions: list[Distribution | None] = []
        self.confidence: list[float] = []
        self.sampling: State | None = None
        self.is_open = budget > 0

    def pending(self, n_past: int) -> list[int]:
        """Committed and drafted tokens that a cache of ``n_past`` tokens lacks."""
        n_committed = len(self.state.tokens)
        return [*self.state.tokens[n_past:], *self.ids[max(0, n_past - n_committed) :]]


class ModelDrafter:
    """Drafts with ``engine``, drawing tokens as ``chooser`` (the verifier) says, or as a sequence's own does.

    ``p_min``: stop before a position whose confidence is below it (llama.cpp ``--spec-draft-p-min``). ``n_min``
    (``--spec-draft-n-min``): a draft that is a point mass is dropped whole when shorter; a sampled draft may not be
    dropped, since throwing drawn tokens away is biased, so there it only forbids ``p_min`` to stop earlier.
    ``end_ids``: the target's; nothing is drafted behind one. ``n_vocab``: the target's; higher ids are never drafted.
    ``pacer``: may end a draft earlier, in the same places and within the same bounds as ``p_min``. ``feed_most``: where
    others wait, a proposal feeds no more tokens of what a cache lacks, and drafts for it once that is done.

    ``n_passes``: draft passes so far. ``n_fed``: tokens so far that caches lacked, but for the two that a draft's first
    pass brings anyway. ``waiting``: sequences that the last proposal did not draft for, as their caches lack too much.
    """

    def __init__(
        self,
        engine: Engine,
        chooser: Chooser,
        n_vocab: int,
        end_ids: frozenset[int] = frozenset(),
        n_min: int = 0,
        p_min: float = 0.0,
        pacer: Pacer | None = None,
        feed_most: int | None = None,
    ) -> None:
        self._engine, self._chooser, self._end_ids = engine, chooser, end_ids
        self._n_vocab, self._n_min, self._p_min = min(n_vocab, engine.n_vocab), n_min, p_min
        self._is_smaller = engine.n_vocab < n_vocab
        self.pacer, self._feed_most = pacer, feed_most
        self.n_passes = self.n_fed = 0
        self.waiting: set[int] = set()
        self._drafted: dict[int, list[int]] = {}  # ids in the cache behind the committed tokens

    @property
    def busy_s(self) -> float:
        """Seconds spent in the draft model's passes."""
        return self._engine.busy_s

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        """Draft for all sequences in step. Raises ``Cancelled`` while feeding a long history."""
        chains = [
            _Chain(state, self._chooser, self.room(state, budget))
            for state, budget in zip(sequences, budgets, strict=True)
        ]
        for chain in chains:
            self._force(chain)
        self._catch_up(chains)
        growing = [chain for chain in chains if chain.is_open]
        is_long = any(len(self._pending(chain)) > SHORT_FEED for chain in growing)
        rows = self._step(growing, interruptible=is_long)
        while growing:
            for chain, row in zip(growing, rows, strict=True):
                self._extend(chain, row)
            growing = [chain for chain in growing if chain.is_open]
            rows = self._step(growing)
        return [self._finished(chain) for chain in chains]

    def _catch_up(self, chains: Sequence[_Chain]) -> None:
        """Feed a part of what the caches lack of long histories, and close those chains for this time."""
        self.waiting.clear()
        left = self._feed_most
        for chain in chains if left is not None else ():
            if chain.is_open and left is not None and len(self._pending(chain)) > max(left, 2):
                chain.is_open = False
                self.waiting.add(chain.state.id)
                if left > 0:
                    part = self._slice(chain, min(left, self._engine.n_batch), 0)
                    self._engine.evaluate([part], interruptible=True)
                    self.n_fed += len(part.tokens)
                    left = 0

    def room(self, state: SequenceState, budget: int) -> int:
        """The part of ``budget`` that the draft's own context and vocabulary allow.

        Drafting k tokens puts the committed tokens and k - 1 drafted ones into the draft's cache.
        """
        n_past, n_vocab = self._engine.n_past(state.id), self._engine.n_vocab
        if self._is_smaller and max(state.tokens[n_past:], default=0) >= n_vocab:
            return 0
        return min(budget, self._engine.n_ctx - len(state.tokens) + 1)

    def n_lacking(self, sequence: SequenceState) -> int:
        """Committed tokens that the draft's cache does not hold yet."""
        return len(sequence.tokens) - self._engine.n_past(sequence.id)

    def commit(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Keep what the target confirmed of the drafted tokens in the cache; roll the rest back."""
        drafted = self._drafted.pop(sequence.id, [])
        n_kept = 0
        while n_kept < min(len(drafted), len(tokens)) and drafted[n_kept] == tokens[n_kept]:
            n_kept += 1
        n_past = self._engine.n_past(sequence.id)
        n_valid = min(n_past - len(drafted) + n_kept, len(sequence.tokens) - 1)
        if n_valid < n_past:
            self._engine.rollback(sequence.id, n_valid)

    def observe(self, outcome: RoundDone) -> None:
        """Nothing to learn: length is decided by ``pacer``."""

    def rewind(self, sequence: SequenceState, n_tokens: int) -> None:
        """Roll the cache back; where it cannot go back that far, empty it."""
        self._drafted.pop(sequence.id, None)
        if self._engine.n_past(sequence.id) > n_tokens:
            roll_back_or_clear(self._engine, sequence.id, n_tokens)

    def forget(self, sequence: SequenceState) -> None:
        """Empty the sequence's cache."""
        self._drafted.pop(sequence.id, None)
        self._engine.rollback(sequence.id, 0)

    def _force(self, chain: _Chain) -> None:
        """Append what must come next; no model is asked."""
        while chain.is_open:
            sampler, state = chain.chooser.sampler, chain.sampling or chain.state.state
            token = sampler.forced(state)
            if token is None:
                return
            if token >= self._n_vocab:
                chain.is_open = False  # the draft could not go on from there
                return
            if self._has_confidence:
                chain.confidence.append(1.0)
            self._add(chain, Choice(token, None, sampler.advance(state or sampler.start(), token)))

    def _add(self, chain: _Chain, choice: Choice) -> None:
        chain.ids.append(choice.token)
        chain.distributions.append(choice.distribution)
        chain.sampling = choice.state
        if self.pacer is not None:
            self.pacer.take(1)
        chain.is_open = len(chain.ids) < chain.budget and choice.token not in self._end_ids

    @property
    def _has_confidence(self) -> bool:
        """Whether anybody asks for it."""
        return self._p_min > 0 or self.pacer is not None

    def _step(self, chains: Sequence[_Chain], interruptible: bool = False) -> list[Row]:
        """Evaluate what the cache lacks of each chain, all of it but the last batch without rows; the rows behind."""
        if not chains:
            return []
        slices, most = [], self._engine.n_batch // len(chains)
        if self.pacer is not None:
            self.pacer.begin_pass(len(chains))
        for chain in chains:
            self.n_fed += max(0, len(self._pending(chain)) - 2)
            while len(self._pending(chain)) > most:
                self._engine.evaluate([self._slice(chain, most, 0)], interruptible)
            slices.append(self._slice(chain, most, 1))
        self.n_passes += 1
        return [rows[0] for rows in self._engine.evaluate(slices, interruptible).rows]

    def _pending(self, chain: _Chain) -> list[int]:
        return chain.pending(self._engine.n_past(chain.state.id))

    def _slice(self, chain: _Chain, most: int, n_rows: int) -> Slice:
        """The next tokens of ``chain`` for its cache, noted as drafted where they are."""
        start, tokens = self._engine.n_past(chain.state.id), self._pending(chain)[:most]
        n_drafted = start + len(tokens) - len(chain.state.tokens)
        if n_drafted > 0:
            self._drafted[chain.state.id] = chain.ids[:n_drafted]
        return Slice(chain.state.id, tokens, start, n_rows)

    def _extend(self, chain: _Chain, row: Row) -> None:
        """Draw the next token, or close the chain before it is drawn; never after."""
        if self.pacer is not None:
            self.pacer.begin_turn()
        row = row[: self._n_vocab]
        if not chain.chooser.sampler.allows_any(chain.sampling or chain.state.state, row):
            chain.is_open = False  # a dead end of the draft is none of the text
            return
        if self._has_confidence:
            confidence = top_probability(row)
            may_stop = not chain.chooser.is_sampled or len(chain.ids) >= self._n_min
            if may_stop and not self._may_draw(chain, confidence):
                chain.is_open = False
                return
            chain.confidence.append(confidence)
        self._add(chain, chain.chooser.choose(row, chain.state, chain.ids, chain.sampling))
        self._force(chain)
        chain.is_open = chain.is_open and self._may_step(chain)

    def _may_draw(self, chain: _Chain, confidence: float) -> bool:
        if confidence < self._p_min:
            return False
        return self.pacer is None or self.pacer.may_draw(chain.confidence, confidence)

    def _may_step(self, chain: _Chain) -> bool:
        return self.pacer is None or len(chain.ids) < self._n_min or self.pacer.may_step(chain.confidence)

    def _finished(self, chain: _Chain) -> Draft:
        is_short = len(chain.ids) < self._n_min
        if not chain.ids or (is_short and not chain.chooser.is_sampled):
            return EMPTY
        confidence = np.asarray(chain.confidence) if chain.confidence else None
        return Draft(chain.ids, chain.distributions, confidence)
