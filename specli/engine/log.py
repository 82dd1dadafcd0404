"""llama.cpp's log: kept in memory, shown on demand, its last error line quoted in our messages."""

from __future__ import annotations

import ctypes
import re
import sys
from collections import deque

import llama_cpp

_ERROR, _CONTINUED = 4, 5  # ggml_log_level
_N_LINES = 2000
_NO_REASONS = ("failed to load model", "failed to create context with model")  # said behind the reason
_FUNCTION = re.compile(r"^\w+: +(?=\S)")


class LlamaLog:
    """Takes llama.cpp's log from the moment it is made; ``verbose`` also writes it to stderr."""

    def __init__(self) -> None:
        self.verbose = False
        self.lines: deque[tuple[int, str]] = deque(maxlen=_N_LINES)
        self._callback = llama_cpp.llama_log_callback(self._on_log)  # llama.cpp keeps the pointer: so must we
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def last_error(self) -> str | None:
        """The last error line that gives a reason, without the function name that llama.cpp puts before it."""
        errors = [_FUNCTION.sub("", line.strip()) for level, line in self.lines if level == _ERROR and line.strip()]
        reasons = [line for line in errors if line not in _NO_REASONS]
        return next(reversed(reasons or errors), None)

    def has(self, words: str) -> bool:
        """Whether a line since ``clear`` has these words."""
        return any(words in line for _level, line in self.lines)

    def clear(self) -> None:
        """Forget the lines so far, so that an error quoted later belongs to what failed."""
        self.lines.clear()

    def _on_log(self, level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
        line = text.decode("utf-8", "replace")
        if level == _CONTINUED and self.lines:
            last_level, last = self.lines[-1]
            self.lines[-1] = (last_level, last + line)
        else:
            self.lines.append((level, line))
        if self.verbose:
            sys.stderr.write(line)


LOG = LlamaLog()
