"""Rows at the bottom of a terminal that are redrawn, below text that stays.

``rich.live`` leaves the cursor under its rows and climbs back by the height it remembers: when the window becomes
narrower and the terminal wraps those rows anew, the climb is too short and leaves debris. Here the cursor rests on the
region's first cell. Terminals keep the cursor's place through a resize, so "erase below" is right whatever happened.
Rows are drawn with the terminal's own wrapping off: a character that it takes for wider than we do cannot add a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments

Row = list[Segment]

_ERASE_BELOW = "\x1b[J"  # from the cursor to the end of the screen
_WRAP_OFF, _WRAP_ON = "\x1b[?7l", "\x1b[?7h"
_CURSOR_OFF, _CURSOR_ON = "\x1b[?25l", "\x1b[?25h"


class Region:
    """Owns the rows from the cursor down, while ``is_open``. Each call is one write."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.is_open = False

    def draw(self, above: Iterable[Segment], rows: Sequence[Row], *, at_cursor: bool = False) -> None:
        """Replace the region: print ``above``, which stays, then ``rows``, each at most the terminal's width.

        ``above`` must end with a newline or in the first column. ``at_cursor`` goes on where the cursor stands
        instead of in the first column.
        """
        out = [] if self.is_open else [Segment(_CURSOR_OFF)]
        out += [Segment(_start(at_cursor)), *above, Segment(_WRAP_OFF)]
        for i, row in enumerate(rows):
            out += [Segment("\n"), *row] if i else row
        climb = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
        out.append(Segment(f"{_WRAP_ON}\r{climb}"))
        self.is_open = True
        self._print(out)

    def close(self, above: Iterable[Segment] = (), *, at_cursor: bool = False) -> None:
        """Remove the region, print ``above`` in its place, and show the cursor."""
        out = [Segment(_start(at_cursor))] if self.is_open else []
        out += above
        if self.is_open:
            out.append(Segment(_CURSOR_ON))
        self.is_open = False
        if out:
            self._print(out)

    def _print(self, segments: list[Segment]) -> None:
        self._console.print(Segments(segments), soft_wrap=True, end="")


def _start(at_cursor: bool) -> str:
    """Erase what is there.

    Not from the screen's very first cell on: tmux takes that for clearing the screen, and keeps it in its history.
    """
    return _ERASE_BELOW if at_cursor else f"\r {_ERASE_BELOW}\r"


def wrap(pieces: Iterable[Segment], width: int) -> list[Row]:
    """Break a line into rows of at most ``width`` cells where a terminal would: anywhere, between characters.

    Cells are counted by code point, which is never less than what a terminal that joins emoji would use.
    """
    rows: list[Row] = [[]]
    used = 0
    for text, style, _ in pieces:
        while text:
            head, cells = _fit(text, width - used)
            if not head and not rows[-1]:
                head = text[0]  # wider than the terminal itself
            if head:
                rows[-1].append(Segment(head, style))
                used += cells
                text = text[len(head) :]
            if text:
                rows.append([])
                used = 0
    return rows


def _fit(text: str, room: int) -> tuple[str, int]:
    """The longest prefix of ``text`` that takes at most ``room`` cells, and how many it takes."""
    if text.isascii():
        head = text[:room]
        return head, len(head)
    used = 0
    for i, character in enumerate(text):
        cells = cell_len(character)
        if used + cells > room:
            return text[:i], used
        used += cells
    return text, used
