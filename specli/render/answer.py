"""The part of a growing answer that the terminal does not hold for good yet."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from specli.events import Provenance, Span
from specli.render.base import encodable, visible
from specli.render.region import Row, wrap

TAB_STOP = 8  # cells

_VAGUE = frozenset({"Mn", "Mc", "Me", "Cf", "Cn", "Co", "Sk", "So"})  # categories of disputed width: emoji, marks


class Answer:
    """Takes spans in; gives finished lines out, and the unfinished one as rows of a given width.

    An unfinished line that outgrows its room is torn: its first rows are given out for good, in such a way that the
    terminal wraps from them into the rest by itself. That holds as long as the width does.
    """

    def __init__(self, tints: Mapping[Provenance, Style | None], encoding: str) -> None:
        self._tints, self._encoding = tints, encoding
        self._finished: list[Segment] = []  # whole lines with their newlines
        self._line: list[Segment] = []
        self._column = 0  # cells of the whole unfinished line, for tab stops
        self._torn_at: int | None = None  # the width at which the unfinished line was torn

    def append(self, spans: Iterable[Span]) -> None:
        """Add text: newlines end lines, tabs become spaces, other controls and what cannot be encoded are shown."""
        for span in spans:
            style = self._tints.get(span.provenance)
            for i, text in enumerate(visible(span.text).split("\n")):
                if i:
                    self._end_line()
                if text:
                    self._extend_line(encodable(text, self._encoding), style)

    def take_lines(self, width: int) -> tuple[list[Segment], bool]:
        """What is finished, given out once; and whether it must go where the cursor stands.

        It must if the terminal, since a line was torn, has become ``width`` columns wide: then nobody knows the
        column, and what there is of that line is ended.
        """
        is_lost = self._torn_at not in (None, width)
        if is_lost and not self._finished:
            self._end_line()
        lines, self._finished = self._finished, []
        if lines:
            self._torn_at = None
        return lines, is_lost

    def take_all(self, width: int) -> tuple[list[Segment], bool]:
        """As ``take_lines``, the unfinished line included and ended."""
        if self._line:
            self._end_line()
        return self.take_lines(width)

    def take_rows(self, width: int, n_max: int) -> tuple[list[Segment], list[Row]]:
        """What the unfinished line has too much for ``n_max`` rows, given out once, and its (last) rows."""
        rows = wrap(self._line, width) if self._line else []
        n_over = len(rows) - n_max
        if n_over <= 0:
            return [], rows
        over = [piece for row in rows[:n_over] for piece in row]
        rows = rows[n_over:]
        self._line = [piece for row in rows for piece in row]
        if any(is_vague(piece.text) for piece in over):
            return [*over, Segment("\n")], rows  # who knows where this ends: a new line is safe
        self._torn_at = width
        first, style, _ = rows[0][0]
        return [*over, Segment(first[0], style), Segment("\r")], rows  # one character more makes the terminal wrap

    def forget_tear(self) -> None:
        """Something else was printed in between: the unfinished line goes on in the first column."""
        self._torn_at = None

    def _end_line(self) -> None:
        self._finished += [*self._line, Segment("\n")]
        self._line, self._column = [], 0

    def _extend_line(self, text: str, style: Style | None) -> None:
        if "\t" in text:
            text = self._expand_tabs(text)
        self._column += cell_len(text)
        if self._line and self._line[-1].style is style:  # long runs stay few segments
            text = self._line.pop().text + text
        self._line.append(Segment(text, style))

    def _expand_tabs(self, text: str) -> str:
        column, parts = self._column, text.split("\t")
        for i, part in enumerate(parts[:-1]):
            column += cell_len(part)
            n_blanks = TAB_STOP - column % TAB_STOP
            column += n_blanks
            parts[i] = part + " " * n_blanks
        return "".join(parts)


def is_vague(text: str) -> bool:
    """Whether terminals differ about how many cells this text takes."""
    return not text.isascii() and any(unicodedata.category(character) in _VAGUE for character in text)
