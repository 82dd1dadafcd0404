"""Measurements kept as JSON, of the bench and of the load test: what --save writes and --compare reads again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from specli.errors import ConfigError


class Document(Protocol):
    """What can be kept."""

    def as_dict(self) -> dict[str, object]:
        """JSON types only."""


def require_writable(flag: str, path: Path) -> None:
    """Raise ``ConfigError`` now rather than after an hour of measuring."""
    try:
        existed = path.exists()
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}") from error


def save(path: Path, report: Document) -> None:
    """Write the whole report. Raises ``ConfigError``."""
    try:
        path.write_text(json.dumps(report.as_dict(), ensure_ascii=False, allow_nan=False, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path} cannot be written: {error.strerror}") from error


def load(path: Path, kind: str, file_format: int, is_one: Callable[[Mapping[str, object]], bool]) -> dict[str, object]:
    """A report that was saved. Raises ``ConfigError`` for anything but one of this ``kind`` and format."""
    found = read(path)
    if not is_one(found):
        raise ConfigError(f"--compare {path} is not a {kind}; expected a file of specli bench --save")
    if found.get("format") != file_format:
        raise ConfigError(f"--compare {path} has format {found.get('format')}, expected {file_format}; measure again")
    return found


def read(path: Path) -> dict[str, object]:
    """Any JSON object, empty for JSON of another type. Raises ``ConfigError`` for what cannot be read or is no JSON."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--compare {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--compare {path} is not JSON; expected a file of specli bench --save") from error
    return found if isinstance(found, dict) else {}
