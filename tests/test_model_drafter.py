"""The draft model: what it evaluates and what it never evaluates twice, when it stops, and what it may throw away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from fakes import memo
from numpy.typing import NDArray

from specli.drafters.base import EMPTY, Choice, Draft, SequenceState
from specli.drafters.model import ModelDrafter
from specli.engine.base import Row
from specli.engine.table import LogitsFunction, TableEngine, random_logits
from specli.errors import EngineError
from specli.sampling import Sampler, State, top_probability
from specli.verify import Verifier, make_verifier

V = 7
LOGITS = memo(random_logits(V, 1))
GREEDY, BLOCK = make_verifier("greedy", Sampler(0.0)), make_verifier("block", Sampler(1.0, 0, 1.0, 0.0))
PROMPT = [1, 2, 3, 4, 5]


class CountingEngine(TableEngine):
    """Counts tokens that were rolled back."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.n_dropped = 0

    def rollback(self, sequence: int, n_past: int) -> None:
        self.n_dropped += self.n_past(sequence) - n_past
        super().rollback(sequence, n_past)

    @property
    def n_fed(self) -> int:
        return sum(length for _start, length in self.batches)


class Chooser:
    """Another verifier's choices, and the positions at which they were asked for."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier, self.is_sampled, self.sampler = verifier, verifier.is_sampled, verifier.sampler
        self.positions: list[int] = []
        self.rows: list[Row] = []

    def choose(self, row: Row, sequence: SequenceState, drafted: Sequence[int], state: State | None) -> Choice:
        self.positions.append(len(sequence.tokens) + len(drafted))
        self.rows.append(row.copy())
        return self._verifier.choose(row, sequence, drafted, state)


class Loop:
    """What the decode loop does with one drafter and one sequence."""

    def __init__(
        self,
        logits: LogitsFunction = LOGITS,
        verifier: Verifier = GREEDY,
        n_vocab: int = V,
        prompt: Sequence[int] = PROMPT,
        limits: dict[str, int] | None = None,
        **options: object,
    ) -> None:
        self.engine = CountingEngine(logits, n_vocab, **(limits or {}))
        self.chooser = Chooser(verifier)
        self.drafter = ModelDrafter(self.engine, self.chooser, **{"n_vocab": V, **options})  # type: ignore[arg-type]
        self.state = SequenceState(0, list(prompt), 3, np.random.default_rng(3))
        self.drafter.commit(self.state, list(prompt))

    def propose(self, budget: int) -> Draft:
        [draft] = self.drafter.propose([self.state], [budget])
        return draft

    def commit(self, *tokens: int) -> None:
        self.state.tokens.extend(tokens)
        self.drafter.commit(self.state, tokens)
        held = self.engine._history[0]
        assert held == self.state.tokens[: len(held)]
        assert len(held) <= len(self.state.tokens) - 1
        assert self.engine.n_fed - self.engine.n_dropped == len(held)


def greedy(history: Sequence[int], n: int, logits: LogitsFunction = LOGITS) -> list[int]:
    tokens = list(history)
    for _ in range(n):
        tokens.append(int(logits(tokens).argmax()))
    return tokens[len(history) :]


def test_nothing_is_evaluated_before_the_first_proposal() -> None:
    loop = Loop()
    loop.commit(6)
    loop.commit(2, 3)
    assert loop.engine.batches == []
    assert loop.propose(0) is EMPTY  # no budget, no work
    assert loop.engine.batches == []


def test_a_proposal_first_feeds_what_is_missing_in_one_batch() -> None:
    loop = Loop()
    loop.commit(6)
    draft = loop.propose(3)
    assert list(draft.ids) == greedy([*PROMPT, 6], 3)
    assert loop.engine.batches == [(0, 6), (6, 1), (7, 1)]  # the third token is drawn, not evaluated


def test_what_was_accepted_is_not_fed_again() -> None:
    loop = Loop()
    loop.commit(6)
    first = greedy(loop.state.tokens, 4)
    loop.propose(3)
    loop.commit(*first)  # all accepted, and a bonus
    assert loop.engine.n_dropped == 0
    assert loop.engine.n_past(0) == 8  # one behind: the third drafted token was never evaluated
    n_batches = len(loop.engine.batches)
    loop.propose(2)
    assert loop.engine.batches[n_batches:] == [(8, 2), (10, 1)]  # the lag and the newest token in one batch


@pytest.mark.parametrize("n_accepted", range(4))
def test_only_rejected_tokens_leave_the_cache(n_accepted: int) -> None:
    loop = Loop()
    loop.commit(6)
    drafted = list(loop.propose(4).ids)
    loop.commit(*drafted[:n_accepted], (drafted[n_accepted] + 1) % V)
    assert loop.engine.n_dropped == 3 - n_accepted  # of the three that were evaluated
    assert loop.engine.n_past(0) == 6 + n_accepted


def test_the_last_committed_token_is_evaluated_again() -> None:
    """The target's own token may be what the draft would have said next; its row is still needed to go on."""
    loop = Loop()
    loop.commit(6)
    drafted = list(loop.propose(3).ids)
    loop.commit(*drafted[:2])
    assert (loop.engine.n_past(0), loop.engine.n_dropped) == (7, 1)
    assert list(loop.propose(1).ids) == drafted[2:]


