"""What a person types: lines with editing and history on a terminal, messages of one or more lines."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from specli.cli.interrupt import Interrupt
from specli.errors import Cancelled, ConfigError

PROMPT, MORE = "> ", "... "
QUOTES = '"""'
HISTORY_LENGTH = 1000  # lines

ReadLine = Callable[[str], str | None]  # the prompt -> a line without its newline, None at the end


class Lines(Protocol):
    """Where lines come from."""

    is_terminal: bool

    def read(self, prompt: str) -> str | None:
        """The next line without its newline, None at the end. Raises ``KeyboardInterrupt`` for Ctrl-C."""


def read_message(lines: Lines) -> str | None:
    r"""One message; None at the end of the input, or when a person ends it in the middle of one.

    A line that ends in a backslash goes on in the next one. A message that begins with three double quotes goes on to
    the next three at the end of a line. A pasted line may hold newlines itself.
    """
    line = lines.read(PROMPT)
    if line is None:
        return None
    is_block = line.lstrip().startswith(QUOTES)
    if is_block:
        line = line.lstrip().removeprefix(QUOTES)
    parts: list[str] = []
    while not _is_last(line, is_block):
        parts.append(line if is_block else line[:-1])
        following = lines.read(MORE)
        if following is None:
            return None if lines.is_terminal else "\n".join(parts)
        line = following
    parts.append(line.rstrip().removesuffix(QUOTES) if is_block else line)
    return "\n".join(parts).strip("\n") if is_block else "\n".join(parts)


def _is_last(line: str, is_block: bool) -> bool:
    return line.rstrip().endswith(QUOTES) if is_block else not line.endswith("\\")


class PipedLines:
    """Lines of a pipe or file, without prompts."""

    is_terminal = False

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def read(self, _prompt: str) -> str | None:
        """See ``Lines.read``. Raises ``ConfigError`` for bytes that are not UTF-8, and ``Cancelled`` for Ctrl-C."""
        try:
            with self._interrupt.as_exception():
                data = sys.stdin.buffer.readline() if sys.stdin else b""
        except KeyboardInterrupt:
            raise Cancelled("stopped while waiting for a message") from None
        try:
            line = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"standard input is not UTF-8: byte {data[error.start]:#04x} in a message; convert it first (iconv)"
            ) from error
        return line.removesuffix("\n").removesuffix("\r") if data else None


class TerminalLines:
    """Lines from a person, edited and remembered where Python has readline. Use it as a context manager.

    The prompt goes where a person sees it: readline's own terminal, or stderr when stdout is redirected.
    """

    is_terminal = True

    def __init__(self, interrupt: Interrupt, history: Path | None) -> None:
        self._interrupt = interrupt
        self._has_editor = sys.stdout.isatty()
        self._history = History(history) if self._has_editor else None

    def read(self, prompt: str) -> str | None:
        """See ``Lines.read``. Input that is not UTF-8 raises ``ConfigError``."""
        try:
            with self._interrupt.as_exception():
                line = input(prompt) if self._has_editor else _plain_input(prompt)
            line.encode("utf-8")  # no lone surrogates from bytes that are not UTF-8
        except EOFError:
            print(file=sys.stderr)
            return None
        except UnicodeError as error:
            raise ConfigError("that line is not UTF-8; type or paste it again") from error
        if self._history is not None:
            self._history.add(line)
        return line


def _plain_input(prompt: str) -> str:
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


class History:
    """Lines of this and earlier chats, for readline. Without readline, or where ``path`` cannot be used, less is kept.

    The file has one entry per line, newlines in it escaped, and is its owner's alone to read.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._readline: Any = None
        self._last = ""
        try:
            import readline
        except ImportError:  # Windows, where the console edits lines itself
            return
        self._readline = readline
        readline.set_auto_history(False)
        for entry in self._load():
            readline.add_history(entry)

    def add(self, line: str) -> None:
        """Remember a line, unless it is empty or the last one again."""
        if not line.strip() or line == self._last or self._readline is None:
            return
        self._last = line
        self._readline.add_history(line)
        with contextlib.suppress(OSError):
            self._append(_escape(line) + "\n")

    def _load(self) -> list[str]:
        """The last entries; a file that has grown long is cut to them."""
        if self._path is None:
            return []
        with contextlib.suppress(OSError):
            lines = self._path.read_text("utf-8", "replace").removesuffix("\n").split("\n")
            if len(lines) > 2 * HISTORY_LENGTH:
                self._path.write_text("".join(f"{line}\n" for line in lines[-HISTORY_LENGTH:]), "utf-8")
            return [_unescape(line) for line in lines[-HISTORY_LENGTH:] if line]
        return []

    def _append(self, text: str) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(text)


def _escape(line: str) -> str:
    return line.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _unescape(line: str) -> str:
    parts = (part.replace("\\n", "\n").replace("\\r", "\r") for part in line.split("\\\\"))
    return "\\".join(parts)


def history_path() -> Path | None:
    """The file of chat lines in the platform's state directory; None where there is none."""
    from platformdirs import user_state_path

    with contextlib.suppress(OSError, RuntimeError):
        return user_state_path("specli", appauthor=False) / "chat_history"
    return None


@contextmanager
def silent_typing(interrupt: Interrupt) -> Iterator[None]:
    """What is typed meanwhile is not echoed into the answer; it waits for the next prompt."""
    try:
        import termios
    except ImportError:
        yield
        return
    try:
        descriptor = sys.stdin.fileno()
        saved = termios.tcgetattr(descriptor)
    except (OSError, ValueError, AttributeError, termios.error):
        yield
        return

    def restore() -> None:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, saved)

    quiet = [*saved]
    quiet[3] &= ~termios.ECHO
    interrupt.before_kill = restore
    try:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSANOW, quiet)
        yield
    finally:
        restore()
        interrupt.before_kill = lambda: None
