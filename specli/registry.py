"""From what the user names to files on disk: the pairs of ``models.toml``, and files inside installed packages.

Two files are read: the ``models.toml`` that specli ships and the user's own, ``user_models_toml()``, whose entries
override by name. A mistake in either is named by file and line.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import platformdirs

from specli import hub
from specli.errors import ConfigError, ModelLoadError
from specli.hub import HubFile
from specli.models_toml import Entry, ModelsToml

DEFAULT_PAIR = "smollm2-135m"
K_LIMIT = 256  # tokens: the longest draft that the settings take


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file inside an installed package; ``install`` brings the package and is quoted when it is missing."""

    package: str
    file: str
    install: str

    def __str__(self) -> str:
        return f"{self.file} in the package {self.package}"


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file of the user's own."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


Source = PackageFile | HubFile | LocalFile


@dataclass(frozen=True, slots=True)
class Model:
    """One side of a pair. ``quantize``: the type of the copy that specli makes of it once, or None.

    ``parameters`` and ``size_gb`` (of the file, 10^9 bytes) are as its publisher states them, or None.
    """

    name: str
    title: str
    source: Source
    licence: str
    tokenizer: str
    parameters: str | None = None
    size_gb: float | None = None
    quantize: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft that fit each other.

    ``k``: the range of draft lengths to try, tokens; ``n_max``: the one that measured best, or None; ``origin``: the
    file that defines the pair.
    """

    name: str
    target: Model
    draft: Model
    description: str
    use: str
    k: tuple[int, int]
    n_max: int | None
    origin: Path

    @property
    def licence(self) -> str:
        """Both licences, or the one that both have."""
        return " / ".join(dict.fromkeys((self.target.licence, self.draft.licence)))


def user_models_toml() -> Path:
    """Where the user's own entries are looked for; it need not exist."""
    return Path(platformdirs.user_config_dir("specli")) / "models.toml"


def load_pairs() -> dict[str, Pair]:
    """The pairs by name, the shipped ones first. Raises ``ConfigError`` that names a bad entry by file and line."""
    files = [ModelsToml(_models_toml())]
    user = user_models_toml()
    if user.is_file():
        files.append(ModelsToml(user))
    models = {name: entry for file in files for name, entry in file.entries("models")}
    pairs = {name: entry for file in files for name, entry in file.entries("pairs")}
    return {name: _pair(entry, models) for name, entry in pairs.items()}


def find_pair(name: str) -> Pair:
    """The pair of that name. Raises ``ConfigError`` with the nearest names."""
    pairs = load_pairs()
    if name in pairs:
        return pairs[name]
    near = difflib.get_close_matches(name, pairs, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"there is no pair {name!r}; {hint}`specli models list` shows all {len(pairs)}")


def find_file(model: Model) -> Path:
    """The file of ``model`` on this disk: nothing is downloaded, no package imported. Raises ``ModelLoadError``."""
    source = model.source
    if isinstance(source, PackageFile):
        return _find_in_package(source)
    if isinstance(source, LocalFile):
        if source.path.is_file():
            return source.path
        raise ModelLoadError(f"{source.path}, which models.toml names for {model.name}, is not there")
    if paths := hub.cached(source):
        return paths[0]
    raise ModelLoadError(f"{source} is not on this disk; `specli models pull` downloads it")


def quantized_copy(source: Path, file_type: str) -> Path:
    """Where the ``file_type`` copy of ``source`` is kept (the user's cache directory); it may not exist yet.

    The name carries a hash of the source's path, size and time, so that a changed source makes a new copy.
    """
    stat = source.stat()
    key = f"{source.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()
    folder = Path(platformdirs.user_cache_dir("specli"))
    return folder / f"{source.stem}.{file_type}-{hashlib.sha256(key).hexdigest()[:12]}.gguf"


