"""The whole loop under the controller: exact by enumeration, equal to plain decoding by seed, and as fast as it claims.

Times are simulated: the engines count seconds, and the loop's clock is their sum.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from fakes import memo
from numpy.typing import NDArray

from specli.controller import Controller
from specli.decode import Decoder
from specli.drafters.adaptive import AdaptiveDrafter
from specli.drafters.base import EMPTY, Choice, Draft, Drafter, SequenceState
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.drafting import Drafting
from specli.engine.base import Row, Rows
from specli.engine.table import LogitsFunction, TableEngine, random_logits
from specli.errors import DeadEnd
from specli.estimates import DEFAULT_C, CostModel
from specli.events import Finished, PrefillDone, RoundDone, SequenceRound
from specli.profile import Profile
from specli.record import Plan
from specli.request import Request
from specli.sampling import Context, Distribution, Sampler, State
from specli.verify import LawVerifier, Verdict, Verifier, _context, block_law, make_verifier, rejection_law

UNIT_S = 0.01
Curve = Callable[[int], float]
GREEDY, COUPLED = make_verifier("greedy", Sampler(0.0)), make_verifier("coupled", Sampler(1.5))


def clock_of(*engines: TableEngine) -> Callable[[], float]:
    return lambda: sum(engine.busy_s for engine in engines)


def passes(curve: Curve, rng: np.random.Generator, noise: float = 0.05) -> Callable[[int], float]:
    """Seconds of a pass: the curve, times a lognormal disturbance of mean 1."""
    return lambda n: float(UNIT_S * curve(n) * np.exp(rng.normal(-0.5 * noise**2, noise)))


def calibrated(curve: Curve, c: float, feed: float, rng: np.random.Generator, k_max: int = 8) -> Controller:
    """A cold controller behind its calibration: eight target passes and two of the draft."""
    controller, draft = Controller(k_max), lambda n: c * (1 + feed * (n - 1))
    for n in (1, 1, 2, 3, 4, 5, 8, 16):
        controller.costs.observe_pass(n, passes(curve, rng)(n))
    for n in (1, 17):
        controller.costs.observe_draft(1, n, passes(draft, rng)(n))
    return controller


# Exactness: every path of the real loop, each with its probability


class Coins:
    """Replays a run over and over, choosing otherwise each time, until every choice of every draw was made."""

    def __init__(self) -> None:
        self._path: list[tuple[int, list[int]]] = []  # chosen, and what else is possible
        self._at = 0
        self.probability = 1.0

    def runs(self) -> Iterator[None]:
        """One turn per path."""
        while True:
            self._at, self.probability = 0, 1.0
            yield
            assert self._at == len(self._path)
            while self._path and not self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            _, rest = self._path.pop()
            self._path.append((rest[0], rest[1:]))

    def draw(self, probs: Sequence[float] | np.ndarray) -> int:
        if self._at == len(self._path):
            possible = np.flatnonzero(probs).tolist()
            self._path.append((possible[0], possible[1:]))
        chosen = self._path[self._at][0]
        self._at += 1
        self.probability *= float(probs[chosen])
        return chosen


class CoinVerifier(LawVerifier):
    """Rejection or block, the laws as shipped, with enumerated draws."""

    is_sampled = True

    def __init__(self, name: str, sampler: Sampler, coins: Coins) -> None:
        super().__init__(name, {"rejection": rejection_law, "block": block_law}[name], sampler)
        self._coins = coins

    def _token(self, distribution: Distribution) -> int:
        return int(distribution.ids[self._coins.draw(distribution.probs)])

    def choose(self, row: Row, sequence: SequenceState, drafted: Sequence[int], state: State | None) -> Choice:
        context = _context(self.sampler, sequence, drafted, state)
        distribution = self.sampler.distribution(row, context)
        token = self._token(distribution)
        return Choice(token, distribution, self.sampler.advance(context.state, token, distribution))

    def verify(self, draft: Draft, rows: Rows, sequence: SequenceState) -> Verdict:
        states, target_probs = self._along(draft, rows, sequence)
        law = self._law(draft.ids, draft.distributions, target_probs)
        n_accepted = self._coins.draw(law.lengths)
        if n_accepted == len(rows):
            sequence.state = states[n_accepted]
            return Verdict(n_accepted, None, "none")
        token = self._token(law.residual(n_accepted))
        sequence.state = self.sampler.advance(states[n_accepted], token, target_probs[n_accepted])
        return Verdict(n_accepted, token, "bonus" if n_accepted == len(draft) else "recovered")


V, PROMPT = 3, [0, 1, 2, 0, 1]
PLAIN = Sampler(1.0, 0, 1.0, 0.0)


def rows_of(seed: int, scale: float, near: LogitsFunction | None = None) -> LogitsFunction:
    """Seeded rows; a token is impossible now and then. The prompt's own row is certain, which saves paths."""
    noise = random_logits(V, seed, scale, order=4)

    def logits(history: Sequence[int]) -> Row:
        row = noise(history) + (near(history) if near is not None else 0)
        if near is None:
            if len(history) == len(PROMPT):
                return np.array([0, -np.inf, -np.inf], np.float32)
            if row.min() < -1.5 * scale:
                row[row.argmin()] = -np.inf
        return np.asarray(row, np.float32)

    return memo(logits, order=9)


class Cheat(AdaptiveDrafter):
    """Wrong on purpose: looks at the drawn tokens, and throws a draft away whose first one is not 1."""

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        drafts = super().propose(sequences, budgets)
        if len(drafts[0]) and drafts[0].ids[0] != 1:
            self._pending.clear()
            return [EMPTY]
        return drafts


@dataclass
class Enumeration:
    """The law of the emitted tokens, and which lengths were proposed after each emitted text."""

    law: dict[tuple[int, ...], float] = field(default_factory=lambda: defaultdict(float))
    lengths: dict[tuple[int, ...], set[int]] = field(default_factory=lambda: defaultdict(set))
    n_paths: int = 0


def enumerated(
    name: str,
    seed: int,
    n_tokens: int,
    cost: tuple[Curve, float],
    uses_ngram: bool = False,
    make: type[AdaptiveDrafter] = AdaptiveDrafter,
    sampler: Sampler = PLAIN,
) -> tuple[Enumeration, LogitsFunction]:
    """All runs of ``n_tokens`` behind the first, K <= 2, each with a controller that starts from the same knowledge."""
    curve, c = cost
    target = rows_of(seed, 1.0)
    near = rows_of(seed + 50, 0.7, target)
    coins, found = Coins(), Enumeration()
    for _ in coins.runs():
        verifier = CoinVerifier(name, sampler, coins)
        engine = TableEngine(target, V, pass_s=lambda n: UNIT_S * curve(n))
        draft_engine = TableEngine(near, V, pass_s=lambda _n: UNIT_S * c)
        controller = Controller(2)
        for n in (1, 1, 2, 3):
            controller.costs.observe_pass(n, UNIT_S * curve(n))
        controller.costs.observe_draft(1, 1, UNIT_S * c)
        controller.costs.observe_draft(1, 12, UNIT_S * c)
        controller._n_drafts = 4  # decided by profit, not tried because everything is new
        drafter = make(
            controller,
            ModelDrafter(draft_engine, verifier, V),
            NgramDrafter(min_hit_rate=0.2, size_min=1, sampler=sampler) if uses_ngram else None,
        )
        request = Request(SequenceState(0, list(PROMPT)), 0.0, n_tokens + 1)
        decoder = Decoder(engine, verifier, lambda _t: b"x", drafter, 2, clock=clock_of(engine, draft_engine))
        emitted: list[int] = []
        with suppress(DeadEnd):
            for event in decoder.run([request]):
                if isinstance(event, RoundDone):
                    found.lengths[tuple(emitted)].add(event.sequences[0].proposed)
                    emitted = request.state.tokens[len(PROMPT) + 1 :]
        found.law[tuple(request.state.tokens[len(PROMPT) + 1 :])] += coins.probability
        found.n_paths += 1
    return found, target


