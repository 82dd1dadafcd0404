"""The loop against plain decoding, token for token: every drafter, K, limit, end and edge, on the numpy engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
from fakes import FALSE_ALARM, FakeDrafter, chi_square_p, memo
from numpy.typing import NDArray

from specli.decode import Decoder
from specli.drafters.base import Draft, Drafter, SequenceState
from specli.drafters.model import ModelDrafter
from specli.engine.base import Evaluation, Row, Slice
from specli.engine.table import LogitsFunction, TableEngine, random_logits, scripted_logits
from specli.errors import Cancelled, ConfigError, ContextOverflow, DeadEnd, EngineError, RollbackUnsupported
from specli.events import Event, Finished, PrefillDone, Provenance, RoundDone, Text
from specli.request import Request
from specli.sampling import Sampler
from specli.stats import Stats
from specli.verify import Verifier, make_verifier

V = 7
TARGET, OTHER = memo(random_logits(V, 1)), memo(random_logits(V, 2))
GREEDY, COUPLED = make_verifier("greedy", Sampler(0.0)), make_verifier("coupled", Sampler(1.5))
VERIFIERS = [GREEDY, COUPLED]
SEED = 11
PROMPT = [1, 2, 3, 4, 5]


def piece(token: int) -> bytes:
    return b"<%d>" % token


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(map(piece, tokens)).decode()


@dataclass
class Run:
    """What one sequence's generation told its observers."""

    state: SequenceState
    events: list[Event] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        [finished] = [event for event in self.events if isinstance(event, Finished)]
        assert self.events[-1] is finished
        return finished

    @property
    def tokens(self) -> list[int]:
        return list(self.finished.tokens)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Text))

    @property
    def rounds(self) -> list[tuple[int, int, int]]:
        """(proposed, accepted, emitted) of each round."""
        parts = [part for event in self.events if isinstance(event, RoundDone) for part in event.sequences]
        return [(part.proposed, part.accepted, part.emitted) for part in parts if part.sequence == self.state.id]

    @property
    def stats(self) -> Stats:
        stats = Stats(self.state.id)
        for event in self.events:
            stats.observe(event)
        return stats

    def check(self) -> None:
        """What holds of every run: counts, order of events, provenance."""
        stats, finished = self.stats, self.finished
        assert stats.n_tokens == len(finished.tokens)
        assert 0 <= stats.accepted <= stats.proposed
        assert all(accepted <= proposed and accepted <= emitted for proposed, accepted, emitted in self.rounds)
        n_prefills = sum(isinstance(event, PrefillDone) for event in self.events)
        assert n_prefills == bool(finished.tokens or finished.n_cut)
        spans = [span for event in self.events if isinstance(event, Text) for span in event.spans]
        assert all(span.text for span in spans)


def request(prompt: Sequence[int], seed: int = SEED, id_: int = 0, **options: object) -> Request:
    state = SequenceState(id_, list(prompt), seed, np.random.default_rng(seed))
    return Request(state, 0.0, **options)  # type: ignore[arg-type]


def generate(
    engine: TableEngine,
    prompt: Sequence[int] = PROMPT,
    verifier: Verifier = GREEDY,
    drafter: Drafter | None = None,
    k: int = 0,
    pieces: Callable[[int], bytes] = piece,
    **options: object,
) -> Run:
    """One sequence, to its end, from an empty cache."""
    engine.rollback(0, 0)
    asked = request(prompt, **options)  # type: ignore[arg-type]
    watched = None if drafter is None else Watched(drafter, engine)
    run = Run(asked.state, list(Decoder(engine, verifier, pieces, watched, k).run([asked])))
    run.check()
    if watched is not None:
        watched.check_end(asked.state)
    return run


