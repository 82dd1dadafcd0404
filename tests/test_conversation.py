"""Turns that share their beginning: what is evaluated, what is kept, and answers that equal a fresh process.

First on the numpy engine, where logits depend on the whole history, so that a cache with one wrong token shows; then
on tiny models in llama.cpp, whose passes of other widths differ by rounding (``assert_same_choices``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import numpy as np
import pytest
from fakes import memo
from support import assert_same_choices, collect, forced_rows, generate, make_engine, settings
from tiny_gguf import EOS

from specli.chat import Message
from specli.config import GenerationOptions, SamplingOptions
from specli.controller import Controller
from specli.conversation import Conversation
from specli.decode import Decoder, Request
from specli.drafters.adaptive import AdaptiveDrafter
from specli.drafters.base import Drafter, SequenceState
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.engine.base import Evaluation, Slice
from specli.engine.table import TableEngine, random_logits
from specli.errors import Cancelled, ConfigError, ContextOverflow, EngineError
from specli.events import Event, Finished, PrefillDone, Text
from specli.prefix import STARTS_OVER, KeptPrefix, common_prefix
from specli.sampling import Sampler
from specli.session import Hooks, Session
from specli.stats import Stats, Totals
from specli.verify import Verifier, make_verifier

V, SEED, K = 7, 11, 3
TARGET, OTHER = memo(random_logits(V, 1), order=40), memo(random_logits(V, 2), order=40)
GREEDY, COUPLED = make_verifier("greedy", Sampler(0.0)), make_verifier("coupled", Sampler(1.5))
FIRST = [1, 2, 3, 4, 5, 1, 2, 3]


def near(history: Sequence[int]) -> np.ndarray:
    """A draft that often agrees with the target."""
    return (0.8 * TARGET(history) + 0.2 * OTHER(history)).astype(np.float32)


def model_drafter(**limits: int) -> ModelDrafter:
    return ModelDrafter(TableEngine(near, V, **limits), GREEDY, V)


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "none": lambda: None,
    "ngram": lambda: NgramDrafter(min_hit_rate=0.0),
    "model": model_drafter,
    "both": lambda: AdaptiveDrafter(Controller(K), model_drafter(), NgramDrafter()),
}


class Chat:
    """One sequence that outlives its generations, on the numpy engine: what a session does."""

    def __init__(self, drafter: Drafter | None, verifier: Verifier = GREEDY, **limits: object) -> None:
        self.engine = TableEngine(TARGET, V, **limits)  # type: ignore[arg-type]
        self.drafter, self.verifier = drafter, verifier
        self.notices: list[str] = []
        self.kept = KeptPrefix(self.engine, drafter, self.notices.append)

    def events(self, prompt: Sequence[int], n: int | None = 10, cancelled: Callable[[], bool] = lambda: False):
        """As ``Session.generate`` with ``reuse``."""
        self.state = SequenceState(0, list(prompt), SEED, np.random.default_rng(SEED))
        request = Request(self.state, 0.0, n, is_kept=True, n_known=self.kept.open(self.state))
        return Decoder(self.engine, self.verifier, lambda t: b"%d," % t, self.drafter, K, cancelled).run([request])

    def ask(self, prompt: Sequence[int], n: int | None = 10, cancelled: Callable[[], bool] = lambda: False) -> Stats:
        """One whole generation. Afterwards the caches hold what they should."""
        stats = Stats()
        for event in self.events(prompt, n, cancelled):
            stats.observe(event)
        self.check()
        return stats

    def check(self) -> None:
        """Every cache holds a prefix of the sequence's tokens, all but the last at most; drafters know them all."""
        tokens = self.state.tokens
        assert self.engine._history[0] == tokens[: self.engine.n_past(0)]
        assert self.engine.n_past(0) <= max(0, len(tokens) - 1)
        drafters = [getattr(self.drafter, "_model", self.drafter), getattr(self.drafter, "_ngram", self.drafter)]
        for drafter in drafters:
            if isinstance(drafter, ModelDrafter):
                held = drafter._engine._history[0]  # type: ignore[attr-defined]
                assert held == tokens[: len(held)]
                assert len(held) <= max(0, len(tokens) - 1)
            if isinstance(drafter, NgramDrafter):
                assert drafter._histories[0].tokens == tokens


