"""Server-sent events out of bytes, however they were cut (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

MOST_BYTES = 1 << 24  # of one line; more is no event of a chat


class EventTooLong(ValueError):
    """A line longer than ``MOST_BYTES``."""


class EventParser:
    """Feed it what arrives; it gives the data of each event that is complete. Lines end in LF, CR or CRLF."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[str] = []
        self._after_cr = False
        self._is_first = True

    def feed(self, data: bytes) -> list[str]:
        """Data of the events that ``data`` completes. Raises ``EventTooLong``."""
        events: list[str] = []
        start = 0
        if self._after_cr and data:
            self._after_cr = False
            start = 1 if data[:1] == b"\n" else 0
        while start < len(data):
            ends = [at for at in (data.find(b"\n", start), data.find(b"\r", start)) if at >= 0]
            if not ends:
                self._line += data[start:]
                break
            end = min(ends)
            self._line += data[start:end]
            self._end_line(events)
            start = end + 1
            if data[end : end + 1] == b"\r":
                if start == len(data):
                    self._after_cr = True
                elif data[start : start + 1] == b"\n":
                    start += 1
        if len(self._line) > MOST_BYTES:
            raise EventTooLong(f"a line of more than {MOST_BYTES} bytes")
        return events

    def close(self) -> list[str]:
        """At the stream's end: an event whose blank line was left out, which browsers drop and servers send."""
        events: list[str] = []
        if self._line:
            self._end_line(events)
        self._end_line(events)
        return events

    def _end_line(self, events: list[str]) -> None:
        line = self._line.decode("utf-8", "replace")
        self._line.clear()
        if self._is_first:
            line, self._is_first = line.removeprefix("\ufeff"), False
        if not line:
            if self._data:
                events.append("\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(":")  # a comment has an empty name
        if name == "data":
            self._data.append(value.removeprefix(" "))
