"""The prompt from -p, -f or standard input, as valid text."""

from __future__ import annotations

import sys
from pathlib import Path

from specli.cli.values import unescape
from specli.errors import ConfigError


def read_prompt(prompt: str | None, file: str | None, escape: bool = False) -> str:
    """The one prompt that was given. Raises ``ConfigError`` for none, two, an empty one, or bytes that are not UTF-8.

    From a file or standard input one newline at the end is cut, as llama.cpp does. ``escape``: backslash sequences of
    -p and of a file mean what they stand for, as there; what is piped in stays as it is.
    """
    if prompt is not None and file is not None:
        raise ConfigError("both -p and -f were given, one prompt was expected; leave one out")
    if prompt is not None:
        text = unescape(prompt, "-p") if escape else prompt
    elif file is not None and file != "-":
        text = read_text_file(Path(file), "prompt")
        text = unescape(text, f"-f {file}") if escape else text
    elif file == "-" or not _is_terminal_input():
        text = _decode(sys.stdin.buffer.read() if sys.stdin else b"", "standard input")
    else:
        raise ConfigError("no prompt was given; use -p TEXT, -f FILE, or pipe one in")
    if not text:
        raise ConfigError("the prompt is empty; give some text with -p, -f or standard input")
    return text


def read_text_file(path: Path, what: str) -> str:
    """The UTF-8 text of a file without one newline at its end. Raises ``ConfigError``, which calls it the ``what``."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} file {path}: {error.strerror}") from error
    return _decode(data, str(path))


def _decode(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start}; convert it first (iconv)"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def _is_terminal_input() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
