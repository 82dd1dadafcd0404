"""Shared by the end-to-end tests: running the command line, loading engines, and comparing token ids."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import specli as package
from specli.config import GenerationOptions, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.decode import Decoder
from specli.drafters.base import Drafter, SequenceState
from specli.engine.base import Slice
from specli.engine.llama import LlamaEngine, LlamaModel
from specli.events import Event, Text
from specli.request import Request
from specli.sampling import Sampler
from specli.session import Session
from specli.stats import Stats
from specli.verify import make_verifier

HANG_S = 300  # nothing takes this long; a busy machine may be slow
THREADS = 1
GREEDY = Sampler(temperature=0)


def never() -> bool:
    """Nobody cancels."""
    return False


# -- the command line


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: bytes
    err: str

    @property
    def error(self) -> str:
        """The one line of a clean failure: nothing on stdout, no traceback, an error code."""
        assert self.code != 0
        assert self.out == b""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("specli: error: ")
        return lines[0].removeprefix("specli: error: ")


@dataclass(frozen=True)
class CommandLine:
    """``specli`` as a process: ``cli("run", "-p", "hi")``."""

    home: Path
    cache_home: Path

    def __call__(
        self, *arguments: str | bytes | Path, stdin: bytes | None = None, env: Mapping[str, str] | None = None
    ) -> Ended:
        """Run to the end. Without ``stdin`` it is empty."""
        done = subprocess.run(
            self.argv(*arguments),
            input=b"" if stdin is None else stdin,
            capture_output=True,
            env=self.environment(env),
            cwd=self.home,
            timeout=HANG_S,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr.decode("utf-8"))

    @contextmanager
    def start(
        self, *arguments: str | bytes | Path, env: Mapping[str, str] | None = None, **options
    ) -> Iterator[subprocess.Popen]:
        """A process that is gone at the end; stdout and stderr are pipes unless ``options`` say otherwise."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"env": self.environment(env), "cwd": self.home, "bufsize": 0, **pipes, **options}
        with subprocess.Popen(self.argv(*arguments), **options) as process:
            try:
                yield process
            finally:
                process.kill()

    def argv(self, *arguments: str | bytes | Path) -> list[str | bytes | Path]:
        """The whole command."""
        return [sys.executable, "-m", "specli", *arguments]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What the process sees: no LLAMA_ARG_*, no NO_COLOR, no locale but UTF-8."""
        kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "OMP_WAIT_POLICY") if name in os.environ}
        folder = str(Path(package.__file__).parent.parent)
        own = {"HOME": str(self.home), "XDG_CACHE_HOME": str(self.cache_home), "LANG": "C.UTF-8", "PYTHONPATH": folder}
        return {**kept, **own, **(more or {})}


# -- engines


def load_model(path: Path, cancelled=never, **options) -> LlamaModel:
    """Weights without a context."""
    return LlamaModel(ModelOptions(path, **options), lambda _fraction: None, cancelled)


def make_engine(model: LlamaModel, n_rows_max: int = 64, n_sequences: int = 1, cancelled=never, **options):
    """A context over ``model``, on one thread unless ``options`` say otherwise."""
    options = {"n_threads": THREADS, **options}
    options = ModelOptions(model.options.path, n_sequences=n_sequences, **options)
    return LlamaEngine(model, options, n_rows_max, cancelled)


def forced_rows(engine: LlamaEngine, tokens: Sequence[int], width: int, n_skipped: int = 0) -> np.ndarray:
    """Rows of ``tokens`` from empty caches, float32 ``(n, n_vocab)``: the first ``n_skipped`` at once and without
    rows, then ``width`` at a time.
    """
    engine.rollback(0, 0)
    if n_skipped:
        engine.evaluate([Slice(0, tokens[:n_skipped], 0, 0)])
    rows = []
    for start in range(n_skipped, len(tokens), width):
        part = tokens[start : start + width]
        rows.append(engine.evaluate([Slice(0, part, start, len(part))]).rows[0].copy())
    return np.concatenate(rows)


# -- generations


@dataclass(frozen=True)
class Answer:
    """One generation, collected."""

    text: str
    tokens: tuple[int, ...]
    stats: Stats

    @property
    def reason(self) -> str | None:
        """Why it ended."""
        return self.stats.finish_reason


def collect(events: Iterable[Event]) -> Answer:
    """Drain a generation."""
    stats, parts = Stats(), []
    for event in events:
        stats.observe(event)
        if isinstance(event, Text):
            parts.append(event.text)
    assert stats.tokens is not None
    return Answer("".join(parts), stats.tokens, stats)


def settings(
    target: Path,
    draft: Path | None = None,
    *,
    model: Mapping[str, object] | None = None,
    sampling: SamplingOptions | None = None,
    **speculation: object,
) -> Settings:
    """Greedy settings on one thread; ``model`` are ``ModelOptions`` of the target, ``speculation`` the drafter's."""
    options = {"n_threads": THREADS, **(model or {})}
    return Settings(
        target=ModelOptions(target, **options),
        draft=ModelOptions(draft, n_threads=THREADS) if draft else None,
        sampling=sampling or SamplingOptions(temperature=0),
        speculation=SpeculationOptions(**speculation),
    )


def generate(session: Session, prompt: Sequence[int], n: int = -1, *, stops=(), speculate: bool = True) -> Answer:
    """One answer of a session."""
    return collect(session.generate(prompt, GenerationOptions(n, tuple(stops)), speculate=speculate))


def decode(
    engine: LlamaEngine,
    prompt: Sequence[int],
    n: int,
    drafter: Drafter | None = None,
    k: int = 0,
    *,
    sampler: Sampler = GREEDY,
    verify: str = "block",
    seed: int = 0,
    n_logprobs: int | None = None,
) -> Answer:
    """One answer of an engine that is already loaded."""
    engine.rollback(0, 0)
    model = engine.model
    end_ids = frozenset(model.end_ids) - frozenset(sampler.banned)
    state = SequenceState(0, list(prompt), seed, np.random.default_rng(seed))
    decoder = Decoder(engine, make_verifier(verify, sampler), model.piece, drafter, k)
    return collect(decoder.run([Request(state, 0.0, n, end_ids, n_logprobs=n_logprobs)]))


# -- comparing


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two sequences differ; None when they are equal."""
    if tuple(one) == tuple(other):
        return None
    both = min(len(one), len(other))
    return next((i for i in range(both) if one[i] != other[i]), both)


def assert_same_choices(engine: LlamaEngine, prompt: Sequence[int], plain: Answer, other: Answer, tolerance: float):
    """Equal token ids; or, where they part, logits so close that a pass of another width may choose either.

    Tiny random models have F32 weights, whose passes differ by rounding (cases A2). ``engine`` is used.
    """
    at = first_difference(plain.tokens, other.tokens)
    if at is None:
        assert plain.text == other.text
        return
    assert at < min(len(plain.tokens), len(other.tokens)), "one answer ends where the other goes on"
    row = forced_rows(engine, [*prompt, *plain.tokens[:at]], 1)[-1]
    margin = float(row[plain.tokens[at]] - row[other.tokens[at]])
    assert abs(margin) < tolerance, f"token {at}: {plain.tokens[at]} against {other.tokens[at]}, margin {margin}"
