"""A growing answer on a terminal: tokens tinted by who proposed them, and one line of figures below.

The unfinished line of the answer lives in a region that is redrawn; lines that are finished are printed above it, and
stay. The terminal wraps them itself, so copied text has no newline that the model did not write.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from specli.events import Event, Finished, PrefillDone, Provenance, SpeculationState, Text
from specli.render.answer import Answer
from specli.render.base import (
    Renderer,
    can_encode,
    encodable,
    is_terminal,
    one_line,
    write_line,
)
from specli.render.plain import print_summary
from specli.render.region import Region
from specli.render.status import SYMBOLS, progress_line, status_line
from specli.render.summary import BLOCKS, Role, lay_out, summary
from specli.stats import Stats

REFRESH_S = 0.1  # between two drawings of the region
FIGURES_S = 0.25  # between two readings of the figures: nobody reads faster

# ANSI's own green: every theme, dark or light, has chosen a shade of it that can be read.
ACCEPTED = Style(color="green")
TINTS: dict[Provenance, Style | None] = {Provenance.DRAFT: ACCEPTED, Provenance.TARGET: None}
DIM = Style(dim=True)
ROLES: dict[Role, Style] = {"label": DIM, "bar": ACCEPTED, "time": DIM}


class TerminalConsole(Console):
    """A console that leaves a vanished reader to the caller (rich would end the process)."""

    def on_broken_pipe(self) -> None:
        """Let the BrokenPipeError that is being handled through."""
        raise


def terminal_console(stream: TextIO, env: Mapping[str, str], *, tint: bool) -> Console:
    """A rich console on a stream that is known to be a terminal."""
    return TerminalConsole(
        file=stream,
        force_terminal=True,
        force_jupyter=False,
        color_system="auto" if tint else None,
        no_color=not tint,
        highlight=False,
        _environ=env,
    )


class LiveRenderer(Renderer):
    """The answer and the live line, both on ``console``'s terminal; notices and the summary on stderr."""

    def __init__(
        self,
        console: Console,
        stderr: TextIO | None,
        *,
        env: Mapping[str, str],
        show_summary: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self._has_tint = console.color_system is not None
        self._stderr = stderr
        self.stderr_console: Console | None = None
        if stderr is not None and is_terminal(stderr):
            self.stderr_console = terminal_console(stderr, env, tint=self._has_tint)
        self._show_summary = show_summary
        self._clock = clock
        self._has_symbols = can_encode(BLOCKS + SYMBOLS, console.encoding)
        self._region = Region(console)
        self._answer = Answer(TINTS if self._has_tint else {}, console.encoding)
        self._state: SpeculationState | None = None
        self._status = ""
        self._drawn_at_s = self._figures_at_s = -math.inf

    def begin(self, state: SpeculationState) -> None:
        """Keep what the status line and the summary tell of the session."""
        self._state = state
        if state.expectation:
            self.notice(f"what to expect: {state.expectation}")

    def on_event(self, event: Event, stats: Stats) -> None:
        """Take in one event; draw when the last drawing is old enough. Rounds draw with the text that follows them."""
        if isinstance(event, Text) and event.sequence == stats.sequence:
            self._answer.append(event.spans)
            now_s = self._clock()
            if now_s - self._drawn_at_s >= REFRESH_S:
                self._read_figures(stats, now_s)
                self._draw(now_s)
        elif isinstance(event, PrefillDone):
            self._drawn_at_s = self._figures_at_s = -math.inf  # the first word waits for nobody
        elif isinstance(event, Finished) and event.sequence == stats.sequence:
            self.close()
            if self._show_summary:
                self.show_summary(stats)

    def notice(self, text: str) -> None:
        """One line on stderr, above what is still growing."""
        if self.stderr_console is None:
            write_line(self._stderr, one_line(text))
            return
        is_open = self._region.is_open
        if is_open:
            above, at_cursor = self._answer.take_lines(self.console.width)
            self._region.close(above, at_cursor=at_cursor)
            self._answer.forget_tear()
        self._print_line([Segment(one_line(text), self._style(DIM))])
        if is_open:
            self._draw(self._clock())

    def progress(self, label: str, fraction: float | None) -> None:
        """A bar in the place of the figures, until the first text."""
        now_s = self._clock()
        if fraction is None or fraction >= 1 or now_s - self._drawn_at_s >= REFRESH_S:
            self._status = progress_line(one_line(label), fraction, self.console.width, use_symbols=self._has_symbols)
            self._draw(now_s)

    def close(self) -> None:
        """Take the live line away and leave the answer, its last line ended."""
        above, at_cursor = self._answer.take_all(self.console.width)
        self._region.close(above, at_cursor=at_cursor)
        self._status = ""

    def _read_figures(self, stats: Stats, now_s: float) -> None:
        if now_s - self._figures_at_s >= FIGURES_S:
            self._figures_at_s = now_s
            self._status = status_line(stats, self._state, self.console.width, use_symbols=self._has_symbols)

    def _draw(self, now_s: float) -> None:
        """Finished lines above; the unfinished one, as much as fits, and the status in the region."""
        self._drawn_at_s = now_s
        width, height = self.console.size
        above, at_cursor = self._answer.take_lines(width)
        over, rows = self._answer.take_rows(width, max(1, height - 2))
        status = encodable(self._status, self.console.encoding)[:width]
        self._region.draw([*above, *over], [*rows, [Segment(status, self._style(DIM))]], at_cursor=at_cursor)

    def _style(self, style: Style | None) -> Style | None:
        return style if self._has_tint else None

    def show_summary(self, stats: Stats) -> None:
        """The figures, laid out for the terminal's width."""
        console = self.stderr_console
        if console is None:
            print_summary(self._stderr, stats, self._state)
            return
        use_blocks = can_encode(BLOCKS, console.encoding)
        self._print_line([])
        for line in lay_out(summary(stats, self._state), console.width, use_blocks=use_blocks):
            self._print_line([Segment(text, self._style(ROLES.get(role))) for text, role in line])
        if self._has_tint:
            self._print_line([])
            self._print_line([Segment("tint: ", DIM), Segment("accepted draft", ACCEPTED), Segment(", target's own")])

    def _print_line(self, line: list[Segment]) -> None:
        """To a terminal's stderr; one that is closed is no reason to lose the answer."""
        console = self.stderr_console
        if console is not None:
            safe = [Segment(encodable(text, console.encoding), style) for text, style, _ in line]
            with contextlib.suppress(OSError, ValueError):
                console.print(Segments([*safe, Segment("\n")]), soft_wrap=True, end="")
