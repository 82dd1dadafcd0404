"""The controller beside every fixed length: what it loses to the best of them, known only afterwards.

For one prompt at one temperature all settings take turns in a shuffled order, so that every ratio is of runs of the
same minutes. The best fixed setting of a cell is picked from the same runs that it is compared in, which favours it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from specli.bench.harness import Run, Setting, Trial
from specli.bench.report import pair_of
from specli.bench.runner import Runner
from specli.bench.statistics import Estimate, speedup
from specli.bench.workloads import Prompt, built_in
from specli.config import ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.render.bench import TITLES, label
from specli.session import Session

HEAD = (
    "| target | workload | temp | prompts | auto ÷ plain | best fixed | it ÷ plain | auto ÷ best fixed |\n"
    "|---|---|---|---|---|---|---|---|"
)
Lengths = Sequence[tuple[str, int]]
LENGTHS: Lengths = [*(("draft", k) for k in (1, 2, 3, 5)), *(("ngram", k) for k in (1, 2, 3, 5, 8))]
FEW_LENGTHS: Lengths = [("draft", 3), ("draft", 5), ("ngram", 3), ("ngram", 8)]  # where a token takes long
WORKLOADS = ("chat", "rewrite", "story")
TEMPERATURES = (0.0, 0.8)


def settings(temperature: float, lengths: Lengths) -> list[Setting]:
    """Plain, every fixed length, and the controller."""
    verify = "block" if temperature else "greedy"
    return [Setting(drafter, k, temperature, verify) for drafter, k in (("none", 0), *lengths, ("auto", None))]


def breadth_first(workloads: Sequence[str]) -> list[Prompt]:
    """The first prompt of every kind of work, then the second of each."""
    kinds = [list(built_in((name,))) for name in workloads]
    return [kind[i] for i in range(max(map(len, kinds))) for kind in kinds if i < len(kind)]


def hindsight(
    title: str, target: Path, draft: Path, lengths: Lengths, n_predict: int, budget_s: float
) -> Iterator[str]:
    """The rows of one target, as many prompts of each workload as ``budget_s`` allows."""
    ends_s, rng = time.monotonic() + budget_s, random.Random(0)
    options = Settings(
        ModelOptions(path=target, n_ctx=2048), ModelOptions(path=draft), SamplingOptions(), SpeculationOptions(n_max=16)
    )
    runs: dict[tuple[str, float, Setting], list[tuple[Prompt, Run]]] = {}
    with Session(options) as session, Runner(session, n_predict) as runner:
        prompts, longest_s = breadth_first(WORKLOADS), 0.0
        for temperature in TEMPERATURES:
            for prompt in prompts[: len(WORKLOADS)]:
                runner.warm_up(prompt, [one for one in settings(temperature, lengths) if one.k is None])
        for i, prompt in enumerate(prompts):
            started_s = time.monotonic()
            if started_s + longest_s > ends_s:
                break
            for temperature in TEMPERATURES:
                order = settings(temperature, lengths)
                rng.shuffle(order)
                for setting in order:
                    run = runner.decode(prompt, setting, i)
                    if run.stats.tpot_ms is not None:
                        runs.setdefault((prompt.workload, temperature, setting), []).append((prompt, run))
            longest_s = max(longest_s, time.monotonic() - started_s)
    for workload in WORKLOADS:
        for temperature in TEMPERATURES:
            found = {one: runs.get((workload, temperature, one), []) for one in settings(temperature, lengths)}
            if all(found.values()):
                yield _row(title, workload, temperature, found)


def _row(title: str, workload: str, temperature: float, found: dict[Setting, list[tuple[Prompt, Run]]]) -> str:
    plain, *fixed, auto = found
    by_fixed = {one: _ratio(found[plain], found[one]) for one in (plain, *fixed)}
    best = max(by_fixed, key=lambda one: by_fixed[one].value)
    columns = (
        title,
        TITLES.get(workload, workload),
        f"{temperature:g}",
        str(len(found[auto])),
        _text(_ratio(found[plain], found[auto])),
        "plain" if best == plain else label(best),
        _text(by_fixed[best]) if best != plain else "1",
        _text(_ratio(found[best], found[auto])),
    )
    return f"| {' | '.join(columns)} |"


def _ratio(before: Sequence[tuple[Prompt, Run]], after: Sequence[tuple[Prompt, Run]]) -> Estimate:
    """How many times as fast ``after`` is, over the same prompts."""
    unused = Setting("none", 0, 0.0, "greedy")
    trials = [Trial(prompt, 0, unused, old, new) for (prompt, old), (_, new) in zip(before, after, strict=True)]
    estimate = speedup([pair_of(trial) for trial in trials])
    assert estimate is not None  # there are trials
    return estimate


def _text(estimate: Estimate) -> str:
    ends = estimate.interval
    return f"{estimate.value:.2f}" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else "")
