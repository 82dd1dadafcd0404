"""A bench for people: one row per setting under its workload, the costs of passes, the verdict; as Markdown too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.table import Table
from rich.text import Text

from specli.bench.advice import label
from specli.bench.compare import Change, Comparison
from specli.bench.document import Report
from specli.bench.report import Cell, Spread, Verdict, best
from specli.bench.statistics import Estimate
from specli.bench.workloads import TITLES
from specli.render.base import visible
from specli.render.tables import NA, markdown_row, new_table, open_console, percent, ratio

USUAL_SETTING = 12  # characters of a setting's name that the columns' widths allow for
_LOAD = ("load_average_before", "logical_cores")
_STYLES: dict[Verdict, str] = {"pays": "green", "costs": "red", "even": ""}


@dataclass(frozen=True)
class _Column:
    """A figure of a cell. ``width``: the terminal's columns from which on it is shown; 0: always."""

    heading: str
    text: Callable[[Cell], str]
    width: int = 0
    plain: Callable[[Sequence[Cell]], str] = lambda _cells: ""  # of a workload's cells: plain decoding's own figure


def print_report(stdout: TextIO, env: Mapping[str, str], report: Report, *, details: bool = False) -> None:
    """Tables, then the verdict in words. ``details``: every figure of every cell."""
    with open_console(stdout, env) as console:
        console.print(_table(report.cells, _MAIN, console.width))
        if details:
            for title, columns in (("time", _TIMES), ("acceptance", _ACCEPTANCE)):
                console.print()
                console.print(Text(title, "bold"))
                console.print(_table(report.cells, columns, console.width))
        console.print()
        console.print(Text(_cost_words(report), overflow="fold"))
        for line in _footnotes(report):
            console.print(Text(line, "dim"))
        console.print()
        for i, line in enumerate(report.conclusion.words):
            console.print(Text(visible(line), "bold" if i == 0 else ""), soft_wrap=line.startswith("use: "))


def markdown(report: Report) -> str:
    """The same as GitHub's Markdown, all figures in one table."""
    columns = [column for column in (*_MAIN, *_TIMES, *_ACCEPTANCE) if column.heading != "setting"]
    headings = ["workload", "setting", *dict.fromkeys(column.heading for column in columns)]
    lines = [markdown_row(headings), markdown_row(["---"] * len(headings))]
    for cell in report.cells:
        figures = {column.heading: column.text(cell) for column in columns}
        lines.append(
            markdown_row([TITLES.get(cell.workload, cell.workload), _setting(cell, report.cells), *figures.values()])
        )
    verdict = [f"- {line}" for line in report.conclusion.words]
    notes = [f"{line}  " for line in (_cost_words(report), *_footnotes(report)) if line]
    return "\n".join([*lines, "", *notes, "", *verdict]) + "\n"


def digest(report: Report) -> str:
    """One Markdown row per workload: plain decoding, and the best setting of each drafter."""
    drafters = [name for name in ("draft", "ngram", "auto") if any(c.setting.drafter == name for c in report.cells)]
    titles = {"draft": "draft model, best K", "ngram": "n-gram, best K", "auto": "auto (the default)"}
    headings = ["workload", "plain tok/s", *(titles[name] for name in drafters)]
    lines = [markdown_row(headings), markdown_row(["---"] * len(headings))]
    for workload in dict.fromkeys(cell.workload for cell in report.cells):
        own = [cell for cell in report.cells if cell.workload == workload]
        row = [TITLES.get(workload, workload), f"{_plain(own).median:.0f}"]
        for name in drafters:
            cell = best([cell for cell in own if cell.setting.drafter == name])
            row.append(NA if cell is None else _digested(cell))
        lines.append(markdown_row(row))
    return "\n".join(lines) + "\n"


def _digested(cell: Cell) -> str:
    length = f"K {cell.setting.k}: " if cell.setting.k is not None else ""
    return f"{length}{ratio(cell.speedup)}, {percent(cell.counts.acceptance_rate)} accepted"


