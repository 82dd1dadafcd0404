"""``specli bench``: what speculation does to these models, prompts and machine, in figures that can be trusted."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specli.cli import options as o
from specli.cli.arguments import draft_length, map_spec_type, show_log
from specli.cli.deliver import FORMATS, deliver, deliver_comparison
from specli.cli.interrupt import Interrupt
from specli.cli.load_flags import LoadFlags, given_options
from specli.cli.model_group import ModelFlags
from specli.cli.models import ModelChoice, resolve_models
from specli.cli.option_groups import LoadingFlags, ProcessFlags, flattened
from specli.cli.values import seconds
from specli.config import BenchOptions, SamplingOptions, Settings, SpeculationOptions
from specli.errors import Cancelled, ConfigError

if TYPE_CHECKING:
    from specli.bench.document import Report
    from specli.bench.harness import Progress
    from specli.bench.workloads import Prompt
    from specli.render.base import Renderer

_RESERVE_S, _RESERVE = 5.0, 0.03  # of the time budget, for what comes before and after the runs
WHAT, RESULT = "What to measure", "Result"

Workloads = Annotated[
    str | None,
    typer.Option(
        "-w", "--workloads", metavar="NAME,...", rich_help_panel=WHAT, help="Built-in kinds of work (unset: all eight)."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts", metavar="FILE", rich_help_panel=WHAT, help="Own prompts: JSON lines, or text with one per line."
    ),
]
SpecTypes = Annotated[
    str | None,
    typer.Option(
        "--spec-type",
        metavar="TYPE,...",
        rich_help_panel=WHAT,
        help="none, draft, ngram, auto (unset: what there is, and auto).",
    ),
]
Lengths = Annotated[
    str,
    typer.Option(
        "--spec-draft-n-max",
        "--draft-max",
        "--draft",
        "--draft-n",
        metavar="N,...",
        rich_help_panel=WHAT,
        help="Draft lengths (K), tokens, always drafted in full; auto is the controller's.",
    ),
]
Temperatures = Annotated[
    str, typer.Option("--temp", "--temperature", metavar="T,...", rich_help_panel=WHAT, help="0 is greedy.")
]
Verifiers = Annotated[
    str, typer.Option("--verify", metavar="NAME,...", rich_help_panel=WHAT, help="block, rejection, coupled.")
]
NTokens = Annotated[
    int, typer.Option("-n", "--predict", "--n-predict", rich_help_panel=WHAT, help="Most tokens of a run.")
]
Repetitions = Annotated[
    int, typer.Option("-r", "--repetitions", rich_help_panel=WHAT, help="Times that each prompt is run.")
]
TimeBudget = Annotated[
    str,
    typer.Option(
        "--time-budget", metavar="TIME", rich_help_panel=WHAT, help="End by then (90s, 15m, 1h), loading in; 0 = never."
    ),
]
BenchSeed = Annotated[
    int, typer.Option("-s", "--seed", rich_help_panel=WHAT, help="Order of runs, and the coins of sampled ones.")
]
ShareDrafts = Annotated[
    bool,
    typer.Option(
        "--share-drafts", rich_help_panel=WHAT, help="Drafters keep what earlier prompts of a workload taught them."
    ),
]
Output = Annotated[
    str, typer.Option("-o", "--output", metavar="FORMAT", rich_help_panel=RESULT, help=f"{', '.join(FORMATS)}.")
]
Details = Annotated[
    bool, typer.Option("--details", rich_help_panel=RESULT, help="Tables of latencies, shares and acceptance too.")
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", rich_help_panel=RESULT, help="Keep everything as JSON.")
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", rich_help_panel=RESULT, help="Draw it, .png or .svg (needs matplotlib)."),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--compare", metavar="OLD NEW", rich_help_panel=RESULT, help="Compare two saved files and exit."),
]


_DEFAULT = BenchOptions()
_DEFAULT_LENGTHS = ",".join("auto" if k is None else str(k) for k in _DEFAULT.lengths)
_DEFAULT_TEMPERATURES = ",".join(f"{temperature:g}" for temperature in _DEFAULT.temperatures)
_DEFAULT_VERIFIERS = ",".join(_DEFAULT.verifiers)


@dataclass(frozen=True)
class BenchFlags:
    """What to measure and what to do with the result."""

    workloads: Workloads = None
    prompts: Prompts = None
    spec_type: SpecTypes = None
    draft_max: Lengths = _DEFAULT_LENGTHS
    temperature: Temperatures = _DEFAULT_TEMPERATURES
    verify: Verifiers = _DEFAULT_VERIFIERS
    n_predict: NTokens = BenchOptions.n_predict
    repetitions: Repetitions = BenchOptions.repetitions
    time_budget: TimeBudget = f"{(BenchOptions.time_budget_s or 0) / 60:.0f}m"
    seed: BenchSeed = BenchOptions.seed
    raw: o.Raw = BenchOptions.raw
    share_drafts: ShareDrafts = BenchOptions.share_drafts
    output: Output = FORMATS[0]
    details: Details = False
    save: Save = None
    plot: Plot = None
    compare: Compare = None

    def options(self) -> tuple[BenchOptions, list[str]]:
        """Checked, and notes on names that were mapped. Raises ``ConfigError``."""
        if self.output not in FORMATS:
            raise ConfigError(f"-o/--output got {self.output!r}, expected one of {', '.join(FORMATS)}")
        mapped = [map_spec_type(name) for name in _list("--spec-type", self.spec_type)] if self.spec_type else []
        options = BenchOptions(
            lengths=tuple(draft_length(text) for text in _list("--draft-max", self.draft_max)),
            spec_types=tuple(dict.fromkeys(name for name, _ in mapped)),
            temperatures=tuple(_number(text) for text in _list("--temp", self.temperature)),
            verifiers=tuple(_list("--verify", self.verify)),
            n_predict=self.n_predict,
            repetitions=self.repetitions,
            time_budget_s=seconds(self.time_budget),
            seed=self.seed,
            raw=self.raw,
            share_drafts=self.share_drafts,
        )
        return options, [note for _, note in mapped if note]

    def read_prompts(self) -> list[Prompt]:
        """The prompts asked for. Raises ``ConfigError``."""
        from specli.bench import workloads

        if self.prompts is not None:
            if self.workloads is not None:
                raise ConfigError("--workloads and --prompts were both given, one was expected; leave one out")
            return workloads.read_prompts(self.prompts)
        return workloads.built_in(_list("--workloads", self.workloads) if self.workloads is not None else ())


@flattened
def bench(
    context: typer.Context,
    *,
    what: BenchFlags,
    models: ModelFlags,
    top_k: o.TopK = SamplingOptions.top_k,
    top_p: o.TopP = SamplingOptions.top_p,
    min_p: o.MinP = SamplingOptions.min_p,
    ignore_eos: o.IgnoreEos = SamplingOptions.ignore_eos,
    exact: o.Exact = Settings.exact,
    loading: LoadingFlags,
    process: ProcessFlags,
    load: LoadFlags,
    verbose: o.Verbose = False,
    debug: o.Debug = False,
) -> None:
    """Measure what speculation does to your models, prompts and machine.

    Plain and speculative decoding take turns; speedups come with 95% intervals, and a verdict in words ends it. With
    --url: a load test of a server. Ctrl-C prints what was measured so far.
    """
    started_s = time.monotonic()
    load.check(list(given_options(context.command.params, context.get_parameter_source)))
    options, notes = what.options()
    if what.compare is not None:
        if load.is_asked:
            raise ConfigError("--url and --compare were both given: measure, or compare two kept files; leave one out")
        _compare(*what.compare, what.output)
        return
    if load.is_asked:
        from specli.cli.load import load_test

        load_test(load, what, options, ignore_eos=ignore_eos, started_s=started_s)
        return
    check_files(what)
    prompts = what.read_prompts()
    choice = ModelChoice.of(context)
    target = loading.target(models.target(choice))
    draft = loading.draft(models.draft(target, choice))
    sampling = SamplingOptions(max(options.temperatures), top_k, top_p, min_p, ignore_eos=ignore_eos)
    speculation = SpeculationOptions(n_max=options.k_max, fixed=True)
    settings = Settings(
        target, draft, sampling, speculation, models.fit, choice.flags(), process=process.options(), exact=exact
    )
    if verbose:
        show_log()
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        from specli.render.choose import choose

        console = stack.enter_context(choose(sys.stderr, sys.stderr, os.environ))
        for note in notes:
            console.notice(note)
        settings = resolve_models(_without_draft(settings, options), choice, console, interrupt)
        report = _measure(settings, prompts, options, started_s, models, console, interrupt)
    _deliver(report, what)
    if report.ending == "interrupted":
        raise typer.Exit(Cancelled.exit_code)


def _without_draft(settings: Settings, options: BenchOptions) -> Settings:
    """``settings`` that load no more than the types asked for need."""
    types = options.spec_types or ("auto",)
    kind = "auto" if {"draft", "auto"} & set(types) else "ngram" if "ngram" in types else "none"
    if "draft" in types:
        kind = "draft"
    if options.k_max == 0:
        kind = "none"
    return replace(settings, speculation=replace(settings.speculation, type=kind))


def _measure(
    settings: Settings,
    prompts: Sequence[Prompt],
    options: BenchOptions,
    started_s: float,
    models: ModelFlags,
    console: Renderer,
    interrupt: Interrupt,
) -> Report:
    from specli.bench.measure import Watch, measure
    from specli.memory_plan import Setup
    from specli.session import Hooks, Session

    setup = Setup(settings.target, settings.draft, options.k_max, settings.names)
    flags = [*setup.flags(), *models.thread_flags(), *(["--exact"] if settings.exact else [])]
    budget_s = options.time_budget_s
    deadline_s = None if budget_s is None else started_s + budget_s - min(_RESERVE_S, _RESERVE * budget_s)
    n_prompts = len(prompts)
    with Session(settings, Hooks(console.progress, console.notice, interrupt)) as session:
        watch = Watch(lambda step: _show(step, console), console.notice, interrupt, deadline_s)
        console.progress(f"warming up for {n_prompts} prompts", None)
        report = measure(session, prompts, options, watch, flags)
    console.close()
    return report


def _show(step: Progress, console: Renderer) -> None:
    from specli.bench.advice import label

    left = "" if step.left_s is None else f", {_minutes(step.left_s)} left"
    console.progress(f"{step.prompt.name}, {label(step.setting)}{left}", step.fraction)


def _deliver(report: Report, what: BenchFlags) -> None:
    from specli.bench.plot import draw
    from specli.render.bench import markdown, print_report

    deliver(report, what, print_report, markdown, draw)


def _compare(old: Path, new: Path, form: str) -> None:
    from specli.loadtest.document import is_load_test

    if is_load_test(old) or is_load_test(new):
        from specli.cli.load import compare_loads

        compare_loads(old, new, form)
        return

    from specli.bench.compare import change_dict, compare
    from specli.bench.document import load
    from specli.render.bench import comparison_markdown, print_comparison

    comparison = compare(load(old), load(new))
    rows = [change_dict(change) for change in comparison.changes]
    deliver_comparison(comparison, rows, form, print_comparison, comparison_markdown)


def check_files(what: BenchFlags) -> None:
    """Refuse now what could not be written after an hour of measuring."""
    from specli.bench.files import require_writable

    if what.save is not None:
        require_writable("--save", what.save)
    if what.plot is not None:
        from specli.bench.plot import require_plotting

        require_plotting(what.plot)
        require_writable("--plot", what.plot)


def _list(flag: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{flag} got {text!r}, expected values between commas")
    return list(dict.fromkeys(parts))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"--temp got {text!r}, expected numbers between commas, as in 0,0.8") from None


def _minutes(left_s: float) -> str:
    minutes, rest = divmod(round(left_s), 60)
    return f"{minutes}:{rest:02d}"
