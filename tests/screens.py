"""What a pseudo-terminal's screen shows, read from pyte's cells."""

from __future__ import annotations

import pyte


def row_of(screen: pyte.Screen, y: int, n_columns: int | None = None) -> str:
    """Row ``y``, its first ``n_columns`` cells. ``Screen.display`` fails once half a wide character is overwritten."""
    line = screen.buffer[y]
    return "".join(line[x].data for x in range(screen.columns if n_columns is None else n_columns))


def rows_of(screen: pyte.HistoryScreen) -> list[str]:
    """Scrollback and screen, trailing blanks and empty rows at the end dropped."""
    above = ["".join(line[x].data for x in range(screen.columns)) for line in screen.history.top]
    rows = [row.rstrip() for row in [*above, *(row_of(screen, y) for y in range(screen.lines))]]
    while rows and not rows[-1]:
        rows.pop()
    return rows
