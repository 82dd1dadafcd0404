"""From what the user names to files on disk: the pairs of ``models.toml``, and files inside installed packages."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs

from specli.errors import ConfigError, ModelLoadError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_PAIR = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A GGUF file inside an installed package. ``quantize``: the type of the copy that specli makes of it, or None.

    ``install``: the command that brings the package, quoted when it is missing.
    """

    package: str
    file: str
    install: str
    quantize: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft that fit each other."""

    name: str
    target: ModelSource
    draft: ModelSource
    description: str
    licence: str
    n_max: int


def load_pairs() -> dict[str, Pair]:
    """The pairs of the shipped ``models.toml`` by name."""
    text = _models_toml().read_text("utf-8")
    return {name: _pair(name, entry) for name, entry in tomllib.loads(text)["pairs"].items()}


def find_file(source: ModelSource) -> Path:
    """The file of ``source``, without importing its package. Raises ``ModelLoadError`` when it is not installed."""
    spec = importlib.util.find_spec(source.package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (path := Path(folder) / source.file).is_file():
            return path
    raise ModelLoadError(
        f"the package {source.package}, which holds {source.file}, is not installed; "
        f"run `{source.install}`, or name your own files with -m and -md"
    )


def quantized_copy(source: Path, file_type: str) -> Path:
    """Where the ``file_type`` copy of ``source`` is kept (the user's cache directory); it may not exist yet.

    The name carries a hash of the source's path, size and time, so that a changed source makes a new copy.
    """
    stat = source.stat()
    key = f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()
    folder = Path(platformdirs.user_cache_dir("specli"))
    return folder / f"{source.stem}.{file_type}-{hashlib.sha256(key).hexdigest()[:12]}.gguf"


def _models_toml() -> Path:
    """In a wheel ``models.toml`` lies inside the package; in a checkout beside it."""
    inside = Path(str(resources.files("specli"))) / "models.toml"
    return inside if inside.is_file() else inside.parent.parent / "models.toml"


def _pair(name: str, entry: Mapping[str, Any]) -> Pair:
    try:
        return Pair(
            name=name,
            target=ModelSource(**entry["target"]),
            draft=ModelSource(**entry["draft"]),
            description=entry["description"],
            licence=entry["licence"],
            n_max=entry["n_max"],
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"models.toml: the pair {name!r} is incomplete or has an unknown key: {error}") from error
