"""GGUF files in the repositories of a hub: which files a name means, what is on disk, and fetching the rest.

``huggingface_hub`` does the talking (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HF_HUB_CACHE are its variables) and owns
the cache, so files that it or llama.cpp fetched are found. One thing is done here: a transfer that ends early leaves
``blobs/<etag>.incomplete``, and the next one goes on from there. ``hf_hub_download`` did that until version 1.20, which
writes to a file of its own and throws it away. The import takes 0.3 s, so it waits until something is to be fetched.
"""

from __future__ import annotations

import errno
import hashlib
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from specli.errors import Cancelled, ConfigError, ModelLoadError, SpecError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

Progress = Callable[[str, int, int], None]  # (file name, bytes on disk, bytes of the file)
Notice = Callable[[str], None]

DEFAULT_QUANTS = ("Q4_K_M", "Q8_0")  # what llama.cpp looks for when -hf names no quant
CHUNK_BYTES = 1 << 20  # between two progress reports, and the most that Ctrl-C loses; huggingface_hub's own is 10 MiB
_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<quant>[\w.-]+))?", re.ASCII)
_SPLIT = re.compile(r"(?P<prefix>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
# Parts of other things than a model (projector, importance matrix, sidecar drafters), as llama.cpp tells them apart.
_NO_MODEL = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")
_N_NAMED = 8  # file names quoted in a message
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class HubFile:
    """A GGUF file, perhaps split, in a repository. ``file`` decides over ``quant``; neither: llama.cpp's default."""

    repo: str
    quant: str | None = None
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        tail = f"/{self.file}" if self.file else f":{self.quant}" if self.quant else ""
        return f"{self.repo}{tail}" + (f" at {self.revision}" if self.revision else "")

    @property
    def leaves_choice(self) -> bool:
        """Whether the repository's contents decide which file it is."""
        return self.file is None and self.quant is None


def parse_reference(text: str, flag: str = "-hf") -> HubFile:
    """``user/model[:quant]``, as llama.cpp's -hf. Raises ``ConfigError``."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{flag} got {text!r}, expected USER/MODEL or USER/MODEL:QUANT, such as org/name-GGUF:Q4_K_M")
    return HubFile(match["repo"], match["quant"])


def choose(names: Iterable[str], wanted: HubFile) -> list[str]:
    """Which of a repository's files ``wanted`` means: all shards, the first one first; empty when there is none.

    llama.cpp's rule (``common/download.cpp``): the named file; else the first name with the quant before a dot or
    hyphen, whatever its case; without a quant Q4_K_M, then Q8_0, then the first model. Names are taken in order.
    """
    names = sorted(names)
    if wanted.file is not None:
        return _shards(names, wanted.file) if wanted.file in names else []
    models = [name for name in names if _is_model(name)]
    for quant in (wanted.quant,) if wanted.quant else DEFAULT_QUANTS:
        pattern = re.compile(re.escape(quant) + "[.-]", re.IGNORECASE)
        if first := next((name for name in models if pattern.search(name)), None):
            return _shards(names, first)
    return _shards(names, models[0]) if models and wanted.quant is None else []


def cached(wanted: HubFile) -> list[Path]:
    """The files on this disk, first shard first, without asking anybody; empty unless all of them are there."""
    folder = _snapshot(wanted)
    if folder is None:
        return []
    here = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.gguf") if path.is_file()}
    names = choose(here, wanted)
    return [here[name] for name in names] if names and len(names) == _n_shards(names[0]) else []


def fetch(
    wanted: HubFile,
    *,
    token: str | None = None,
    progress: Progress = lambda _name, _done, _size: None,
    notice: Notice = lambda _line: None,
    refresh: bool = False,
) -> list[Path]:
    """The files on this disk, first shard first; what is missing is downloaded, going on where a transfer stopped.

    What is on disk is used without asking the hub, unless ``refresh`` is set or the hub's list decides which file it
    is. When nobody can be reached, what is on disk has to do. Raises ``ModelLoadError``, ``Cancelled`` (Ctrl-C).
    """
    settled = replace(wanted, quant=DEFAULT_QUANTS[0]) if wanted.leaves_choice else wanted
    if not refresh and (paths := cached(settled)):
        return paths
    _quiet()
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        if paths := cached(wanted):
            return paths
        raise ModelLoadError(
            f"{wanted} is not on this disk and HF_HUB_OFFLINE is set, so it cannot be fetched; unset it, or use -m FILE"
        )
    try:
        listing = _list(wanted, token)
        _download(wanted, listing, token, progress)
    except KeyboardInterrupt:
        raise Cancelled(f"stopped while fetching {wanted}; what came stays, the same command goes on there") from None
    except Exception as error:
        problem = _explain(error, wanted)
        if isinstance(problem, _Unreachable) and (paths := cached(wanted)):
            notice(f"{problem}; using what is on disk")
            return paths
        raise problem from error
    return [Path(path) for path in listing.paths]


class _Unreachable(ModelLoadError):
    """Nobody answered."""


@dataclass(frozen=True, slots=True)
class _Remote:
    """A file as the hub lists it; ``etag`` names its blob in the cache."""

    name: str
    size: int
    etag: str


@dataclass(slots=True)
class _Listing:
    """What of a repository is wanted, at one commit; ``paths`` fills while it is fetched."""

    commit: str
    files: list[_Remote]
    paths: list[str]


def _list(wanted: HubFile, token: str | None) -> _Listing:
    """Ask the hub which files there are, and choose."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(
        wanted.repo, revision=wanted.revision, files_metadata=True, token=token, timeout=_TIMEOUT_S
    )
    remote = {sibling.rfilename: _remote(sibling) for sibling in info.siblings or ()}
    names = choose(remote, wanted)
    if not names:
        raise ModelLoadError(f"{wanted} is not in that repository; GGUF files there: {_some(remote)}")
    if (n_shards := _n_shards(names[0])) != len(names):
        raise ModelLoadError(f"{wanted} is split into {n_shards} files, but {wanted.repo} holds {len(names)} of them")
    return _Listing(str(info.sha), [remote[name] for name in names], [])


