"""Ctrl-C as a flag. The first one asks everybody to stop, the second one kills.

An exception would be swallowed inside llama.cpp's callbacks and could leave a cache half written; a flag is read at
every place that may stop.
"""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType


class Interrupt:
    """While entered, SIGINT sets ``requested`` once; the next SIGINT has the system's own effect.

    Where SIGINT is ignored (a job in the background of a script, nohup), it stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: signal._HANDLER = None

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.requested

    def __enter__(self) -> Interrupt:
        self._previous = signal.getsignal(signal.SIGINT)
        if self._previous is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.requested:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
