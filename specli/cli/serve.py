"""``specli serve``: an OpenAI-compatible server over a target and its drafter."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, TextIO

import typer

from specli.cli import options as o
from specli.cli.arguments import draft_length, map_spec_type, show_log
from specli.cli.interrupt import Interrupt
from specli.cli.model_group import ModelFlags
from specli.cli.models import ModelChoice, resolve_models
from specli.cli.option_groups import LoadingFlags, ProcessFlags, TemplateFlags, flattened
from specli.cli.sampler_flags import SamplerFlags
from specli.cli.serve_flags import ServeFlags, require_packages
from specli.config import (
    RANDOM_SEED,
    GenerationOptions,
    SamplingOptions,
    ServeOptions,
    Settings,
    SpeculationOptions,
)
from specli.errors import Cancelled, ConfigError
from specli.registry import DEFAULT_PAIR

if TYPE_CHECKING:
    from specli.session import Session


@flattened
def serve(
    context: typer.Context,
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
    verbose: o.Verbose = False,
    debug: o.Debug = False,
    *,
    server: ServeFlags,
    models: ModelFlags,
    samplers: SamplerFlags,
    template: TemplateFlags,
    loading: LoadingFlags,
    process: ProcessFlags,
) -> None:
    """Serve a target and its drafter to OpenAI-compatible clients.

    Sampling options are what a request gets that does not say otherwise. Ctrl-C finishes what is under way, a second
    one stops at once.
    """
    require_packages()
    options = server.options()
    choice = ModelChoice.of(context)
    if options.alias is None and choice.is_pair:
        options = dataclasses.replace(options, alias=choice.pair or DEFAULT_PAIR)
    if samplers.generation(GenerationOptions(), has_json=True).n_logprobs is not None:
        raise ConfigError("--logprobs was given, but each request says so for itself; leave it out")
    kind, note = map_spec_type(spec_type)
    target = dataclasses.replace(loading.target(models.target(choice)), n_sequences=server.parallel)
    draft = loading.draft(models.draft(target, choice))
    sampling = SamplingOptions(temperature, top_k, top_p, min_p, None if seed in (-1, RANDOM_SEED) else seed)
    settings = Settings(
        target,
        draft,
        samplers.options(sampling, False),
        SpeculationOptions(kind, draft_length(draft_max), draft_min, draft_p_min, verify, draft_fixed),
        models.fit,
        choice.flags(),
        template.options(),
        process.options(),
        exact,
    )
    if verbose:
        show_log()
    if not _serve(settings, choice, options, note):
        raise typer.Exit(Cancelled.exit_code)


def _serve(settings: Settings, choice: ModelChoice, options: ServeOptions, note: str | None) -> bool:
    """Load, then answer until a signal; whether everything that was asked for was answered."""
    from specli.render.choose import choose
    from specli.serve.server import address, bind, serve
    from specli.session import Hooks, Session

    with ExitStack() as sockets:
        listener = sockets.enter_context(bind(options))
        with ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt())
            console = stack.enter_context(choose(sys.stderr, sys.stderr, os.environ))
            if note:
                console.notice(note)
            settings = resolve_models(settings, choice, console, interrupt)
            if settings.exact:
                console.notice(
                    "--exact: the settings are proved before it listens; minutes at first, then that is kept"
                )
            session = sockets.enter_context(Session(settings, Hooks(console.progress, console.notice, interrupt)))
            for line in _words(session, options, address(listener)):
                console.notice(line)
        _log_to_stderr()
        ready = f"listening at {address(listener)} (Ctrl-C stops)"
        return serve(session, options, listener, lambda: typer.echo(ready, err=True))


def _words(session: Session, options: ServeOptions, where: str) -> list[str]:
    """What somebody who starts a server should know."""
    state, engine = session.speculation, session.engine
    drafting = f"drafting: {state.drafter}, K up to {state.k}" if state.active else f"no drafting: {state.reason}"
    at_a_time = "1 answer" if engine.n_sequences == 1 else f"{engine.n_sequences} answers"
    lines = [f"{drafting}; {at_a_time} at a time, a context of {engine.n_ctx} tokens each"]
    if session.settings.exact:
        bounds = ", and --sla-ttft and --sla-tpot cannot pace them" if options.has_bounds else ""
        lines.append(f"--exact: prompts are evaluated whole, in batches of {engine.n_batch} tokens (-ub){bounds}")
    if state.expectation:
        lines.append(state.expectation)
    if not options.is_loopback and not options.api_keys:
        lines.append(f"warning: anybody who can reach {where} may use it: give --api-key, or listen at 127.0.0.1")
    return lines


def _log_to_stderr() -> None:
    """The server's log: one line per answer, no prompts."""
    handler = logging.StreamHandler(_own_stderr())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("specli", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False


def _own_stderr() -> TextIO:
    """Stderr under a number of its own: number 2 is caught while llama.cpp parses a grammar (``engine.grammar``)."""
    try:
        return os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError:  # there is none
        return sys.stderr
