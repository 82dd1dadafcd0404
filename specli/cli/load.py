"""The body of ``specli bench --url``: a load test of a server, and two kept ones compared."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specli.cli.bench import check_files, write_csv
from specli.cli.interrupt import Interrupt
from specli.errors import Cancelled, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specli.bench.workloads import Prompt
    from specli.cli.bench import BenchFlags
    from specli.cli.load_flags import LoadFlags
    from specli.config import BenchOptions, LoadOptions
    from specli.load.document import LoadReport


def load_test(flags: LoadFlags, what: BenchFlags, options: BenchOptions, *, ignore_eos: bool, started_s: float) -> None:
    """Measure and deliver. ``started_s``: since when the time budget counts, on ``time.monotonic``."""
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
    _deliver(report, what)
    if report.ending == "interrupted":
        raise typer.Exit(Cancelled.exit_code)


def _measure(options: LoadOptions, prompts: Sequence[Prompt], started_s: float) -> LoadReport:
    from specli.load.measure import measure
    from specli.load.run import Watch
    from specli.render.choose import choose

    deadline_s = None if options.time_budget_s is None else started_s + options.time_budget_s
    with ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        console = stack.enter_context(choose(sys.stderr, sys.stderr, os.environ))
        return measure(options, prompts, Watch(console.progress, interrupt, deadline_s))


def _deliver(report: LoadReport, what: BenchFlags) -> None:
    """Print, save and draw. The answer goes to stdout before any file is written."""
    from specli.bench.document import flat
    from specli.load import document

    if what.output == "table":
        from specli.render.load import print_load

        print_load(sys.stdout, os.environ, report, details=what.details)
    elif what.output == "md":
        from specli.render.load import markdown

        sys.stdout.write(markdown(report))
    elif what.output == "json":
        _write_json(report.as_dict(), indent=1)
    elif what.output == "jsonl":
        for line in report.lines():
            _write_json(line)
    else:
        write_csv([flat(line) for line in report.lines()])
    sys.stdout.flush()
    if what.save is not None:
        document.save(what.save, report)
    if what.plot is not None:
        from specli.load.plot import draw

        draw(report, what.plot)


def compare_loads(old: Path, new: Path, output: str) -> None:
    """Print what changed between two kept load tests. Raises ``ConfigError``, also for one of another kind."""
    from specli.bench.document import flat
    from specli.load.compare import compare
    from specli.load.document import is_load_test, load

    found = [load(path) if is_load_test(path) else _other_kind(path) for path in (old, new)]
    comparison = compare(*found)
    rows = [change.as_dict() for change in comparison.changes]
    if output == "table":
        from specli.render.load import print_comparison

        print_comparison(sys.stdout, os.environ, comparison)
    elif output == "md":
        from specli.render.load import comparison_markdown

        sys.stdout.write(comparison_markdown(comparison))
    elif output == "json":
        _write_json({"changes": rows, "notes": list(comparison.notes)}, indent=1)
    elif output == "jsonl":
        for row in rows:
            _write_json(row)
    else:
        write_csv([flat(row) for row in rows])


def _other_kind(path: Path) -> dict[str, object]:
    """A file beside a load test that is none: a bench of models, or what no bench has written."""
    from specli.bench import document

    document.load(path)
    raise ConfigError(f"--compare got a load test and a bench of models ({path}); expected two of a kind")


def _write_json(found: object, indent: int | None = None) -> None:
    sys.stdout.write(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=indent) + "\n")
