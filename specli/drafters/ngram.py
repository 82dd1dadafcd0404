"""N-gram drafting: propose what followed the longest earlier match of the text's end. No model, no weights.

The idea is prompt lookup decoding (Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding). Counting the
continuations and refusing thin or contradicted matches is llama.cpp's ``common/ngram-cache.cpp`` (sizes 1 to 4, fixed
thresholds). Added here: thresholds learned from the sequence itself, copies that go on behind an edited token, and an
estimate of being right for every proposed token.

    index       per size n a table: last n ids -> where they were continued last, and how often
    longest     the largest size that knows the suffix decides; of its continuations the most frequent wins, ties go
                to the most recent; unless it has two thirds of the occurrences, nothing is proposed
    copy        one under way that has matched for longer than any size keeps its place, and backs the most frequent
                continuation if that is its own; after twice as long it is believed alone
    repair      no size matches and a copy has just met an edited token: the copy is assumed to go on behind it
    hit rate    each committed token is first compared with the one foretold; every kind of match (its size, seen once
                or more often) keeps a hit rate with a prior and exponential forgetting, also while it is not trusted
    chain       a drafted token extends the suffix, and the next one is looked up from there

Measured with the default sizes (4 to 2, one core, Python 3.11): 16 tokens are proposed in 33 us after 1k tokens of
history and after 128k; a prompt is indexed at 0.1 to 0.2 s per 100k tokens,
an output token committed in 2 to 3 us; the index takes up to 310 bytes per token of new text, 10 of repeated text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from specli.drafters.base import EMPTY, Draft, SequenceState
from specli.errors import ConfigError
from specli.events import RoundDone
from specli.sampling import Sampler

# Ids are packed into keys of 20 bits each: three fit the 60 bits of a small int. A larger id would blur two keys and
# cost a wrong guess, never a wrong text.
_ID_BITS = 20
_POSITION = (1 << 32) - 1  # low bits of a table's int entry; above them is the number of occurrences, minus one
_ONCE_MORE = 1 << 32

# Priors, from 8,079 output tokens of 39 answers (JSON extraction, renaming, copy-editing, lists, prose, code): a match
# of n tokens was wrong in 0.8/n of the cases if seen once, in 0.4/n if seen more often (measured for n = 2, 3, 4, 8:
# 0.40, 0.28, 0.20, 0.11 and 0.20, 0.14, 0.07, 0.01). The first token of a repair was right in 0.25 (of 6,721 others in
# 0.17), the next in 0.61; a match seen once was wrong in 0.10 after 8 right tokens, and no less often after more.
_WRONG_ONCE, _WRONG_OFTEN = 0.8, 0.4
_REPAIR_PRIOR = (0.2, 0.6)
_PRIOR_WEIGHT = 4.0  # observations that a prior counts for
_MEMORY = 0.95  # of the hit statistics, per observation: the last 20 count
_STREAK_CAP_ONCE, _STREAK_CAP_OFTEN = 8, 32  # tokens


@dataclass(slots=True)
class _Split:
    """An n-gram with several continuations: the best one, kept up to date at each occurrence, so never searched."""

    position: int  # the latest occurrence of the best continuation
    best: int  # its count
    total: int
    counts: dict[int, int]  # token -> occurrences


class _Match(NamedTuple):
    """What an earlier text says of the next token: the one at ``position``, ``seen`` of ``total`` times."""

    position: int
    size: int  # tokens; 0 is a repair
    seen: int
    total: int

    @property
    def kind(self) -> int:
        """Which hit statistics it belongs to: by size, and seen once or more often."""
        return 2 * self.size + (self.seen > 1)


class _History:
    """One sequence: its tokens, the index over them, and how well the index foretold them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.tables: list[tuple[int, int, dict[int, int | _Split]]] = [
            (size, (1 << _ID_BITS * size) - 1, {}) for size in sizes
        ]
        self.suffix = 0  # the last sizes[0] ids, packed
        self.streak = 0  # tokens foretold rightly in a row
        self.copied = 0  # of those before the next token, how many the copied text is known to share
        self.source = -1  # the copied text's position that answers to the next token; -1: nothing is being copied
        self.edited = False  # whether the last token differed from the copied text
        self.hits = [0.0] * (2 * sizes[0] + 2)
        self.tries = [0.0] * (2 * sizes[0] + 2)
        self.is_prompt = True  # the next tokens are somebody else's text: nothing to learn from
        self._next: _Match | None = None  # what continues the text as it is,
        self._is_looked_up = False  # if that was asked for

    def cut(self, n_tokens: int) -> _History:
        """The first ``n_tokens``, indexed anew where there are more; what was learned stays."""
        history = self
        if n_tokens < len(self.tokens):
            history = _History([size for size, _, _ in self.tables])
            for token in self.tokens[:n_tokens]:
                history.append(token)
            history.hits, history.tries = self.hits, self.tries
        history.streak, history.copied, history.source, history.edited, history.is_prompt = 0, 0, -1, False, True
        history._is_looked_up = False
        return history

    def pushed(self, suffix: int, token: int) -> int:
        """``suffix`` with ``token`` behind it and its first id dropped."""
        return (suffix << _ID_BITS | token) & self.tables[0][1]

    def append(self, token: int) -> None:
        """Index one token under each size and make it the end of the text."""
        tokens, suffix, position = self.tokens, self.suffix, len(self.tokens)
        for size, mask, table in self.tables:
            if position < size:
                continue
            key = suffix & mask
            entry = table.get(key)
            if entry is None:
                table[key] = position
            elif isinstance(entry, int):
                if (old := tokens[entry & _POSITION]) == token:
                    table[key] = (entry & ~_POSITION) + _ONCE_MORE + position
                else:
                    count = (entry >> 32) + 1
                    best = position if count == 1 else entry & _POSITION
                    table[key] = _Split(best, count, count + 1, {old: count, token: 1})
            else:
                count = entry.counts[token] = entry.counts.get(token, 0) + 1
                entry.total += 1
                if count >= entry.best:
                    entry.best, entry.position = count, position
        tokens.append(token)
        self.suffix, self._is_looked_up = self.pushed(suffix, token), False

    def longest(self, suffix: int) -> _Match | None:
        """The longest n-gram at the end of ``suffix`` that has been seen, whatever its evidence."""
        for size, mask, table in self.tables:
            entry = table.get(suffix & mask)
            if isinstance(entry, int):
                count = (entry >> 32) + 1
                return _Match(entry & _POSITION, size, count, count)
            if entry is not None:
                return _Match(entry.position, size, entry.best, entry.total)
        return None

    def match(self, suffix: int, source: int, edited: bool, copied: int) -> _Match | None:
        """What continues ``suffix``: a copy that is longer than any size, or the longest match unless contradicted.

        Where nothing matches, the copy is resumed at ``source``. ``copied``: tokens before ``source`` that are known to
        be the same as the last ones.
        """
        found, tokens, longest = self.longest(suffix), self.tokens, self.tables[0][0]
        is_copy = 0 <= source < len(tokens)
        if found is None:
            return _Match(source, 0, 1 if edited else 2, 2) if is_copy else None
        position, size, seen, total = found
        if is_copy and copied > longest:
            if position == source:
                return found
            if tokens[position] == tokens[source]:
                return _Match(source, size, seen, total)
            if copied >= 2 * longest:
                return _Match(source, longest, 1, 1)
        return found if 3 * seen >= 2 * total else None

    def foretold(self) -> _Match | None:
        """What continues the text as it is; drafting and learning ask for the same."""
        if not self._is_looked_up:
            self._next, self._is_looked_up = self.match(self.suffix, self.source, self.edited, self.copied), True
        return self._next

    def hit_rate(self, match: _Match, streak: int) -> float:
        """Estimated chance, in (0, 1), that ``match`` is right after ``streak`` right ones."""
        if match.size == 0:
            prior = _REPAIR_PRIOR[match.seen - 1]
        else:
            wrong, cap = (_WRONG_ONCE, _STREAK_CAP_ONCE) if match.seen == 1 else (_WRONG_OFTEN, _STREAK_CAP_OFTEN)
            prior = 1.0 - wrong / (max(match.size, min(streak, cap)) if match.size == self.tables[0][0] else match.size)
        return (_PRIOR_WEIGHT * prior + self.hits[match.kind]) / (_PRIOR_WEIGHT + self.tries[match.kind])

    def learn(self, token: int) -> None:
        """Compare the next real token with the one foretold; ``append`` must follow."""
        match = self.foretold()
        if match is None:
            self.streak, self.copied, self.source = 0, 0, -1
            return
        hit = self.tokens[match.position] == token
        self.hits[match.kind] = _MEMORY * self.hits[match.kind] + hit
        self.tries[match.kind] = _MEMORY * self.tries[match.kind] + 1.0
        self.streak = self.streak + 1 if hit else 0
        known = self.copied if match.position == self.source else match.size
        self.copied = known + 1 if hit else 0
        gave_up = not hit and match.size == 0 and self.edited
        self.source = -1 if gave_up else match.position + 1
        self.edited = not hit


