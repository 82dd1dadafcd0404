"""``specli demo``: two prompts on the default pair, what speculation did with each, and whether it paid.

Whether it paid is measured here and now: plain and speculative decoding of the same prompt take turns, and the median
ratio of the pairs is printed with its range.
"""

from __future__ import annotations

import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specli.cli import options as o
from specli.cli.interrupt import Interrupt
from specli.cli.models import ModelChoice, resolve_models
from specli.config import GenerationOptions, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.errors import Cancelled
from specli.stats import Stats

if TYPE_CHECKING:
    from specli.render.base import Renderer
    from specli.session import Session

N_PAIRS = 5
_EXTRACTION = """\
Text: Bob Stone lives at 14 Mill Road in Leeds, phone 555 0142, and orders 12 garden chairs.
JSON: {"name": "Bob Stone", "street": "14 Mill Road", "city": "Leeds", "phone": "555 0142", "order": "12 garden chairs"}

Text: Mary Hill lives at 9 Church Street in Dublin, phone 555 0177, and orders 3 wooden tables.
JSON:"""


@dataclass(frozen=True)
class _Scene:
    title: str
    prompt: str
    generation: GenerationOptions
    speculation: SpeculationOptions
    flags: tuple[str, ...]


def _scenes() -> tuple[_Scene, ...]:
    return (
        _Scene(
            "A chat prompt, drafted by the small model that was trained for this target",
            "Write a Python function that returns the n-th Fibonacci number.",
            GenerationOptions(200),
            SpeculationOptions(),
            ("-n", "200"),
        ),
        _Scene(
            "A prompt whose answer copies from it, drafted from the text itself",
            _EXTRACTION,
            GenerationOptions(200, ("\n\n",)),
            SpeculationOptions(type="ngram", n_max=7),
            ("-n", "200", "-r", "\n\n", "--spec-type", "ngram", "--spec-draft-n-max", "7"),
        ),
    )


def demo(verbose: o.Verbose = False, debug: o.Debug = False) -> None:
    """Show what speculation does with two prompts on the default pair, and whether it pays here."""
    from specli.render.choose import choose

    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        for scene in _scenes():
            renderer = stack.enter_context(choose(sys.stdout, sys.stderr, os.environ, show_summary=True))
            _show(scene, renderer, interrupt)
            if interrupt.requested:
                raise typer.Exit(Cancelled.exit_code)


def _show(scene: _Scene, renderer: Renderer, interrupt: Interrupt) -> None:
    from specli.chat import Message
    from specli.session import Hooks, Session

    command = ["specli", "run", "--temp", "0", *scene.flags, "-p", scene.prompt]
    typer.echo(f"\n{scene.title}:\n\n$ {shlex.join(command)}\n", err=True)
    unnamed = ModelOptions(path=Path())
    settings = Settings(unnamed, unnamed, SamplingOptions(temperature=0), scene.speculation)
    settings = resolve_models(settings, ModelChoice(), renderer, interrupt)
    with Session(settings, Hooks(renderer.progress, renderer.notice, interrupt)) as session:
        renderer.begin(session.speculation)
        prompt = session.chat_ids([Message("user", scene.prompt)])
        stats = Stats(load_s=session.load_s)
        for event in session.generate(prompt, scene.generation):
            stats.observe(event)
            renderer.on_event(event, stats)
        ratios = _ratios(session, prompt, scene.generation, renderer, interrupt)
    if ratios:
        verdict = "it paid" if min(ratios) > 1 else "it did not pay" if max(ratios) < 1 else "no sure difference"
        renderer.notice(
            f"{verdict}: {statistics.median(ratios):.2f} x the speed of plain decoding "
            f"(median of {len(ratios)} pairs in turn, {min(ratios):.2f} to {max(ratios):.2f})"
        )


def _ratios(
    session: Session, prompt: Sequence[int], generation: GenerationOptions, renderer: Renderer, interrupt: Interrupt
) -> list[float]:
    """Plain TPOT / speculative TPOT of pairs that take turns; fewer when the user stops."""
    ratios = []
    for i in range(N_PAIRS):
        renderer.progress("comparing with plain decoding", i / N_PAIRS)
        plain_ms, speculative_ms = (_tpot_ms(session, prompt, generation, speculate) for speculate in (False, True))
        if interrupt.requested:
            break
        if plain_ms and speculative_ms:
            ratios.append(plain_ms / speculative_ms)
    renderer.close()
    return ratios


def _tpot_ms(session: Session, prompt: Sequence[int], generation: GenerationOptions, speculate: bool) -> float | None:
    stats = Stats()
    for event in session.generate(prompt, generation, speculate=speculate):
        stats.observe(event)
    return stats.tpot_ms
