"""The controller beside several fixed lengths: what it loses to the best of them, known only afterwards.

For one prompt at one temperature all settings take turns in a shuffled order, so that every ratio is of runs of the
same minutes. The best fixed setting of a cell is picked from the same runs that it is compared in, which favours it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from specli.bench.harness import Setting
from specli.bench.runner import Runner
from specli.bench.statistics import Estimate, Pair, speedup
from specli.bench.workloads import Prompt, built_in
from specli.config import ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.render.bench import TITLES, label
from specli.session import Session

HEAD = (
    "| target | workload | temp | prompts | auto ÷ plain | best fixed | it ÷ plain | auto ÷ best fixed |\n"
    "|---|---|---|---|---|---|---|---|"
)
Lengths = Sequence[tuple[str, int]]
Times = Mapping[Setting, tuple[int, float | None]]  # tokens behind the first, ms for each
LENGTHS: Lengths = [*(("draft", k) for k in (1, 2, 3, 5)), *(("ngram", k) for k in (1, 2, 3, 5, 8))]
FEW_LENGTHS: Lengths = [("draft", 3), ("draft", 5), ("ngram", 3), ("ngram", 8)]  # where a token takes long
WORKLOADS = ("chat", "rewrite", "story")
TEMPERATURES = (0.0, 0.8)


def settings(temperature: float, lengths: Lengths) -> list[Setting]:
    """Plain, the fixed lengths, and the controller."""
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
        ModelOptions(path=target, n_ctx=2048),
        ModelOptions(path=draft),
        SamplingOptions(),
        SpeculationOptions(n_max=16, fixed=True),
    )
    times: dict[tuple[str, float], list[tuple[str, Times]]] = {}
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
                runs = {setting: runner.decode(prompt, setting, i).stats for setting in order}
                found = {setting: (stats.n_tokens - 1, stats.tpot_ms) for setting, stats in runs.items()}
                if all(tpot_ms is not None for _, tpot_ms in found.values()):  # an answer of one token has no time
                    times.setdefault((prompt.workload, temperature), []).append((prompt.name, found))
            longest_s = max(longest_s, time.monotonic() - started_s)
    for workload in WORKLOADS:
        for temperature in TEMPERATURES:
            if (workload, temperature) in times:
                yield _row(title, workload, temperature, times[workload, temperature])


def _row(title: str, workload: str, temperature: float, times: Sequence[tuple[str, Times]]) -> str:
    plain, *fixed, auto = sorted(times[0][1], key=lambda one: (one.drafter != "none", one.k is None))

    def ratio(before: Setting, after: Setting) -> Estimate:
        """How many times as fast ``after`` is, over the same prompts."""
        pairs = [Pair(name, found[plain][0], found[before][1] or 0.0, found[after][1] or 0.0) for name, found in times]
        estimate = speedup(pairs)
        assert estimate is not None  # there are pairs
        return estimate

    by_fixed = {one: ratio(plain, one) for one in (plain, *fixed)}
    best = max(by_fixed, key=lambda one: by_fixed[one].value)
    columns = (
        title,
        TITLES.get(workload, workload),
        f"{temperature:g}",
        str(len(times)),
        with_interval(ratio(plain, auto)),
        "plain" if best == plain else label(best),
        with_interval(by_fixed[best]) if best != plain else "1",
        with_interval(ratio(best, auto)),
    )
    return f"| {' | '.join(columns)} |"


def with_interval(estimate: Estimate) -> str:
    """The value, and its interval where there is one."""
    ends = estimate.interval
    return f"{estimate.value:.2f}" + (f" ({ends[0]:.2f}–{ends[1]:.2f})" if ends else "")
