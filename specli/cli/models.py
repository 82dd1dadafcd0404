"""Which files a command works on: what the user named, or the default pair, made ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from specli import registry
from specli.config import Settings
from specli.registry import ModelSource


def resolve_models(
    settings: Settings,
    has_target: bool,
    has_draft: bool,
    notice: Callable[[str], None],
    cancelled: Callable[[], bool],
) -> Settings:
    """``settings`` with the default pair's files where -m (and -md) were not given."""
    if has_target:
        return settings if has_draft else dataclasses.replace(settings, draft=None)
    pair = registry.load_pairs()[registry.DEFAULT_PAIR]
    path, name = prepare_source(pair.target, notice, cancelled)
    target = dataclasses.replace(settings.target, path=path, name=name)
    if has_draft or settings.draft is None:
        return dataclasses.replace(settings, target=target)
    draft = dataclasses.replace(settings.draft, path=registry.find_file(pair.draft))
    return dataclasses.replace(settings, target=target, draft=draft)


def prepare_source(
    source: ModelSource, notice: Callable[[str], None], cancelled: Callable[[], bool]
) -> tuple[Path, str]:
    """The file of ``source`` and what to call it, requantized once where the pair says so."""
    path = registry.find_file(source)
    if source.quantize is None:
        return path, path.name
    copy = registry.quantized_copy(path, source.quantize)
    if not copy.is_file():
        from specli.engine.quantize import quantize

        notice(f"making a {source.quantize} copy of {path.name}, once, in {copy.parent} (it verifies faster on CPUs)")
        try:
            quantize(path, copy, source.quantize, cancelled)
        except OSError as error:
            notice(f"no copy could be kept ({error}); using {path.name} as it is")
            return path, path.name
    return copy, copy.name