def print_comparison(stdout: TextIO, env: Mapping[str, str], comparison: Comparison) -> None:
    """One row per common cell; ratios are new / old in speed."""
    with open_console(stdout, env) as console:
        table = new_table("workload", "setting", "plain>", "decoding>", "speedup>", "")
        for change, title in _titled(comparison.changes):
            style = {"better": "green", "worse": "red"}.get(change.words, "")
            table.add_row(title, label(change.setting), *map(ratio, _estimates(change)), Text(change.words, style))
        console.print(table)
        for note in comparison.notes:
            console.print(Text(f"note: {note}", "yellow"))


def comparison_markdown(comparison: Comparison) -> str:
    """The same as Markdown."""
    lines = [markdown_row(["workload", "setting", "plain", "decoding", "speedup", ""]), markdown_row(["---"] * 6)]
    for change in comparison.changes:
        title = TITLES.get(change.workload, change.workload)
        lines.append(markdown_row([title, label(change.setting), *map(ratio, _estimates(change)), change.words]))
    return "\n".join([*lines, *(f"\n{note}" for note in comparison.notes)]) + "\n"


def _titled(changes: Sequence[Change]) -> Iterator[tuple[Change, str]]:
    last = None
    for change in changes:
        yield change, TITLES.get(change.workload, change.workload) if change.workload != last else ""
        last = change.workload


def _estimates(change: Change) -> tuple[Estimate, Estimate, Estimate]:
    return change.plain, change.speculative, change.relative


# -- tables ------------------------------------------------------------------------------------------------------------


def _table(cells: Sequence[Cell], columns: Sequence[_Column], width: int) -> Table:
    """Rows under the name of their workload, plain decoding first."""
    longest = max((len(_setting(cell, cells)) for cell in cells), default=0)
    room = width - max(0, longest - USUAL_SETTING)
    shown = [column for column in columns if column.width <= room]
    table = new_table("", *(f"{column.heading}>" for column in shown))
    table.columns[0].no_wrap = True
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.workload, []).append(cell)
    for workload, own in groups.items():
        table.add_row(Text(TITLES.get(workload, workload), "bold"))
        table.add_row("  plain", *(column.plain(own) for column in shown))
        surest = best(own)
        for cell in own:
            style = ("bold " if cell is surest and cell.verdict == "pays" else "") + _STYLES[cell.verdict]
            first = Text(f"  {_setting(cell, cells)}", style.strip())
            table.add_row(first, *(Text(column.text(cell), _style_of(column, style)) for column in shown))
        table.add_section()
    return table


def _style_of(column: _Column, style: str) -> str:
    return style.strip() if column.heading == "speedup" else ""


def _setting(cell: Cell, cells: Sequence[Cell]) -> str:
    """The setting, with temperature and verifier where cells differ in them."""
    setting = cell.setting
    words = [label(setting)]
    if len({other.setting.temperature for other in cells}) > 1:
        words.append(f"T {setting.temperature:g}")
    verifiers = {other.setting.verify for other in cells if other.setting.temperature > 0}
    if len(verifiers) > 1 and setting.temperature > 0:
        words.append(setting.verify)
    return " ".join(words)


def _cost_words(report: Report) -> str:
    """v(n) and c in one line."""
    curve = ", ".join(f"{n} tokens {cost:.2f}" for n, cost in report.costs.curve.items() if n > 1)
    parts = [f"a target pass over {curve} (one-token passes = 1)"] if curve else []
    if report.costs.c is not None:
        parts.append(f"a drafted token {report.costs.c:.2f}")
    return f"costs: {'; '.join(parts)}" if parts else ""


