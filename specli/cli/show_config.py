"""``--show-config``: every setting, its value, and where the value comes from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence

import typer

from specli import registry
from specli.cli.models import ModelChoice
from specli.config import CONTEXT_CAP, Settings

_NO_SETTINGS = ("show_config", "help")
_SECRETS = ("hf_token",)


def show_config(context: typer.Context, choice: ModelChoice, settings: Settings) -> None:
    """Print one line per option of the command: its names, its value as JSON or in words, its origin.

    Origins: ``flag``, ``environment (NAME)``, ``models.toml (pair NAME)``, ``default``. Nothing is read but
    models.toml, and nothing downloaded.
    """
    rows = list(_rows(context, _from_pair(choice), _words(settings)))
    names_width, value_width = (max(len(row[i]) for row in rows) for i in range(2))
    for names, value, origin in rows:
        typer.echo(f"{names:{names_width}}  {value:{value_width}}  {origin}")


def _rows(
    context: typer.Context, from_pair: Mapping[str, tuple[str, str]], words: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in _NO_SETTINGS:
            continue
        value = context.params.get(name)
        source = getattr(context.get_parameter_source(name), "name", "DEFAULT")
        origin = {"COMMANDLINE": "flag", "ENVIRONMENT": _variable(parameter.envvar)}.get(source, "default")
        if origin == "default" and name in from_pair:
            shown, origin = from_pair[name]
        elif name in _SECRETS and value:
            shown = "(hidden)"
        elif value in (None, (), []) or (origin == "default" and name in words):
            shown = words.get(name, "-")
        else:
            shown = json.dumps(value, ensure_ascii=False, default=str)  # paths as text
        yield "/".join(_names(parameter.opts)), shown, origin


def _names(options: Sequence[str]) -> list[str]:
    """The first short and the first long name."""
    first = [next((name for name in options if name.startswith("--") is is_long), None) for is_long in (False, True)]
    return [name for name in first if name is not None]


def _variable(names: object) -> str:
    known = [names] if isinstance(names, str) else list(names) if isinstance(names, list | tuple) else []
    return f"environment ({next((name for name in known if os.environ.get(name)), '?')})"


def _from_pair(choice: ModelChoice) -> dict[str, tuple[str, str]]:
    """Value and origin of the options that a pair of models.toml stands in for."""
    if not choice.is_pair:
        return {}
    pair = registry.find_pair(choice.pair or registry.DEFAULT_PAIR)
    origin = f"{pair.origin} (pair {pair.name})"
    values = {"model": _shown(pair.target)}
    if choice.draft_model is None and choice.hf_repo_draft is None:
        values["draft_model"] = _shown(pair.draft)
    return {name: (value, origin) for name, value in values.items()}


def _shown(model: registry.Model) -> str:
    return str(model.source) + (f" (a {model.quantize} copy of it)" if model.quantize else "")


def _words(settings: Settings) -> dict[str, str]:
    """What stands for a value that was not given."""
    return {
        "ctx_size": f"as trained, at most {CONTEXT_CAP}, less if memory is short",
        "gpu_layers": "auto (what fits)",
        "gpu_layers_draft": "auto (what fits)",
        "draft_max": f"auto (up to {settings.speculation.k_max})",
        "verify": settings.verify,
        "seed": "none",
        "threads": "one per physical core",
        "threads_batch": "as -t",
        "threads_draft": "as -t",
        "threads_batch_draft": "as -td",
        "prompt": "-f or standard input, on a terminal a chat",
        "device": "all",
        "device_draft": "as -dev",
        "kv_offload": "on" if settings.target.placement.kv_offload else "off",
        "load_mode": settings.target.load_mode,
        "chat_template": "the model's",
        **dict.fromkeys(("rope_scaling", "rope_scale", "rope_freq_scale"), "the model's"),
    }