class Watched:
    """Another drafter, and the cache invariants at each of its calls (B1, B2, B10, B11)."""

    def __init__(self, drafter: Drafter, target: TableEngine) -> None:
        self.drafter, self.target = drafter, target
        self.draft_engine: TableEngine | None = getattr(drafter, "_engine", None)

    @property
    def busy_s(self) -> float:
        return self.drafter.busy_s

    def _check_draft(self, state: SequenceState) -> None:
        if self.draft_engine is not None:
            held = self.draft_engine._history[state.id]
            assert len(held) == self.draft_engine.n_past(state.id) <= max(0, len(state.tokens) - 1)
            assert held == state.tokens[: len(held)]

    def _check(self, state: SequenceState) -> None:
        assert self.target._history[state.id] == state.tokens[:-1]
        self._check_draft(state)

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        for state in sequences:
            self._check(state)
        drafts = self.drafter.propose(sequences, budgets)
        for state, draft, budget in zip(sequences, drafts, budgets, strict=True):
            assert len(draft) <= budget
            assert self.target._history[state.id] == state.tokens[:-1]
        return drafts

    def commit(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        assert sequence.tokens[-len(tokens) :] == list(tokens)
        self.drafter.commit(sequence, tokens)
        self._check_draft(sequence)

    def observe(self, outcome: RoundDone) -> None:
        self.drafter.observe(outcome)

    def forget(self, sequence: SequenceState) -> None:
        self.drafter.forget(sequence)
        assert self.draft_engine is None or self.draft_engine.n_past(sequence.id) == 0

    def check_end(self, state: SequenceState) -> None:
        assert self.target._history[state.id] == state.tokens[: self.target.n_past(state.id)]
        assert self.target.n_past(state.id) <= len(state.tokens) - 1


def naive(
    logits: LogitsFunction, prompt: Sequence[int], n: int, verifier: Verifier = GREEDY, seed: int = SEED
) -> list[int]:
    """Plain decoding, written apart from the loop."""
    state = SequenceState(0, list(prompt), seed)
    for _ in range(n):
        row = np.array(logits(state.tokens), np.float32)
        state.tokens.append(verifier.choose(row, state, [], None).token)
    return state.tokens[len(prompt) :]


def drafters_for(prompt: Sequence[int], answer: Sequence[int]) -> dict[str, Callable[[], FakeDrafter]]:
    """Drafters that know ``answer`` and use it well or badly; behind its end they go on with anything."""

    def right(history: Sequence[int]) -> int:
        at = len(history) - len(prompt)
        return answer[at] if at < len(answer) else at % V

    coin = random_logits(V, 3)
    guesses: dict[str, Callable[[Sequence[int]], int | None]] = {
        "perfect": right,
        "wrong": lambda history: (right(history) + 1) % V,
        "wrong every third": lambda history: (right(history) + (len(history) % 3 == 0)) % V,
        "random": lambda history: int(coin(history).argmax()),
        "empty": lambda _history: None,
        "short": lambda history: right(history) if len(history) % 3 else None,
        "right at times": lambda history: right(history) if coin(history)[0] > 0 else int(coin(history).argmax()),
    }
    return {name: lambda guess=guess: FakeDrafter(guess) for name, guess in guesses.items()}


def model_drafter(
    logits: LogitsFunction, verifier: Verifier = GREEDY, n_vocab: int = V, **options: object
) -> ModelDrafter:
    """A ``ModelDrafter`` over its own numpy engine; ``n_ctx``, ``n_batch``, ``n_sequences`` are the engine's."""
    limits = {name: options.pop(name) for name in ("n_ctx", "n_batch", "n_sequences") if name in options}
    return ModelDrafter(TableEngine(logits, n_vocab, **limits), verifier, V, **options)  # type: ignore[arg-type]


# Equal to plain decoding


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("kind", list(drafters_for([], [])))
def test_any_drafter_k_and_limit_gives_the_plain_tokens(verifier: Verifier, kind: str) -> None:
    answer = naive(TARGET, PROMPT, 20, verifier)
    engine = TableEngine(TARGET, V)
    for k, max_tokens in itertools.product(range(7), range(13)):
        run = generate(
            engine, verifier=verifier, drafter=drafters_for(PROMPT, answer)[kind](), k=k, max_tokens=max_tokens
        )
        assert run.tokens == answer[:max_tokens]  # G13: never over, never under
        assert run.text == text_of(answer[:max_tokens])
        assert run.finished.reason == "length"
        if kind == "perfect" and max_tokens > 1:
            assert run.stats.acceptance_rate == (1.0 if k and max_tokens > 2 else None)
            assert len(run.rounds) == -(-(max_tokens - 1) // (k + 1))
        elif kind == "empty":
            assert run.rounds == [(0, 0, 1)] * (max_tokens - 1)
        elif kind == "wrong":
            assert run.stats.accepted == 0


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("k", range(7))
def test_a_draft_model_gives_the_plain_tokens(verifier: Verifier, k: int) -> None:
    answer = naive(TARGET, PROMPT, 30, verifier)
    engine = TableEngine(TARGET, V)
    near = memo(lambda history: TARGET(history) + OTHER(history) / 2)
    for logits, max_tokens in itertools.product((TARGET, OTHER, near), (1, 2, 3, 7, 30)):
        run = generate(engine, verifier=verifier, drafter=model_drafter(logits, verifier), k=k, max_tokens=max_tokens)
        assert run.tokens == answer[:max_tokens]
        if logits is TARGET and k and max_tokens > 2:
            assert run.stats.acceptance_rate == 1  # A4: a model that drafts for itself


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
def test_p_min_and_n_min_change_no_token(verifier: Verifier) -> None:
    answer = naive(TARGET, PROMPT, 25, verifier)
    near = memo(lambda history: TARGET(history) + OTHER(history) / 2)
    for p_min, n_min in itertools.product((0.0, 0.3, 0.6, 1.0), (0, 1, 3)):
        drafter = model_drafter(near, verifier, p_min=p_min, n_min=n_min)
        assert generate(TableEngine(TARGET, V), verifier=verifier, drafter=drafter, k=4, max_tokens=25).tokens == answer


@pytest.mark.parametrize("n_vocab", [3, 5, 6, 8, 12])
@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
def test_draft_vocabularies_smaller_and_larger_than_the_targets(n_vocab: int, verifier: Verifier) -> None:
    answer = naive(TARGET, PROMPT, 25, verifier)
    logits = memo(random_logits(n_vocab, 4, scale=1.0))

    def padded(history: Sequence[int]) -> Row:  # near the target, where the draft has the tokens
        row = logits(history).copy()
        row[: min(V, n_vocab)] += TARGET(history)[: min(V, n_vocab)]
        return row

    prompts = [PROMPT, [1, 2]]  # one with tokens that a small draft lacks, one without
    for prompt, k in itertools.product(prompts, (1, 3, 5)):
        drafter = model_drafter(padded, verifier, n_vocab)
        run = generate(TableEngine(TARGET, V), prompt, verifier, drafter, k, max_tokens=25)
        assert run.tokens == (answer if prompt is PROMPT else naive(TARGET, prompt, 25, verifier))
        if prompt is PROMPT and n_vocab < 6:
            assert run.stats.proposed == 0  # the prompt's 5 is no token of the draft


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("n_prompt", range(1, 13))
def test_every_context_edge(verifier: Verifier, n_prompt: int) -> None:
    """C1, C8: as many tokens as plain decoding, the last draft shortened; C3: a draft's context may end before."""
    n_ctx = 12
    prompt = [t % V for t in range(n_prompt)]
    answer = naive(TARGET, prompt, n_ctx - n_prompt + 1, verifier)
    engine = TableEngine(TARGET, V, n_ctx=n_ctx)
    assert generate(engine, prompt, verifier).tokens == answer
    for k in (1, 2, 3, 6, 16):
        drafters: list[Drafter] = [make() for make in drafters_for(prompt, answer).values()]
        drafters += [model_drafter(TARGET, verifier, n_ctx=draft_ctx) for draft_ctx in (1, 2, 5, 11, 12, 13, 40)]
        drafters += [model_drafter(OTHER, verifier, n_ctx=draft_ctx) for draft_ctx in (5, 12)]
        for drafter in drafters:
            run = generate(engine, prompt, verifier, drafter, k)
            assert run.tokens == answer
            assert run.finished.reason == "length"
        for max_tokens in range(len(answer) + 2):  # C8: a limit at and around the end of the context
            run = generate(engine, prompt, verifier, drafters[0], k, max_tokens=max_tokens)
            assert run.tokens == answer[:max_tokens]


def test_a_shorter_draft_context_ends_drafting_only() -> None:
    run = generate(TableEngine(TARGET, V), drafter=model_drafter(TARGET, n_ctx=12), k=4, max_tokens=30)
    assert run.tokens == naive(TARGET, PROMPT, 30)
    # 6 tokens after the prefill; drafting k tokens takes 6 + k - 1, 11 + k - 1 cells: 4, then 2, then none
    assert [proposed for proposed, _, _ in run.rounds] == [4, 2] + [0] * 21


@pytest.mark.parametrize("n_batch", [1, 2, 3, 5])
@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda verifier: verifier.name)
def test_small_batches(n_batch: int, verifier: Verifier) -> None:
    """C5: prompts in chunks, drafts shortened to the batch; A3: the same chunks with and without a draft."""
    for n_prompt in range(1, 12):
        prompt = [(3 * t) % V for t in range(n_prompt)]
        answer = naive(TARGET, prompt, 9, verifier)
        chunks = [(start, min(n_batch, n_prompt - start)) for start in range(0, n_prompt, n_batch)]
        drafters = [None, drafters_for(prompt, answer)["perfect"](), model_drafter(TARGET, verifier, n_batch=n_batch)]
        for drafter in drafters:
            engine = TableEngine(TARGET, V, n_batch=n_batch)
            run = generate(engine, prompt, verifier, drafter, 4, max_tokens=9)
            assert run.tokens == answer
            assert engine.batches[: len(chunks)] == chunks
            assert max(length for _start, length in engine.batches[len(chunks) :]) == (
                1 if drafter is None else min(5, n_batch)
            )


def test_a_draft_is_shortened_to_the_rows_that_the_engine_gives() -> None:
    answer = naive(TARGET, PROMPT, 9)
    run = generate(
        TableEngine(TARGET, V, n_rows_max=2), drafter=drafters_for(PROMPT, answer)["perfect"](), k=6, max_tokens=9
    )
    assert run.tokens == answer
    assert run.rounds == [(1, 1, 2)] * 4


@pytest.mark.parametrize(
    "verifier", [*VERIFIERS, make_verifier("block", Sampler(1.5))], ids=lambda verifier: verifier.name
)
@pytest.mark.parametrize(("k", "n_batch"), [(0, 3), (1, 6), (3, 64), (4, 64), (4, 7)])
def test_several_sequences_equal_each_alone(verifier: Verifier, k: int, n_batch: int) -> None:
    prompts, limits = [PROMPT, [2], [6, 6, 0, 1, 2, 3, 4, 5]], [12, None, 9]
    ends = frozenset([5])

    def requests(only: int | None = None) -> list[Request]:
        chosen = range(3) if only is None else [only]
        return [request(prompts[i], 50 + i, i, max_tokens=limits[i], end_ids=ends) for i in chosen]

    def run(asked: list[Request], n_batch: int) -> dict[int, tuple[tuple[int, ...], str]]:
        engine = TableEngine(TARGET, V, n_ctx=40, n_batch=n_batch, n_sequences=3)
        drafter = Watched(model_drafter(OTHER, verifier, n_sequences=3, n_ctx=30), engine)
        events = list(Decoder(engine, verifier, piece, drafter, k).run(asked))
        return {event.sequence: (event.tokens, event.reason) for event in events if isinstance(event, Finished)}

    together = run(requests(), n_batch)
    assert len(together) == 3
    if verifier.is_sampled and n_batch == 7:
        return  # drafts are shorter together than alone there, and sampled drafts take coins
    for i in range(3):
        assert run(requests(i), 64) == {i: together[i]}


def test_several_sequences_end_apart_and_counts_belong_to_each() -> None:
    engine = TableEngine(TARGET, V, n_sequences=3)
    asked = [request(PROMPT, id_=i, max_tokens=limit) for i, limit in enumerate((1, 4, 9))]
    answer = naive(TARGET, PROMPT, 9)
    events = list(Decoder(engine, GREEDY, piece, drafters_for(PROMPT, answer)["perfect"](), 2).run(asked))
    for i, limit in enumerate((1, 4, 9)):
        run = Run(
            asked[i].state, [event for event in events if not isinstance(event, RoundDone) and event.sequence == i]
        )
        stats = Stats(i)
        for event in events:
            stats.observe(event)
        assert run.tokens == answer[:limit]
        assert run.text == text_of(answer[:limit])
        assert stats.n_tokens == limit
        assert stats.rounds == (0, 1, 3)[i]
    sizes = [len(event.sequences) for event in events if isinstance(event, RoundDone)]
    assert sizes == [2, 1, 1]  # the first ends with its prefill, the second in the first round


# Ends


def script(tokens: Sequence[int], n_prompt: int = len(PROMPT)) -> LogitsFunction:
    """A target that says ``tokens`` after a prompt, then 0s."""
    return scripted_logits(V, lambda at: tokens[at - n_prompt] if at - n_prompt < len(tokens) else 0)


@pytest.mark.parametrize("k", range(7))
def test_the_end_is_honoured_at_every_position(k: int) -> None:
    """G10, G11, G15, B10: as first token, at each index of a draft, as the target's own; nothing behind it is kept."""
    body = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4]
    for at in range(12):
        said = [*body[:at], 6, 2, 3, 1, 1, 2]
        for name, make in drafters_for(PROMPT, said).items():
            engine = TableEngine(script(said), V)
            run = generate(engine, drafter=make(), k=k, end_ids=frozenset([5, 6]))
            assert run.tokens == said[: at + 1], name
            assert (run.finished.reason, run.finished.n_cut) == ("eos", 0)
            assert run.text == text_of(said[:at])  # the end itself is no text
            assert engine._history[0] == [*PROMPT, *said[:at]]
            assert run.stats.n_tokens == at + 1