def test_no_token_is_fed_twice_in_a_long_run() -> None:
    """Fed = held + rolled back, and rolled back only what differs from the text."""
    rng = np.random.default_rng(5)
    loop = Loop(limits={"n_ctx": 2000})
    n_wrong = 0
    loop.commit(0)
    for _ in range(200):
        drafted = list(loop.propose(int(rng.integers(0, 6))).ids)
        n_accepted = int(rng.integers(0, len(drafted) + 1))
        own = int(rng.integers(V))
        if n_accepted < len(drafted):
            own = (drafted[n_accepted] + 1) % V
            n_wrong += max(0, len(drafted) - 1 - n_accepted)
        loop.commit(*drafted[:n_accepted], own)
    assert loop.engine.n_dropped == n_wrong
    assert loop.engine.n_fed == loop.engine.n_past(0) + n_wrong


def test_a_lag_of_many_rounds_is_fed_at_once() -> None:
    loop = Loop(limits={"n_ctx": 200})
    loop.commit(6)
    loop.propose(2)
    loop.commit(*[1, 2] * 10)  # rounds that somebody else drafted for, or nobody
    n_batches = len(loop.engine.batches)
    loop.propose(1)
    assert len(loop.engine.batches) == n_batches + 1
    assert loop.engine.n_past(0) == len(loop.state.tokens)


@pytest.mark.parametrize("n_batch", [1, 2, 4, 5, 6, 7])
def test_a_long_history_is_fed_in_chunks(n_batch: int) -> None:
    loop = Loop(limits={"n_batch": n_batch})
    loop.commit(6)
    assert list(loop.propose(3).ids) == greedy([*PROMPT, 6], 3)
    assert max(length for _start, length in loop.engine.batches) <= n_batch
    assert loop.engine.n_fed == 8


def test_several_sequences_step_together() -> None:
    engine = CountingEngine(LOGITS, V, n_sequences=3)
    drafter = ModelDrafter(engine, GREEDY, V)
    states = [SequenceState(i, list(prompt)) for i, prompt in enumerate(([1], [2, 3, 4], [5, 6]))]
    for state in states:
        drafter.commit(state, state.tokens)
    drafts = drafter.propose(states, [3, 0, 1])
    assert [list(draft.ids) for draft in drafts] == [greedy([1], 3), [], greedy([5, 6], 1)]
    assert engine.batches == [(0, 1), (0, 2), (1, 1), (2, 1)]  # the second sequence waits, unfed
    assert [engine.n_past(i) for i in range(3)] == [3, 0, 2]


def test_forget_empties_one_sequence() -> None:
    engine = CountingEngine(LOGITS, V, n_sequences=2)
    drafter = ModelDrafter(engine, GREEDY, V)
    states = [SequenceState(0, [1, 2]), SequenceState(1, [3, 4])]
    drafter.propose(states, [3, 3])
    drafter.forget(states[0])
    assert (engine.n_past(0), engine.n_past(1)) == (0, 4)
    [draft] = drafter.propose([SequenceState(0, [6])], [2])  # another sequence takes its place
    assert list(draft.ids) == greedy([6], 2)
    states[1].tokens += [int(t) for t in greedy([3, 4], 1)]
    drafter.commit(states[1], states[1].tokens[2:])
    assert engine.n_past(1) == 2  # at most all committed tokens but the last
    drafter.forget(SequenceState(1, []))
    drafter.forget(SequenceState(1, []))  # twice is fine
    assert engine.n_past(1) == 0


# When a draft ends


def confident(*places: int) -> LogitsFunction:
    """Argmax as ``LOGITS``; certain, but for rows after ``places`` tokens, which are nearly flat."""

    def logits(history: Sequence[int]) -> Row:
        row = np.zeros(V, np.float32)
        row[int(LOGITS(history).argmax())] = 0.1 if len(history) in places else 9.0
        return row

    return logits