def _remote(sibling: RepoSibling) -> _Remote:
    etag = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or ""
    return _Remote(sibling.rfilename, sibling.size or 0, etag)


def _download(wanted: HubFile, listing: _Listing, token: str | None, progress: Progress) -> None:
    """Bring every file that is missing into the cache."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    storage = _storage(wanted.repo)
    missing = []
    for file in listing.files:
        path = try_to_load_from_cache(wanted.repo, file.name, revision=listing.commit)
        if not isinstance(path, str):
            missing.append(file)
    _check_space(storage, missing)
    for file in listing.files:
        if file in missing:
            _fill_blob(wanted, listing.commit, storage, file, token, progress)
        path = hf_hub_download(wanted.repo, file.name, revision=wanted.revision, token=token)
        listing.paths.append(path)


def _fill_blob(
    wanted: HubFile, commit: str, storage: Path, file: _Remote, token: str | None, progress: Progress
) -> None:
    """Fetch one file to where ``hf_hub_download`` looks for it."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    bar = _progress_bar(lambda done: progress(file.name, done, file.size))
    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:  # the hub serves these in its own protocol only: no resuming
        hf_hub_download(wanted.repo, file.name, revision=commit, token=token, tqdm_class=cast("Any", bar))
        return
    url = hf_hub_url(wanted.repo, file.name, revision=commit)
    metadata = get_hf_file_metadata(url, token=token, timeout=_TIMEOUT_S)
    if metadata.etag is None or metadata.size is None:
        raise ModelLoadError(f"{constants.ENDPOINT} sent no ETag or size for {file.name}; HF_ENDPOINT must name a hub")
    blob = storage / "blobs" / metadata.etag
    lock = storage.parent / ".locks" / storage.name / f"{metadata.etag}.lock"
    for folder in (blob.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            partial = blob.with_name(f"{metadata.etag}.incomplete")
            _go_on(url, partial, metadata.size, token, bar)
            _check_sum(partial, metadata.etag, file.name)
            partial.replace(blob)
    progress(file.name, metadata.size, metadata.size)


def _go_on(url: str, partial: Path, size: int, token: str | None, bar: type[object]) -> None:
    """Append to ``partial`` what it lacks of ``size`` bytes, as long as something comes.

    ``http_get`` tries again by itself, but not after every way in which a connection can break.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    headers: dict[str, Any] = dict(build_hf_headers(token=token))
    with partial.open("ab") as file:
        if file.tell() > size:  # of another file
            file.seek(0)
            file.truncate()
        while True:
            done = file.tell()
            try:
                http_get(url, file, resume_size=done, headers=headers, expected_size=size, tqdm_class=cast("Any", bar))
            except _http_error() as error:
                if isinstance(error, HfHubHTTPError) or file.tell() <= done:
                    raise
            else:
                return


def _http_error() -> type[Exception]:
    """The base of what the HTTP library raises: httpx in version 1 of the client, httpx2 in version 2."""
    from huggingface_hub.errors import HfHubHTTPError

    return next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")


def _check_sum(partial: Path, etag: str, name: str) -> None:
    """Compare with the SHA-256 that the hub gives large files: parts may come from transfers days apart."""
    if re.fullmatch("[0-9a-f]{64}", etag) is None:
        return
    digest = hashlib.sha256()
    with partial.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != etag:
        partial.unlink()
        raise ModelLoadError(f"{name} arrived damaged (its SHA-256 is not the hub's) and was removed; run it again")


def _check_space(storage: Path, missing: Sequence[_Remote]) -> None:
    """Raise ``ModelLoadError`` when the disk cannot hold what is to come."""
    kept = 0
    for file in missing:
        partial = storage / "blobs" / f"{file.etag}.incomplete"
        kept += min(partial.stat().st_size, file.size) if partial.is_file() else 0
    needed = sum(file.size for file in missing) - kept
    folder = next(path for path in (storage, *storage.parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadError(
            f"{format_bytes(needed)} are to be downloaded to {storage.parent}, where {format_bytes(free)} are free; "
            f"make room for {format_bytes(needed - free)} more, or set HF_HUB_CACHE to a folder on another disk"
        )


def format_bytes(n: float) -> str:
    """``4.92 GB``: decimal units, three digits."""
    for unit in ("bytes", "kB", "MB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB" if n < 999.5 else f"{n:.0f} GB"


def _explain(error: Exception, wanted: HubFile) -> SpecError:
    """One line for whatever the client raised."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    how_to_log_in = "set HF_TOKEN or give -hft TOKEN"
    if isinstance(error, SpecError):
        return error
    if isinstance(error, errors.HFValidationError):
        return ConfigError(f"{wanted.repo!r} is no repository name ({error}); expected USER/MODEL")
    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(
            f"{wanted.repo} is gated: accept its licence on its page at {endpoint}, then {how_to_log_in}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        revision = wanted.revision or "main"
        return ModelLoadError(f"{wanted.repo} has no revision {revision}; name a branch, tag or commit")
    if isinstance(error, errors.RepositoryNotFoundError):
        return ModelLoadError(
            f"{endpoint} shows no repository {wanted.repo}; check the name, or, if it is private or gated, "
            f"{how_to_log_in}"
        )
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        todo = {401: how_to_log_in, 403: how_to_log_in, 404: "check the name"}.get(status, "try again later")
        return ModelLoadError(f"{endpoint} answered {status} for {wanted}; {todo}")
    if isinstance(error, (errors.LocalEntryNotFoundError, _http_error())):
        return _Unreachable(f"{endpoint} cannot be reached for {wanted} ({_reason(error)}); run it again to go on")
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return ModelLoadError(f"the disk is full; free some space, and run it again to go on with {wanted}")
    if isinstance(error, OSError) and error.errno is not None:
        return ModelLoadError(f"{error.filename or wanted} cannot be written: {error.strerror}")
    return ModelLoadError(f"{wanted} could not be fetched ({_reason(error)}); run it again to go on")


def _reason(error: BaseException) -> str:
    """The innermost cause, on one line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return " ".join(str(error).split()) or type(error).__name__


def _quiet() -> None:
    """Leave the terminal to us: no warnings from the client."""
    from huggingface_hub.utils import logging

    logging.set_verbosity(logging.ERROR)


def _progress_bar(report: Callable[[int], None]) -> type[object]:
    """A class that the client takes for tqdm: it draws nothing and tells ``report`` the bytes on disk."""

    class Bar:
        total: int | None = None

        def __init__(self, initial: int = 0, **_options: object) -> None:
            self.n = initial
            report(initial)

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_error: object) -> None:
            pass

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            report(self.n)

        def ignore(self, *_arguments: object, **_options: object) -> None:
            pass

        # Files over 50 GB: the bytes on the wire, and speeds.
        update_transfer = set_postfix_str = set_transfer_postfix_str = close = ignore

    return Bar


def _storage(repo: str) -> Path:
    """The repository's folder in the cache, which llama.cpp shares."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / ("models--" + repo.replace("/", "--"))


def _snapshot(wanted: HubFile) -> Path | None:
    """The folder of the last commit that was fetched of the wanted revision."""
    storage = _storage(wanted.repo)
    revision = wanted.revision or "main"
    try:
        commit = (storage / "refs" / revision).read_text("utf-8").strip()
    except (OSError, ValueError):
        commit = revision
    folder = storage / "snapshots" / commit
    return folder if folder.is_dir() else None


def _is_model(name: str) -> bool:
    file = name.rpartition("/")[2]
    return file.endswith(".gguf") and not any(part in file for part in _NO_MODEL)


def _shards(names: Iterable[str], name: str) -> list[str]:
    """The files that ``name`` is split into, in order; itself when it is whole."""
    split = _SPLIT.fullmatch(name)
    if split is None:
        return [name]
    found = (match for match in map(_SPLIT.fullmatch, names) if match)
    return sorted(m[0] for m in found if (m["prefix"], m["count"]) == (split["prefix"], split["count"]))


def _n_shards(name: str) -> int:
    split = _SPLIT.fullmatch(name)
    return int(split["count"]) if split else 1


def _some(names: Mapping[str, object]) -> str:
    """The first few GGUF files, for a message."""
    files = sorted(name for name in names if name.endswith(".gguf"))
    more = f" and {len(files) - _N_NAMED} more" if len(files) > _N_NAMED else ""
    return (", ".join(files[:_N_NAMED]) + more) or "none"