def test_end_ids_come_from_the_target_only() -> None:
    """D8, and a limit reached together with an end: the end is what is reported."""
    run = generate(
        TableEngine(script([1, 6, 2]), V),
        drafter=model_drafter(script([1, 6, 2])),
        k=4,
        end_ids=frozenset([6]),
        max_tokens=2,
    )
    assert (run.tokens, run.finished.reason) == ([1, 6], "eos")
    free = generate(
        TableEngine(script([1, 6, 2]), V),
        drafter=model_drafter(script([1, 6, 2]), end_ids=frozenset([6])),
        k=4,
        max_tokens=5,
    )
    assert free.tokens == [1, 6, 2, 0, 0]  # without end ids (--ignore-eos) 6 is a token like any other


def test_the_next_turn_feeds_only_what_is_new() -> None:
    """B10: the cache ends at the end token; a second turn over it equals a fresh one."""
    said = [1, 2, 6, 3, 4]
    engine = TableEngine(script(said), V)
    first = generate(engine, drafter=drafters_for(PROMPT, said)["perfect"](), k=4, end_ids=frozenset([6]))
    assert engine.n_past(0) == len(PROMPT) + 2
    prompt = [*first.state.tokens, 5, 5]
    n_batches = len(engine.batches)
    events = list(Decoder(engine, GREEDY, piece).run([request(prompt, max_tokens=4)]))
    assert engine.batches[n_batches] == (len(PROMPT) + 2, 3)
    fresh = generate(TableEngine(script(said), V), prompt, max_tokens=4)
    assert events[-1].tokens == fresh.finished.tokens  # type: ignore[union-attr]