def law_error(found: Enumeration, target: LogitsFunction, n_tokens: int, sampler: Sampler = PLAIN) -> float:
    """The largest difference from the target's own law."""
    assert sum(found.law.values()) == pytest.approx(1, abs=1e-12)
    first = sampler.distribution(target(PROMPT), Context(PROMPT, state=sampler.start()))
    wanted = target_law(target, (), n_tokens, sampler, sampler.advance(sampler.start(), 0, first))
    return max(abs(found.law.get(text, 0.0) - wanted.get(text, 0.0)) for text in found.law.keys() | wanted.keys())


def target_law(
    target: LogitsFunction, emitted: tuple[int, ...], n_tokens: int, sampler: Sampler, state: State
) -> dict[tuple[int, ...], float]:
    """The chance of each text of ``n_tokens``, given its beginning ``emitted``; shorter where it cannot go on."""
    history = [*PROMPT, 0, *emitted]
    try:
        distribution = sampler.distribution(target(history), Context(history, state=state))
    except DeadEnd:
        return {emitted: 1.0}
    if len(emitted) == n_tokens:
        return {emitted: 1.0}
    law: dict[tuple[int, ...], float] = {}
    for token, chance in zip(distribution.ids.tolist(), distribution.probs.tolist(), strict=True):
        behind = target_law(target, (*emitted, token), n_tokens, sampler, sampler.advance(state, token, distribution))
        law |= {text: chance * rest for text, rest in behind.items()}
    return law


# Costs near break-even, so that what earlier rounds taught decides; the second has v(2) > v(3).
NEAR_BREAK_EVEN: list[tuple[Curve, float]] = [
    (lambda n: 1 + 0.3 * (n - 1), 0.25),
    (lambda n: {1: 1.0, 2: 1.7, 3: 1.4}.get(n, 2.0), 0.2),
]


