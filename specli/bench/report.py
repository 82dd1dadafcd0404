"""Runs become figures: one cell per workload and setting, the costs of passes, and what all of it means.

Counts of a cell are sums over its runs, and rates are derived from them by ``stats``; times are medians over its runs.

    v(n)       target pass over n tokens / one-token pass, medians within a pair of runs, then the median over pairs.
               A run's last round is left out: its draft may have been cut.
    c          seconds per drafted token / one-token pass, likewise; a run's first round is left out too: it also
               feeds the prompt to the draft
    predicted  tau / mean cost of a round, k * c + v(1 + k): what these costs promise, without host time
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean
from typing import Literal

from specli.bench.harness import Run, Setting, Trial
from specli.bench.statistics import FEW, Estimate, Pair, median, quantiles, speedup
from specli.stats import Stats

LEVELS = (0.50, 0.95, 0.99)  # of latencies
MIN_PASSES = 5
Verdict = Literal["pays", "costs", "even"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a text first left plain decoding's, and by how much plain's logit led there (None: not looked at)."""

    prompt: str
    position: int  # tokens that are the same
    plain_token: int | None  # None: plain had ended
    token: int | None
    margin: float | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """How many texts of a cell were plain decoding's own, and the earliest of the others."""

    n_same: int
    n_compared: int
    first: Difference | None = None


@dataclass(frozen=True, slots=True)
class Costs:
    """In units of a one-token target pass. ``v``: n -> v(n) and the passes behind it. ``c``: None without a draft."""

    v: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    c: float | None = None

    @property
    def curve(self) -> dict[int, float]:
        """v(n) where at least ``MIN_PASSES`` were measured: what is shown, as one slow pass is no cost."""
        return {n: cost for n, (cost, n_passes) in self.v.items() if n == 1 or n_passes >= MIN_PASSES}

    def round_cost(self, k: int, uses_model: bool) -> float | None:
        """What a round with ``k`` drafted tokens costs; None if such a pass was not seen."""
        if 1 + k not in self.v or (uses_model and k and self.c is None):
            return None
        return self.v[1 + k][0] + (k * self.c if uses_model and self.c is not None else 0.0)


@dataclass(frozen=True, slots=True)
class DraftingRounds:
    """Means over the rounds that proposed something: what they cost and brought. ``share``: of all rounds."""

    share: float
    k: float  # tokens proposed
    emitted: float  # tokens
    v: float  # cost of the target's pass


@dataclass(frozen=True, slots=True)
class Cell:
    """Everything measured of one workload with one setting. Times in their names' units; None where undefined."""

    workload: str
    setting: Setting
    pairs: tuple[Pair, ...]
    speedup: Estimate
    predicted: float | None
    tok_s: Spread
    plain_tok_s: Spread
    counts: Stats  # pooled: read the rates of rounds from it, not times
    ttft_s: float | None
    plain_ttft_s: float | None
    tpot_ms: float | None
    itl_token_ms: tuple[float, ...] | None  # at LEVELS
    itl_burst_ms: tuple[float, ...] | None
    shares: Mapping[str, float] | None  # draft, verify, host
    v: float | None  # mean cost of this cell's target passes
    c: float | None  # draft time per drafted token
    k: float  # mean draft length, tokens
    drafting: DraftingRounds | None
    n_tokens: int
    peak_bytes: int | None
    identity: Identity | None

    @property
    def n_prompts(self) -> int:
        """Prompts that were measured."""
        return len({pair.prompt for pair in self.pairs})

    @property
    def verdict(self) -> Verdict:
        """Whether the interval says that it pays, that it costs, or neither; one pair says nothing."""
        low, high = self.speedup.interval or (1.0, 1.0)
        return "pays" if low > 1 else "costs" if high < 1 else "even"


def costs(trials: Iterable[Trial]) -> Costs:
    """The cost curve and the draft's cost, over all ``trials``."""
    ratios: dict[int, list[tuple[float, int]]] = {}
    steps: list[float] = []
    for trial in trials:
        unit_s = median([outcome.verify_s for outcome in trial.plain.rounds])
        if not unit_s or trial.setting.drafter == "none":
            continue
        by_width: dict[int, list[float]] = {}
        for outcome in trial.run.rounds[:-1]:
            by_width.setdefault(1 + outcome.sequences[0].proposed, []).append(outcome.verify_s)
        for width, times_s in by_width.items():
            ratios.setdefault(width, []).append(((median(times_s) or 0.0) / unit_s, len(times_s)))
        step_s = draft_step_s(trial.run)
        if step_s is not None:
            steps.append(step_s / unit_s)
    curve = {n: (median([ratio for ratio, _ in found]) or 0.0, sum(m for _, m in found)) for n, found in ratios.items()}
    return Costs({1: (1.0, 0)} | {n: curve[n] for n in sorted(curve) if n > 1}, median(steps))