@pytest.mark.parametrize(("max_tokens", "tokens"), [(0, []), (1, [1]), (4, [1, 2, 3, 4])])
def test_limits(max_tokens: int, tokens: list[int]) -> None:
    """A6, G16."""
    for drafter in (None, model_drafter(script([1, 2, 3, 4, 5]))):
        engine = TableEngine(script([1, 2, 3, 4, 5]), V)
        run = generate(engine, drafter=drafter, k=4, max_tokens=max_tokens)
        assert (run.tokens, run.finished.reason) == (tokens, "length")
        assert bool(engine.batches) == (max_tokens > 0)  # no model work for nothing


def test_prompts_that_do_not_fit() -> None:
    """C10: both numbers are named; an empty prompt is refused."""
    engine = TableEngine(TARGET, V, n_ctx=4)
    with pytest.raises(ContextOverflow, match=r"5 tokens.* 4"):
        generate(engine, PROMPT)
    with pytest.raises(ConfigError, match="empty"):
        generate(engine, [])
    assert not engine.batches


# Stop strings


def spell(*pieces: str) -> tuple[list[int], Callable[[int], bytes]]:
    """Tokens 0, 1, 2, … with the given pieces; token ``len(pieces)`` and higher are ``~``."""
    return list(range(len(pieces))), lambda token: pieces[token].encode() if token < len(pieces) else b"~"


def generate_text(pieces: Sequence[str], stops: Sequence[str], k: int, kind: str = "perfect", **options: object) -> Run:
    """The target says ``pieces``, one token each, after a prompt of one token, and then ``~`` for ever."""
    tokens, give = spell(*pieces)
    n_vocab = max(V, len(pieces) + 1)
    logits = scripted_logits(n_vocab, lambda at: min(at - 1, len(pieces)))
    drafter = drafters_for([0], [*tokens, *[len(pieces)] * 20])[kind]()
    options.setdefault("max_tokens", len(pieces) + 3)
    return generate(TableEngine(logits, n_vocab), [0], drafter=drafter, k=k, pieces=give, stops=tuple(stops), **options)


@pytest.mark.parametrize("kind", ["perfect", "wrong", "wrong every third", "short"])
@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize(
    ("pieces", "stops", "text", "n_kept"),
    [
        (["a", "b", " ST", "OP", "c", "d", "e", "f", "g", "h"], ["STOP"], "ab ", 3),  # G1: early in a long run
        (["x", "##", "#EN", "D", "y"], ["###END"], "x", 1),  # G4
        (["##", "#EN", "D", "y"], ["###END"], "", 0),
        (["a", " ha", " ha", " ha", " b"], [" ha ha ha"], "a", 1),  # G3
        (["Is", " it", "?\n", "No"], ["\n"], "Is it?", 3),  # G5
        (["Is", " it", "?", "\n", "No"], ["\n"], "Is it?", 3),
        ([" ", "Alice", ":", " hi"], ["\n", "Alice:"], " ", 1),
        (["a", "b", "STOP", "STOP"], ["STOP"], "ab", 2),
        (["STOP"], ["STOP"], "", 0),
        (["one", " two"], ["two", "one t"], "", 0),
    ],
)
def test_stop_strings_cut_text_and_tokens_alike(
    pieces: list[str], stops: list[str], text: str, n_kept: int, k: int, kind: str
) -> None:
    run = generate_text(pieces, stops, k, kind)
    assert run.text == text
    assert run.tokens == list(range(n_kept))
    assert run.finished.reason == "stop"
    assert run.finished.stop in stops
    assert run.stats.n_tokens == n_kept