@pytest.mark.parametrize("name", ["rejection", "block"])
@pytest.mark.parametrize(("cost", "seed"), [(NEAR_BREAK_EVEN[0], 1), (NEAR_BREAK_EVEN[0], 3), (NEAR_BREAK_EVEN[1], 1)])
def test_the_emitted_law_is_the_targets_with_the_controller_in_the_loop(
    name: str, cost: tuple[Curve, float], seed: int
) -> None:
    found, target = enumerated(name, seed, 5, cost)
    assert law_error(found, target, 5) < 1e-12
    assert found.n_paths > 300
    # It learned: behind the same text, another past (what was rejected, where) led to another length.
    assert any(len(lengths) > 1 for lengths in found.lengths.values())


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_the_law_holds_where_the_account_cuts_drafts_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token costs 0.2 units, two cost 0.4: a first draft, before anything was earned, has one on a poor account."""
    cheap = (lambda n: 1 + 0.1 * (n - 1), 0.1)
    rich, _target = enumerated(name, 1, 5, cheap)
    monkeypatch.setattr("specli.controller.CREDIT", 0.3)
    poor, target = enumerated(name, 1, 5, cheap)
    assert law_error(poor, target, 5) < 1e-12
    assert (rich.lengths[()], poor.lengths[()]) == ({2}, {1})


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_the_emitted_law_is_the_targets_with_both_drafters(name: str) -> None:
    found, target = enumerated(name, 3, 4, NEAR_BREAK_EVEN[0], uses_ngram=True)
    assert law_error(found, target, 4) < 1e-12


class NoThird(NamedTuple):
    """A toy grammar: no token three times in a row, and at most two 2s."""

    last: tuple[int, ...] = ()
    n_twos: int = 0

    def allows(self, token: int) -> bool:
        return self.last != (token, token) and (token != 2 or self.n_twos < 2)

    def best(self, row: Row, n: int | None) -> NDArray[np.int64]:
        ids = np.array(
            [i for i in np.argsort(-row, kind="stable") if row[i] > -np.inf and self.allows(int(i))], np.int64
        )
        return ids[:n]

    def forced(self) -> int | None:
        allowed = [token for token in range(V) if self.allows(token)]
        return allowed[0] if len(allowed) == 1 else None

    def after(self, token: int) -> NoThird:
        assert self.allows(token)
        return NoThird((*self.last[-1:], token), self.n_twos + (token == 2))


class Forcing(NoThird):
    """Behind a 2 comes a 0, and then a 1: both are forced."""

    def allows(self, token: int) -> bool:
        if self.last[-1:] == (2,):
            return token == 0
        if self.last == (2, 0):
            return token == 1
        return True

    def after(self, token: int) -> Forcing:
        assert self.allows(token)
        return Forcing((*self.last[-1:], token))


class Trap(NoThird):
    """Behind a 1 there is no way on."""

    def allows(self, token: int) -> bool:
        return self.last[-1:] != (1,)

    def after(self, token: int) -> Trap:
        assert self.allows(token)
        return Trap((*self.last[-1:], token))


CHAINS = {
    "dead ends": Sampler(1.0, 0, 1.0, 0.0, constraint=Trap()),
    "forcing grammar": Sampler(1.0, 0, 1.0, 0.0, constraint=Forcing()),
    "penalties and bias": Sampler(
        1.0, 0, 1.0, 0.0, repeat_penalty=1.4, frequency_penalty=0.3, repeat_last_n=4, bias={1: 0.5}
    ),
    "grammar": Sampler(1.0, 0, 1.0, 0.0, constraint=NoThird()),
    "dry, top-k and grammar": Sampler(0.7, 2, 1.0, 0.0, dry_multiplier=0.7, dry_allowed_length=1, constraint=NoThird()),
    "mirostat": Sampler(1.0, mirostat=2, mirostat_tau=1.0, mirostat_eta=0.5),
}


@pytest.mark.parametrize("uses_ngram", [False, True], ids=["draft", "both"])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", ["rejection", "block"])
def test_the_law_is_the_processed_one(name: str, chain: str, uses_ngram: bool) -> None:
    """Penalties, bias, a grammar and mirostat see what stands before a position, and nothing of what was rejected."""
    sampler = CHAINS[chain]
    found, target = enumerated(name, 3, 4, NEAR_BREAK_EVEN[0], uses_ngram, sampler=sampler)
    assert law_error(found, target, 4, sampler) < 1e-12
    assert law_error(found, target, 4) > 1e-3  # and not the bare model's


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_the_enumeration_notices_a_decision_by_a_drawn_token(name: str) -> None:
    found, target = enumerated(name, 1, 3, (lambda _n: 1.0, 0.01), make=Cheat)
    assert law_error(found, target, 3) > 1e-2
    honest, target = enumerated(name, 1, 3, (lambda _n: 1.0, 0.01))
    assert law_error(honest, target, 3) < 1e-12


# Identity: the same seed, the same text


def answer_of(drafter: Drafter | None, verifier: Verifier, engine: TableEngine, seed: int, n: int) -> list[int]:
    engine.rollback(0, 0)
    request = Request(SequenceState(0, [1, 2, 3, 4, 1, 2], seed, np.random.default_rng(seed)), 0.0, n)
    clock = lambda: engine.busy_s + (drafter.busy_s if drafter is not None else 0.0)  # noqa: E731
    decoder = Decoder(engine, verifier, lambda _t: b"x", drafter, 0 if drafter is None else 6, clock=clock)
    [finished] = [event for event in decoder.run([request]) if isinstance(event, Finished)]
    return list(finished.tokens)


@pytest.mark.parametrize("verifier", [GREEDY, COUPLED], ids=lambda verifier: verifier.name)
@pytest.mark.parametrize("kind", ["model", "ngram", "both"])
def test_any_costs_give_the_plain_tokens(verifier: Verifier, kind: str) -> None:
    """Random curves, some with impossible times; one controller that goes on learning from text to text."""
    n_vocab, n_drafted = 6, 0
    target, other = memo(random_logits(n_vocab, 1)), memo(random_logits(n_vocab, 2))
    near = memo(lambda history: target(history) + other(history) / 2)
    for seed in range(12):
        rng = np.random.default_rng(seed)
        curve = np.cumsum(rng.choice([0.0, 0.05, 0.5, -0.2, 1.0], 70)) + 1
        seconds = lambda n, curve=curve, rng=rng: float(curve[n]) * rng.choice([1.0, 1.1, 30.0, 0.0])  # noqa: E731
        engine = TableEngine(target, n_vocab, pass_s=seconds)
        draft = TableEngine(near, n_vocab, pass_s=lambda _n, rng=rng: float(rng.choice([0.0, 0.1, 0.5])))
        controller = Controller(6)
        model = ModelDrafter(draft, verifier, n_vocab) if kind != "ngram" else None
        ngram = NgramDrafter(min_hit_rate=0.1) if kind != "model" else None
        drafter = AdaptiveDrafter(controller, model, ngram)
        for text in range(3):
            plain = answer_of(None, verifier, TableEngine(target, n_vocab), text, 40)
            assert answer_of(drafter, verifier, engine, text, 40) == plain
        n_drafted += controller.record.proposed
    assert n_drafted > 100


# Speed, in simulation: the real loop over engines whose v, c and acceptance are known

N_VOCAB = 32
CURVES: dict[str, Curve] = {
    "flat": lambda n: 1 + 0.01 * (n - 1),
    "linear": lambda n: 1 + 0.64 * (n - 1),
    "steps": lambda n: 1 + 0.5 * ((n - 1) // 4) + 0.05 * (n - 1),
    "tiles": lambda n: {1: 1.0, 2: 1.55, 3: 2.1, 4: 1.95, 5: 2.6, 6: 2.7, 7: 3.2, 8: 3.0}.get(n, 3 + 0.3 * (n - 8)),
}
FEED = {"flat": 0.0}  # of c, per token that the draft must catch up with; elsewhere 0.12
TEXTS: dict[str, Callable[[int], float]] = {  # chance of acceptance at a position
    "high": lambda _t: 0.85,
    "middling": lambda _t: 0.6,
    "low": lambda _t: 0.2,
    "hopeless": lambda _t: 0.03,
    "drifting": lambda t: 0.85 if (t // 150) % 2 else 0.2,
}


@functools.cache
def _script(text: str, seed: int) -> tuple[list[int], list[int], list[float]]:
    rng, n = np.random.default_rng([seed, 2]), 1100
    mean = np.array([TEXTS[text](t) for t in range(n)])
    chance = rng.beta(1.5 * mean, 1.5 * (1 - mean))
    tokens = rng.integers(0, N_VOCAB, n)
    others = np.where(rng.random(n) < chance, tokens, (tokens + 1) % N_VOCAB)
    said = np.clip(chance + rng.normal(0, 0.05, n), 0.15, 0.985)  # what the draft believes of itself
    return tokens.tolist(), others.tolist(), np.log(9 * said / (1 - said)).tolist()


@dataclass(frozen=True)
class World:
    """A pair with a text: what the target says, how often the draft agrees, what passes take (``noise``: of them)."""

    curve: str
    c: float
    text: str
    seed: int
    noise: float = 0.05

    @property
    def feed(self) -> float:
        return FEED.get(self.curve, 0.12)

    def script(self) -> tuple[list[int], list[int], list[float]]:
        """Per position: the target's token, the draft's, and the logit that the draft gives to its own."""
        return _script(self.text, self.seed)

    def engines(self) -> tuple[TableEngine, TableEngine]:
        rng, one = np.random.default_rng([self.seed, 1]), np.eye(N_VOCAB, dtype=np.float32)
        tokens, others, logits = self.script()
        draft_curve: Curve = lambda n: self.c * (1 + self.feed * (n - 1))  # noqa: E731
        target = TableEngine(
            lambda history: one[tokens[len(history)]] * 9,
            N_VOCAB,
            n_ctx=len(tokens),
            pass_s=passes(CURVES[self.curve], rng, self.noise),
        )
        draft = TableEngine(
            lambda history: one[others[len(history)]] * logits[len(history)],
            N_VOCAB,
            n_ctx=len(tokens),
            pass_s=passes(draft_curve, rng, self.noise),
        )
        return target, draft

    def controller(self) -> Controller:
        return calibrated(CURVES[self.curve], self.c, self.feed, np.random.default_rng([self.seed, 3]))

    def run(
        self, n_tokens: int, drafter_of: Callable[[TableEngine], Drafter | None], k: int
    ) -> tuple[float, list[int]]:
        """Units per token behind the first, in the real loop, and how many were proposed in each round."""
        target, draft = self.engines()
        decoder = Decoder(
            target, GREEDY, lambda _t: b"x", drafter_of(draft), k, clock=lambda: target.busy_s + draft.busy_s
        )
        state, prefill_s, ks = SequenceState(0, self.script()[0][:N_PROMPT]), 0.0, []
        for event in decoder.run([Request(state, 0.0, n_tokens + 1)]):
            if isinstance(event, PrefillDone):
                prefill_s = event.prefill_s
            elif isinstance(event, RoundDone):
                ks.append(event.sequences[0].proposed)
        return (target.busy_s + draft.busy_s - prefill_s) / UNIT_S / n_tokens, ks

    def adaptive(self, n_tokens: int, controller: Controller) -> tuple[float, list[int]]:
        """The controller decides."""
        return self.run(
            n_tokens, lambda draft: AdaptiveDrafter(controller, ModelDrafter(draft, GREEDY, N_VOCAB), None), 8
        )

    def fixed(self, n_tokens: int, k_max: int) -> float:
        """Units per token with a fixed K, by arithmetic; equal to the loop's without noise."""
        tokens, others, _ = self.script()
        agrees = [a == b for a, b in zip(tokens, others, strict=True)]
        at, end, n_lacking, units = N_PROMPT + 1, N_PROMPT + 1 + n_tokens, N_PROMPT + 1, 0.0
        while at < end:
            k = min(k_max, end - at - 1)
            n_accepted = next((i for i in range(k) if not agrees[at + i]), k)
            units += CURVES[self.curve](1 + k) + k * self.c + (self.c * self.feed * (n_lacking - 1) if k else 0.0)
            n_lacking = 1 + (n_accepted == k)
            at += n_accepted + 1
        return units / n_tokens


