"""Text for pipes, files and dumb terminals: the answer as it is, and never an escape code of ours."""

from __future__ import annotations

from typing import TextIO

from specli.events import Event, Finished, SpeculationState, Text
from specli.render.base import (
    Renderer,
    can_encode,
    encodable,
    is_one_file,
    is_terminal,
    one_line,
    visible,
    write_line,
)
from specli.render.summary import BLOCKS, lay_out, plain_text, summary
from specli.stats import Stats

SUMMARY_WIDTH = 80  # columns, where no terminal says otherwise


class PlainRenderer(Renderer):
    """Writes text at once and flushes per event. On a pipe the bytes pass unchanged, with no newline added."""

    def __init__(self, stdout: TextIO, stderr: TextIO | None, *, show_summary: bool = False) -> None:
        self._stdout, self._stderr = stdout, stderr
        self._show_summary = show_summary
        self._for_eyes = is_terminal(stdout)
        self._is_line_open = False
        self._state: SpeculationState | None = None

    def begin(self, state: SpeculationState) -> None:
        """Keep what the summary tells of the session."""
        self._state = state
        if state.expectation and self._show_summary:
            self.notice(f"what to expect: {state.expectation}")

    def on_event(self, event: Event, stats: Stats) -> None:
        """Write text; on the end close the line (for eyes only) and print the summary if it was asked for."""
        if isinstance(event, Text) and event.sequence == stats.sequence:
            self._write(event.text)
        elif isinstance(event, Finished) and event.sequence == stats.sequence:
            self._close_line()
            if self._show_summary:
                self.show_summary(stats)

    def show_summary(self, stats: Stats) -> None:
        """The figures as plain lines, below the answer where both go to one file."""
        if self._is_line_open and is_one_file(self._stdout, self._stderr):
            write_line(self._stderr, "")
        print_summary(self._stderr, stats, self._state)

    def notice(self, text: str) -> None:
        """One line on stderr."""
        write_line(self._stderr, one_line(text))

    def progress(self, label: str, fraction: float | None) -> None:
        """Nothing: a bar cannot be drawn without taking characters back."""

    def close(self) -> None:
        """Give a person's prompt a line of its own."""
        self._close_line()

    def _write(self, text: str) -> None:
        if not text:
            return
        text = visible(text) if self._for_eyes else text
        self._stdout.write(encodable(text, self._stdout.encoding))
        self._stdout.flush()
        self._is_line_open = not text.endswith("\n")

    def _close_line(self) -> None:
        if self._for_eyes and self._is_line_open:
            self._is_line_open = False
            self._write("\n")


def print_summary(stderr: TextIO | None, stats: Stats, state: SpeculationState | None) -> None:
    """The figures as plain lines; blocks only where the encoding has them."""
    use_blocks = stderr is not None and can_encode(BLOCKS, stderr.encoding)
    for line in lay_out(summary(stats, state), SUMMARY_WIDTH, use_blocks=use_blocks):
        write_line(stderr, plain_text(line))
