"""``specli selftest``: a user's own proof that speculation changes nothing with these files on this machine.

Exit codes: 0 everything passed, 1 something failed; the others as everywhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from specli.cli import options as o
from specli.cli.interrupt import Interrupt
from specli.cli.model_group import ModelFlags
from specli.cli.models import ModelChoice, resolve_models
from specli.cli.option_groups import LoadingFlags, ProcessFlags, flattened
from specli.config import AUTO_K, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.errors import Cancelled, ConfigError

if TYPE_CHECKING:
    from specli.engine.base import Engine
    from specli.render.base import Renderer
    from specli.selftest.subject import Check, Subject
    from specli.session import Session

FORMATS = ("table", "json")
N_CTX = 1024  # tokens: enough for the longest check
N_TEXT = 560
_FAILED = 1


@flattened
def selftest(
    context: typer.Context,
    *,
    models: ModelFlags,
    exact: o.Exact = Settings.exact,
    output: o.Output = FORMATS[0],
    loading: LoadingFlags,
    process: ProcessFlags,
    verbose: o.Verbose = False,
    debug: o.Debug = False,
) -> None:
    """Prove on your own files and machine that speculation changes nothing.

    The verifiers' laws by enumeration, rollback, greedy and seeded texts against plain decoding, sampled texts against
    the target's own probabilities, and a map of how logits depend on the width of a pass.

    Exit code: 0 all passed, 1 something failed, 2 a bad option, 3 a file that cannot be loaded.
    """
    if output not in FORMATS:
        raise ConfigError(f"-o/--output got {output!r}, expected one of {', '.join(FORMATS)}")
    choice = ModelChoice.of(context)
    target = loading.target(models.target(choice))
    target = replace(target, n_ctx=N_CTX) if target.n_ctx is None else target
    draft = loading.draft(models.draft(target, choice))
    settings = Settings(
        target,
        draft,
        SamplingOptions(temperature=0),
        SpeculationOptions(n_max=AUTO_K, fixed=True),
        models.fit,
        choice.flags(),
        process=process.options(),
        exact=exact,
    )
    if verbose:
        from specli.engine.log import LOG

        LOG.verbose = True
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        from specli.render.choose import choose

        console = stack.enter_context(choose(sys.stderr, sys.stderr, os.environ))
        settings = resolve_models(settings, choice, console, interrupt)
        checks = _run(settings, console, interrupt)
        console.close()
    _print(settings, checks, output)
    if any(check.passed is False for check in checks):
        raise typer.Exit(_FAILED)


def _run(settings: Settings, console: Renderer, interrupt: Interrupt) -> list[Check]:
    from specli.selftest import suite
    from specli.session import Hooks, Session

    started = ""

    def on_start(name: str) -> None:
        nonlocal started
        started = name
        console.progress(name, None)

    with Session(settings, Hooks(console.progress, console.notice, interrupt)) as session:
        if not session.speculation.active:
            raise ConfigError(f"there is no speculation to test: {session.speculation.reason}")
        subject = make_subject(session, interrupt, lambda fraction: console.progress(started, fraction))
        checks = list(suite.run(subject, on_start))
    if interrupt.requested:
        raise Cancelled("stopped during the self-test")
    return checks


def make_subject(session: Session, cancelled: Callable[[], bool], progress: Callable[[float], None]) -> Subject:
    """The session's engines as what the checks work on."""
    from specli.bench.workloads import built_in
    from specli.bits import sample_tokens
    from specli.chat import Message
    from specli.selftest.subject import Subject

    model, drafting = session.model, session.drafting
    texts = [prompt.text for prompt in built_in(("chat", "rewrite", "extract", "story")) if prompt.name.endswith(" 1")]
    prompts = [
        session.text_ids(text) if session.template is None else session.chat_ids([Message("user", text)])
        for text in texts
    ]
    return Subject(
        target=session.engine,
        draft=drafting.draft if drafting is not None else None,
        piece=model.piece,
        end_ids=session.end_ids,
        prompts=prompts,
        text=sample_tokens(lambda text: model.tokenize(text, False, False), N_TEXT),
        cache_type=session.target_options.cache_type_k,
        open_engine=lambda cache_type: _open(session, cache_type, cancelled),
        cancelled=cancelled,
        progress=progress,
    )


def _open(session: Session, cache_type: str, cancelled: Callable[[], bool]) -> Engine:
    from specli.engine.llama import LlamaEngine

    options: ModelOptions = session.target_options
    flash = options.flash_attn if cache_type == "f16" else "on"
    options = replace(options, cache_type_k=cache_type, cache_type_v=cache_type, flash_attn=flash)
    return LlamaEngine(session.model, options, AUTO_K + 1, cancelled)


def _print(settings: Settings, checks: list[Check], output: str) -> None:
    if output == "json":
        from specli import __version__
        from specli.engine.llama import library_build

        found = {
            "passed": all(check.passed is not False for check in checks),
            "specli": __version__,
            "library": library_build(),
            "target": str(settings.target.path),
            "draft": None if settings.draft is None else str(settings.draft.path),
            "checks": [
                {
                    "name": check.name,
                    "passed": check.passed,
                    "detail": check.detail,
                    "elapsed_s": round(check.elapsed_s, 3),
                    **check.data,
                }
                for check in checks
            ],
        }
        sys.stdout.write(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=2) + "\n")
        return
    from specli.render.selftest import print_checks

    print_checks(sys.stdout, os.environ, checks)