N_PROMPT = 20


def test_the_arithmetic_of_a_fixed_length_is_the_loops() -> None:
    for curve, c, text, k in (("tiles", 0.2, "high", 3), ("flat", 0.1, "middling", 8), ("steps", 0.4, "low", 1)):
        world = World(curve, c, text, 5, noise=0.0)
        in_loop, ks = world.run(300, lambda draft: ModelDrafter(draft, GREEDY, N_VOCAB), k)
        assert world.fixed(300, k) == pytest.approx(in_loop, rel=1e-9)
        assert max(ks) == k
        assert world.fixed(300, 0) == pytest.approx(1.0)


@dataclass
class Ratios:
    """Speed relative to plain decoding and to the best fixed K in hindsight: means over seeds, cold and warm."""

    cold_plain: float
    cold_best: float
    warm_plain: float
    warm_best: float


def ratios(curve: str, c: float, text: str, n_tokens: int, n_seeds: int, taught_by: str | None = None) -> Ratios:
    """``taught_by``: the text of the run before a warm one."""
    found = []
    for seed in range(n_seeds):
        before, controller = (
            World(curve, c, taught_by or text, 200 + seed),
            World(curve, c, text, 200 + seed).controller(),
        )
        before.adaptive(300, controller)
        kept = json.loads(json.dumps(controller.profile()))
        world, warm = World(curve, c, text, seed), Controller(8)
        assert warm.restore(kept)
        plain, *fixed = (world.fixed(n_tokens, k) for k in range(9))
        best = min(plain, *fixed)
        times = [world.adaptive(n_tokens, controller)[0] for controller in (world.controller(), warm)]
        found.append([time / of for of in times for time in (plain, best)])
    return Ratios(*np.mean(found, axis=0).tolist())


# Tokens that take some 200 rounds where most of what is drafted is accepted; elsewhere 500 do.
N_TOKENS = {("flat", "high"): 900, ("steps", "high"): 800}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("curve", CURVES)
def test_never_slower_than_plain_and_as_fast_as_the_best_fixed_length(curve: str, text: str) -> None:
    """After 200 rounds, learning included, cold and with a profile: regret <= 3% against the best K in 0..8.

    Where catching up costs more than 1% of the time per token (here with c = 0.2, but not on the flat curve), a draft
    that was given up in one part of a text is not always found again in the next; plain decoding bounds the loss. So it
    does where the first eight drafts are unlucky, one start of 16 with tiles, high and c = 0.2: hundreds of rounds pass
    before the next look.
    """
    for c in (0.05, 0.2, 0.4) if curve == "flat" else (0.05, 0.2):
        found = ratios(curve, c, text, N_TOKENS.get((curve, text), 500), 3)
        print(
            f"{curve:6s} {text:9s} c={c:4.2f}: against the best K {found.cold_best:.3f}, warm {found.warm_best:.3f}; "
            f"against plain {found.cold_plain:.3f}, warm {found.warm_plain:.3f}"
        )
        assert min(found.cold_plain, found.warm_plain) >= 0.98
        assert min(found.cold_best, found.warm_best) >= 0.97 or (text == "drifting" and curve != "flat" and c >= 0.2)


@pytest.mark.parametrize(("before", "now"), [("high", "hopeless"), ("hopeless", "high"), ("high", "low")])
def test_a_profile_of_another_text_costs_little(before: str, now: str) -> None:
    for curve in ("flat", "tiles"):
        assert ratios(curve, 0.1, now, 500, 3, taught_by=before).warm_plain >= 0.975


