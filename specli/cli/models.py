"""Which files a command works on: what the user named, or the default pair, made ready."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import typer

from specli import hub, registry
from specli.config import ModelOptions, Settings
from specli.errors import ConfigError, ModelLoadError
from specli.hub import HubFile
from specli.prepare import quantized
from specli.registry import Model


class Console(Protocol):
    """Who is told what happens; a ``Renderer`` is one."""

    def notice(self, text: str) -> None:
        """One line."""

    def progress(self, label: str, fraction: float | None) -> None:
        """How far something has come, in [0, 1]."""

    def close(self) -> None:
        """Take the progress away."""


@dataclass(frozen=True)
class ModelChoice:
    """How the user named the models; None where a flag was not given. Nothing at all: the default pair.

    The fields carry the names of the command's parameters.
    """

    model: Path | None = None  # -m
    draft_model: Path | None = None  # -md
    hf_repo: str | None = None  # -hf
    hf_file: str | None = None  # -hff
    hf_repo_draft: str | None = None  # -hfd
    hf_token: str | None = None  # -hft
    pair: str | None = None  # --pair

    @classmethod
    def of(cls, context: typer.Context) -> ModelChoice:
        """What ``context`` says; a flag beats an environment variable that names the same thing another way."""
        values = {field.name: context.params.get(field.name) for field in dataclasses.fields(cls)}
        origins = {name: getattr(context.get_parameter_source(name), "name", "") for name in values}
        for names in (("model", "hf_repo", "hf_file", "pair"), ("draft_model", "hf_repo_draft", "pair")):
            typed = {name for name in names if origins[name] == "COMMANDLINE" and values[name] is not None}
            kept = {"hf_repo"} if typed == {"hf_file"} else set()
            if typed:
                values.update({name: None for name in {*names} - kept if origins[name] == "ENVIRONMENT"})
        for name in ("model", "draft_model"):
            if (value := values[name]) is not None:
                values[name] = Path(value)  # older Typers keep a str in the context
        return cls(**values)

    def __post_init__(self) -> None:
        targets = {"-m": self.model, "-hf": self.hf_repo, "--pair": self.pair}
        drafts = {"-md": self.draft_model, "-hfd": self.hf_repo_draft}
        for side, named in (("target", targets), ("draft", drafts)):
            given = [flag for flag, value in named.items() if value is not None]
            if len(given) > 1:
                raise ConfigError(f"{' and '.join(given)} were given, but each names the {side}; keep one of them")
        if self.hf_file is not None and self.hf_repo is None:
            raise ConfigError("-hff names a file in a hub repository, but -hf was not given; add -hf USER/MODEL")
        for flag, text in (("-hf", self.hf_repo), ("-hfd", self.hf_repo_draft)):
            if text is not None:
                hub.parse_reference(text, flag)

    def flags(self) -> tuple[str, ...]:
        """The flags that name the same models; empty for the default pair. The token is left out."""
        names = {"model": "-m", "draft_model": "-md", "hf_repo": "-hf", "hf_file": "-hff", "hf_repo_draft": "-hfd"}
        values = [(flag, getattr(self, name)) for name, flag in {**names, "pair": "--pair"}.items()]
        return tuple(part for flag, value in values if value is not None for part in (flag, str(value)))

    @property
    def is_pair(self) -> bool:
        """Whether the target comes from a pair, and with it the draft unless the user names one."""
        return self.model is None and self.hf_repo is None


def resolve_models(
    settings: Settings,
    choice: ModelChoice,
    console: Console,
    cancelled: Callable[[], bool],
) -> Settings:
    """``settings`` with the files that ``choice`` names, downloaded where they are on the hub.

    A draft is looked for only where ``settings`` has one and uses it. Raises ``ConfigError``, ``ModelLoadError``,
    ``Cancelled``.
    """
    pair = registry.find_pair(choice.pair or registry.DEFAULT_PAIR) if choice.is_pair else None
    target, draft = settings.target, settings.draft
    if choice.hf_repo is not None:
        wanted = dataclasses.replace(hub.parse_reference(choice.hf_repo), file=choice.hf_file)
        target = _at(target, fetch(wanted, console, choice.hf_token))
    elif pair is not None:
        path, name = prepare_source(pair.target, console.notice, cancelled, console, choice.hf_token)
        target = dataclasses.replace(target, path=path, name=name)
    if draft is not None and choice.draft_model is None:
        if not settings.speculation.uses_draft:
            draft = None
        elif choice.hf_repo_draft is not None:
            draft = _at(draft, fetch(hub.parse_reference(choice.hf_repo_draft, "-hfd"), console, choice.hf_token))
        else:
            draft = _at(draft, locate(pair.draft, console, choice.hf_token)) if pair is not None else None
    return dataclasses.replace(settings, target=target, draft=draft)


def prepare_source(
    model: Model,
    notice: Callable[[str], None],
    cancelled: Callable[[], bool],
    console: Console | None = None,
    token: str | None = None,
) -> tuple[Path, str]:
    """The file of ``model`` and what to call it, requantized once where the pair says so.

    ``console`` None: nothing is downloaded.
    """
    path = locate(model, console, token) if console is not None else registry.find_file(model)
    path = quantized(model, path, notice, cancelled)
    return path, path.name


def locate(model: Model, console: Console, token: str | None = None) -> Path:
    """The file of ``model``, downloaded if the hub has it and the disk has not."""
    if isinstance(model.source, HubFile):
        return fetch(model.source, console, token)
    return registry.find_file(model)


def find_model(name: str, console: Console, token: str | None = None) -> Path:
    """The file that ``name`` means where no pair is asked for: a path that exists, else ``user/model[:quant]``.

    Raises ``ModelLoadError`` when it is neither.
    """
    if Path(name).exists():
        return Path(name)
    try:
        wanted = hub.parse_reference(name, "-m")
    except ConfigError:
        raise ModelLoadError(f"{name} is not there; expected a GGUF file, or USER/MODEL[:QUANT] on the hub") from None
    return fetch(wanted, console, token)


def fetch(wanted: HubFile, console: Console, token: str | None = None) -> Path:
    """A hub file on this disk (its first shard), with ``console`` told how the download goes. Ctrl-C stops at once."""
    announced = set[str]()

    def progress(name: str, done: int, size: int) -> None:
        if name not in announced and done < size:
            announced.add(name)
            console.notice(f"downloading {name} ({hub.format_bytes(size)}) of {wanted.repo}")
        label = f"{name}, {hub.format_bytes(done)} of {hub.format_bytes(size)}"
        console.progress(label, done / size if size else None)

    with ctrl_c_raises():
        try:
            return hub.fetch(wanted, token=token, progress=progress, notice=console.notice)[0]
        finally:
            console.close()


@contextmanager
def ctrl_c_raises() -> Iterator[None]:
    """Ctrl-C as an exception for a while: a flag would wait for a server that does not answer."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _at(options: ModelOptions, path: Path) -> ModelOptions:
    return dataclasses.replace(options, path=path, name="")