class NgramDrafter:
    """Drafts by looking the end of the text up in the text itself (prompt and output). Point masses, no model.

    ``end_ids``: end-of-generation ids; a draft ends behind the first one. ``n_min`` (``--spec-draft-n-min``): a
    shorter draft is dropped whole, as a point mass may be. ``p_min`` (``--spec-draft-p-min``) and ``min_hit_rate``:
    a token is proposed while its estimated chance of being right reaches both. ``min_reach``: a draft ends behind a
    token that stands with less than this chance, with those before it. ``size_max``, ``size_min``: sizes of
    the n-grams in tokens, longest first. ``sampler`` (or a sequence's own, where there is one) says what may come next
    at all. Raises ``ConfigError`` for sizes that make no sense.

    Defaults, from simulated greedy rounds over 47 answers: sizes above 4 or below 2 gained nothing; ``min_hit_rate``
    0.3, 0.4 and 0.5 were within 1% at K = 3; a long fixed K wants it higher, a controller or a GPU lower.
    """

    busy_s = 0.0

    def __init__(
        self,
        end_ids: frozenset[int] = frozenset(),
        n_min: int = 0,
        p_min: float = 0.0,
        *,
        min_hit_rate: float = 0.4,
        min_reach: float = 0.0,
        size_max: int = 4,
        size_min: int = 2,
        sampler: Sampler | None = None,
    ) -> None:
        if not 1 <= size_min <= size_max:
            raise ConfigError(f"n-gram sizes from {size_min} to {size_max} tokens; expected 1 <= size_min <= size_max")
        self._end_ids, self._n_min, self._floor, self._min_reach = end_ids, n_min, max(p_min, min_hit_rate), min_reach
        self._sampler = sampler
        self._sizes = range(size_max, size_min - 1, -1)
        self._histories: dict[int, _History] = {}

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        """At most ``budgets[i]`` tokens for ``sequences[i]``; an unknown sequence gets none.

        ``confidence`` is float64 ``(k,)``: per position, the chance of being right given that all before it were.
        """
        return [self._draft(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]

    def chance(self, sequence: SequenceState) -> float:
        """How likely the token is that the text foretells next, proposed or not; 0 where it foretells none."""
        history = self._histories.get(sequence.id)
        match = None if history is None else history.foretold()
        return 0.0 if history is None or match is None else history.hit_rate(match, history.streak)

    def shortened(self, draft: Draft, k: int) -> Draft:
        """The first ``k`` tokens of a draft, or none where that is below ``n_min``."""
        if k < max(1, self._n_min):
            return EMPTY
        return draft if k >= len(draft) else draft.first(k)

    def _draft(self, sequence: SequenceState, budget: int) -> Draft:
        history = self._histories.get(sequence.id)
        if history is None:
            return EMPTY
        suffix, streak, source, edited = history.suffix, history.streak, history.source, history.edited
        tokens, copied, reach, match = history.tokens, history.copied, 1.0, history.foretold()
        position = -1 if match is None else match.position
        ids: list[int] = []
        rates: list[float] = []
        while budget > 0 and match is not None and (rate := history.hit_rate(match, streak)) >= self._floor:
            token = tokens[position]
            ids.append(token)
            rates.append(rate)
            reach *= rate
            is_reached = reach >= self._min_reach or len(ids) < self._n_min
            if token in self._end_ids or len(ids) == budget or not is_reached:
                break
            copied = (copied if position == source else match.size) + 1
            suffix, streak, source, edited = history.pushed(suffix, token), streak + 1, position + 1, False
            if copied >= 2 * self._sizes[0] and source < len(tokens):
                position = source  # so long a copy goes on whatever else is found
            elif (match := history.match(suffix, source, edited, copied)) is not None:
                position = match.position
        if not ids:
            return EMPTY
        if self._sampler is not None:
            sampler = self._sampler if sequence.verifier is None else sequence.verifier.sampler
            del ids[sampler.n_allowed(sequence.state, ids) :]
        return self.shortened(Draft(ids, [None] * len(ids), np.array(rates[: len(ids)])), len(ids))

    def commit(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Index ``tokens``; all but a prompt's also teach the hit rates. O(sizes) per token."""
        history = self._histories.get(sequence.id)
        if history is None:
            history = self._histories[sequence.id] = _History(self._sizes)
        for token in tokens:
            if not history.is_prompt:
                history.learn(token)
            history.append(token)
        history.is_prompt = False

    def observe(self, outcome: RoundDone) -> None:
        """Nothing to learn from times; the hit rates learn on commit."""

    def rewind(self, sequence: SequenceState, n_tokens: int) -> None:
        """Index no more than the first ``n_tokens``, the next ones as a prompt; the hit rates stay."""
        history = self._histories.get(sequence.id)
        if history is not None:
            self._histories[sequence.id] = history.cut(n_tokens)

    def forget(self, sequence: SequenceState) -> None:
        """Drop the sequence's index and statistics."""
        self._histories.pop(sequence.id, None)
