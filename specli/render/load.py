"""A load test for people: one row per load, what it comes to, and what to know of the figures; as Markdown too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.text import Text

from specli.loadtest.compare import Change, Comparison
from specli.loadtest.document import LoadReport
from specli.loadtest.figures import Figures, Latency, Lengths
from specli.render.base import one_line
from specli.render.tables import NA, markdown_row, new_table, open_console, percent, ratio

_RATIOS = {
    "ttft_p95": "TTFT p95",
    "tpot_p50": "TPOT p50",
    "e2e_p95": "E2E p95",
    "output_tok_s": "tok/s",
    "requests_s": "req/s",
}


@dataclass(frozen=True)
class _Column:
    """A figure of a load. ``width``: the terminal's columns from which on it is shown; 0: always."""

    heading: str
    text: Callable[[Figures], str]
    width: int = 0
    needed: Callable[[Figures], bool] = lambda _step: True  # shown when any load needs it


def print_report(stdout: TextIO, env: Mapping[str, str], report: LoadReport, *, details: bool = False) -> None:
    """The table, remarks, and the verdict. ``details``: intervals, gaps and lengths too."""
    with open_console(stdout, env) as console:
        tables = [("", _MAIN), ("times", _TIMES), ("requests", _REQUESTS)] if details else [("", _MAIN)]
        for title, columns in tables:
            if title:
                console.print()
                console.print(Text(title, "bold"))
            shown = [column for column in _shown(columns, report.steps) if column.width <= console.width]
            table = new_table(_loads_heading(report.steps), *(f"{column.heading}>" for column in shown))
            for step in report.steps:
                table.add_row(f"{step.load:g}", *(column.text(step) for column in shown), style=_style(step))
            console.print(table)
        console.print()
        for line in report.remarks:
            console.print(Text(one_line(line), "dim"))
        if report.words:
            console.print()
        for i, line in enumerate(report.words):
            console.print(Text(one_line(line), "bold" if i == 0 else ""))


def markdown(report: LoadReport) -> str:
    """The same as GitHub's Markdown, all figures in one table."""
    columns = _shown((*_MAIN, *_TIMES, *_REQUESTS), report.steps)
    columns = list({column.heading: column for column in columns}.values())
    lines = [markdown_row([_loads_heading(report.steps), *(column.heading for column in columns)])]
    lines.append(markdown_row(["---"] * (1 + len(columns))))
    lines += [markdown_row([f"{step.load:g}", *(column.text(step) for column in columns)]) for step in report.steps]
    remarks = [f"{one_line(line)}  " for line in report.remarks]
    return "\n".join([*lines, "", *remarks, "", *(f"- {one_line(line)}" for line in report.words)]).rstrip() + "\n"


def print_comparison(stdout: TextIO, env: Mapping[str, str], comparison: Comparison) -> None:
    """One row per common load; above 1 the new one is better."""
    with open_console(stdout, env) as console:
        table = new_table("load", *(f"{heading}>" for heading in _RATIOS.values()), "in SLA>")
        for change in comparison.changes:
            table.add_row(_load(change), *(ratio(change.ratios[name]) for name in _RATIOS), _shares(change))
        console.print(table)
        console.print(Text("ratios above 1: the new one is faster, or does more", "dim"))
        for note in comparison.notes:
            console.print(Text(one_line(f"note: {note}"), "yellow"))


def comparison_markdown(comparison: Comparison) -> str:
    """The same as Markdown."""
    lines = [markdown_row(["load", *_RATIOS.values(), "in SLA"]), markdown_row(["---"] * (2 + len(_RATIOS)))]
    lines += [
        markdown_row([_load(change), *(ratio(change.ratios[name]) for name in _RATIOS), _shares(change)])
        for change in comparison.changes
    ]
    return "\n".join([*lines, *(f"\n{one_line(note)}" for note in comparison.notes)]) + "\n"


# -- cells -------------------------------------------------------------------------------------------------------------


def _shown(columns: Sequence[_Column], steps: Sequence[Figures]) -> list[_Column]:
    return [column for column in columns if any(column.needed(step) for step in steps)]


def _loads_heading(steps: Sequence[Figures]) -> str:
    return "req/s asked" if any(step.is_open for step in steps) else "in flight"


def _style(step: Figures) -> str:
    return {True: "green", False: "", None: ""}[step.is_inside]


def _number(value: float | None, unit: float = 1.0) -> str:
    """Three digits, more before the point."""
    if value is None:
        return NA
    scaled = value / unit
    decimals = next(n for n, least in enumerate((99.5, 9.95, 0.0995, 0.0)) if scaled >= least)
    return f"{scaled:.{decimals}f}"


def _levels(found: Latency | None, unit: float = 1.0) -> str:
    return NA if found is None else " ".join(_number(v, unit) for v in (found.p50, found.p95, found.p99))


def _interval(ends: tuple[float, float] | None) -> str:
    return NA if ends is None else f"{_number(ends[0])}-{_number(ends[1])}"


def _length(lengths: Lengths) -> str:
    return f"{_number(lengths.counted)} ({_number(lengths.asked)})"


def _failed(step: Figures) -> str:
    n = sum(step.errors.values())
    return str(n) if n else ""


def _intervals(found: Latency | None) -> str:
    return NA if found is None else f"{_interval(found.p50_interval)}, {_interval(found.p95_interval)}"


_MAIN = (
    _Column("n", lambda step: str(step.n_ok), 90),
    _Column("TTFT ms p50 95 99", lambda step: _levels(step.ttft_ms)),
    _Column("TPOT ms p50 95 99", lambda step: _levels(step.tpot_ms)),
    _Column("E2E s p50 95 99", lambda step: _levels(step.e2e_ms, 1000.0), 100),
    _Column("tok/s", lambda step: _number(step.output_tok_s)),
    _Column("req/s", lambda step: _number(step.requests_s), 90),
    _Column("in SLA", lambda step: percent(step.goodput), 0, lambda step: step.goodput is not None),
    _Column("accepted", lambda step: percent(step.acceptance_rate), 0, lambda step: step.acceptance_rate is not None),
    _Column("failed", _failed, 0, lambda step: bool(step.errors)),
)
_TIMES = (
    _Column("ITL ms/piece p50 95 99", lambda step: _levels(step.itl_burst_ms)),
    _Column("ITL ms/token p50 95 99", lambda step: _levels(step.itl_token_ms)),
    _Column("TTFT p50, p95 intervals", lambda step: _intervals(step.ttft_ms)),
    _Column("TPOT p50, p95 intervals", lambda step: _intervals(step.tpot_ms), 110),
)
_REQUESTS = (
    _Column("window s", lambda step: _number(step.window_s)),
    _Column("mean in flight", lambda step: _number(step.in_flight)),
    _Column("tokens in (asked)", lambda step: _length(step.input_tokens)),
    _Column("tokens out (asked)", lambda step: _length(step.output_tokens)),
    _Column("good req/s", lambda step: _number(step.goodput_s), 0, lambda step: step.goodput_s is not None),
)


def _load(change: Change) -> str:
    return f"{change.load:g} req/s" if change.is_open else f"{change.load:g} in flight"


def _shares(change: Change) -> str:
    old, new = change.goodput
    return NA if old is None and new is None else f"{percent(old)} to {percent(new)}"