def test_a_change_of_text_is_followed_within_ten_rounds() -> None:
    """Regimes of 150 tokens on the flat curve, where catching up costs nothing: rounds until K is what it will be."""
    delays = []
    for seed, c in itertools.product(range(4), (0.05, 0.2)):
        world = World("flat", c, "drifting", seed)
        _time, ks = world.adaptive(600, world.controller())
        at, starts = 0, dict[int, int]()  # regime -> its first round
        agrees = [a == b for a, b in zip(*world.script()[:2], strict=True)]
        for t, k in enumerate(ks):
            position = N_PROMPT + 1 + at
            starts.setdefault(position // 150, t)
            at += 1 + next((i for i in range(k) if not agrees[position + i]), k)
        for regime in (1, 3):
            late = ks[starts[regime] : starts[regime] + 60]
            delays.append(next(t for t in range(len(late)) if np.mean(late[t : t + 4]) >= 2))
    print("rounds until the drafts are long again:", sorted(delays))
    assert np.median(delays) <= 10


# N-gram drafts, and both


def bursts(seed: int, n: int, n_vocab: int) -> list[int]:
    """New text and copies of earlier text by turns, 20 to 80 tokens each; one copied token in twenty is edited."""
    rng = np.random.default_rng([seed, 77])
    text = rng.integers(0, n_vocab, 60).tolist()
    while len(text) < n:
        text += rng.integers(0, n_vocab, int(rng.integers(20, 80))).tolist()
        length = int(rng.integers(20, 80))
        start = int(rng.integers(0, max(1, len(text) - length)))
        text += [int(rng.integers(n_vocab)) if rng.random() < 0.05 else token for token in text[start : start + length]]
    return text


def burst_run(
    curve: Curve, seed: int, drafter_of: Callable[[TableEngine], Drafter | None], k: int, acceptance: float, c: float
) -> float:
    """Units per token over 500 tokens of bursts; the draft model agrees with chance ``acceptance``."""
    n_vocab, n_prompt, n_tokens = 300, 100, 500
    text, rng = bursts(seed, 800, n_vocab), np.random.default_rng([seed, 4])
    agrees, one = rng.random(len(text)) < acceptance, np.eye(n_vocab, dtype=np.float32)
    others = [token if right else (token + 1) % n_vocab for token, right in zip(text, agrees, strict=True)]
    said = 9 * acceptance / (1 - acceptance) * n_vocab / 10
    target = TableEngine(lambda h: one[text[len(h)]] * 9, n_vocab, n_ctx=800, n_batch=200, pass_s=passes(curve, rng))
    draft = TableEngine(
        lambda h: one[others[len(h)]] * math.log(said),
        n_vocab,
        n_ctx=800,
        n_batch=200,
        pass_s=passes(lambda _n: c, rng),
    )
    decoder = Decoder(target, GREEDY, lambda _t: b"x", drafter_of(draft), k, clock=lambda: target.busy_s + draft.busy_s)
    prefill_s = 0.0
    for event in decoder.run([Request(SequenceState(0, text[:n_prompt]), 0.0, n_tokens + 1)]):
        if isinstance(event, PrefillDone):
            prefill_s = event.prefill_s
    return (target.busy_s + draft.busy_s - prefill_s) / UNIT_S / n_tokens


@pytest.mark.parametrize("curve", CURVES)
def test_bursty_copies(curve: str) -> None:
    """The text itself drafts: regret <= 3% against the best fixed K of the same drafter, 0 included."""
    v, found = CURVES[curve], []
    for seed in range(4):
        controller = calibrated(v, 0.2, 0.0, np.random.default_rng([seed, 3]), k_max=16)
        adaptive = burst_run(
            v, seed, lambda _d, c=controller: AdaptiveDrafter(c, None, NgramDrafter(min_hit_rate=0.2)), 16, 0.5, 0.2
        )
        plain, *fixed = (burst_run(v, seed, lambda _d: NgramDrafter(), k, 0.5, 0.2) for k in (0, 1, 2, 3, 4, 8, 16))
        found.append((plain / adaptive, min(plain, *fixed) / adaptive))
    against_plain, against_best = np.mean(found, axis=0)
    print(f"{curve:6s} bursts: against the best K {against_best:.3f}, against plain {against_plain:.3f}")
    assert against_plain >= 0.99
    assert against_best >= 0.97


@pytest.mark.parametrize("acceptance", [0.75, 0.4, 0.05])
@pytest.mark.parametrize("curve", ["flat", "steps", "tiles"])
def test_both_drafters_are_as_good_as_the_better_one(curve: str, acceptance: float) -> None:
    v, c, found = CURVES[curve], 0.1, []
    for seed in range(3):
        controller = calibrated(v, c, 0.0, np.random.default_rng([seed, 3]), k_max=16)

        def both(draft: TableEngine, controller: Controller = controller) -> AdaptiveDrafter:
            return AdaptiveDrafter(controller, ModelDrafter(draft, GREEDY, 300), NgramDrafter(min_hit_rate=0.2))

        adaptive = burst_run(v, seed, both, 16, acceptance, c)
        fixed = [burst_run(v, seed, lambda _d: NgramDrafter(), k, acceptance, c) for k in (0, 3, 8)]
        fixed += [burst_run(v, seed, lambda d: ModelDrafter(d, GREEDY, 300), k, acceptance, c) for k in (1, 3, 6)]
        found.append(min(fixed) / adaptive)
    print(f"{curve:6s} acceptance {acceptance:.2f}: against the best fixed drafter {np.mean(found):.3f}")
    assert np.mean(found) >= 0.96  # two ways to be tried, each at its 1%


# Several sequences


def batch_run(n: int, acceptance: float, k: int | None) -> tuple[float, float]:
    """``n`` sequences on a curve with a knee at 16 tokens: (tokens per unit, mean K)."""
    knee: Curve = lambda width: 1 + 0.01 * (width - 1) + 0.12 * max(0, width - 16)  # noqa: E731
    rng, c = np.random.default_rng(n), 0.1

    def logits(is_draft: bool) -> LogitsFunction:
        def row(history: Sequence[int]) -> Row:
            g = np.random.default_rng([len(history), history[0], history[-1]])
            token, row = int(g.integers(N_VOCAB)), np.zeros(N_VOCAB, np.float32)
            row[token if not is_draft or g.random() < acceptance else (token + 1) % N_VOCAB] = 6.0
            return row

        return memo(row, order=10**6)

    limits = {"n_ctx": 160, "n_batch": 512, "n_rows_max": 512, "n_sequences": n}
    target = TableEngine(logits(False), N_VOCAB, **limits, pass_s=passes(knee, rng, 0.02))
    draft = TableEngine(logits(True), N_VOCAB, **limits, pass_s=passes(lambda _n: c, rng, 0.02))
    drafter: Drafter | None = ModelDrafter(draft, GREEDY, N_VOCAB) if k != 0 else None
    if k is None:
        controller = calibrated(knee, c, 0.0, np.random.default_rng([n, 3]))
        for width in (24, 32, 64):
            controller.costs.observe_pass(width, UNIT_S * knee(width))
        assert isinstance(drafter, ModelDrafter)
        drafter = AdaptiveDrafter(controller, drafter, None)
    decoder = Decoder(
        target, GREEDY, lambda _t: b"x", drafter, 8 if k is None else k, clock=lambda: target.busy_s + draft.busy_s
    )
    requests = [Request(SequenceState(i, [i, 1, 2]), 0.0, 120) for i in range(n)]
    parts = [part for event in decoder.run(requests) if isinstance(event, RoundDone) for part in event.sequences]
    units = (target.busy_s + draft.busy_s) / UNIT_S
    return sum(part.emitted for part in parts) / units, float(np.mean([part.proposed for part in parts]))


def test_more_sequences_get_shorter_drafts() -> None:
    lengths = []
    for n in (1, 4, 8, 16):
        speed, length = batch_run(n, 0.7, None)
        best = max(batch_run(n, 0.7, k)[0] for k in (0, 1, 2, 3, 4, 6))
        plain = batch_run(n, 0.7, 0)[0]
        print(
            f"{n:2d} sequences: mean K {length:.2f}, against the best K {speed / best:.3f}, plain {speed / plain:.3f}"
        )
        assert speed / plain >= 0.97
        assert speed / best >= 0.92
        lengths.append(length)
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 2
    assert lengths[-1] < 0.1  # compute-bound


# The drafter itself


class Watched(Controller):
    """Remembers what it was told."""

    def __init__(self, k_max: int, costs: CostModel | None = None) -> None:
        super().__init__(k_max, costs)
        self.told: list[tuple[object, ...]] = []

    def observe(self, *what: object) -> None:  # type: ignore[override]
        self.told.append(what)
        super().observe(*what)  # type: ignore[arg-type]


def free(k_max: int = 4) -> Watched:
    """A controller that knows passes of any width to cost the same, and drafts to cost nothing."""
    controller = Watched(k_max)
    for n in (1, 2, 9):
        controller.costs.observe_pass(n, 1.0)
    controller.costs.observe_draft(1, 1, 0.0)
    controller.costs.observe_draft(1, 9, 0.0)
    return controller


CYCLE = memo(lambda history: np.eye(7, dtype=np.float32)[(history[-1] + 1) % 7] * 9)


def cycle_drafter(controller: Controller, n_ctx: int = 256, ngram: bool = True) -> AdaptiveDrafter:
    model = ModelDrafter(TableEngine(CYCLE, 7, n_ctx=n_ctx, pass_s=lambda _n: 0.0), GREEDY, 7)
    return AdaptiveDrafter(controller, model, NgramDrafter() if ngram else None)


def test_a_copy_is_cut_to_the_length_that_pays() -> None:
    controller = free(k_max=16)
    for n in (5, 6, 9, 17):
        for _ in range(9):
            controller.costs.observe_pass(n, 1.0 if n == 5 else 20.0)  # four tokens are free, the fifth is not
    drafter, state = AdaptiveDrafter(controller, None, NgramDrafter()), SequenceState(0, [0, 1, 2, 3, 4, 5, 6] * 4)
    drafter.commit(state, state.tokens)
    [draft] = drafter.propose([state], [16])
    assert list(draft.ids) == [0, 1, 2, 3]
    assert len(draft.distributions) == 4
    assert draft.confidence is not None
    assert draft.confidence.shape == (4,)


def test_a_model_without_room_leaves_it_to_the_text() -> None:
    """The draft's context is full: asking it would give nothing, and keep the n-gram drafter out."""
    controller = free()
    drafter, state = cycle_drafter(controller, n_ctx=20), SequenceState(0, [0, 1, 2, 3, 4, 5, 6] * 4)
    drafter.commit(state, state.tokens)
    [draft] = drafter.propose([state], [4])
    assert list(draft.ids) == [0, 1, 2, 3]
    assert not controller.record.has_model
    assert drafter.busy_s == 0.0


def test_the_controller_is_told_what_was_evaluated_and_what_counts() -> None:
    """A text that ends inside a draft: the pass was as wide as the draft, but tokens behind the end were not judged."""
    controller = free(k_max=4)
    drafter, state = cycle_drafter(controller, ngram=False), SequenceState(0, [0, 1, 2])
    drafter.commit(state, state.tokens)
    [draft] = drafter.propose([state], [4])
    assert list(draft.ids) == [3, 4, 5, 6]
    drafter.observe(RoundDone((SequenceRound(0, 2, 2, 2),), 1.0, 0.25, 0.5, 0.25))
    [outcome], target_s, draft_s, n_steps, n_lacking = controller.told[-1]
    assert (outcome.kind, len(outcome.chances)) == ("draft", 4)
    assert (outcome.n_judged, outcome.n_accepted, outcome.n_emitted) == (2, 2, 2)
    assert (target_s, draft_s, n_steps, n_lacking) == (0.75, 0.25, 4, 3)
    assert controller.record.proposed == 4


def test_a_round_without_a_proposal_is_a_plain_one() -> None:
    """The loop does not ask for drafts where none fits."""
    controller = free()
    drafter, state = cycle_drafter(controller), SequenceState(0, [0, 1, 2])
    drafter.commit(state, state.tokens)
    drafter.observe(RoundDone((SequenceRound(0, 0, 0, 1),), 1.0, 0.0, 1.0, 0.0))
    [outcome], *_times, n_steps, n_lacking = controller.told[-1]
    assert (outcome.kind, n_steps, n_lacking) == ("none", 0, 0)
    assert controller.report()["decisions"] == {"none": 1, "draft": 0, "ngram": 0, "given_up": 0}


def test_several_sequences_are_fed_and_told_apart() -> None:
    controller = free(k_max=2)
    for _ in range(3):
        controller.costs.observe_pass(3, 1.0)  # or the first round would be a look at plain decoding
    engine = TableEngine(CYCLE, 7, n_sequences=3, pass_s=lambda _n: 0.0)
    drafter = AdaptiveDrafter(controller, ModelDrafter(engine, GREEDY, 7), NgramDrafter(min_hit_rate=0.99))
    states = [SequenceState(i, list(range(3 + i))) for i in range(3)]
    for state in states:
        drafter.commit(state, state.tokens)
    drafts = drafter.propose(states, [2, 0, 2])
    assert [list(draft.ids) for draft in drafts] == [[3, 4], [], [5, 6]]
    drafter.observe(RoundDone(tuple(SequenceRound(i, len(d), 0, 1) for i, d in enumerate(drafts)), 1.0, 0.0, 1.0, 0.0))
    outcomes, *_times, n_steps, n_lacking = controller.told[-1]
    assert [outcome.kind for outcome in outcomes] == ["draft", "none", "draft"]  # type: ignore[attr-defined]
    assert (n_steps, n_lacking) == (2, 2 + 1 + 3)  # behind by one and by three tokens more than a step brings anyway


def test_the_controller_knows_how_far_an_answer_has_come() -> None:
    told: list[int] = []

    class Listening(Watched):
        def plan(self, *arguments: Any, n_emitted: int = 0, n_left: int | None = None) -> Plan:
            told.append(n_emitted)
            return super().plan(*arguments, n_emitted=n_emitted, n_left=n_left)

    drafter, state = cycle_drafter(Listening(4)), SequenceState(0, [0, 1, 2])

    def say(*tokens: int) -> None:
        state.tokens += tokens
        drafter.commit(state, tokens)
        drafter.propose([state], [4])

    say()
    say(3, 4)
    say(5)
    drafter.rewind(state, 3)  # a second question behind the same beginning
    say(6, 0)
    say(1)
    drafter.forget(state)
    say(2)
    assert told == [0, 2, 3, 0, 1, 0]


def test_what_is_forgotten_is_forgotten_by_both() -> None:
    controller = free()
    drafter, state = cycle_drafter(controller), SequenceState(0, [0, 1, 2, 3, 4, 5, 6] * 2)
    drafter.commit(state, state.tokens)
    drafter.propose([state], [3])
    drafter.rewind(state, 7)
    drafter.forget(state)
    assert drafter._pending == {}
    drafter.commit(state, [0, 1, 2])
    drafter.observe(RoundDone((SequenceRound(0, 0, 0, 1),), 1.0, 0.0, 1.0, 0.0))
    assert controller.record.by_kind["none"] == 1


@pytest.mark.parametrize("n_min", [0, 3])
def test_a_copy_that_cannot_pay_in_its_batch_is_not_made(n_min: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts are those of a drafter that makes all copies and then looks what they are worth."""
    made: list[int] = []

    class Counting(NgramDrafter):
        def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
            made.append(0)
            return super().propose(sequences, budgets)

    def drafts(seed: int) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(seed)
        steps = rng.exponential(0.4, 40) * (rng.random(40) < 0.9)
        controller = Controller(16, n_min=n_min)
        for n in range(1, 41):
            controller.costs.observe_pass(n, UNIT_S * float(1 + steps[: n - 1].sum()))
        drafter = AdaptiveDrafter(controller, None, Counting(n_min=n_min, min_hit_rate=0.2))
        states = [SequenceState(i, rng.integers(0, 3, 12).tolist() * 3) for i in range(int(rng.integers(2, 5)))]
        for state in states:
            drafter.commit(state, state.tokens)
        return [tuple(draft.ids) for draft in drafter.propose(states, [16] * len(states))]

    found = [drafts(seed) for seed in range(60)]
    n_made = len(made)
    monkeypatch.setattr(Controller, "least_copied", lambda _self: 0.0)
    assert [drafts(seed) for seed in range(60)] == found
    assert n_made < 0.95 * (len(made) - n_made)
    assert any(map(any, found))


def test_time_of_the_controller() -> None:
    """Printed, not asserted: microseconds of its own per proposed token, real clock."""
    own_s = 0.0

    def timed(function: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object, **options: object) -> object:
            nonlocal own_s
            started_s = time.perf_counter()
            result = function(*arguments, **options)
            own_s += time.perf_counter() - started_s
            return result

        return call

    for curve, text in (("flat", "high"), ("steps", "high"), ("steps", "middling"), ("tiles", "hopeless")):
        world, own_s = World(curve, 0.05, text, 1), 0.0
        controller = world.controller()
        for name in ("begin", "plan", "begin_pass", "begin_turn", "may_draw", "may_step", "take", "observe"):
            setattr(controller, name, timed(getattr(controller, name)))
        _time, ks = world.adaptive(500, controller)
        n_proposed = max(1, sum(ks))
        print(f"{curve} {text}: {own_s / n_proposed * 1e6:.1f} us per token, {own_s / len(ks) * 1e6:.1f} us per round")
        assert own_s > 0


# Many sequences, whose draft caches catch up a part at a time


class Served:
    """Answers of a server one round at a time: the target's next id is one more; ``says``: the draft's logits."""

    def __init__(self, n_sequences: int, says: LogitsFunction, feed_most: int | None = 128, **options: float) -> None:
        self.units, self.c, self.feed = 0.0, 0.1, options.get("feed", 0.01)
        self.controller = Controller(16)
        for n in (1, 1, 2, 3, 4, 5, 8, 16):
            self.controller.costs.observe_pass(n, UNIT_S * self.v(n))
        for n in (1, 17):
            self.controller.costs.observe_draft(1, n, UNIT_S * self.step(n))
        self.engine = TableEngine(
            says,
            7,
            n_ctx=4000,
            n_batch=512,
            n_rows_max=64,
            n_sequences=n_sequences,
            pass_s=lambda n: UNIT_S * self.step(n),
        )
        self.model = ModelDrafter(self.engine, GREEDY, 7, feed_most=feed_most)
        self.drafter = AdaptiveDrafter(self.controller, self.model, None)

    def v(self, n: int) -> float:
        return 1 + 0.02 * (n - 1)

    def step(self, n: int) -> float:
        return self.c + self.feed * max(0, n - 2)

    def round(self, states: Sequence[SequenceState]) -> list[Draft]:
        busy_s = self.engine.busy_s
        drafts = self.drafter.propose(states, [16] * len(states))
        parts, n_tokens = [], 0
        for state, draft in zip(states, drafts, strict=True):
            truth = [(state.tokens[-1] + 1 + i) % 7 for i in range(len(draft) + 1)]
            n = next((i for i, token in enumerate(draft.ids) if token != truth[i]), len(draft))
            state.tokens.extend(truth[: n + 1])
            self.drafter.commit(state, truth[: n + 1])
            parts.append(SequenceRound(state.id, len(draft), n, n + 1))
            n_tokens += 1 + len(draft)
        draft_s, verify_s = self.engine.busy_s - busy_s, UNIT_S * self.v(n_tokens)
        self.units += (draft_s + verify_s) / UNIT_S
        self.drafter.observe(RoundDone(tuple(parts), 0.0, draft_s, verify_s, 0.0))
        return drafts


def right(history: Sequence[int]) -> Row:
    return np.eye(7, dtype=np.float32)[(history[-1] + 1) % 7] * 9


def wrong(history: Sequence[int]) -> Row:
    return np.eye(7, dtype=np.float32)[history[-1]] * 3


@pytest.mark.parametrize("feed_most", [128, None])
def test_a_wrong_draft_of_long_prompts_costs_what_is_allowed(feed_most: int | None) -> None:
    """40 answers of 80 tokens behind prompts of 1,000, whose draft cache is fed in parts: every part is paid for."""
    server, n_rounds = Served(2, wrong, feed_most, feed=0.005), 0
    for _ in range(40):
        state = SequenceState(0, [t % 7 for t in range(1000)])
        server.drafter.commit(state, state.tokens)
        while len(state.tokens) < 1080:
            server.round([state])
            n_rounds += 1
        server.drafter.forget(state)
    assert server.units < 1.01 * n_rounds + 4


def test_who_waits_for_a_turn_to_catch_up_has_not_drafted() -> None:
    """One answer drafts, three lack 1,000 tokens each: 128 tokens a round are fed, counted once, for their time."""
    server = Served(4, right)
    server.controller._n_drafts, server.controller._account = 10, 8.0
    long = [t % 7 for t in range(1000)]
    states = [SequenceState(0, [0, 1, 2]), *(SequenceState(i, list(long)) for i in (1, 2, 3))]
    for state in states:
        server.drafter.commit(state, state.tokens)
    while server.engine.n_past(1) < 896:
        drafts = server.round(states)
        assert [len(draft) for draft in drafts[1:]] == [0, 0, 0]
    record = server.controller.record
    assert server.controller.costs.feed == pytest.approx(0.01, rel=0.2)
    assert record.given_up == 0
    assert record.by_kind["draft"] == record.speculated  # the first answer's
    for _ in range(20):
        drafts = server.round(states)
    assert all(len(draft) > 2 for draft in drafts)


def test_plain_decoding_of_more_answers_than_may_draft_has_no_gain() -> None:
    """40 answers share 64 rows: none has room for a draft, and the batch is counted as what it is."""
    engine = TableEngine(right, 7, n_ctx=60, n_batch=512, n_rows_max=64, n_sequences=40, pass_s=lambda n: UNIT_S * n)
    draft = TableEngine(right, 7, n_ctx=60, n_batch=512, n_rows_max=64, n_sequences=40, pass_s=lambda _n: UNIT_S)
    controller = Controller(16)
    drafter = AdaptiveDrafter(controller, ModelDrafter(draft, GREEDY, 7), NgramDrafter())
    decoder = Decoder(engine, GREEDY, lambda _t: b"x", drafter, 16, clock=clock_of(engine, draft))
    events = list(decoder.run([Request(SequenceState(i, [0, 1]), 0.0, 20) for i in range(40)]))
    assert {part.proposed for event in events if isinstance(event, RoundDone) for part in event.sequences} == {0}
    assert controller.report()["gain_tokens_per_unit"] == pytest.approx({"predicted": 0.0, "actual": 0.0}, abs=1e-9)


class Passes(Controller):
    """Remembers how many sequences shared each pass."""

    def begin_pass(self, n_chains: int) -> None:
        super().begin_pass(n_chains)
        self.shared = [*getattr(self, "shared", []), n_chains]


@pytest.mark.parametrize("p_min", [0.0, 0.9])
def test_passes_are_counted_as_they_are_made(p_min: float) -> None:
    """Three of four stop at once, by ``p_min`` or by the vocabulary: the fourth is charged for passes of its own."""
    says = lambda history: right(history) if history[0] == 0 else np.zeros(7, np.float32)  # noqa: E731
    controller = Passes(8)
    for n in (1, 1, 2, 4, 8, 16, 40):
        controller.costs.observe_pass(n, UNIT_S)
    controller.costs.c, controller._account, controller.acceptance.mean = 0.01, 8.0, 0.9
    engine = TableEngine(says, 7, n_sequences=4, n_rows_max=64)
    drafter = AdaptiveDrafter(controller, ModelDrafter(engine, GREEDY, 7, p_min=p_min), None)
    states = [SequenceState(i, [i, 1, 2]) for i in range(4)]
    for state in states:
        drafter.commit(state, state.tokens)
    drafts = drafter.propose(states, [8] * 4)
    assert len(drafts[0]) == 8
    if p_min:
        assert [len(draft) for draft in drafts[1:]] == [0, 0, 0]
        assert controller.shared == [4, *[1] * 7]
    assert controller._n_passes == len(controller.shared) == drafter._model.n_passes


# What may be proposed at all


def copies(**options: object) -> tuple[AdaptiveDrafter, SequenceState, Controller]:
    """A text whose next tokens have been seen often, and free passes."""
    controller, state = Controller(16), SequenceState(0, [1, 2, 3, 4, 5, 6] * 6 + [1, 2, 3])
    for n in (1, 1, 2, 4, 8, 16):
        controller.costs.observe_pass(n, UNIT_S)
    drafter = AdaptiveDrafter(controller, None, NgramDrafter(**options), options.get("sampler"))  # type: ignore[arg-type]
    drafter.commit(state, state.tokens)
    return drafter, state, controller


def test_a_copy_that_the_controller_cuts_below_n_min_is_dropped() -> None:
    for n_min, budget, n in ((0, 16, 16), (6, 16, 16), (6, 4, 0)):
        drafter, state, _controller = copies(n_min=n_min)
        [draft] = drafter.propose([state], [budget])
        assert len(draft) == n
    drafter, state, controller = copies(n_min=6)
    controller.plan = lambda *_arguments, **_options: Plan("ngram", 2)  # type: ignore[method-assign]
    [draft] = drafter.propose([state], [16])
    assert len(draft) == 0


def test_a_copy_that_may_not_begin_is_none() -> None:
    """The grammar has used up its 2s, and a 1 would be the third."""
    banned = Sampler(0.0, constraint=NoThird((4, 4), 2))
    drafter, state, controller = copies(sampler=banned)
    assert drafter.propose([state], [16]) == [EMPTY]
    state.tokens.append(0)
    drafter.commit(state, [0])
    drafter.observe(RoundDone((SequenceRound(0, 0, 0, 1),), 0.0, 0.0, UNIT_S, 0.0))
    decisions = controller.report()["decisions"]
    assert decisions == {"none": 1, "draft": 0, "ngram": 0, "given_up": 0}
    assert controller.record.state == "off"


# Calibration


@pytest.mark.parametrize("has_draft", [True, False])
def test_a_cold_start_measures_with_eight_passes_and_one_slow_moment_of_each_model_misleads_nobody(
    has_draft: bool,
) -> None:
    engines = []
    for unit_s in (UNIT_S, 0.3 * UNIT_S):
        first = iter([10.0])
        pass_s = lambda n, unit_s=unit_s, first=first: unit_s * (0.9 + 0.1 * n) * next(first, 1.0)  # noqa: E731
        engines.append(TableEngine(right, 7, n_ctx=64, n_rows_max=17, pass_s=pass_s))
    target, draft = engines
    made = Drafting(target, GREEDY, frozenset(), 16, 0, 0.0, False, draft if has_draft else None, uses_ngram=True)
    _drafter, controller = made.make()
    assert controller is not None
    assert len(target.batches) + len(draft.batches) == 8
    assert target.n_past(0) == draft.n_past(0) == 0
    assert [controller.costs.v(n) for n in (2, 4, 8)] == pytest.approx([1.1, 1.3, 1.7])
    assert controller.costs.c == pytest.approx(0.3 if has_draft else DEFAULT_C)


def drafting(tmp_path: Path, slow: float = 1.0, **options: Any) -> tuple[Drafting, TableEngine, TableEngine]:
    """A pair that keeps a profile; passes of more than one token, and the draft's, take ``slow`` times as long."""
    target = TableEngine(right, 7, n_ctx=64, n_rows_max=17, pass_s=lambda n: UNIT_S * (1 + 0.1 * (n - 1) * slow))
    draft = TableEngine(right, 7, n_ctx=64, n_rows_max=17, pass_s=lambda n: UNIT_S * 0.1 * slow)
    kept = Profile(tmp_path / "costs.json", tmp_path / "drafts.json")
    made = Drafting(target, GREEDY, frozenset(), 16, 0, 0.0, False, draft, True, kept, **options)
    return made, target, draft


def test_what_a_busy_machine_made_of_the_first_start_is_set_right_by_the_second(tmp_path: Path) -> None:
    """Everything but one-token passes took 15 times as long: nothing could pay, so nothing wide would ever be tried."""
    first, *_engines = drafting(tmp_path, slow=15.0)
    _drafter, controller = first.make()
    assert controller is not None
    assert controller.break_even is None
    first.keep(controller)
    second, target, draft = drafting(tmp_path)
    _drafter, controller = second.make()
    assert controller is not None
    assert len(target.batches) + len(draft.batches) <= 8
    assert [controller.costs.v(n) for n in (2, 4, 8)] == pytest.approx([1.1, 1.3, 1.7])
    assert controller.costs.c == pytest.approx(0.1)
    second.keep(controller)
    third, target, draft = drafting(tmp_path)
    third.make()
    assert draft.batches == []
    assert target.batches == []


def test_a_pair_that_cannot_pay_is_not_measured_for_ever(tmp_path: Path) -> None:
    n_passes = []
    for _start in range(5):
        made, target, draft = drafting(tmp_path, slow=15.0)
        _drafter, controller = made.make()
        assert controller is not None
        made.keep(controller)
        n_passes.append(len(target.batches) + len(draft.batches))
    assert max(n_passes) <= 8
    assert n_passes[3:] == [0, 0]


def test_costs_are_measured_anew_where_that_is_asked_for(tmp_path: Path) -> None:
    for _start in range(4):
        made, *_engines = drafting(tmp_path, slow=15.0)
        _drafter, controller = made.make()
        assert controller is not None
        controller.acceptance.mean = 0.9
        controller.acceptance.observe([0.9], 1)
        made.keep(controller)
    anew, _target, _draft = drafting(tmp_path, is_measured_anew=True)
    _drafter, controller = anew.make()
    assert controller is not None
    assert controller.costs.v(4) == pytest.approx(1.3)
    assert controller.acceptance.is_known  # what is known of drafts stays


def test_costs_are_shared_by_those_whose_drafts_fare_otherwise(tmp_path: Path) -> None:
    first, *_engines = drafting(tmp_path)
    _drafter, controller = first.make()
    assert controller is not None
    controller.acceptance.observe([0.9], 1)
    first.keep(controller)
    other, _target, _draft = drafting(tmp_path)
    other = replace(other, profile=Profile(tmp_path / "costs.json", tmp_path / "at another temperature.json"))
    _drafter, controller = other.make()
    assert controller is not None
    assert controller.costs.c == pytest.approx(0.1)
    assert not controller.acceptance.is_known


def test_what_a_grammar_forces_while_the_cache_catches_up_is_a_draft() -> None:
    """Behind a 2 come a 0 and a 1: no pass is needed for them, and the round verifies three tokens."""
    verifier = make_verifier("greedy", Sampler(0.0, constraint=Forcing()))
    engine = TableEngine(lambda _history: np.zeros(3, np.float32), 3, n_ctx=99, n_sequences=2, pass_s=lambda _n: UNIT_S)
    controller = Controller(4)
    for n in (1, 1, 2, 3):
        controller.costs.observe_pass(n, UNIT_S)
    drafter = AdaptiveDrafter(controller, ModelDrafter(engine, verifier, 3, feed_most=16), None)
    state = SequenceState(0, [0, 1] * 20 + [2], state=State(Forcing((1, 2))))
    drafter.commit(state, state.tokens)
    [draft] = drafter.propose([state], [4])
    assert list(draft.ids) == [0, 1]
    assert engine.n_past(0) == 16
    state.tokens += [0, 1, 2]
    drafter.observe(RoundDone((SequenceRound(0, 2, 2, 3),), 0.0, UNIT_S, UNIT_S, 0.0))
    assert controller.report()["decisions"] == {"none": 0, "draft": 1, "ngram": 0, "given_up": 0}
    assert controller.costs.n_samples(3) == 2  # of the calibration, and of this round
