"""The body of ``specli bench --url``: a load test of a server, and two kept ones compared."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specli.cli.bench import check_files
from specli.cli.deliver import deliver, deliver_comparison
from specli.cli.interrupt import Interrupt
from specli.errors import Cancelled, ConfigError, ServerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specli.bench.workloads import Prompt
    from specli.cli.bench import BenchFlags
    from specli.cli.load_flags import LoadFlags
    from specli.config import BenchOptions, LoadOptions
    from specli.loadtest.document import LoadReport


def load_test(flags: LoadFlags, what: BenchFlags, options: BenchOptions, *, ignore_eos: bool, started_s: float) -> None:
    """Measure and deliver. ``started_s``: since when the time budget counts, on ``time.monotonic``.

    Raises ``ServerError`` behind the figures where most requests failed at every load.
    """
    if len(options.temperatures) > 1:
        raise ConfigError(f"--temp got {what.temperature!r}, expected one temperature with --url")
    wanted = flags.options(
        seed=options.seed,
        temperature=options.temperatures[0],
        time_budget_s=options.time_budget_s,
        ignore_eos=ignore_eos,
        has_prompts=what.prompts is not None,
    )
    check_files(what)
    prompts = what.read_prompts() if what.prompts is not None else []
    report = _measure(wanted, prompts, started_s)

    from specli.loadtest.plot import draw
    from specli.render.load import markdown, print_report

    deliver(report, what, print_report, markdown, draw)
    if report.ending == "interrupted":
        raise typer.Exit(Cancelled.exit_code)
    if report.failure is not None:
        raise ServerError(report.failure)


def _measure(options: LoadOptions, prompts: Sequence[Prompt], started_s: float) -> LoadReport:
    from specli.loadtest.measure import measure
    from specli.loadtest.run import Watch
    from specli.render.choose import choose

    deadline_s = None if options.time_budget_s is None else started_s + options.time_budget_s
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        console = stack.enter_context(choose(sys.stderr, sys.stderr, os.environ))
        return measure(options, prompts, Watch(console.progress, interrupt, deadline_s))


def compare_loads(old: Path, new: Path, form: str) -> None:
    """Print what changed between two kept load tests. Raises ``ConfigError``, also for one of another kind."""
    from specli.loadtest.compare import compare
    from specli.loadtest.document import is_load_test, load
    from specli.render.load import comparison_markdown, print_comparison

    comparison = compare(*(load(path) if is_load_test(path) else _other_kind(path) for path in (old, new)))
    rows = [change.as_dict() for change in comparison.changes]
    deliver_comparison(comparison, rows, form, print_comparison, comparison_markdown)


def _other_kind(path: Path) -> dict[str, object]:
    """A file beside a load test that is none: a bench of models, or what no bench has written."""
    from specli.bench import document

    document.load(path)
    raise ConfigError(f"--compare got a load test and a bench of models ({path}); expected two of a kind")
