"""``specli models``: the pairs of ``models.toml``, what they are, what is on disk, and fetching the rest."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from specli import hub, registry
from specli.cli import options as o
from specli.cli.models import ctrl_c_raises
from specli.errors import ConfigError, ModelLoadError
from specli.hub import HubFile
from specli.registry import Model, PackageFile, Pair

if TYPE_CHECKING:
    from rich.console import Console

FORMATS = ("table", "json")
PIPE_WIDTH = 200  # columns of a table that no terminal shows
_HERE, _PART, _ABSENT = "both", "one of two", "-"

app = typer.Typer(help="The pairs that specli knows, and their files.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="A pair's name, as `specli models list` shows it.")]
Wanted = Annotated[
    str, typer.Argument(metavar="NAME", help="A pair's name, or USER/MODEL[:QUANT] for one file of the hub.")
]


@app.callback(invoke_without_command=True)
def _models(context: typer.Context) -> None:
    """The pairs that specli knows, and their files; `list` when no command is given."""
    if context.invoked_subcommand is None:
        list_pairs()


@app.command("list")
def list_pairs(output: o.Output = FORMATS[0], debug: o.Debug = False) -> None:
    """List all pairs: sizes, draft lengths to try, tokenizer, licence, use, and what is on disk."""
    _check_format(output)
    pairs = list(registry.load_pairs().values())
    if output == "json":
        _print_json([_pair_dict(pair) for pair in pairs])
        return
    _print_table(pairs)
    typer.echo(f"\nyour own entries: {registry.user_models_toml()}", err=True)


@app.command("show")
def show(name: Name, output: o.Output = FORMATS[0], debug: o.Debug = False) -> None:
    """Show one pair: where its files are, their sizes and licences, and how to run it."""
    _check_format(output)
    pair = registry.find_pair(name)
    if output == "json":
        _print_json(_pair_dict(pair))
        return
    measured = f", {pair.n_max} measured best" if pair.n_max is not None else ""
    rows = [
        ("pair", pair.name),
        ("", pair.description),
        ("use", pair.use),
        ("draft length K", f"{pair.k[0]} to {pair.k[1]} tokens{measured}"),
        *_model_rows("target", pair.target),
        *_model_rows("draft", pair.draft),
        ("defined in", str(pair.origin)),
        ("run", f"specli run --pair {pair.name} -p ..."),
    ]
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        typer.echo(f"{key:{width}}  {value}".rstrip())


@app.command("pull")
def pull(wanted: Wanted, hf_token: o.HfToken = None, debug: o.Debug = False) -> None:
    """Download a pair's files from the hub; a transfer that was stopped goes on where it was.

    The paths are printed on stdout. HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_OFFLINE have their usual meaning.
    """
    sources: list[Model | HubFile] = []
    if "/" in wanted:
        sources.append(hub.parse_reference(wanted, "pull"))
    else:
        pair = registry.find_pair(wanted)
        sources += [pair.target, pair.draft]
    for source in sources:
        remote = source.source if isinstance(source, Model) else source
        if isinstance(remote, HubFile):
            with _bars() as progress, ctrl_c_raises():
                paths = hub.fetch(remote, token=hf_token, progress=progress, notice=_say, refresh=True)
        else:
            assert isinstance(source, Model)
            paths = [registry.find_file(source)]
        for path in paths:
            typer.echo(path)


def _print_table(pairs: Sequence[Pair]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for heading in ("pair", "target", "draft", "K", "on disk", "tokenizer", "licence", "use"):
        table.add_column(heading, no_wrap=heading in ("pair", "K"))
    for pair in pairs:
        sizes = (_size(pair.target), _size(pair.draft))
        lengths = f"{pair.k[0]}-{pair.k[1]}"
        table.add_row(pair.name, *sizes, lengths, _on_disk(pair), pair.target.tokenizer, pair.licence, pair.use)
    console = _console(sys.stdout)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        typer.echo(line.rstrip())


def _check_format(output: str) -> None:
    if output not in FORMATS:
        raise ConfigError(f"-o/--output got {output!r}, expected one of {', '.join(FORMATS)}")


def _size(model: Model) -> str:
    """``70B 42.5 GB``, as much of it as is documented."""
    size = hub.format_bytes(model.size_gb * 1e9) if model.size_gb is not None else ""
    return f"{model.parameters or ''} {size}".strip() or "?"


def _path(model: Model) -> Path | None:
    """Where the model's file is on this disk, or None."""
    try:
        return registry.find_file(model)
    except ModelLoadError:
        return None


def _on_disk(pair: Pair) -> str:
    n = sum(_path(model) is not None for model in (pair.target, pair.draft))
    return (_ABSENT, _PART, _HERE)[n]


def _model_rows(side: str, model: Model) -> list[tuple[str, str]]:
    path = _path(model)
    place = f"hub: {model.source}" if isinstance(model.source, HubFile) else str(model.source)
    facts = ", ".join(fact for fact in (_size(model), model.licence, f"tokenizer {model.tokenizer}") if fact != "?")
    return [
        (side, f"{model.title} ({facts})"),
        ("", place),
        ("", f"on disk: {path}" if path is not None else "not on this disk"),
    ]


def _pair_dict(pair: Pair) -> dict[str, Any]:
    return {
        "name": pair.name,
        "description": pair.description,
        "use": pair.use,
        "k": list(pair.k),
        "n_max": pair.n_max,
        "licence": pair.licence,
        "tokenizer": pair.target.tokenizer,
        "target": _model_dict(pair.target),
        "draft": _model_dict(pair.draft),
        "defined_in": str(pair.origin),
    }


def _model_dict(model: Model) -> dict[str, Any]:
    source, path = model.source, _path(model)
    place: dict[str, Any]
    if isinstance(source, HubFile):
        place = {"repo": source.repo, "quant": source.quant, "file": source.file, "revision": source.revision}
    elif isinstance(source, PackageFile):
        place = {"package": source.package, "file": source.file, "install": source.install}
    else:
        place = {"path": str(source.path)}
    return {
        "name": model.name,
        "title": model.title,
        "parameters": model.parameters,
        "size_bytes": None if model.size_gb is None else round(model.size_gb * 1e9),
        "licence": model.licence,
        "tokenizer": model.tokenizer,
        "source": place,
        "on_disk": str(path) if path is not None else None,
    }


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _say(line: str) -> None:
    typer.echo(f"specli: note: {line}", err=True)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False)


@contextmanager
def _bars() -> Iterator[hub.Progress]:
    """A bar per file on a terminal's stderr; elsewhere one line per file, when it starts."""
    if not sys.stderr.isatty():
        announced = set[str]()

        def announce(name: str, done: int, size: int) -> None:
            if name not in announced and done < size:
                announced.add(name)
                start = f", going on at {hub.format_bytes(done)}" if done else ""
                typer.echo(f"downloading {name} ({hub.format_bytes(size)}){start}", err=True)

        yield announce
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=_console(sys.stderr)) as bars:
        tasks: dict[str, Any] = {}

        def draw(name: str, done: int, size: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name.rpartition("/")[2], total=size)
            bars.update(tasks[name], completed=done)

        yield draw
