"""What is run, in which order, and for how long. Pure: it is given a function that decodes a prompt, and a clock.

For one prompt at one temperature and verifier the settings are shuffled and cut into groups of at most four; plain
decoding takes a turn in each group, at a random place, and is what the others in its group are compared with. So both
sides of a comparison have seen the same minute of the machine's life, and neither always comes first.

Breadth comes first: one prompt of every workload, then the second of each, so that whatever a time budget cuts off, all
cells have about as many pairs. Repetitions come after the last prompt.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specli.bench.workloads import Prompt
from specli.errors import ContextOverflow
from specli.events import Event, Finished, RoundDone
from specli.stats import Stats

GROUP = 4  # settings that share one turn of plain decoding
Ending = Literal["done", "time", "interrupted"]


@dataclass(frozen=True, slots=True)
class Setting:
    """How to decode. ``drafter``: none, draft, ngram, or auto (both). ``k``: tokens of a draft; None: controlled."""

    drafter: str
    k: int | None
    temperature: float
    verify: str  # greedy at temperature 0

    @property
    def plain(self) -> Setting:
        """Plain decoding, otherwise alike."""
        return Setting("none", 0, self.temperature, self.verify)


@dataclass(frozen=True, slots=True)
class Run:
    """One generation: its figures, its rounds, and the most memory that the process took meanwhile (bytes)."""

    stats: Stats
    rounds: tuple[RoundDone, ...]
    peak_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Trial:
    """A run and the plain one of its group."""

    prompt: Prompt
    repetition: int
    setting: Setting
    plain: Run
    run: Run


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. ``seed`` orders the runs and seeds the sampled ones."""

    prompts: Sequence[Prompt]
    settings: Sequence[Setting]
    repetitions: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a bench stands: runs done, seconds gone, and seconds left (None before the first run is done)."""

    prompt: Prompt
    setting: Setting
    n_done: int
    gone_s: float
    left_s: float | None

    @property
    def fraction(self) -> float:
        """The part of the time that is gone, in [0, 1]."""
        return 0.0 if self.left_s is None else self.gone_s / max(self.gone_s + self.left_s, 1e-9)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that was measured. ``skipped``: prompts that could not be used, and why."""

    trials: Sequence[Trial]
    skipped: dict[str, str]
    ending: Ending
    n_done: int
    n_planned: int
    elapsed_s: float


Decode = Callable[[Prompt, Setting, int], Run]  # prompt, setting, seed; raises ContextOverflow


def record(events: Iterable[Event], peak_bytes: Callable[[], int | None] = lambda: None) -> Run | None:
    """Drain one generation; None if it was cancelled."""
    stats, rounds = Stats(), list[RoundDone]()
    for event in events:
        stats.observe(event)
        if isinstance(event, RoundDone):
            rounds.append(event)
        elif isinstance(event, Finished) and event.reason == "cancelled":
            return None
    return Run(stats, tuple(rounds), peak_bytes())


class Interrupted(Exception):
    """A decode that was stopped half-way: by the user, or because the time is up."""