@pytest.mark.parametrize("verifier", [GREEDY, BLOCK], ids=lambda verifier: verifier.name)
def test_p_min_ends_a_draft_before_a_token_is_drawn(verifier: Verifier) -> None:
    loop = Loop(confident(8), verifier, p_min=0.5)
    loop.commit(6)
    draft = loop.propose(6)
    assert len(draft) == 2
    assert loop.chooser.positions == [6, 7]
    assert draft.confidence is not None
    np.testing.assert_allclose(draft.confidence, 1 / (1 + 6 * np.exp(-9)), rtol=1e-6)
    if verifier.is_sampled:  # two coins for two tokens: none for the third
        coins = np.random.default_rng(3)
        coins.random(2)
        assert loop.state.rng.random() == coins.random()


def test_p_min_at_the_first_position_is_an_empty_draft() -> None:
    loop = Loop(confident(6), p_min=0.5)
    loop.commit(6)
    assert loop.propose(4) is EMPTY
    loop.commit(0)
    assert loop.engine.n_past(0) == 6  # the history stays
    assert loop.engine.n_dropped == 0


def test_confidence_is_the_top_probability_and_known_only_if_asked_for() -> None:
    loop = Loop(p_min=1e-9)
    loop.commit(6)
    draft = loop.propose(3)
    assert draft.confidence is not None
    assert draft.confidence.dtype == np.float64
    histories = [[*PROMPT, 6, *draft.ids[:i]] for i in range(3)]
    np.testing.assert_array_equal(draft.confidence, [top_probability(LOGITS(history)) for history in histories])
    silent = Loop()
    silent.commit(6)
    assert silent.propose(3).confidence is None


def test_n_min_drops_a_short_point_mass() -> None:
    """J4: whole, so that it counts as neither proposed nor rejected. What was right of it stays in the cache."""
    loop = Loop(confident(8), p_min=0.5, n_min=3)
    loop.commit(6)
    assert loop.propose(6) is EMPTY
    assert loop.engine.n_past(0) == 8
    loop.commit(greedy([*PROMPT, 6], 1)[0])
    assert loop.engine.n_past(0) == 6
    long_enough = Loop(confident(8), p_min=0.5, n_min=2)
    long_enough.commit(6)
    assert len(long_enough.propose(6)) == 2


def test_n_min_makes_a_sampled_draft_longer_and_never_drops_it() -> None:
    """Throwing drawn tokens away is biased: for them it only forbids p-min to stop earlier."""
    loop = Loop(confident(7, 9), BLOCK, p_min=0.5, n_min=3)
    loop.commit(6)
    draft = loop.propose(6)
    assert len(draft) == 3  # over the doubt at 7 tokens, but not over that at 9
    assert all(distribution is not None for distribution in draft.distributions)
    short = Loop(confident(), BLOCK, n_min=3)
    short.commit(6)
    assert len(short.propose(2)) == 2  # the budget is shorter: kept all the same
    assert Loop(confident(), GREEDY, n_min=3).propose(2) is EMPTY


def test_point_masses_carry_no_distribution_and_samples_carry_theirs() -> None:
    loop = Loop(verifier=BLOCK)
    loop.commit(6)
    draft = loop.propose(3)
    for i, (token, distribution) in enumerate(zip(draft.ids, draft.distributions, strict=True)):
        assert distribution is not None
        np.testing.assert_array_equal(distribution.ids, np.arange(V))
        row = LOGITS([*PROMPT, 6, *draft.ids[:i]]).astype(np.float64)
        np.testing.assert_allclose(distribution.probs, np.exp(row) / np.exp(row).sum(), rtol=1e-12)
        assert distribution.prob(token) > 0
    assert Loop().propose(3).distributions == [None] * 3


def test_nothing_is_drafted_behind_an_end_id() -> None:
    tokens = greedy([*PROMPT, 6], 6)
    at = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i > 0)
    loop = Loop(end_ids=frozenset([tokens[at]]))
    loop.commit(6)
    assert list(loop.propose(6).ids) == tokens[: at + 1]
    sampled = Loop(confident(), BLOCK, end_ids=frozenset([greedy(PROMPT, 1)[0]]), n_min=4)
    assert len(sampled.propose(6)) == 1  # an end is no p-min: n-min cannot go on behind it, nor drop it


# Vocabularies and contexts


def test_tokens_that_the_target_lacks_are_never_drafted() -> None:
    logits: LogitsFunction = memo(lambda history: np.append(LOGITS(history), [50.0, 60.0]).astype(np.float32))
    for verifier in (GREEDY, BLOCK):
        loop = Loop(logits, verifier, n_vocab=V + 2, p_min=1e-9)
        loop.commit(6)
        draft = loop.propose(5)
        assert len(draft) == 5
        assert max(draft.ids) < V
        assert {row.size for row in loop.chooser.rows} == {V}
        assert draft.confidence is not None
        assert draft.confidence[0] == top_probability(LOGITS([*PROMPT, 6]))


