"""What a bench means, in words: the best setting for each workload, whether it pays and why not, and what to type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specli.bench.harness import Setting
from specli.bench.report import Cell, Verdict, best, overall, reasons
from specli.bench.workloads import TITLES
from specli.config import SamplingOptions

VERDICTS: dict[Verdict, str] = {"pays": "pays", "costs": "does not pay", "even": "makes no sure difference"}


@dataclass(frozen=True, slots=True)
class Advice:
    """The best setting of one workload (at one temperature and verifier), and why it does not pay if it does not."""

    title: str
    cell: Cell
    why_not: tuple[str, ...]

    @property
    def words(self) -> str:
        """One line."""
        is_known = self.cell.speedup.interval is not None
        verdict = VERDICTS[self.cell.verdict] if is_known else "too little to tell"
        why = f": {' and '.join(self.why_not[:2])}" if self.why_not else ""
        return f"{self.title}: {label(self.cell.setting)}, {times(self.cell)}, {verdict}{why}"


@dataclass(frozen=True, slots=True)
class Conclusion:
    """All advice. ``command``: what to type for all workloads; ``average``: its mean speedup (None: not known)."""

    advice: tuple[Advice, ...]
    setting: Setting | None
    average: float | None
    command: str

    @property
    def headline(self) -> str:
        """Whether speculation pays here, in one sentence."""
        n, n_pays = len(self.advice), sum(advice.cell.verdict == "pays" for advice in self.advice)
        if not n:
            return "nothing was measured, so there is nothing to say"
        word = "workload" if n == len({advice.cell.workload for advice in self.advice}) else "case"
        if n_pays:
            where = f"the {word}" if n == 1 else f"all {n} {word}s" if n_pays == n else f"{n_pays} of {n} {word}s"
            return f"speculation pays here for {where} with the right setting"
        if all(advice.cell.verdict == "costs" for advice in self.advice):
            every = f"the {word}" if n == 1 else f"every {word}"
            return f"speculation does not pay here: the best setting of {every} is slower than plain decoding"
        return f"no setting is surely faster than plain decoding here, for {'the' if n == 1 else 'any'} {word}"

    @property
    def words(self) -> list[str]:
        """The headline, a line for each workload, and the command."""
        lines = [self.headline, *(advice.words for advice in self.advice)]
        if self.setting is not None and self.average is not None:
            scope = "over the workloads" if len(self.advice) > 1 else "here"
            lines.append(f"best for all: {label(self.setting)}, {self.average:.2f} × on average {scope}")
        if self.advice:
            lines.append(f"use: {self.command}")
        return lines


def conclude(cells: Sequence[Cell], flags: Sequence[str] = ()) -> Conclusion:
    """What ``cells`` mean. ``flags``: those that name the models and the hardware settings, to repeat in commands."""
    groups: dict[tuple[str, float, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.workload, cell.setting.temperature, cell.setting.verify), []).append(cell)
    kinds = {(temperature, verify) for _, temperature, verify in groups}
    advice = []
    for (workload, temperature, verify), own in groups.items():
        chosen = best(own)
        if chosen is not None:
            title = TITLES.get(workload, workload)
            title += f" (temperature {temperature:g}, {verify})" if len(kinds) > 1 else ""
            advice.append(Advice(title, chosen, tuple(reasons(chosen)) if chosen.speedup.value < 1 else ()))
    ranked = overall(cells)
    setting, average = ranked[0][:2] if ranked else (None, None)
    if setting is not None and not any(a.cell.verdict == "pays" for a in advice):  # nobody should use a guess
        setting, average = setting.plain, None
    return Conclusion(tuple(advice), setting, average, command(setting, flags))


def command(setting: Setting | None, flags: Sequence[str] = ()) -> str:
    """The command line that decodes with ``setting``."""
    return shlex.join(["specli", "run", *flags, *(setting_flags(setting) if setting is not None else ())])


def setting_flags(setting: Setting) -> list[str]:
    """The options of ``specli run`` that stand for ``setting``; nothing where it is the default."""
    flags = [] if setting.drafter == "auto" else ["--spec-type", setting.drafter]
    if setting.k is not None and setting.drafter != "none":
        flags += ["--spec-draft-n-max", str(setting.k), "--draft-fixed"]
    if setting.temperature != SamplingOptions.temperature:
        flags += ["--temp", f"{setting.temperature:g}"]
    if setting.verify not in ("greedy", "block"):
        flags += ["--verify", setting.verify]
    return flags


_DRAFTERS: Mapping[str, str] = {"none": "plain", "draft": "draft", "ngram": "n-gram", "auto": "draft or n-gram"}


def label(setting: Setting) -> str:
    """A setting for people, without temperature and verifier: ``draft K 4``."""
    if setting.drafter == "none":
        return "plain"
    if setting.k is not None:
        return f"{_DRAFTERS[setting.drafter]} K {setting.k}"
    return "auto" if setting.drafter == "auto" else f"{_DRAFTERS[setting.drafter]} K auto"


def times(cell: Cell) -> str:
    """A speedup with its interval: ``1.52 × (1.40 to 1.63)``."""
    ends = cell.speedup.interval
    return f"{cell.speedup.value:.2f} ×" + (f" ({bounded(ends[0])} to {bounded(ends[1])})" if ends else " (one pair)")


def bounded(ratio: float) -> str:
    """Two decimals; what two or three prompts cannot tell need not be told to the digit."""
    return "<0.1" if ratio < 0.1 else ">10" if ratio > 10 else f"{ratio:.2f}"
