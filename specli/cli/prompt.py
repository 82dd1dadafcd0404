"""The prompt from -p, -f or standard input, as valid text."""

from __future__ import annotations

import sys
from pathlib import Path

from specli.errors import ConfigError


def read_prompt(prompt: str | None, file: str | None) -> str:
    """The one prompt that was given. Raises ``ConfigError`` for none, two, an empty one, or bytes that are not UTF-8.

    From a file or standard input one newline at the end is cut, as llama.cpp does.
    """
    if prompt is not None and file is not None:
        raise ConfigError("both -p and -f were given, one prompt was expected; leave one out")
    if prompt is not None:
        text = prompt
    elif file is not None and file != "-":
        text = _decode(_read_file(Path(file)), file)
    elif file == "-" or not _is_terminal_input():
        text = _decode(sys.stdin.buffer.read() if sys.stdin else b"", "standard input")
    else:
        raise ConfigError("no prompt was given; use -p TEXT, -f FILE, or pipe one in")
    if not text:
        raise ConfigError("the prompt is empty; give some text with -p, -f or standard input")
    return text


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the prompt file {path}: {error.strerror}") from error


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
