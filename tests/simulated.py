"""A pair of table engines whose costs and acceptance are known, on a clock that only they move, as a bench sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specli.bench.harness import Harness, Outcome, Plan, Run, Setting, record
from specli.bench.workloads import Prompt
from specli.decode import Decoder
from specli.drafters.base import SequenceState
from specli.drafters.model import ModelDrafter
from specli.engine.base import Row
from specli.engine.table import TableEngine
from specli.request import Request
from specli.sampling import Sampler
from specli.verify import make_verifier

N_VOCAB = 8
UNIT_S = 0.01
PLAIN = Setting("none", 0, 0.0, "greedy")
_ROWS = np.eye(N_VOCAB, dtype=np.float32)
_GREEDY = make_verifier("greedy", Sampler(temperature=0))


def draft_of(k: int) -> Setting:
    """A draft model at a fixed length, greedy."""
    return Setting("draft", k, 0.0, "greedy")


def hashed(seed: int, history: Sequence[int]) -> int:
    """A number of 64 bits from the beginning, the end and the length of a history (splitmix64's finaliser)."""
    value = seed
    for part in (*history[:3], len(history), history[-1]):
        value = (value + part + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
        value ^= value >> 31
    return value


@dataclass
class Machine:
    """``acceptance``: chance that a drafted token is right, independent of all others. ``v(n)``, ``c``: in units.

    ``noise``: standard deviation of the logarithm of each pass's time. ``prefill_s``: of passes wider than 17 tokens.
    """

    seed: int = 0
    acceptance: float = 0.7
    c: float = 0.1
    v: Callable[[int], float] = lambda n: 1 + 0.2 * (n - 1)
    noise: float = 0.05
    prefill_s: float = 0.1
    n_tokens: int = 64
    n_prompts: int = 8
    now_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)

        def spent(units: float) -> float:
            seconds = units * UNIT_S * float(np.exp(rng.normal(0, self.noise)))
            self.now_s += seconds
            return seconds

        self.target = TableEngine(
            self._target_row, N_VOCAB, pass_s=lambda n: spent(self.v(n) if n <= 17 else self.prefill_s / UNIT_S)
        )
        self.draft = TableEngine(self._draft_row, N_VOCAB, pass_s=lambda _n: spent(self.c))

    def speedup(self, k: int) -> float:
        """The truth, of a text without end."""
        tokens = sum(self.acceptance**i for i in range(k + 1))
        return tokens / (k * self.c + self.v(k + 1))

    def prompts(self) -> list[Prompt]:
        """Different texts; only their ids matter here."""
        ids = ((i % N_VOCAB, i // N_VOCAB % N_VOCAB, i // N_VOCAB**2) for i in range(self.n_prompts))
        return [Prompt("work", f"work {i}", " ".join(map(str, three))) for i, three in enumerate(ids)]

    def decode(self, prompt: Prompt, setting: Setting, seed: int) -> Run:
        """What a bench calls."""
        self.target.rollback(0, 0)
        self.draft.rollback(0, 0)
        drafter = ModelDrafter(self.draft, _GREEDY, N_VOCAB) if setting.drafter == "draft" else None
        state = SequenceState(0, [int(part) for part in prompt.text.split()])
        decoder = Decoder(self.target, _GREEDY, lambda _token: b"x", drafter, setting.k or 0, clock=lambda: self.now_s)
        run = record(decoder.run([Request(state, self.now_s, self.n_tokens)]))
        assert run is not None
        return run

    def bench(self, *settings: Setting, repetitions: int = 1, **options: object) -> Outcome:
        """A whole bench."""
        plan = Plan(self.prompts(), settings, repetitions, self.seed)
        return Harness(plan, self.decode, clock=lambda: self.now_s, **options).run()

    def _right(self, history: Sequence[int]) -> int:
        return hashed(self.seed, history) % N_VOCAB

    def _target_row(self, history: Sequence[int]) -> Row:
        return _ROWS[self._right(history)]

    def _draft_row(self, history: Sequence[int]) -> Row:
        right = self._right(history)
        is_right = hashed(self.seed + 77, history) < self.acceptance * 2**64
        return _ROWS[right if is_right else (right + 1) % N_VOCAB]