def draft_step_s(run: Run) -> float | None:
    """Seconds per token that the draft model drafted, first and last round left out; None if it drafted nothing."""
    drafted = [outcome for outcome in run.rounds[1:-1] if outcome.draft_s > 0 and outcome.sequences[0].proposed]
    n_tokens = sum(outcome.sequences[0].proposed for outcome in drafted)
    return sum(outcome.draft_s for outcome in drafted) / n_tokens if n_tokens else None


def cells(
    trials: Sequence[Trial],
    known: Costs,
    differences: Mapping[int, Difference] | None = None,
    workloads: Sequence[str] = (),
) -> list[Cell]:
    """One cell per workload and setting: by workload (in the order of ``workloads``), temperature, drafter, length.

    ``differences``: by index in ``trials``, where texts that should have been plain's were not.
    """
    groups: dict[tuple[str, Setting], list[int]] = {}
    for i, trial in enumerate(trials):
        groups.setdefault((trial.prompt.workload, trial.setting), []).append(i)
    found = []
    for (workload, setting), indices in groups.items():
        own = [trials[i] for i in indices]
        noted = [(differences or {}).get(i) for i in indices]
        found.append(_cell(workload, setting, own, known, noted))
    order = list(dict.fromkeys([*workloads, *(workload for workload, _ in groups)]))
    return sorted(found, key=lambda cell: (order.index(cell.workload), *_rank(cell.setting)))


def _rank(setting: Setting) -> tuple[float, str, int, float]:
    order = ("none", "draft", "ngram", "auto")
    return (
        setting.temperature,
        setting.verify,
        order.index(setting.drafter),
        math.inf if setting.k is None else setting.k,
    )


def _cell(
    workload: str, setting: Setting, trials: Sequence[Trial], known: Costs, differences: Sequence[Difference | None]
) -> Cell:
    pairs = tuple(pair_of(trial) for trial in trials)
    estimate = speedup(pairs)
    assert estimate is not None  # a cell has a trial
    runs, plain = [trial.run for trial in trials], [trial.plain for trial in trials]
    counts = pooled(runs)
    uses_model = any(outcome.draft_s > 0 for run in runs for outcome in run.rounds)
    round_costs = [
        cost
        for run in runs
        for outcome in run.rounds
        if (cost := known.round_cost(outcome.sequences[0].proposed, uses_model and outcome.draft_s > 0)) is not None
    ]
    passes = [known.v[n][0] for run in runs for o in run.rounds if (n := 1 + o.sequences[0].proposed) in known.v]
    steps = [step for trial in trials if (step := _step(trial)) is not None]
    tau = counts.block_efficiency
    return Cell(
        workload,
        setting,
        pairs,
        estimate,
        predicted=tau / fmean(round_costs) if tau is not None and round_costs else None,
        tok_s=_spread([run.stats.decode_tok_s for run in runs]),
        plain_tok_s=_spread([run.stats.decode_tok_s for run in plain]),
        counts=counts,
        ttft_s=median([run.stats.ttft_s for run in runs if run.stats.ttft_s is not None]),
        plain_ttft_s=median([run.stats.ttft_s for run in plain if run.stats.ttft_s is not None]),
        tpot_ms=median([run.stats.tpot_ms for run in runs if run.stats.tpot_ms is not None]),
        itl_token_ms=_latencies(gap for run in runs for gap in run.stats.itl_token_ms),
        itl_burst_ms=_latencies(gap for run in runs for gap in run.stats.itl_burst_ms),
        shares=_shares(counts),
        v=fmean(passes) if passes else None,
        c=median(steps),
        k=counts.mean_draft_length or 0.0,
        drafting=_drafting(runs, known),
        n_tokens=sum(run.stats.n_tokens for run in runs),
        peak_bytes=max((run.peak_bytes for run in runs if run.peak_bytes is not None), default=None),
        identity=_identity(setting, trials, differences),
    )


def _drafting(runs: Sequence[Run], known: Costs) -> DraftingRounds | None:
    parts = [outcome.sequences[0] for run in runs for outcome in run.rounds]
    priced = [part for part in parts if part.proposed and 1 + part.proposed in known.v]
    if not priced:
        return None
    return DraftingRounds(
        sum(part.proposed > 0 for part in parts) / len(parts),
        fmean(part.proposed for part in priced),
        fmean(part.emitted for part in priced),
        fmean(known.v[1 + part.proposed][0] for part in priced),
    )


def pooled(runs: Iterable[Run]) -> Stats:
    """The counters of all ``runs`` together; its clock marks mean nothing."""
    counts = Stats()
    for run in runs:
        for outcome in run.rounds:
            counts.observe(outcome)
    return counts


