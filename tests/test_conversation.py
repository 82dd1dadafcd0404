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
from support import assert_same_choices, collect, generate, make_engine, settings
from tiny_gguf import EOS

from specli.chat import Message
from specli.config import GenerationOptions, SamplingOptions
from specli.controller import Controller
from specli.conversation import Conversation
from specli.decode import Decoder
from specli.drafters.adaptive import AdaptiveDrafter
from specli.drafters.base import Drafter, SequenceState
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.engine.base import Evaluation, Slice
from specli.engine.table import TableEngine, random_logits
from specli.errors import Cancelled, ConfigError, ContextOverflow, EngineError
from specli.events import Finished, PrefillDone, Text
from specli.prefix import STARTS_OVER, KeptPrefix, common_prefix
from specli.request import Request
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
            next(events, None)  # a controller goes by the clock: the next run may take fewer rounds
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


# -- in llama.cpp

CLOSE = 0.3  # margin of two logits that a pass of another width may turn over
GREEDILY = SamplingOptions(temperature=0, ignore_eos=True)
SAID = "once upon a time there was a time once upon a "


@pytest.fixture
def open_session(closing_stack):
    """A session that is closed at the end, and the notices that it gave."""

    def open_session(target, draft=None, cancelled=lambda: False, sampling=GREEDILY, **options):
        notices: list[str] = []
        chosen = settings(target, draft, sampling=sampling, **options)
        hooks = Hooks(notice=notices.append, cancelled=cancelled)
        return closing_stack.enter_context(Session(chosen, hooks)), notices

    return open_session


def go_on(session: Session, prompt: Sequence[int], n: int = 12):
    """One answer that keeps what the caches hold."""
    return collect(session.generate(prompt, GenerationOptions(n), reuse=True))


def assert_equals_fresh(session: Session, prompt: Sequence[int], answer) -> None:
    """Another engine over the same weights, which never saw anything else, says the same."""
    n = len(answer.tokens)
    with closing(make_engine(session.model, n_ctx=session.engine.n_ctx)) as engine:
        plain = generate(session, prompt, n, speculate=False)  # which empties the session's caches
        assert_same_choices(engine, prompt, plain, answer, CLOSE)


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft", "auto"])
def test_a_second_turn_feeds_only_what_is_new(tiny_model, open_session, drafter):
    draft = tiny_model(noise=0.1) if drafter in ("draft", "auto") else None
    for ending in ("", " and", " and then there was more of it than anybody had ever thought"):
        session, notices = open_session(tiny_model(), draft, type=drafter)
        prompt = session.text_ids(SAID)
        first = go_on(session, prompt)
        onward = [*prompt, *first.tokens, *session.text_ids(ending)]
        second = go_on(session, onward)
        assert second.stats.n_reused == len(prompt) + len(first.tokens) - 1
        assert second.stats.n_evaluated == 1 + len(session.text_ids(ending))
        assert notices == []
        assert_equals_fresh(session, onward, second)


def test_a_generation_without_reuse_neither_uses_nor_leaves_anything(tiny_model, open_session):
    session, _ = open_session(tiny_model(), type="ngram")
    prompt = session.text_ids(SAID)
    go_on(session, prompt)
    assert generate(session, prompt, 5).stats.n_reused == 0
    assert go_on(session, prompt).stats.n_reused == 0
    assert go_on(session, prompt).stats.n_reused == len(prompt) - 1
    assert generate(session, prompt, 5, speculate=False).stats.n_reused == 0


# A window of 32 tokens in a cache of 256 cells that evicts: batches of 8 in a context that is longer.
SLIDING = {"context_length": 2048, "sliding_window": 32}
EVICTING = {"n_ctx": 1024, "n_ubatch": 8}


