"""``specli tune``: measure a pair once, keep the profile, and tell from which acceptance on each draft length pays."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specli.cli import options as o
from specli.cli.interrupt import Interrupt
from specli.cli.models import ModelChoice, resolve_models
from specli.config import GenerationOptions, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.errors import Cancelled, ConfigError

if TYPE_CHECKING:
    from specli.controller import Controller
    from specli.record import Kind, Record
    from specli.session import Session
    from specli.stats import Stats, Totals

BUSY = 1.5  # load per core, this command's own threads among it
_MOST_CHARACTERS = 40  # of a prompt, in the table
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
FORMATS = ("table", "json")
PROMPTS = (
    "What are the main differences between cats and dogs as pets?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Repeat this sentence three times: The kitchen of the old house faces the garden.",
)


def tune(
    context: typer.Context,
    model: o.Model = None,
    draft_model: o.DraftModel = None,
    pair: o.Pair = None,
    hf_repo: o.HfRepo = None,
    hf_file: o.HfFile = None,
    hf_repo_draft: o.HfRepoDraft = None,
    hf_token: o.HfToken = None,
    prompts: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", help="A prompt to measure on; may be repeated.")
    ] = None,
    n_predict: o.NPredict = 96,
    temperature: o.Temperature = SamplingOptions.temperature,
    threads: o.Threads = ModelOptions.n_threads,
    gpu_layers: o.GpuLayers = ModelOptions.n_gpu_layers,
    gpu_layers_draft: o.GpuLayersDraft = ModelOptions.n_gpu_layers,
    flash_attn: o.FlashAttn = ModelOptions.flash_attn,
    cache_type_k: o.CacheTypeK = ModelOptions.cache_type_k,
    cache_type_v: o.CacheTypeV = ModelOptions.cache_type_v,
    cache_type_k_draft: o.CacheTypeKDraft = ModelOptions.cache_type_k,
    cache_type_v_draft: o.CacheTypeVDraft = ModelOptions.cache_type_v,
    output: o.Output = "table",
    verbose: o.Verbose = False,
    debug: o.Debug = False,
) -> None:
    """Measure v(n), the draft's cost and its acceptance on your prompts; print when drafting pays, keep the profile."""
    from specli.bench import machine
    from specli.render.choose import choose
    from specli.session import Hooks, Session
    from specli.stats import Totals

    if output not in FORMATS:
        raise ConfigError(f"-o/--output got {output!r}, expected one of {', '.join(FORMATS)}")
    if "" in (prompts or ()):
        raise ConfigError("-p/--prompt is empty, a text was expected: there would be nothing to measure")
    generation = GenerationOptions(n_predict)
    if n_predict == 0:
        raise ConfigError("-n/--predict got 0, at least 1 token was expected: there would be nothing to measure")
    choice = ModelChoice.of(context)
    target = ModelOptions(
        choice.model or Path(),
        n_threads=threads,
        n_gpu_layers=gpu_layers,
        flash_attn=flash_attn,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
    )
    draft = replace(
        target,
        path=choice.draft_model or Path(),
        n_gpu_layers=gpu_layers_draft,
        cache_type_k=cache_type_k_draft,
        cache_type_v=cache_type_v_draft,
    )
    settings = Settings(target, draft, SamplingOptions(temperature), SpeculationOptions(measure_anew=True))
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        console = stack.enter_context(choose(sys.stderr, sys.stderr, os.environ))
        settings = resolve_models(settings, choice, console, interrupt)
        with Session(settings, Hooks(console.progress, console.notice, interrupt)) as session:
            if session.controller is None:
                raise ConfigError(f"there is nothing to tune: {session.speculation.reason}")
            asked, totals, records = tuple(prompts or PROMPTS), Totals(), []
            for i, prompt in enumerate(asked):
                console.progress("measuring", i / len(asked))
                totals.add(_measure(session, prompt, generation))
                records.append((prompt, session.controller.record))
            if (load := machine.load_average()) is not None and load > BUSY * (os.cpu_count() or 1):
                console.notice(f"the machine was busy (load {load:.1f}): these costs are doubtful; measure again alone")
            console.close()
            _print(session.controller, totals, records, output)
        if interrupt.requested:
            raise typer.Exit(Cancelled.exit_code)


def _measure(session: Session, prompt: str, generation: GenerationOptions) -> Stats:
    from specli.chat import Message
    from specli.stats import Stats

    ids = session.text_ids(prompt) if session.template is None else session.chat_ids([Message("user", prompt)])
    stats = Stats()
    for event in session.generate(ids, generation):
        stats.observe(event)
    return stats


def break_even(k: int, cost: float) -> float | None:
    """The acceptance per token at which k drafted tokens bring ``cost`` tokens a round; None if none can."""
    if cost >= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(middle**i for i in range(k + 1)) >= cost else (middle, high)
    return high


def _print(controller: Controller, totals: Totals, records: Sequence[tuple[str, Record]], output: str) -> None:
    """Costs as measured; without a draft model the proposals are copies, which cost no pass.

    ``totals``: over all prompts; ``records``: what was decided, by prompt.
    """
    costs, has_model = controller.costs, controller.costs.knows_c
    rows = []
    for k in LENGTHS:
        cost = costs.v(1 + k) + (costs.draft_cost(k, 1) if has_model else 0.0)
        rows.append({"k": k, "v": costs.v(1 + k), "cost": cost, "break_even": break_even(k, cost)})
    if output == "json":
        drafted = {"proposed": totals.proposed, "accepted": totals.accepted, "acceptance_rate": totals.acceptance_rate}
        told = [{"prompt": prompt, **record.as_dict()} for prompt, record in records]
        pays = controller.break_even if has_model else None
        report = {**costs.as_dict(), **drafted, "break_even": pays, "lengths": rows, "prompts": told}
        typer.echo(json.dumps(report, allow_nan=False))
        return
    copies = f"copies of the text (n-gram) cost nothing to propose; of these {_accepted('ngram', records)}"
    if has_model:
        typer.echo(f"draft step c = {costs.c:.2f}; of its tokens {_accepted('draft', records)}\n{copies}")
    else:
        typer.echo(f"no draft model; {copies}")
    typer.echo("  K  v(K+1)   cost  pays from acceptance")
    for row in rows:
        needed = row["break_even"]
        word = "never" if needed is None else f"{needed:.2f}"
        typer.echo(f"{row['k']:3d}  {row['v']:6.2f} {row['cost']:6.2f}  {word}")
    for prompt, record in records:
        words = record.explain() or "not measured"
        typer.echo(f"{textwrap.shorten(prompt, _MOST_CHARACTERS, placeholder='…')!r}: {words}")


def _accepted(kind: Kind, records: Sequence[tuple[str, Record]]) -> str:
    """How many tokens of one drafter the target accepted, over all prompts."""
    judged = sum(record.judged[kind] for _prompt, record in records)
    accepted = sum(record.accepted[kind] for _prompt, record in records)
    return f"{accepted} of {judged} accepted" + (f", {accepted / judged:.1%}" if judged else "")
