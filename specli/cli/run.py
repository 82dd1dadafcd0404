"""``specli run``: one prompt, its answer as a stream, and what speculation did."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specli.cli import options as o
from specli.cli.arguments import draft_length, map_spec_type, show_log
from specli.cli.chat import ChatRequest, chat, wants_chat
from specli.cli.interrupt import Interrupt
from specli.cli.models import ModelChoice, resolve_models
from specli.cli.option_groups import LoadingFlags, ProcessFlags, TemplateFlags, TextFlags, flattened
from specli.cli.prompt import read_prompt
from specli.cli.sampler_flags import SamplerFlags
from specli.cli.show_config import show_config as print_config
from specli.cli.stats_json import StatsJson
from specli.config import (
    RANDOM_SEED,
    GenerationOptions,
    ModelOptions,
    SamplingOptions,
    Settings,
    SpeculationOptions,
)
from specli.errors import Cancelled, ConfigError
from specli.events import FinishReason, Text

if TYPE_CHECKING:
    from specli.render.base import Renderer
    from specli.render.choose import ColorMode
    from specli.session import Session


@flattened
def run(
    context: typer.Context,
    model: o.Model = None,
    draft_model: o.DraftModel = None,
    pair: o.Pair = None,
    hf_repo: o.HfRepo = None,
    hf_file: o.HfFile = None,
    hf_repo_draft: o.HfRepoDraft = None,
    hf_token: o.HfToken = None,
    prompt: o.Prompt = None,
    file: o.PromptFile = None,
    system: o.System = None,
    raw: o.Raw = False,
    conversation: o.Conversation = None,
    interactive: o.Interactive = False,
    single_turn: o.SingleTurn = False,
    n_predict: o.NPredict = GenerationOptions.n_predict,
    stops: o.Stops = None,
    ignore_eos: o.IgnoreEos = SamplingOptions.ignore_eos,
    show_stats: o.ShowStats = False,
    stats_json: o.StatsJson = None,
    temperature: o.Temperature = SamplingOptions.temperature,
    top_k: o.TopK = SamplingOptions.top_k,
    top_p: o.TopP = SamplingOptions.top_p,
    min_p: o.MinP = SamplingOptions.min_p,
    seed: o.Seed = -1,
    spec_type: o.SpecType = SpeculationOptions.type,
    draft_max: o.DraftMax = "auto",
    draft_fixed: o.DraftFixed = SpeculationOptions.fixed,
    draft_min: o.DraftMin = SpeculationOptions.n_min,
    draft_p_min: o.DraftPMin = SpeculationOptions.p_min,
    verify: o.Verify = SpeculationOptions.verify,
    exact: o.Exact = Settings.exact,
    ctx_size: o.CtxSize = ModelOptions.n_ctx,
    batch_size: o.BatchSize = ModelOptions.n_batch,
    ubatch_size: o.UbatchSize = ModelOptions.n_ubatch,
    threads: o.Threads = ModelOptions.n_threads,
    threads_batch: o.ThreadsBatch = ModelOptions.n_threads_batch,
    threads_draft: o.ThreadsDraft = None,
    threads_batch_draft: o.ThreadsBatchDraft = None,
    gpu_layers: o.GpuLayers = ModelOptions.n_gpu_layers,
    gpu_layers_draft: o.GpuLayersDraft = ModelOptions.n_gpu_layers,
    fit: o.Fit = Settings.fit,
    flash_attn: o.FlashAttn = ModelOptions.flash_attn,
    cache_type_k: o.CacheTypeK = ModelOptions.cache_type_k,
    cache_type_v: o.CacheTypeV = ModelOptions.cache_type_v,
    cache_type_k_draft: o.CacheTypeKDraft = ModelOptions.cache_type_k,
    cache_type_v_draft: o.CacheTypeVDraft = ModelOptions.cache_type_v,
    show_config: o.ShowConfig = False,
    verbose: o.Verbose = False,
    debug: o.Debug = False,
    *,
    texts: TextFlags,
    samplers: SamplerFlags,
    template: TemplateFlags,
    loading: LoadingFlags,
    process: ProcessFlags,
) -> None:
    """Complete a prompt, or chat where none is given, faster with a draft, with the target's own words."""
    choice = ModelChoice.of(context)
    system = texts.system(system)
    generation = GenerationOptions(n_predict, texts.stops(stops), texts.special)
    generation = samplers.generation(generation, has_json=stats_json is not None)
    kind, note = map_spec_type(spec_type)
    target = ModelOptions(
        path=choice.model or Path(),
        n_ctx=ctx_size,
        n_batch=batch_size,
        n_ubatch=ubatch_size,
        n_threads=threads,
        n_threads_batch=threads_batch,
        n_gpu_layers=gpu_layers,
        flash_attn=flash_attn,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
    )
    target = loading.target(target)
    draft = dataclasses.replace(
        target,
        path=choice.draft_model or Path(),
        n_ctx=None,
        n_threads=_first(threads_draft, threads),
        n_threads_batch=_first(threads_batch_draft, threads_draft, threads_batch),
        n_gpu_layers=gpu_layers_draft,
        cache_type_k=cache_type_k_draft,
        cache_type_v=cache_type_v_draft,
    )
    draft = loading.draft(draft)
    sampling = samplers.options(
        SamplingOptions(temperature, top_k, top_p, min_p, None if seed in (-1, RANDOM_SEED) else seed, ignore_eos),
        texts.escape,
    )
    speculation = SpeculationOptions(kind, draft_length(draft_max), draft_min, draft_p_min, verify, draft_fixed)
    settings = Settings(
        target, draft, sampling, speculation, fit, choice.flags(), template.options(), process.options(), exact
    )
    if show_config:
        print_config(context, choice, settings)
        return
    if raw:
        template.refuse_with_raw()
        if system is not None:
            raise ConfigError("-sys was given with --raw, which has no place for a system message; leave one out")
    has_prompt = prompt is not None or file is not None
    answer: _Answer | ChatRequest
    if is_chat := wants_chat(conversation, interactive, single_turn, has_prompt, raw):
        first = read_prompt(prompt, file, texts.escape) if has_prompt else None
        answer = ChatRequest(first, system, generation, single_turn, StatsJson(stats_json), not show_stats)
    else:
        answer = _Answer(read_prompt(prompt, file, texts.escape), system, raw, generation, StatsJson(stats_json))
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        renderer = stack.enter_context(_renderer(stats_json == "-", show_stats, is_chat, texts.color_mode))
        if note:
            renderer.notice(note)
        settings = resolve_models(settings, choice, renderer, interrupt)
        if verbose:
            show_log()
        reason = _generate(settings, answer, renderer, interrupt)
    if reason == "cancelled":
        raise typer.Exit(Cancelled.exit_code)