def _find_in_package(source: PackageFile) -> Path:
    spec = importlib.util.find_spec(source.package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        if (path := Path(folder) / source.file).is_file():
            return path
    raise ModelLoadError(
        f"the package {source.package}, which holds {source.file}, is not installed; "
        f"run `{source.install}`, or name your own files with -m and -md"
    )


def _models_toml() -> Path:
    """In a wheel ``models.toml`` lies inside the package; in a checkout beside it."""
    inside = Path(str(resources.files("specli"))) / "models.toml"
    return inside if inside.is_file() else inside.parent.parent / "models.toml"


# -- from entries to pairs


def _pair(entry: Entry, models: Mapping[str, Entry]) -> Pair:
    target, draft = (_side(entry, side, models) for side in ("target", "draft"))
    pair = Pair(
        name=entry.name,
        target=target,
        draft=draft,
        description=entry.optional_text("description") or f"{target.title}, drafted by {draft.title}",
        use=entry.text("use"),
        k=_range(entry),
        n_max=_length(entry, "n_max", entry.get("n_max")),
        origin=entry.file.path,
    )
    entry.done()
    return pair


def _side(entry: Entry, side: str, models: Mapping[str, Entry]) -> Model:
    """The target or draft of a pair: the name of a model, or a table that describes one."""
    value = entry.get(side)
    if isinstance(value, dict):
        return _model(Entry(entry.file, (*entry.keys, side), value))
    if not isinstance(value, str):
        raise entry.fault(side if value is not None else "", f"{side} must be the name of a model or a table")
    if value not in models:
        raise entry.fault(side, f"{side} names the model {value!r}, but there is no [models.{value}]")
    return _model(models[value])


def _model(entry: Entry) -> Model:
    size_gb = entry.get("size_gb")
    if size_gb is not None and (isinstance(size_gb, bool) or not isinstance(size_gb, int | float) or size_gb <= 0):
        raise entry.fault("size_gb", f"size_gb is {size_gb!r}, expected the file's size in 10^9 bytes")
    model = Model(
        name=entry.name,
        title=entry.optional_text("title") or entry.name,
        source=_source(entry),
        licence=entry.text("licence"),
        tokenizer=entry.text("tokenizer"),
        parameters=entry.optional_text("parameters"),
        size_gb=size_gb,
        quantize=entry.optional_text("quantize"),
    )
    entry.done()
    return model


def _source(entry: Entry) -> Source:
    package, repo, path = (entry.optional_text(key) for key in ("package", "repo", "path"))
    file, quant, revision = (entry.optional_text(key) for key in ("file", "quant", "revision"))
    install = entry.optional_text("install")
    if sum(place is not None for place in (package, repo, path)) != 1:
        raise entry.fault("", "expected one of package, repo and path, which say where the file is")
    if repo is not None:
        try:
            return HubFile(hub.parse_reference(repo, "repo").repo, quant, file, revision)
        except ConfigError as error:
            raise entry.fault("repo", str(error)) from error
    if path is not None:
        return LocalFile(Path(path).expanduser())
    if package is None or file is None or install is None:
        raise entry.fault("package", "a file in a package needs package, file and install")
    return PackageFile(package, file, install)


def _range(entry: Entry) -> tuple[int, int]:
    value = entry.get("k")
    if value is None:
        raise entry.fault("", "k is missing")
    if not isinstance(value, list) or len(value) != 2:
        raise entry.fault("k", f"k is {value!r}, expected the shortest and the longest draft to try, as [2, 8]")
    low, high = (_length(entry, "k", number) for number in value)
    if low is None or high is None or low > high:
        raise entry.fault("k", f"k is {value!r}, expected the shorter length first")
    return low, high


def _length(entry: Entry, key: str, value: object) -> int | None:
    """A draft length in tokens, or None where there is none."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= K_LIMIT):
        return value
    raise entry.fault(key, f"{key} has {value!r}, expected 1 to {K_LIMIT} tokens")