def _footnotes(report: Report) -> Iterator[str]:
    hardware = report.circumstances.get("hardware")
    load, cores = (hardware.get(name) if isinstance(hardware, Mapping) else None for name in _LOAD)
    if isinstance(load, float) and isinstance(cores, int) and load > 0.5 * cores:
        yield f"the machine was busy (load {load:.1f} on {cores} cores before the first run): measure again alone"
    if report.ending != "done":
        why = {"time": "the time was up", "interrupted": "it was interrupted"}[report.ending]
        yield f"{report.n_done} of {report.n_planned} runs were done when {why}; figures are of these"
    for name, reason in report.skipped.items():
        yield f"{name} is not in the figures: {reason}"
    for cell in report.cells:
        first = cell.identity.first if cell.identity is not None else None
        if first is not None:
            margin = f", where plain's logit led by {first.margin:.3f}" if first.margin is not None else ""
            title = f"{TITLES.get(cell.workload, cell.workload)}, {_setting(cell, report.cells)}"
            yield f"{title}: first other token in {first.prompt} at position {first.position + 1}{margin}"


# -- columns -----------------------------------------------------------------------------------------------------------


def _number(value: float | None, decimals: int = 2) -> str:
    return NA if value is None else f"{value:.{decimals}f}"


def _same(cell: Cell) -> str:
    identity = cell.identity
    if identity is None:
        return NA
    return "yes" if identity.n_same == identity.n_compared else f"{identity.n_same}/{identity.n_compared}"


def _levels(values: Sequence[float] | None) -> str:
    return NA if values is None else " ".join(f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" for value in values)


def _shares(cell: Cell) -> str:
    return NA if cell.shares is None else " ".join(f"{100 * share:.0f}" for share in cell.shares.values())


def _plain(cells: Sequence[Cell]) -> Spread:
    """Plain decoding beside the cell that was compared with it most often."""
    return max(cells, key=lambda cell: len(cell.pairs)).plain_tok_s


def _quartiles(spread: Spread) -> str:
    return f"{spread.low:.0f}-{spread.high:.0f}"


def _memory(cell: Cell) -> str:
    return NA if cell.peak_bytes is None else f"{cell.peak_bytes / 2**20:.0f}"


_MAIN = (
    _Column("tok/s", lambda cell: _number(cell.tok_s.median, 1), 0, lambda cells: _number(_plain(cells).median, 1)),
    _Column("quartiles", lambda cell: _quartiles(cell.tok_s), 100, lambda cells: _quartiles(_plain(cells))),
    _Column("speedup", lambda cell: ratio(cell.speedup)),
    _Column("predicted", lambda cell: _number(cell.predicted), 100),
    _Column("accepted", lambda cell: percent(cell.counts.acceptance_rate)),
    _Column("τ", lambda cell: _number(cell.counts.block_efficiency)),
    _Column("TPOT ms", lambda cell: _number(cell.tpot_ms, 1), 110),
    _Column("TTFT s", lambda cell: _number(cell.ttft_s), 110),
    _Column("same text", _same),
    _Column("runs", lambda cell: str(len(cell.pairs)), 120),
)
_TIMES = (
    _Column("TTFT s", lambda cell: _number(cell.ttft_s)),
    _Column("TPOT ms", lambda cell: _number(cell.tpot_ms, 1)),
    _Column("token gap p50 95 99 ms", lambda cell: _levels(cell.itl_token_ms)),
    _Column("burst gap p50 95 99 ms", lambda cell: _levels(cell.itl_burst_ms)),
    _Column("draft verify host %", _shares, 90),
    _Column("v", lambda cell: _number(cell.v), 100),
    _Column("c", lambda cell: _number(cell.c), 100),
    _Column("peak MiB", _memory, 110),
)
_ACCEPTANCE = (
    _Column("K", lambda cell: _number(cell.k, 1)),
    _Column("accepted", lambda cell: percent(cell.counts.acceptance_rate)),
    _Column("length", lambda cell: _number(cell.counts.mean_accepted_length)),
    _Column(
        "by position %", lambda cell: " ".join(f"{100 * p:.0f}" for p in cell.counts.per_position_acceptance[:8]) or NA
    ),
)