@dataclasses.dataclass(frozen=True)
class _Answer:
    """What is asked for: the prompt and where its answer ends and goes."""

    text: str
    system: str | None
    raw: bool
    generation: GenerationOptions
    json: StatsJson

    def prompt_ids(self, session: Session, renderer: Renderer) -> list[int]:
        """Token ids, through the chat template unless ``--raw`` was given or the model has none."""
        if self.raw or session.template is None:
            if not self.raw:
                renderer.notice("the model has no chat template: the text is completed as is")
                if self.system is not None:
                    raise ConfigError("-sys was given, but the model has no chat template to put it in; leave it out")
            return session.text_ids(self.text)
        from specli.chat import Message

        system = [Message("system", self.system)] if self.system is not None else []
        return session.chat_ids([*system, Message("user", self.text)])


def _generate(
    settings: Settings, answer: _Answer | ChatRequest, renderer: Renderer, interrupt: Interrupt
) -> FinishReason | None:
    """Load, generate, show; why the (last) generation ended."""
    from specli.session import Hooks, Session
    from specli.stats import Stats

    hooks = Hooks(renderer.progress, renderer.notice, interrupt)
    with Session(settings, hooks) as session:
        renderer.begin(session.speculation)
        if isinstance(answer, ChatRequest):
            return chat(session, answer, renderer, interrupt)
        accepted_at_s = time.perf_counter()
        stats, text = Stats(load_s=session.load_s), []
        prompt = answer.prompt_ids(session, renderer)
        for event in session.generate(prompt, answer.generation, accepted_at_s):
            stats.observe(event)
            renderer.on_event(event, stats)
            if isinstance(event, Text):
                text.append(event.text)
        if stats.fills(n_ctx := session.speculation.n_ctx):
            renderer.notice(f"the answer is cut off: the context of {n_ctx} tokens is full; -c N gives more")
        answer.json.write(session, stats, "".join(text))
    return stats.finish_reason


def _renderer(json_on_stdout: bool, show_stats: bool, is_chat: bool, color: ColorMode) -> Renderer:
    """The live renderer on a terminal, plain text on a pipe, nothing on stdout under JSON.

    One answer on a terminal is followed by the summary, without being asked for.
    """
    from specli.render.choose import choose

    stdout = open(os.devnull, "w", encoding="utf-8") if json_on_stdout else sys.stdout  # noqa: PTH123, SIM115
    show_summary = show_stats or (stdout.isatty() and sys.stderr.isatty() and not is_chat)
    return choose(stdout, sys.stderr, os.environ, color=color, show_summary=show_summary)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