def pair_of(trial: Trial) -> Pair:
    """The times of ``trial`` as what intervals are made from."""
    before, after = trial.plain.stats.tpot_ms, trial.run.stats.tpot_ms
    assert before is not None  # the harness keeps no trial without times
    assert after is not None
    return Pair(trial.prompt.name, trial.plain.stats.n_tokens - 1, before, after)


def _step(trial: Trial) -> float | None:
    step_s, unit_s = draft_step_s(trial.run), median([outcome.verify_s for outcome in trial.plain.rounds])
    return step_s / unit_s if step_s is not None and unit_s else None


def _spread(values: Iterable[float | None]) -> Spread:
    found = quantiles([value for value in values if value is not None], (0.5, 0.25, 0.75))
    return Spread(*found) if found else Spread(0.0, 0.0, 0.0)


def _latencies(gaps: Iterable[float]) -> tuple[float, ...] | None:
    found = quantiles(list(gaps), LEVELS)
    return tuple(found) if found else None


def _shares(counts: Stats) -> Mapping[str, float] | None:
    seconds = {"draft": counts.draft_s, "verify": counts.verify_s, "host": counts.host_s}
    total_s = sum(seconds.values())
    return {name: part_s / total_s for name, part_s in seconds.items()} if total_s > 0 else None


def promises_identity(setting: Setting) -> bool:
    """Whether the text should be plain decoding's own: greedy, and coupled, whose noise is the seed's alone."""
    return setting.verify in ("greedy", "coupled")


def first_difference(trial: Trial) -> Difference | None:
    """Where the text left plain decoding's, its margin not looked at yet; None where it did not."""
    plain, own = trial.plain.stats.tokens or (), trial.run.stats.tokens or ()
    if plain == own:
        return None
    at = next((i for i, (a, b) in enumerate(zip(plain, own, strict=False)) if a != b), min(len(plain), len(own)))
    ends = (plain[at] if at < len(plain) else None, own[at] if at < len(own) else None)
    return Difference(trial.prompt.name, at, *ends)


def _identity(setting: Setting, trials: Sequence[Trial], differences: Sequence[Difference | None]) -> Identity | None:
    if not promises_identity(setting):
        return None
    found = [known or first_difference(trial) for trial, known in zip(trials, differences, strict=True)]
    different = sorted((one for one in found if one is not None), key=lambda one: one.position)
    return Identity(len(trials) - len(different), len(trials), different[0] if different else None)


# -- what it means -----------------------------------------------------------------------------------------------------


def best(candidates: Sequence[Cell]) -> Cell | None:
    """The cell with the best speedup to count on: by the interval's lower end; by the value where prompts are few."""
    drafting = [cell for cell in candidates if cell.setting.drafter != "none"]
    are_few = any(cell.n_prompts < FEW for cell in drafting)
    return max(
        drafting,
        key=lambda cell: cell.speedup.value if are_few or cell.speedup.low is None else cell.speedup.low,
        default=None,
    )


def reasons(cell: Cell) -> list[str]:
    """Why a cell does not pay: each cause that alone would make it pay if it were away, the weightiest first.

    Looked at are the rounds that drafted: a round without a draft is plain decoding.
    """
    rounds, acceptance = cell.drafting, cell.counts.acceptance_rate
    if rounds is None or acceptance is None:
        return ["hardly anything was drafted"]
    draft = rounds.k * (cell.c or 0.0)
    cost = draft + rounds.v
    needed = (cost - 1.0) / rounds.k  # then a round brings what it costs
    wanted = f", {100 * needed:.0f}% would break even" if acceptance < needed <= 1 else ""
    causes = [
        ((1.0 + rounds.k) / cost, f"acceptance is too low ({100 * acceptance:.0f}%{wanted})"),
        (
            rounds.emitted / (draft + 1.0),
            f"verification is not flat (a pass over {1 + rounds.k:.1f} tokens costs {rounds.v:.1f} plain ones)",
        ),
    ]
    if draft > 0:
        causes.append((rounds.emitted / rounds.v, f"the draft is too heavy ({cell.c:.2f} of a plain pass per token)"))
    words = [words for gain, words in sorted(causes, key=lambda cause: -cause[0]) if gain > 1.0]
    return words or [f"a round costs {cost:.1f} plain passes, more than its {1 + rounds.k:.1f} tokens could ever bring"]


def overall(found: Sequence[Cell]) -> list[tuple[Setting, float, int]]:
    """Settings by the geometric mean of their speedups over workloads, best first, and how many workloads pay."""
    by_setting: dict[Setting, list[Cell]] = {}
    for cell in found:
        by_setting.setdefault(cell.setting, []).append(cell)
    most = max(map(len, by_setting.values()), default=0)
    means = [
        (setting, geometric_mean([cell.speedup.value for cell in own]), sum(cell.verdict == "pays" for cell in own))
        for setting, own in by_setting.items()
        if len(own) == most and setting.drafter != "none"
    ]
    return sorted(means, key=lambda item: -item[1])