@pytest.mark.parametrize("k", range(9))
def test_text_that_only_looks_like_a_stop(k: int) -> None:
    """G7: given out once, and all of it."""
    run = generate_text([" Alice", "!", " #", "#"], ["\n", "Alice:", "###"], k, max_tokens=4)
    assert (run.text, run.finished.reason, run.finished.stop) == (" Alice! ##", "length", None)
    assert run.tokens == [0, 1, 2, 3]


def test_streamed_pieces_are_final() -> None:
    run = generate_text(["ab", "#", "#", "c", "##", "#"], ["###"], 3)
    texts = [event.text for event in run.events if isinstance(event, Text)]
    assert texts == ["ab", "##c"]
    assert run.text == "ab##c"


def test_a_stop_completed_by_the_end_of_the_text_is_a_stop() -> None:
    """An unfinished character becomes U+FFFD at the end, and that may be a stop string too."""
    pieces = [b"a", b"\xf0"]
    logits = scripted_logits(3, lambda at: min(at - 1, 2))
    run = generate(TableEngine(logits, 3), [0], pieces=lambda t: pieces[t], stops=("\ufffd",), max_tokens=2)
    assert (run.text, run.finished.stop, run.finished.reason, run.tokens) == ("a", "\ufffd", "stop", [0])


def test_the_end_wins_over_a_stop_that_is_only_begun() -> None:
    run = generate_text(["a", "##", "", "x"], ["###"], 4, end_ids=frozenset([2]))
    assert (run.text, run.finished.reason, run.tokens) == ("a##", "eos", [0, 1, 2])


def test_split_characters_over_a_round_boundary() -> None:
    """F1."""
    llama = "🦙".encode()
    pieces = [llama[:1], llama[1:3], llama[3:], b"!"]
    logits = scripted_logits(5, lambda at: min(at - 1, 4))
    for k in range(4):
        drafter = drafters_for([0], [0, 1, 2, 3])["perfect"]()
        run = generate(TableEngine(logits, 5), [0], drafter=drafter, k=k, pieces=lambda t: pieces[t], max_tokens=4)
        assert run.text == "🦙!"


def test_provenance_says_who_proposed() -> None:
    said = [1, 2, 3, 4, 1]
    run = generate(
        TableEngine(script(said), V), drafter=drafters_for(PROMPT, [1, 2, 3, 0])["perfect"](), k=3, max_tokens=5
    )
    assert run.rounds == [(3, 2, 3), (0, 0, 1)]
    spans = [(span.text, span.provenance) for event in run.events if isinstance(event, Text) for span in event.spans]
    drafted, own = Provenance.DRAFT, Provenance.TARGET
    assert spans == [("<1>", own), ("<2>", drafted), ("<3>", drafted), ("<4>", own), ("<1>", own)]


# Counts