def fresh(prompt: Sequence[int], verifier: Verifier = GREEDY, n: int | None = 10) -> tuple[int, ...]:
    """What another process answers."""
    answer = Chat(None, verifier).ask(prompt, n).tokens
    assert answer is not None
    return answer


def follow_ups(answer: Sequence[int]) -> Iterator[tuple[list[int], int]]:
    """Prompts after ``FIRST`` and ``answer``, and how many tokens each shares with what was said."""
    said = [*FIRST, *answer]
    yield [*said, 6, 5, 4], len(said)  # the next turn
    yield FIRST, len(FIRST)  # the same prompt again
    yield [*said[:-3], (said[-3] + 1) % V, 0], len(said) - 3  # the answer was written in another way
    yield [*FIRST, (answer[0] + 1) % V, 3], len(FIRST)
    yield [(FIRST[0] + 1) % V, *said], 0  # another system message
    yield said[:3], 3
    yield [said[0]], 1


@pytest.mark.parametrize("verifier", [GREEDY, COUPLED], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_turn_evaluates_only_what_is_new_and_equals_fresh(kind: str, verifier: Verifier) -> None:
    answer = fresh(FIRST, verifier)
    for prompt, n_shared in follow_ups(answer):
        chat = Chat(DRAFTERS[kind](), verifier)
        first = chat.ask(FIRST)
        assert (first.tokens, first.n_reused, first.n_evaluated) == (answer, 0, len(FIRST))
        n_batches = len(chat.engine.batches)
        second = chat.ask(prompt)
        n_reused = min(n_shared, len(FIRST) + len(answer) - 1, len(prompt) - 1)
        assert second.tokens == fresh(prompt, verifier)
        assert (second.n_prompt, second.n_reused) == (len(prompt), n_reused)
        assert chat.engine.batches[n_batches] == (n_reused, len(prompt) - n_reused)
        third = [*prompt, *(second.tokens or ()), 2]
        assert chat.ask(third).tokens == fresh(third, verifier)
        assert chat.notices == []


@pytest.mark.parametrize("kind", DRAFTERS)
def test_long_prompts_of_later_turns_are_fed_in_chunks(kind: str) -> None:
    chat = Chat(DRAFTERS[kind](), n_batch=4)
    chat.ask(FIRST)
    prompt = [*chat.state.tokens, *FIRST, *FIRST]
    assert chat.ask(prompt).tokens == fresh(prompt)


def test_a_draft_is_not_fed_its_history_again() -> None:
    """The draft's cache, too, outlives the turn."""
    chat = Chat(model_drafter())
    chat.ask(FIRST)
    engine = chat.drafter._engine  # type: ignore[union-attr]
    n_held, n_batches = engine.n_past(0), len(engine.batches)
    assert n_held > len(FIRST)
    chat.ask([*chat.state.tokens, 1, 2, 3])
    assert engine.batches[n_batches][0] == n_held


def test_a_text_said_before_is_drafted_in_the_next_turn() -> None:
    """The index knows all turns: a question repeated is answered with the old answer as the draft."""
    chat = Chat(NgramDrafter(min_hit_rate=0.0))
    chat.ask(FIRST, 12)
    chat.ask([*chat.state.tokens, *FIRST], 1)
    assert chat.drafter is not None
    drafts = chat.drafter.propose([chat.state], [4])
    assert len(drafts[0]) > 0


# -- interrupts


def interrupted(kind: str, verifier: Verifier, prompt: Sequence[int], n_asked: int) -> Chat:
    """A chat whose second turn was cancelled when ``cancelled`` was asked for the ``n_asked``-th time."""
    chat = Chat(DRAFTERS[kind](), verifier, n_batch=4)
    chat.ask(FIRST)
    counter = itertools.count()
    stats = chat.ask(prompt, cancelled=lambda: next(counter) >= n_asked)
    chat.was_cancelled = stats.finish_reason == "cancelled"  # type: ignore[attr-defined]
    return chat


@pytest.mark.parametrize("verifier", [GREEDY, COUPLED], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_turn_after_an_interrupt_anywhere_equals_fresh(kind: str, verifier: Verifier) -> None:
    """Every moment at which anybody asks whether to stop: in the prompt, between rounds, in a draft's feed."""
    prompt = [*FIRST, *fresh(FIRST, verifier), *FIRST]
    for n_asked in itertools.count():
        chat = interrupted(kind, verifier, prompt, n_asked)
        for following in ([*chat.state.tokens, 6, 5], prompt, [*FIRST, 2, 2], FIRST):
            again = interrupted(kind, verifier, prompt, n_asked)
            assert again.ask(following).tokens == fresh(following, verifier)
        if not chat.was_cancelled:  # type: ignore[attr-defined]
            break
    assert n_asked > 4


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_turn_after_one_closed_at_any_event_equals_fresh(kind: str) -> None:
    prompt = [*FIRST, *fresh(FIRST), *FIRST]
    n_events = len(list(Chat(DRAFTERS[kind]()).events(prompt)))
    for n_seen in range(1, n_events + 1):
        chat = Chat(DRAFTERS[kind]())
        chat.ask(FIRST)
        events = chat.events(prompt)
        for _ in range(n_seen):
            next(events)
        events.close()
        chat.check()
        following = [*chat.state.tokens, 6, 5]
        assert chat.ask(following).tokens == fresh(following)


class Breaking(TableEngine):
    """Fails, or is stopped, at one of its batches."""

    error: Exception | None = None
    at = -1

    def evaluate(self, slices: Sequence[Slice], interruptible: bool = False) -> Evaluation:
        self.at -= 1
        if self.at == 0 and self.error is not None:
            raise self.error
        return super().evaluate(slices, interruptible)


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("where", ["target", "draft"])
def test_a_failure_anywhere_leaves_nothing_wrong_behind(where: str, at: int) -> None:
    chat = Chat(ModelDrafter(Breaking(near, V), GREEDY, V))
    chat.engine = Breaking(TARGET, V, n_batch=4)
    chat.kept = KeptPrefix(chat.engine, chat.drafter)
    chat.ask(FIRST)
    broken = chat.engine if where == "target" else chat.drafter._engine  # type: ignore[union-attr]
    broken.error, broken.at = EngineError("device lost"), at
    prompt = [*chat.state.tokens, *FIRST]
    try:
        chat.ask(prompt)
    except EngineError:
        chat.kept.drop()
    broken.error = None
    assert chat.ask(prompt).tokens == fresh(prompt)


def test_a_prefill_stopped_inside_a_batch() -> None:
    """llama.cpp's abort: the batch is not in the cache, the ones before it are."""
    chat = Chat(NgramDrafter())
    chat.engine = Breaking(TARGET, V, n_batch=4)
    chat.kept = KeptPrefix(chat.engine, chat.drafter)
    chat.engine.error, chat.engine.at = Cancelled("stopped"), 2
    assert chat.ask(FIRST).finish_reason == "cancelled"
    chat.engine.error = None
    again = chat.ask(FIRST)
    assert (again.tokens, again.n_reused) == (fresh(FIRST), 4)


# -- memories that cannot go back


@pytest.mark.parametrize("n_turns", [1, 3])
def test_a_memory_without_rollback_starts_over_and_says_so_once(n_turns: int) -> None:
    chat = Chat(None, can_roll_back=False)
    chat.ask(FIRST)
    onward = [*chat.state.tokens, 2, 2]
    assert chat.ask(onward).n_reused == len(onward) - 3  # going on needs no rollback
    assert chat.notices == []
    for turn in range(n_turns):
        prompt = [*FIRST, turn, turn]
        answer = chat.ask(prompt)
        assert (answer.n_reused, answer.tokens) == (0, fresh(prompt))
        chat.ask([*prompt, 3])
    assert chat.notices == [STARTS_OVER]


def test_a_draft_without_far_rollback_starts_over_in_silence() -> None:
    drafter = model_drafter()
    chat = Chat(drafter)
    chat.ask(FIRST)
    drafter._engine.can_roll_back = False  # type: ignore[attr-defined]
    drafter.rewind(chat.state, 3)
    assert drafter._engine.n_past(0) == 0


# -- drafters


def test_an_index_that_was_cut_equals_a_new_one() -> None:
    rng = np.random.default_rng(5)
    tokens = [int(token) for token in rng.integers(0, 4, 60)]
    for n_kept in (0, 1, 2, 17, 59, 60):
        cut, new = NgramDrafter(min_hit_rate=0.0), NgramDrafter(min_hit_rate=0.0)
        state = SequenceState(0, tokens[:])
        cut.commit(state, tokens)
        rest = [int(token) for token in rng.integers(0, 4, 9)]
        state.tokens[n_kept:] = rest
        cut.rewind(state, n_kept)
        cut.commit(state, rest)
        new.commit(state, state.tokens)
        [one], [other] = cut.propose([state], [8]), new.propose([state], [8])
        assert list(one.ids) == list(other.ids)
        assert np.array_equal(one.confidence, other.confidence)


def test_a_new_prompt_teaches_nothing_and_forgets_nothing() -> None:
    drafter, state = NgramDrafter(), SequenceState(0, [])

    def say(*tokens: int) -> None:
        state.tokens += tokens
        drafter.commit(state, tokens)

    say(1, 2, 3, 1, 2, 3, 1)
    say(2, 3, 1)  # an answer: three hits
    hits, tries = drafter._histories[0].hits[:], drafter._histories[0].tries[:]
    assert sum(tries) > 0
    drafter.rewind(state, 6)
    del state.tokens[6:]
    say(1, 2, 3)
    assert (drafter._histories[0].hits, drafter._histories[0].tries) == (hits, tries)
    say(1)
    assert drafter._histories[0].tries != tries


def test_rewinding_an_unknown_sequence_is_nothing() -> None:
    for make in DRAFTERS.values():
        drafter = make()
        if drafter is not None:
            drafter.rewind(SequenceState(0, [1, 2]), 1)
            drafter.forget(SequenceState(0, [1, 2]))


@pytest.mark.parametrize(
    ("one", "other", "n"), [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([1, 2], [2, 2], 0)]
)
def test_common_prefix(one: list[int], other: list[int], n: int) -> None:
    assert common_prefix(one, other) == common_prefix(other, one) == n


# -- figures


def test_only_evaluated_tokens_count_for_the_prefill_rate() -> None:
    stats = Stats()
    stats.observe(PrefillDone(0, 100, 1.0, 1.5, 0.25, n_reused=75))
    assert (stats.n_prompt, stats.n_reused, stats.n_evaluated) == (100, 75, 25)
    assert stats.prefill_tok_s == 100.0  # 25 tokens in 0.25 s
    assert stats.ttft_s == 0.5
    assert (stats.as_dict()["prompt_tokens"], stats.as_dict()["reused_tokens"]) == (100, 75)


def test_totals_are_sums_over_turns() -> None:
    chat, totals = Chat(NgramDrafter(min_hit_rate=0.0)), Totals()
    turns = []
    for _ in range(3):
        turns.append(chat.ask([*getattr(chat, "state", SequenceState(0, [])).tokens, *FIRST]))
        totals.add(turns[-1])
    assert (totals.turns, totals.generated) == (3, sum(len(turn.tokens or ()) for turn in turns))
    assert totals.evaluated + totals.reused == sum(turn.n_prompt or 0 for turn in turns)
    assert totals.evaluated == 3 * len(FIRST) + 2  # the last token of an answer is evaluated with the next prompt
    assert totals.acceptance_rate == totals.accepted / totals.proposed
    assert Totals().acceptance_rate is None
