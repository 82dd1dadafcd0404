"""Ctrl-C as a flag. The first one asks everybody to stop, the second one kills.

An exception would be swallowed inside llama.cpp's callbacks and could leave a cache half written; a flag is read at
every place that may stop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupt:
    """While entered, SIGINT sets ``requested`` once; the next SIGINT has the system's own effect.

    Where SIGINT is ignored (a job in the background of a script, nohup), it stays ignored. ``patience`` is how many
    SIGINTs are taken as requests before one kills; ``before_kill`` is called then.
    """

    def __init__(self) -> None:
        self.requested = False
        self.patience = 1
        self.before_kill: Callable[[], None] = lambda: None
        self._n_seen = 0
        self._raises = False
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

    def reset(self) -> None:
        """What was requested has been done."""
        self.requested, self._n_seen = False, 0

    @contextmanager
    def as_exception(self) -> Iterator[None]:
        """SIGINT raises ``KeyboardInterrupt`` for a while: where a person is waited for, a flag would not be seen."""
        try:
            self._raises = True
            yield
        finally:
            self._raises = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._raises:
            raise KeyboardInterrupt
        self._n_seen += 1
        if self._n_seen > self.patience:
            self.before_kill()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.requested = True