class ScriptedDrafts:
    """Round i proposes ``lengths[i]`` tokens, of which the first ``right[i]`` are right."""

    def __init__(self, answer: Sequence[int], rounds: Sequence[tuple[int, int]]) -> None:
        self._answer, self._rounds = answer, iter(rounds)
        self.busy_s = 0.0

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        [state], [budget] = sequences, budgets
        k, n_right = next(self._rounds)
        assert k <= budget
        at = len(state.tokens) - len(PROMPT)
        ids = [(token + (i >= n_right)) % V for i, token in enumerate(self._answer[at : at + k])]
        return [Draft(ids, [None] * k)]

    def commit(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        pass

    def observe(self, outcome: RoundDone) -> None:
        pass

    def forget(self, sequence: SequenceState) -> None:
        pass


def test_counts_of_known_rounds() -> None:
    """J1: (4, 4), (4, 1), (0, 0)."""
    answer = naive(TARGET, PROMPT, 20)
    drafter = ScriptedDrafts(answer, [(4, 4), (4, 1), (0, 0)])
    engine = TableEngine(TARGET, V)
    asked = request(PROMPT)
    events = list(itertools.islice(Decoder(engine, GREEDY, piece, drafter, 4).run([asked]), 8))
    run = Run(asked.state, events)
    assert run.rounds == [(4, 4, 5), (4, 1, 2), (0, 0, 1)]
    stats = run.stats
    assert (stats.proposed, stats.accepted, stats.acceptance_rate) == (8, 5, 0.625)
    assert stats.n_tokens == 1 + 8  # the prefill's token, then 5 + 2 + 1
    assert stats.block_efficiency == pytest.approx(8 / 3)
    assert stats.mean_accepted_length == 2.5
    assert stats.per_position_acceptance == [1, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("said", "k", "expected"),
    [
        ([1, 2, 3, 6, 4, 4, 4], 5, [(3, 3, 3)]),  # J3: the end inside an accepted run
        ([1, 2, 3, 4, 1, 2, 6], 5, [(5, 5, 6)]),  # the end as bonus
        ([1, 2, 3, 4, 1, 6], 5, [(5, 5, 5)]),  # the end as last drafted token
        ([1, 6], 5, [(1, 1, 1)]),
        ([6, 1], 5, []),
    ],
)
def test_nothing_behind_the_end_is_counted(said: list[int], k: int, expected: list[tuple[int, int, int]]) -> None:
    drafter = drafters_for(PROMPT, said)["perfect"]()
    run = generate(TableEngine(script(said), V), drafter=drafter, k=k, end_ids=frozenset([6]))
    assert run.rounds == expected
    assert run.stats.n_tokens == said.index(6) + 1
    assert 1 + sum(emitted for _, _, emitted in run.rounds) == len(run.tokens)


def test_the_end_as_the_targets_own_after_a_rejection() -> None:
    """The rejected token before it was judged, the two behind it were not."""
    drafter = drafters_for(PROMPT, [1, 2, 3, 0, 0])["perfect"]()
    run = generate(TableEngine(script([1, 2, 6]), V), drafter=drafter, k=4, end_ids=frozenset([6]))
    assert run.rounds == [(2, 1, 2)]


def test_tokens_cut_off_by_a_stop_count_nowhere() -> None:
    run = generate_text(["a", "b", "#", "#", "#", "c"], ["###"], 5)
    assert run.rounds == [(4, 4, 4)]  # of five: the stop is complete with the fourth
    assert (run.finished.n_cut, run.tokens) == (3, [0, 1])
    stats = run.stats
    assert (stats.proposed, stats.accepted, stats.n_tokens) == (1, 1, 2)


def test_a_draft_that_is_always_empty_is_plain_decoding() -> None:
    """B11: 20 rounds with nothing, then one of four."""
    answer = naive(TARGET, PROMPT, 40)
    drafter = ScriptedDrafts(answer, [(0, 0)] * 20 + [(4, 4)] + [(0, 0)] * 10)
    run = generate(TableEngine(TARGET, V), drafter=drafter, k=4, max_tokens=30)
    assert run.tokens == answer[:30]
    assert run.rounds[:21] == [(0, 0, 1)] * 20 + [(4, 4, 5)]


# Caches


def test_cache_lengths_after_a_round() -> None:
    """B1: target at n_committed - 1, draft the same, or one behind when all were accepted."""
    for k, accepted, lag in ((4, 0, 0), (4, 1, 0), (4, 3, 0), (4, 4, 1), (1, 1, 1), (1, 0, 0)):
        said = [1, 2, 3, 4, 1, 2, 3]
        engine, draft_engine = TableEngine(script(said), V), TableEngine(script([*said[: 1 + accepted], 0, 0, 0, 0]), V)
        asked = request(PROMPT)
        events = Decoder(engine, GREEDY, piece, ModelDrafter(draft_engine, GREEDY, V), k).run([asked])
        while not isinstance(next(events), RoundDone):
            pass
        n_committed = len(PROMPT) + 1 + accepted + 1
        assert len(asked.state.tokens) == n_committed
        assert engine.n_past(0) == n_committed - 1
        assert draft_engine.n_past(0) == n_committed - 1 - lag


def test_acceptance_does_not_decay() -> None:
    """B2: a draft that is wrong at every third position, 200 rounds: the same at the end as at the beginning."""
    said = [int(x) for x in np.random.default_rng(1).integers(0, V, 1000)]
    wrong = [(token + (at % 3 == 0)) % V for at, token in enumerate(said)]
    target, draft = TableEngine(script(said), V, n_ctx=1000), TableEngine(script(wrong), V, n_ctx=1000)
    run = generate(target, drafter=ModelDrafter(draft, GREEDY, V), k=4, max_tokens=601)
    assert run.tokens == said[:601]
    assert len(run.rounds) == 200
    assert set(run.rounds[:-2]) == {(4, 2, 3)}


def test_verified_rows_see_the_right_history() -> None:
    """H4: position i sees prompt + committed + the first i proposals; what stays of the log equals plain decoding's."""
    seen: list[tuple[int, ...]] = []

    def logged(history: Sequence[int]) -> Row:
        seen.append(tuple(history))
        return TARGET(history)

    generate(TableEngine(logged, V), max_tokens=15)
    plain, answer = list(seen), naive(TARGET, PROMPT, 15)
    final = [*PROMPT, *answer]
    for kind in ("wrong every third", "right at times", "perfect"):
        seen.clear()
        run = generate(TableEngine(logged, V), drafter=drafters_for(PROMPT, answer)[kind](), k=4, max_tokens=15)
        assert run.tokens == answer
        assert list(dict.fromkeys(h for h in seen if list(h) == final[: len(h)])) == plain


# Failures and interruptions


class Fragile(TableEngine):
    """Raises ``error`` at its n-th batch, before it touches anything, as llama.cpp's failures end up."""

    def __init__(self, logits: LogitsFunction, at: int, error: Exception, **limits: int) -> None:
        super().__init__(logits, V, **limits)
        self._left, self._error, self.has_failed = at, error, False

    def evaluate(self, slices: Sequence[Slice], interruptible: bool = False) -> Evaluation:
        self._left -= 1
        if self._left < 0 and (interruptible or not isinstance(self._error, Cancelled)):
            self.has_failed = True
            raise self._error
        return super().evaluate(slices, interruptible)


def check_resumes(engine: TableEngine, state: SequenceState, answer: Sequence[int]) -> None:
    """The caches fit the tokens, and going on from here gives what an undisturbed run gives."""
    assert engine._history[0] == state.tokens[: engine.n_past(0)]
    assert engine.n_past(0) < max(1, len(state.tokens))
    n_left = len(PROMPT) + len(answer) - len(state.tokens)
    if n_left > 0:
        events = list(Decoder(engine, GREEDY, piece).run([Request(state, 0.0, n_left)]))
        assert isinstance(events[-1], Finished)
    assert state.tokens == [*PROMPT, *answer][: len(state.tokens)]
    assert len(state.tokens) >= len(PROMPT) + len(answer)


def failures(
    make: Callable[[int], tuple[TableEngine, Drafter]], answer: Sequence[int]
) -> Iterator[tuple[TableEngine, Drafter, SequenceState]]:
    """Runs that fail at the first, second, … opportunity. Those that do not fail are right."""
    n_failed = 0
    for at in range(15):
        engine, drafter = make(at)
        asked = request(PROMPT, max_tokens=len(answer))
        try:
            list(Decoder(engine, GREEDY, piece, drafter, 3).run([asked]))
        except EngineError:
            n_failed += 1
            yield engine, drafter, asked.state
        else:
            assert asked.state.tokens == [*PROMPT, *answer]
    assert n_failed > 4


def test_a_failing_target_leaves_the_caches_right() -> None:
    answer = naive(TARGET, PROMPT, 8)
    for engine, drafter, state in failures(
        lambda at: (Fragile(TARGET, at, EngineError("lost"), n_batch=4), model_drafter(OTHER)), answer
    ):
        assert drafter._engine.n_past(0) == 0  # type: ignore[attr-defined]
        engine._left = 10**9  # type: ignore[attr-defined]
        check_resumes(engine, state, answer)


def test_a_failing_draft_leaves_the_caches_right() -> None:
    answer = naive(TARGET, PROMPT, 8)
    for engine, drafter, state in failures(
        lambda at: (
            TableEngine(TARGET, V),
            ModelDrafter(Fragile(OTHER, at, EngineError("lost"), n_batch=4), GREEDY, V),
        ),
        answer,
    ):
        assert drafter._engine.n_past(0) == 0  # type: ignore[attr-defined]
        check_resumes(engine, state, answer)


def test_rows_of_nan_leave_the_caches_right() -> None:
    """The pass went well, its numbers did not: the failure comes from the verifier, after the cache has grown."""
    answer = naive(TARGET, PROMPT, 8)

    def make(at: int) -> tuple[TableEngine, Drafter]:
        left = itertools.count(at, -1)
        logits: LogitsFunction = lambda history: TARGET(history) * (np.nan if next(left) == 0 else 1)  # noqa: E731
        return TableEngine(logits, V), model_drafter(OTHER)

    for engine, _drafter, state in failures(make, answer):
        check_resumes(engine, state, answer)


@pytest.mark.parametrize("make_drafter", [lambda: None, lambda: model_drafter(OTHER), lambda: model_drafter(TARGET)])
def test_closing_the_generator_at_any_event_leaves_the_caches_right(make_drafter: Callable[[], Drafter | None]) -> None:
    answer = naive(TARGET, PROMPT, 8)
    n_events = len(
        list(Decoder(TableEngine(TARGET, V), GREEDY, piece, make_drafter(), 3).run([request(PROMPT, max_tokens=8)]))
    )
    for n_taken in range(n_events + 1):
        engine, drafter, asked = TableEngine(TARGET, V), make_drafter(), request(PROMPT, max_tokens=8)
        events = Decoder(engine, GREEDY, piece, drafter, 3).run([asked])
        for _ in range(n_taken):
            next(events)
        events.close()  # type: ignore[attr-defined]
        assert drafter is None or drafter._engine.n_past(0) == 0  # type: ignore[attr-defined]
        check_resumes(engine, asked.state, answer)


def test_cancelling_at_every_batch() -> None:
    """The text so far is kept and told; nothing is raised."""
    answer = naive(TARGET, PROMPT, 12)
    for drafter_logits, n_asked in itertools.product((None, OTHER, TARGET), range(20)):
        engine = TableEngine(TARGET, V, n_batch=2)
        drafter = None if drafter_logits is None else model_drafter(drafter_logits)
        left, asked = itertools.count(n_asked, -1), request(PROMPT, max_tokens=12)
        decoder = Decoder(engine, GREEDY, piece, drafter, 3, cancelled=lambda left=left: next(left) <= 0)
        run = Run(asked.state, list(decoder.run([asked])))
        run.check()
        n_told = len(run.tokens)
        assert run.tokens == answer[:n_told]
        assert run.text == text_of(run.tokens)
        assert run.finished.reason == ("cancelled" if n_told < 12 else "length")
        if n_asked < 3:  # the prompt takes three batches
            assert n_told == 0
            assert len(engine.batches) == n_asked
        check_resumes(engine, asked.state, answer)


def test_an_evaluation_that_stops_early() -> None:
    """The engine itself raises ``Cancelled`` in the middle of a long batch."""
    answer = naive(TARGET, PROMPT, 8)
    for n_good, where in itertools.product(range(4), ("target", "draft")):
        stopping = Fragile(TARGET, n_good, Cancelled("stopped"), n_batch=2)
        engine = stopping if where == "target" else TableEngine(TARGET, V, n_batch=6)
        draft_engine = stopping if where == "draft" else TableEngine(OTHER, V)
        asked = request(PROMPT, max_tokens=8)
        decoder = Decoder(
            engine,
            GREEDY,
            piece,
            ModelDrafter(draft_engine, GREEDY, V),
            3,
            cancelled=lambda stopping=stopping: stopping.has_failed,
        )
        run = Run(asked.state, list(decoder.run([asked])))
        assert run.tokens == answer[: len(run.tokens)]
        assert run.text == text_of(run.tokens)
        assert run.finished.reason == ("cancelled" if stopping.has_failed else "length")
        stopping._left = 10**9
        check_resumes(engine, asked.state, answer)


def test_one_cancelled_prompt_among_several() -> None:
    """The first is under way, the second is stopped before its prompt is in: both end, in order."""
    asked = [request(PROMPT, id_=0, max_tokens=9), request(PROMPT, id_=1, max_tokens=9)]
    left = itertools.count(1, -1)
    engine = TableEngine(TARGET, V, n_sequences=2)
    events = list(Decoder(engine, GREEDY, piece, cancelled=lambda: next(left) <= 0).run(asked))
    finished = {event.sequence: event for event in events if isinstance(event, Finished)}
    assert {i: event.reason for i, event in finished.items()} == {0: "cancelled", 1: "cancelled"}
    assert finished[0].tokens == tuple(naive(TARGET, PROMPT, 1))
    assert finished[1].tokens == ()


def test_a_memory_that_cannot_roll_back() -> None:
    """B5, B6: plain decoding works; a rejection raises, and is never ignored."""
    answer = naive(TARGET, PROMPT, 12)
    engine = TableEngine(TARGET, V, can_roll_back=False)
    assert generate(engine, max_tokens=12).tokens == answer
    assert generate(engine, drafter=drafters_for(PROMPT, answer)["perfect"](), k=3, max_tokens=12).tokens == answer
    with pytest.raises(RollbackUnsupported, match="--spec-type none"):
        generate(engine, drafter=drafters_for(PROMPT, answer)["wrong"](), k=3, max_tokens=12)


# Sampled: block and rejection


@pytest.mark.parametrize("name", ["block", "rejection"])
def test_a_model_that_drafts_for_itself_is_always_accepted(name: str) -> None:
    """A4. Also with the chain's truncation, which both sides share."""
    for sampler in (Sampler(1.0, 0, 1.0, 0.0), Sampler(0.8, 4, 0.9, 0.1)):
        verifier = make_verifier(name, sampler)
        for seed in range(20):
            run = generate(
                TableEngine(TARGET, V),
                verifier=verifier,
                drafter=model_drafter(TARGET, verifier),
                k=4,
                max_tokens=30,
                seed=seed,
            )
            assert run.stats.acceptance_rate == 1.0
            assert len(run.tokens) == 30


@pytest.mark.parametrize("name", ["block", "rejection", "coupled"])
@pytest.mark.parametrize(("p_min", "n_min"), [(0.0, 0), (0.6, 2)])
def test_emitted_tokens_have_the_targets_law(name: str, p_min: float, n_min: int) -> None:
    """The whole loop with a draft model: three tokens, 27 cells, against the product of the target's rows."""
    n_vocab, n_runs, prompt = 3, 2500, [0]
    sampler = Sampler(1.0, 0, 1.0, 0.0)
    verifier = make_verifier(name, sampler)
    target, draft = memo(random_logits(n_vocab, 8, 1.0)), memo(random_logits(n_vocab, 9, 1.0))
    engine = TableEngine(target, n_vocab)
    drafter = ModelDrafter(TableEngine(draft, n_vocab), verifier, n_vocab, n_min=n_min, p_min=p_min)
    counts, n_accepted, n_proposed = np.zeros((n_vocab,) * 3), 0, 0
    for seed in range(n_runs):
        engine.rollback(0, 0)
        asked = request(prompt, seed, max_tokens=4)
        for event in Decoder(engine, verifier, piece, drafter, 2).run([asked]):
            if isinstance(event, RoundDone):
                n_accepted += event.sequences[0].accepted
                n_proposed += event.sequences[0].proposed
        counts[tuple(asked.state.tokens[1:4])] += 1
    expected = np.zeros((n_vocab,) * 3)
    for tokens in itertools.product(range(n_vocab), repeat=3):
        rows = [target([*prompt, *tokens[:i]]) for i in range(3)]
        expected[tokens] = n_runs * np.prod(
            [sampler.distribution(row).prob(t) for row, t in zip(rows, tokens, strict=True)]
        )
    assert chi_square_p(counts, expected) > FALSE_ALARM
    assert 0.3 < n_accepted / n_proposed < 0.95  # both outcomes were exercised


class Wall(NamedTuple):
    """A constraint that has no way on behind ``n`` tokens."""

    n: int

    def allows(self, token: int) -> bool:
        return self.n > 0

    def best(self, row: Row, n: int | None) -> NDArray[np.int64]:
        return np.argsort(-row, kind="stable")[:n] if self.n > 0 else np.zeros(0, np.int64)

    def forced(self) -> int | None:
        return None

    def after(self, token: int) -> Wall:
        assert self.n > 0
        return Wall(self.n - 1)


@pytest.mark.parametrize("verify", ["greedy", "coupled", "block"])
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_a_dead_end_loses_nothing_that_came_before(verify: str, k: int) -> None:
    """Its row is asked for while a draft is verified: what stands before it is emitted, then it is an error."""
    n_vocab, n_allowed = 9, 6
    logits = scripted_logits(n_vocab, lambda at: at % n_vocab)
    sampler = Sampler(0.0 if verify == "greedy" else 0.01, constraint=Wall(n_allowed))
    engine, plain = TableEngine(logits, n_vocab), [at % n_vocab for at in range(2, 2 + n_allowed)]
    drafter = FakeDrafter(lambda history: len(history) % n_vocab) if k else None
    state = SequenceState(0, [0, 1], SEED)
    decoder = Decoder(engine, make_verifier(verify, sampler), lambda _token: b"x", drafter, k)
    seen: list[Event] = []
    with pytest.raises(DeadEnd, match=f"no token behind {2 + n_allowed} tokens"):
        seen.extend(decoder.run([Request(state, 0.0)]))
    assert "".join(event.text for event in seen if isinstance(event, Text)) == "x" * n_allowed
    assert state.tokens[2:] == plain
