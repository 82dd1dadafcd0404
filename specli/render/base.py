"""What every renderer does, and the two rules for text: no control code from a model, no character that crashes."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType
from typing import Protocol, TextIO, TypeVar

from specli.events import Event, SpeculationState
from specli.stats import Stats

_Self = TypeVar("_Self", bound="Renderer")

# C0 but newline and tab become control pictures (␀ … ␛ … ␟), DEL ␡, C1 their Python escape: a terminal obeys none.
_VISIBLE: dict[int, int | str] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE[0x7F] = 0x2421
_VISIBLE.update({code: f"\\x{code:02x}" for code in range(0x80, 0xA0)})


class Renderer(Protocol):
    """Shows one generation. Feed each event to the ``Stats`` first, then to the renderer with those stats.

    Writing the answer may raise ``OSError`` (``BrokenPipeError`` when the reader has gone); stderr never raises.
    """

    def begin(self, state: SpeculationState) -> None:
        """Learn what the session decided; before the first event."""

    def on_event(self, event: Event, stats: Stats) -> None:
        """Show one event of the sequence that ``stats`` counts; other sequences are passed over."""

    def show_summary(self, stats: Stats) -> None:
        """Write the figures of ``stats`` to stderr."""

    def notice(self, text: str) -> None:
        """Write one line to stderr."""

    def progress(self, label: str, fraction: float | None) -> None:
        """Show how far something has come: a fraction in [0, 1], or None when nobody knows."""

    def close(self) -> None:
        """Leave the streams tidy, whatever happened. May be called twice."""

    def __enter__(self: _Self) -> _Self:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; a second failing write does not hide the first one."""
        with contextlib.suppress(OSError) if isinstance(error, OSError) else contextlib.nullcontext():
            self.close()


def visible(text: str) -> str:
    """``text`` with every control character but newline and tab replaced by something that can be seen."""
    return text.translate(_VISIBLE)


def encodable(text: str, encoding: str | None) -> str:
    """``text`` with what ``encoding`` (None: UTF-8) cannot hold, lone surrogates included, as backslash escapes."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.encode(encoding, "backslashreplace").decode(encoding)
    return text


def can_encode(text: str, encoding: str | None) -> bool:
    """Whether a stream of this ``encoding`` takes ``text`` as it is."""
    return encodable(text, encoding) == text


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sees this stream; a missing or closed one is no terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def is_one_file(one: TextIO, other: TextIO | None) -> bool:
    """Whether two streams write to the same pipe or file (``2>&1``)."""
    try:
        return other is not None and os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError):  # closed, or no file at all
        return False


def one_line(text: str) -> str:
    """``text`` for a line of its own: line breaks and runs of blanks become one space, controls visible."""
    return visible(" ".join(text.split()))


def write_line(stream: TextIO | None, line: str) -> None:
    """A line to stderr. Missing, closed or full, it is no reason to lose the answer."""
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):
            stream.write(encodable(line, stream.encoding) + "\n")
            stream.flush()
