"""Where the answers of ``specli bench`` go, with or without --url: to stdout in the form asked for, and into files."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, TypeVar

if TYPE_CHECKING:
    from specli.cli.bench import BenchFlags

FORMATS = ("table", "md", "json", "jsonl", "csv")


class Measured(Protocol):
    """A report."""

    def as_dict(self) -> dict[str, object]:
        """All of it, JSON types only."""

    def lines(self) -> Iterator[dict[str, object]]:
        """One object per row."""


class Compared(Protocol):
    """What differs between two reports."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What else differs."""


_Report = TypeVar("_Report", bound=Measured, contravariant=True)
_Comparison = TypeVar("_Comparison", bound=Compared)


class TablePrinter(Protocol[_Report]):
    """Prints a report for people."""

    def __call__(self, stdout: TextIO, env: Mapping[str, str], report: _Report, *, details: bool) -> None:
        """``details``: every figure."""


@dataclass(frozen=True)
class Forms:
    """An answer in each of ``FORMATS``, made when it is asked for. ``whole``: json; ``rows``: jsonl and csv."""

    print_table: Callable[[], None]
    markdown: Callable[[], str]
    whole: Callable[[], Mapping[str, object]]
    rows: Callable[[], Iterable[Mapping[str, object]]]

    def write(self, form: str) -> None:
        """To stdout."""
        if form == "table":
            self.print_table()
        elif form == "md":
            sys.stdout.write(self.markdown())
        elif form == "json":
            _write_json(self.whole(), indent=1)
        elif form == "jsonl":
            for row in self.rows():
                _write_json(row)
        else:
            _write_csv(self.rows())
        sys.stdout.flush()


def deliver(
    report: _Report,
    what: BenchFlags,
    print_table: TablePrinter[_Report],
    markdown: Callable[[_Report], str],
    draw: Callable[[_Report, Path], None],
) -> None:
    """Print, save and draw. The answer goes to stdout before any file is written."""
    from specli.bench.files import save

    table = partial(print_table, sys.stdout, os.environ, report, details=what.details)
    Forms(table, partial(markdown, report), report.as_dict, report.lines).write(what.output)
    if what.save is not None:
        save(what.save, report)
    if what.plot is not None:
        draw(report, what.plot)


def deliver_comparison(
    comparison: _Comparison,
    rows: Sequence[Mapping[str, object]],
    form: str,
    print_table: Callable[[TextIO, Mapping[str, str], _Comparison], None],
    markdown: Callable[[_Comparison], str],
) -> None:
    """Print a comparison. ``rows``: its changes, JSON types only."""
    Forms(
        partial(print_table, sys.stdout, os.environ, comparison),
        partial(markdown, comparison),
        lambda: {"changes": rows, "notes": list(comparison.notes)},
        lambda: rows,
    ).write(form)


def _write_json(found: Mapping[str, object], indent: int | None = None) -> None:
    sys.stdout.write(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=indent) + "\n")


def _write_csv(rows: Iterable[Mapping[str, object]]) -> None:
    """Rows with one header; nested figures by columns of their own."""
    from specli.bench.document import flat

    flattened = [flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flattened for name in row))
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flattened)
