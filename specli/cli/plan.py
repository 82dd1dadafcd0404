"""``specli plan``: will target and draft fit, and what would make them fit? No weight is loaded."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specli.cli import options as o
from specli.cli.arguments import draft_length
from specli.cli.interrupt import Interrupt
from specli.cli.models import ModelChoice, resolve_models
from specli.cli.option_groups import LoadingFlags, flattened
from specli.config import ModelOptions, Settings, SpeculationOptions
from specli.errors import ConfigError

if TYPE_CHECKING:
    from specli.memory_plan import Setup
    from specli.render.plan import Report

FORMATS = ("table", "json")
_DOES_NOT_FIT = 1


@flattened
def plan(
    context: typer.Context,
    model: o.Model = None,
    draft_model: o.DraftModel = None,
    pair: o.Pair = None,
    hf_repo: o.HfRepo = None,
    hf_file: o.HfFile = None,
    hf_repo_draft: o.HfRepoDraft = None,
    hf_token: o.HfToken = None,
    output: o.Output = FORMATS[0],
    draft_max: o.DraftMax = "auto",
    ctx_size: o.CtxSize = ModelOptions.n_ctx,
    batch_size: o.BatchSize = ModelOptions.n_batch,
    ubatch_size: o.UbatchSize = ModelOptions.n_ubatch,
    gpu_layers: o.GpuLayers = ModelOptions.n_gpu_layers,
    gpu_layers_draft: o.GpuLayersDraft = ModelOptions.n_gpu_layers,
    flash_attn: o.FlashAttn = ModelOptions.flash_attn,
    cache_type_k: o.CacheTypeK = ModelOptions.cache_type_k,
    cache_type_v: o.CacheTypeV = ModelOptions.cache_type_v,
    cache_type_k_draft: o.CacheTypeKDraft = ModelOptions.cache_type_k,
    cache_type_v_draft: o.CacheTypeVDraft = ModelOptions.cache_type_v,
    debug: o.Debug = False,
    *,
    loading: LoadingFlags,
) -> None:
    """Tell whether target and draft fit the memory at hand, and which settings would make them fit.

    llama.cpp is asked for the size of every buffer; weights are not loaded.

    Exit code: 0 it fits, 1 it does not, 2 a bad option, 3 a file that cannot be loaded.
    """
    if output not in FORMATS:
        raise ConfigError(f"-o/--output got {output!r}, expected one of {', '.join(FORMATS)}")
    choice = ModelChoice.of(context)
    common = ModelOptions(Path(), n_batch=batch_size, n_ubatch=ubatch_size, flash_attn=flash_attn)
    target = replace(common, path=choice.model or Path(), n_ctx=ctx_size, n_gpu_layers=gpu_layers)
    target = loading.target(replace(target, cache_type_k=cache_type_k, cache_type_v=cache_type_v))
    draft = replace(target, path=choice.draft_model or Path(), n_ctx=None, n_gpu_layers=gpu_layers_draft)
    draft = loading.draft(replace(draft, cache_type_k=cache_type_k_draft, cache_type_v=cache_type_v_draft))
    speculation = SpeculationOptions(n_max=draft_length(draft_max))
    settings = _resolve(Settings(target, draft, speculation=speculation), choice)

    from specli.memory_plan import Setup

    report = _report(Setup(settings.target, settings.draft, settings.speculation.k_max, choice.flags()))
    _print(report, output)
    if not report.plan.fits:
        raise typer.Exit(_DOES_NOT_FIT)


def _resolve(settings: Settings, choice: ModelChoice) -> Settings:
    from specli.render.choose import choose as choose_renderer

    with Interrupt() as interrupt, choose_renderer(sys.stderr, sys.stderr, os.environ) as console:
        return resolve_models(settings, choice, console, interrupt)


def _report(setup: Setup) -> Report:
    from specli import gguf_file, memory_search
    from specli.engine.sizing import LlamaSizer
    from specli.memory_plan import weights_by_type
    from specli.render.plan import Report

    headers = [gguf_file.check_loadable(gguf_file.read_header(setup.target.path), "target")]
    if setup.draft is not None:
        headers.append(gguf_file.check_loadable(gguf_file.read_header(setup.draft.path), "draft"))
    with LlamaSizer(models=[setup.target, *([setup.draft] if setup.draft else [])]) as sizer:
        choice = memory_search.choose(setup, sizer)
        return Report(
            plan=choice.plan,
            notices=choice.notices,
            weights=[weights_by_type(shards) for shards in headers],
            cost=memory_search.draft_cost(choice.plan, sizer),
            suggestions=() if choice.plan.fits else memory_search.suggest(choice.plan, sizer),
        )


def _print(report: Report, output: str) -> None:
    from specli.render.plan import as_dict, print_plan

    if output == "json":
        sys.stdout.write(json.dumps(as_dict(report), ensure_ascii=False, allow_nan=False, indent=2) + "\n")
    else:
        print_plan(sys.stdout, os.environ, report)