def test_a_token_that_the_draft_lacks_ends_drafting_for_the_sequence() -> None:
    small = memo(random_logits(5, 2))
    engine = CountingEngine(small, 5, n_sequences=2)
    drafter = ModelDrafter(engine, GREEDY, V)
    states = [SequenceState(0, [1, 2]), SequenceState(1, [3, 4])]
    drafts = drafter.propose(states, [2, 2])
    assert [len(draft) for draft in drafts] == [2, 2]
    for state, token in zip(states, (6, 3), strict=True):
        state.tokens.append(token)
        drafter.commit(state, [token])
    for _ in range(3):
        drafts = drafter.propose(states, [2, 2])
        assert len(drafts[0]) == 0
        assert list(drafts[1].ids) == greedy(states[1].tokens, 2, small)
        for state in states:
            state.tokens.append(1)
            drafter.commit(state, [1])
    assert engine.n_past(0) == 2


@pytest.mark.parametrize("n_ctx", range(1, 12))
def test_the_drafts_own_context_is_respected(n_ctx: int) -> None:
    loop = Loop(limits={"n_ctx": n_ctx})
    loop.commit(6)
    n_expected = min(4, max(0, n_ctx - 6 + 1))  # the committed tokens and all drafted ones but the last are evaluated
    assert list(loop.propose(4).ids) == greedy([*PROMPT, 6], n_expected)
    assert loop.engine.n_past(0) <= n_ctx


def test_a_failing_pass_does_not_spoil_the_next_sequence() -> None:
    loop = Loop()
    loop.commit(6)
    loop.engine.n_batch = 0
    with pytest.raises(EngineError):
        loop.propose(3)
    loop.engine.n_batch = 64
    loop.drafter.forget(loop.state)
    assert list(loop.propose(3).ids) == greedy(loop.state.tokens, 3)


def test_busy_seconds_are_the_engines() -> None:
    engine = TableEngine(LOGITS, V, pass_s=lambda n_tokens: 0.5 + n_tokens)
    drafter = ModelDrafter(engine, GREEDY, V)
    drafter.propose([SequenceState(0, [1, 2, 3])], [2])
    assert drafter.busy_s == 0.5 + 3 + 0.5 + 1


class Script(NamedTuple):
    """A constraint that forces the ids of a list, one after the other, and then allows everything."""

    ids: tuple[int, ...] = ()

    def allows(self, token: int) -> bool:
        return not self.ids or token == self.ids[0]

    def best(self, row: Row, n: int | None) -> NDArray[np.int64]:
        order = np.argsort(-row, kind="stable")
        return np.array([i for i in order.tolist() if self.allows(i)], np.int64)[:n]

    def forced(self) -> int | None:
        return self.ids[0] if self.ids else None

    def after(self, token: int) -> Script:
        return Script(self.ids[1:])


def test_forced_tokens_cost_no_pass_and_enter_the_cache_later() -> None:
    verifier = make_verifier("greedy", Sampler(0.0, constraint=Script((2, 1, 0))))
    loop = Loop(verifier=verifier)
    loop.commit(6)
    draft = loop.propose(3)
    assert list(draft.ids) == [2, 1, 0]
    assert loop.drafter.n_passes == 0
    longer = Loop(verifier=verifier)
    longer.commit(6)
    draft = longer.propose(5)
    assert list(draft.ids[:3]) == [2, 1, 0]
    assert longer.drafter.n_passes == 2
    assert longer.engine.n_past(0) == len(longer.state.tokens) + 4
    longer.commit(2)  # whatever came: what does not stand leaves the cache
    assert longer.engine.n_past(0) <= len(longer.state.tokens) - 1


def test_forced_tokens_count_against_the_batch() -> None:
    verifier = make_verifier("greedy", Sampler(0.0, constraint=Script((2, 1, 0))))
    loop = Loop(verifier=verifier, limits={"n_batch": 4})
    loop.commit(6)
    assert list(loop.propose(5).ids[:3]) == [2, 1, 0]


def test_a_draft_without_the_forced_token_ends_there() -> None:
    """Its vocabulary is smaller, or nothing that it knows may come: neither is an error of the text."""
    for ids, n_vocab in (((2, V + 1), V + 4), ((V + 3,), V + 4)):
        verifier = make_verifier("greedy", Sampler(0.0, constraint=Script(ids)))
        loop = Loop(verifier=verifier)
        loop.drafter = ModelDrafter(loop.engine, loop.chooser, n_vocab)
        loop.commit(5)
        assert list(loop.propose(4).ids) == [token for token in ids if token < V]