@pytest.mark.parametrize("n_said", [40, 60, 200, 250, 300, 400])
@pytest.mark.parametrize("drafter", ["none", "draft"])
def test_far_rewinds_of_a_sliding_window(tiny_model, open_session, n_said, drafter):
    """B7: a rewind to what is no longer held is refused, and the text evaluated again."""
    draft = tiny_model("gemma2", noise=0.1, **SLIDING) if drafter == "draft" else None
    session, notices = open_session(tiny_model("gemma2", **SLIDING), draft, type=drafter, model=EVICTING)
    prompt = session.text_ids((SAID * 9)[:n_said])
    for n_kept in (n_said, n_said - 1, n_said - 30, n_said // 2, 1):
        first = go_on(session, prompt, 24)
        onward = [*prompt[:n_kept], *session.text_ids("!")]
        second = go_on(session, onward, 24)
        assert second.stats.n_reused in (0, n_kept)
        assert_equals_fresh(session, onward, second)
        assert go_on(session, prompt, 24).tokens[:1] == first.tokens[:1]
    assert notices == ([] if n_said < 232 else [STARTS_OVER])


def test_a_sliding_window_that_only_goes_on_is_never_evaluated_again(tiny_model, open_session):
    session, notices = open_session(tiny_model("gemma2"))
    prompt = session.text_ids(SAID)
    for _ in range(3):
        answer = go_on(session, prompt, 20)
        assert answer.stats.n_reused == (0 if prompt == session.text_ids(SAID) else len(prompt) - 3)
        prompt = [*prompt, *answer.tokens, *session.text_ids("ab")]
    assert notices == []


def test_a_recurrent_memory_goes_on_or_starts_over(tiny_model, open_session):
    """B12: the second of two texts that share half their prompt equals a fresh process."""
    session, notices = open_session(tiny_model("mamba"), type="none")
    prompt = session.text_ids(SAID)
    first = go_on(session, prompt)
    onward = [*prompt, *first.tokens, *session.text_ids("more")]
    second = go_on(session, onward)
    assert second.stats.n_reused == len(prompt) + len(first.tokens) - 1
    assert notices == []
    half = [*prompt[: len(prompt) // 2], *session.text_ids("?")]
    third = go_on(session, half)
    assert third.stats.n_reused == 0
    assert notices == [STARTS_OVER]
    assert go_on(session, prompt).tokens == first.tokens
    assert notices == [STARTS_OVER]
    for asked, answer in ((onward, second), (half, third)):
        assert_equals_fresh(session, asked, answer)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mamba"])
def test_after_an_interrupt_at_any_moment_the_next_turn_equals_fresh(tiny_model, open_session, architecture):
    """B7 and promise of chat: the caches are right whatever was under way."""
    countdown = [1 << 30]

    def cancelled() -> bool:
        countdown[0] -= 1
        return countdown[0] < 0

    draft = None if architecture == "mamba" else tiny_model(architecture, noise=0.1)
    options = {"type": "none"} if architecture == "mamba" else {}
    session, _ = open_session(tiny_model(architecture), draft, cancelled, model={"n_ubatch": 32}, **options)
    said = session.text_ids(SAID * 2)
    others = [session.text_ids(ending) for ending in ("", " new")]
    n_asked, answer = 0, None
    while answer is None or answer.reason == "cancelled":
        go_on(session, said[:40], 4)
        countdown[0] = n_asked
        answer = go_on(session, said, 10)
        countdown[0] = 1 << 30
        for other in others:
            following = [*said, *answer.tokens, *other]
            assert_equals_fresh(session, following, go_on(session, following, 8))
        n_asked += 1 + n_asked // 4  # llama.cpp asks per node of its graph while it evaluates a prompt
    assert answer.reason == "length"
    assert n_asked > 20


def test_the_controller_tells_of_one_answer(tiny_model, open_session):
    session, _ = open_session(tiny_model(), tiny_model(noise=0.1))
    prompt = session.text_ids(SAID)
    for n in (20, 12):
        answer = go_on(session, prompt, n)
        assert session.controller.report()["rounds"] == answer.stats.rounds


def test_a_new_generation_ends_the_one_before(tiny_model, open_session):
    session, _ = open_session(tiny_model(), tiny_model(noise=0.1))
    prompt = session.text_ids(SAID)
    old = session.generate(prompt, GenerationOptions(20), reuse=True)
    for _ in range(5):
        next(old)
    answer = go_on(session, prompt)
    assert list(old) == []
    assert_equals_fresh(session, prompt, answer)


def test_closing_a_session_ends_its_generation(tiny_model):
    session = Session(settings(tiny_model(), sampling=GREEDILY))
    events = session.generate(session.text_ids(SAID), GenerationOptions(20))
    next(events)
    session.close()
    assert list(events) == []


@pytest.mark.parametrize("verify", ["coupled", "block"])
def test_a_seed_repeats_a_turn_and_another_attempt_is_another_answer(tiny_model, open_session, verify):
    """Block's coins depend on K, which a controller chooses by the clock: there the promise needs a fixed one."""
    hot = SamplingOptions(temperature=1.5, seed=7, ignore_eos=True)
    fixed = {"verify": verify, "fixed": verify == "block"}
    session, _ = open_session(tiny_model(), sampling=hot, **fixed)
    prompt = session.text_ids(SAID)

    def answer(attempt: int) -> tuple[int, ...]:
        return collect(session.generate(prompt, GenerationOptions(12), attempt=attempt)).tokens

    assert answer(0) == answer(0) != answer(1)
    assert answer(1) == answer(1) != answer(2)
    other, _ = open_session(
        tiny_model(), sampling=SamplingOptions(1.5, seed=session.seed_of(1), ignore_eos=True), **fixed
    )
    assert collect(other.generate(prompt, GenerationOptions(12))).tokens == answer(1)


# -- conversations


@pytest.fixture
def open_chat(tiny_model, open_session):
    """A conversation over a tiny model."""

    def open_chat(target=None, n: int = 6, system: str | None = None, **options) -> Conversation:
        session, _ = open_session(target or tiny_model(), **options)
        return Conversation(session, GenerationOptions(n), system)

    return open_chat


def text_of(events) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def roles(chat: Conversation) -> list[str]:
    return [message.role for message in chat.messages]


def test_a_conversation_grows_by_question_and_answer(open_chat):
    chat = open_chat(system="be brief")
    first = text_of(chat.ask("one"))
    second = text_of(chat.ask("two"))
    assert chat.messages == [
        Message("system", "be brief"),
        Message("user", "one"),
        Message("assistant", first),
        Message("user", "two"),
        Message("assistant", second),
    ]
    chat.clear()
    assert chat.messages == [Message("system", "be brief")]
    assert chat.last_question is None


def test_each_turn_equals_a_fresh_process_with_the_same_history(open_chat, open_session, tiny_model):
    chat = open_chat(tiny_model(), n=10)
    for question in ("one", "two", "three"):
        history = chat.messages
        answer = collect(chat.ask(question))
        other, _ = open_session(tiny_model(), type="none")
        prompt = other.chat_ids([*history, Message("user", question)])
        plain = generate(other, prompt, 10)
        with closing(make_engine(other.model)) as engine:
            assert_same_choices(engine, prompt, plain, answer, CLOSE)


def test_the_system_message_may_change_in_between(open_chat):
    chat = open_chat()
    list(chat.ask("one"))
    for system, expected in (("shout", ["system", "user", "assistant"]), ("", ["user", "assistant"])):
        chat.system = system
        assert roles(chat) == expected
        assert text_of(chat.ask("two"))
        del chat.history[2:]


def test_a_stopped_answer_stays_as_far_as_it_came(open_chat):
    chat = open_chat(n=40)
    events = chat.ask("one")
    parts = []
    while len(parts) < 3:
        event = next(events)
        parts += [event.text] if isinstance(event, Text) else []
    events.close()
    assert chat.messages == [Message("user", "one"), Message("assistant", "".join(parts))]
    answer = collect(chat.ask("two"))
    assert answer.stats.n_reused > 0


def test_a_question_without_an_answer_is_taken_back_and_may_be_asked_again(tiny_model, open_session):
    stop = [False]
    session, _ = open_session(tiny_model(), cancelled=lambda: stop[0])
    chat = Conversation(session, GenerationOptions(6))
    first = text_of(chat.ask("one"))
    stop[0] = True
    assert collect(chat.ask("two")).reason == "cancelled"
    assert [message.content for message in chat.messages] == ["one", first]
    assert chat.last_question == "two"
    stop[0] = False
    again = text_of(chat.regenerate())
    assert [message.content for message in chat.messages] == ["one", first, "two", again]


def test_regenerating_replaces_the_answer_and_evaluates_nothing_again(open_chat):
    chat = open_chat(sampling=SamplingOptions(1.5, seed=3, ignore_eos=True))
    list(chat.ask("one"))
    first = collect(chat.ask("two"))
    answers = {first.text}
    for attempt in (1, 2, 3):
        again = collect(chat.regenerate())
        assert again.stats.n_evaluated == 1  # the prompt's last token, for its row
        assert (roles(chat), chat.attempt) == (["user", "assistant"] * 2, attempt)
        assert chat.messages[-1].content == again.text
        answers.add(again.text)
    assert len(answers) == 4
    list(chat.ask("three"))
    assert chat.attempt == 0


def test_a_regeneration_that_brings_nothing_keeps_the_old_answer(tiny_model, open_session):
    stop = [False]
    session, _ = open_session(tiny_model(), cancelled=lambda: stop[0])
    chat = Conversation(session, GenerationOptions(6))
    list(chat.ask("one"))
    before = chat.messages
    stop[0] = True
    list(chat.regenerate())
    assert chat.messages == before
    stop[0] = False
    list(chat.regenerate())
    assert roles(chat) == ["user", "assistant"]


def test_there_must_be_something_to_regenerate(open_chat):
    chat = open_chat()
    with pytest.raises(ConfigError, match="no question"):
        list(chat.regenerate())
    chat.history = [Message("user", "given"), Message("assistant", "answer")]
    assert text_of(chat.regenerate())
    assert chat.messages[0].content == "given"


def test_a_conversation_that_no_longer_fits_is_refused_and_stays_usable(open_chat):
    chat = open_chat(n=-1, model={"n_ctx": 96})
    list(chat.ask("one"))
    before = chat.messages
    with pytest.raises(ContextOverflow, match="the context holds 96"):
        list(chat.ask("x" * 90))
    assert chat.messages == before
    chat.clear()
    assert text_of(chat.ask("two"))


def test_a_full_context_ends_the_answer(open_chat):
    chat = open_chat(n=-1, model={"n_ctx": 64})
    answer = collect(chat.ask("one"))
    assert (answer.reason, answer.stats.n_prompt + answer.stats.n_tokens) == ("length", 65)


def test_a_model_without_a_template_cannot_chat(tiny_model, open_session):
    session, _ = open_session(tiny_model(chat_template=None))
    with pytest.raises(ConfigError, match="no chat template, so it cannot chat"):
        Conversation(session)


def test_a_template_that_refuses_takes_the_question_back(tiny_model, open_session):
    template = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}x"
    session, _ = open_session(tiny_model(chat_template=template))
    chat = Conversation(session, GenerationOptions(3))
    with pytest.raises(ConfigError, match="no"):
        list(chat.ask("bad"))
    assert chat.messages == []
    list(chat.ask("good"))
    assert roles(chat) == ["user", "assistant"]


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>"
)


def test_thoughts_are_kept_as_generated_and_the_template_drops_them(tiny_model, open_session, monkeypatch):
    """The history holds them; only the shared beginning becomes shorter."""
    session, _ = open_session(tiny_model(chat_template=THINKING))
    chat = Conversation(session, GenerationOptions(8))
    chat.history = [Message("user", "one"), Message("assistant", "hm</think>answer")]
    monkeypatch.setattr(session.model, "piece", lambda token: b"ab</think>cd"[token % 12 : token % 12 + 1])
    first = collect(chat.ask("two"))
    assert chat.messages[-1].content == first.text
    assert [message.content for message in chat.messages][1] == "hm</think>answer"
    n_prompt = first.stats.n_prompt
    second = collect(chat.ask("three"))
    assert 0 < second.stats.n_reused <= n_prompt


def test_an_answer_of_nothing_but_the_end_is_an_answer(tiny_model, open_session, monkeypatch):
    session, _ = open_session(tiny_model(), sampling=SamplingOptions(temperature=0))
    rows = np.zeros((1, session.model.n_vocab), np.float32)
    rows[0, EOS] = 1
    monkeypatch.setattr(type(session.engine), "_split_rows", lambda _self, _slices: [rows])
    chat = Conversation(session, GenerationOptions(6))
    finished = [event for event in chat.ask("one") if isinstance(event, Finished)]
    assert finished[0].reason == "eos"
    assert chat.messages == [Message("user", "one"), Message("assistant", "")]


def test_the_end_of_turn_is_where_the_next_turn_goes_on(tiny_model, open_session):
    """B10: an ASCII answer that ends by itself is found again in the next prompt, to its last token."""
    session, _ = open_session(tiny_model(), sampling=SamplingOptions(temperature=0), type="ngram")
    chat = Conversation(session, GenerationOptions(1))
    for i in range(200):
        chat.clear()
        answer = collect(chat.ask(f"{i}"))
        if answer.text.isascii() and answer.text.isprintable() and answer.text:
            break
    assert answer.text
    n_held = answer.stats.n_prompt  # the one token of the answer is evaluated with the next prompt
    second = collect(chat.ask("more"))
    assert second.stats.n_reused == n_held
    prompt = session.chat_ids(chat.messages[:-1])
    assert second.stats.n_evaluated == len(prompt) - n_held


def test_a_far_rewind_in_a_sliding_window_chat(tiny_model, open_session):
    """Another system message when the window has left it behind: evaluated from the start, and right."""
    session, notices = open_session(tiny_model("gemma2", **SLIDING), model=EVICTING)
    chat = Conversation(session, GenerationOptions(12), "be brief")
    for question in ("one", "two", "three " * 40):
        list(chat.ask(question))
    assert notices == []
    chat.system = "be long"
    history = chat.messages
    answer = collect(chat.ask("four"))
    assert answer.stats.n_reused == 0
    assert notices == [STARTS_OVER]
    assert_equals_fresh(session, session.chat_ids([*history, Message("user", "four")]), answer)
