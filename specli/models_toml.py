"""Reading ``models.toml``: its entries key by key, and the line on which each stands, for messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specli.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class ModelsToml:
    """One file, and where in it things stand. Raises ``ConfigError`` when it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text("utf-8")
            self._tables = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        for name in self._tables:
            if name not in ("models", "pairs"):
                raise self.fault((name,), f"unknown table {name!r}, expected [models.NAME] and [pairs.NAME]")

    def entries(self, kind: str) -> Iterator[tuple[str, Entry]]:
        """The entries below ``[models]`` or ``[pairs]``."""
        table = self._tables.get(kind, {})
        if not isinstance(table, dict):
            raise self.fault((kind,), f"{kind} must be a table of named entries")
        for name, values in table.items():
            if not isinstance(values, dict):
                raise self.fault((kind, name), f"{kind}.{name} must be a table")
            yield name, Entry(self, (kind, name), values)

    def fault(self, keys: Sequence[str], problem: str) -> ConfigError:
        """``problem`` with the file and the line on which ``keys`` stands, or as much of it as can be found."""
        for n in range(len(keys), 0, -1):
            if (line := self._line(keys[:n])) is not None:
                return ConfigError(f"{self.path}, line {line}: {problem}")
        return ConfigError(f"{self.path}: {problem}")

    def _line(self, keys: Sequence[str]) -> int | None:
        """The first line that sets ``keys``: a header, or a key below one; tomllib does not tell."""
        table: list[str] = []
        for number, line in enumerate(self.text.splitlines(), 1):
            text = line.strip()
            is_header = text.startswith("[")
            path = _keys_of(text if is_header else text.partition("=")[0] + "= 0")
            if is_header and path:
                table = path
            if (path if is_header else [*table, *path])[: len(keys)] == list(keys) and path:
                return number
        return None


def _keys_of(line: str) -> list[str]:
    """The dotted key of one line of TOML; empty when it has none."""
    try:
        values: Any = tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return []
    keys = []
    while isinstance(values, dict) and values:
        key, values = next(iter(values.items()))
        keys.append(key)
    return keys


class Entry:
    """One table, whose keys are asked for one by one and then accounted for."""

    def __init__(self, file: ModelsToml, keys: tuple[str, ...], values: Mapping[str, Any]) -> None:
        self.file, self.keys, self._values = file, keys, values
        self._known: list[str] = []

    @property
    def name(self) -> str:
        """The entry's name; a side that a pair describes itself is called after the pair."""
        return " ".join(self.keys[1:])

    def text(self, key: str) -> str:
        """A text that must be there."""
        value = self.optional_text(key)
        if value is None:
            raise self.fault("", f"{key} is missing")
        return value

    def optional_text(self, key: str) -> str | None:
        """A text, or None."""
        value = self.get(key)
        if value is None or (isinstance(value, str) and value.strip()):
            return value
        raise self.fault(key, f"{key} is {value!r}, expected a text")

    def get(self, key: str) -> object:
        """Whatever stands there, or None."""
        self._known.append(key)
        return self._values.get(key)

    def done(self) -> None:
        """Raise ``ConfigError`` for a key that nobody asked for."""
        for key in self._values:
            if key not in self._known:
                raise self.fault(key, f"unknown key {key!r}, expected some of {', '.join(self._known)}")

    def fault(self, key: str, problem: str) -> ConfigError:
        """``problem`` with the entry's name, the file and the line of ``key``."""
        keys = (*self.keys, key) if key else self.keys
        return self.file.fault(keys, f"{'.'.join(self.keys)}: {problem}")