@dataclass(slots=True)
class Harness:
    """Runs a plan. ``deadline_s``: on ``clock``, None for no limit. ``stopped``: whether the user wants no more."""

    plan: Plan
    decode: Decode
    clock: Callable[[], float] = time.monotonic
    deadline_s: float | None = None
    stopped: Callable[[], bool] = lambda: False
    on_step: Callable[[Progress], None] = lambda _progress: None
    _spent: dict[Setting, tuple[int, float]] = field(default_factory=dict)  # runs and their seconds
    _trials: list[Trial] = field(default_factory=list)
    _skipped: dict[str, str] = field(default_factory=dict)
    _started_s: float = 0.0

    def run(self) -> Outcome:
        """Measure until everything is done, the next group would end too late, or the user stops."""
        n_planned, n_done, self._started_s = n_runs(self.plan), 0, self.clock()
        ending: Ending = "done"
        for group in order(self.plan):
            if self.stopped():
                ending = "interrupted"
                break
            if group.prompt.name not in self._skipped:
                expected_s = self._expected_s(group.settings)
                if self.deadline_s is not None and self.clock() + (expected_s or 0.0) > self.deadline_s:
                    ending = "time"
                    break
                try:
                    self._run_group(group, n_done, n_planned)
                except Interrupted:
                    ending = "interrupted" if self.stopped() else "time"
                    break
            n_done += len(group.settings)
        return Outcome(self._trials, self._skipped, ending, n_done, n_planned, self.clock() - self._started_s)

    def _run_group(self, group: Group, n_done: int, n_planned: int) -> None:
        runs: list[tuple[Setting, Run]] = []
        for position, setting in enumerate(group.settings):
            n_gone = n_done + position
            gone_s, left_s = self.clock() - self._started_s, self._left_s(n_planned - n_gone)
            self.on_step(Progress(group.prompt, setting, n_gone, gone_s, left_s))
            started_s = self.clock()
            try:
                run = self.decode(group.prompt, setting, group.seed)
            except ContextOverflow as error:
                self._skipped[group.prompt.name] = str(error)
                return
            n, spent_s = self._spent.get(setting, (0, 0.0))
            self._spent[setting] = n + 1, spent_s + self.clock() - started_s
            runs.append((setting, run))
        plain = runs.pop(group.plain_at)[1]
        if any(run.stats.tpot_ms is None for run in (plain, *(run for _, run in runs))):
            self._skipped.setdefault(group.prompt.name, "an answer of one token has no time per token")
            return
        self._trials += [Trial(group.prompt, group.repetition, setting, plain, run) for setting, run in runs]

    def _expected_s(self, settings: Sequence[Setting]) -> float | None:
        """Seconds that runs of ``settings`` will take; None while nothing is known."""
        if not self._spent:
            return None
        n_all = sum(n for n, _ in self._spent.values())
        all_s = sum(spent_s for _, spent_s in self._spent.values())
        known = (self._spent.get(setting, (n_all, all_s)) for setting in settings)
        return sum(spent_s / n for n, spent_s in known)

    def _left_s(self, n_left: int) -> float | None:
        """Seconds until ``n_left`` more runs are done or the time is up."""
        n_all = sum(n for n, _ in self._spent.values())
        if not n_all:
            return None
        expected_s = n_left * sum(spent_s for _, spent_s in self._spent.values()) / n_all
        return expected_s if self.deadline_s is None else max(0.0, min(expected_s, self.deadline_s - self.clock()))


@dataclass(frozen=True, slots=True)
class Group:
    """Settings that follow each other on one prompt; plain decoding is the one at ``plain_at``."""

    prompt: Prompt
    repetition: int
    settings: Sequence[Setting]
    plain_at: int
    seed: int


def n_runs(plan: Plan) -> int:
    """All runs of ``plan``, plain decoding's turns among them."""
    per_prompt = sum(len(own) - (-len(own) // GROUP) for own in _by_plain(plan).values())
    return plan.repetitions * len(plan.prompts) * per_prompt


def _by_plain(plan: Plan) -> dict[Setting, list[Setting]]:
    """Settings by the plain one that they are compared with."""
    found: dict[Setting, list[Setting]] = {}
    for setting in plan.settings:
        found.setdefault(setting.plain, []).append(setting)
    return found


def order(plan: Plan) -> Iterator[Group]:
    """The groups of ``plan`` in the order in which they are run."""
    rng, by_plain = random.Random(plan.seed), _by_plain(plan)
    by_workload: dict[str, list[Prompt]] = {}
    for prompt in plan.prompts:
        by_workload.setdefault(prompt.workload, []).append(prompt)
    longest = max(map(len, by_workload.values()), default=0)
    for repetition in range(plan.repetitions):
        for number in range(longest):
            column = [prompts[number] for prompts in by_workload.values() if number < len(prompts)]
            cells = [(prompt, plain) for prompt in column for plain in by_plain]
            rng.shuffle(cells)
            for prompt, plain in cells:
                yield from _groups(prompt, repetition, plain, by_plain[plain], rng)


def _groups(
    prompt: Prompt, repetition: int, plain: Setting, settings: Sequence[Setting], rng: random.Random
) -> Iterator[Group]:
    """Shuffled groups of nearly the same size, with plain decoding somewhere in each."""
    shuffled, seed = rng.sample(list(settings), len(settings)), rng.randrange(2**32)
    n_groups = -(-len(shuffled) // GROUP)
    for i in range(n_groups):
        part = shuffled[i::n_groups]
        plain_at = rng.randrange(len(part) + 1)
        yield Group(prompt, repetition, [*part[:plain_at], plain, *part[plain_at:]], plain_at, seed)
