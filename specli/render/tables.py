"""Tables of figures: a console that suits where they go, and the cells that several commands show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from specli.bench.advice import bounded
from specli.bench.statistics import Estimate
from specli.render.base import is_terminal
from specli.render.live import TerminalConsole, terminal_console

NA = "–"
PIPE_WIDTH = 120  # columns where no terminal sets them


@contextlib.contextmanager
def open_console(stdout: TextIO, env: Mapping[str, str]) -> Iterator[Console]:
    """A console; on a pipe without the blanks that rich fills cells up with."""
    if is_terminal(stdout):
        yield terminal_console(stdout, env, tint=not env.get("NO_COLOR"))
        return
    console = TerminalConsole(file=stdout, force_terminal=False, color_system=None, width=PIPE_WIDTH)
    with console.capture() as captured:
        yield console
    stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def new_table(*headings: str) -> Table:
    """A table; a heading that ends in ``>`` is of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False, padding=(0, 1, 0, 0))
    for heading in headings:
        is_number = heading.endswith(">")
        justify = "right" if is_number else "left"
        table.add_column(heading.removesuffix(">"), justify=justify, no_wrap=is_number)  # type: ignore[arg-type]
    return table


def markdown_row(values: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"


def percent(share: float | None) -> str:
    """A fraction in whole percent."""
    return NA if share is None else f"{100 * share:.0f}%"


def ratio(estimate: Estimate | None) -> str:
    """A ratio with its interval, where it has one."""
    if estimate is None:
        return NA
    ends = estimate.interval
    return f"{estimate.value:.2f}" + (f" [{bounded(ends[0])}, {bounded(ends[1])}]" if ends else "")
