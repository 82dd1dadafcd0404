"""A self-test for people: one line per check, then the map of widths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from specli.render.tables import new_table, open_console
from specli.selftest.subject import Check

_WORDS = {True: ("pass", "green"), False: ("FAIL", "bold red"), None: ("none", "dim")}


def print_checks(stdout: TextIO, env: Mapping[str, str], checks: Sequence[Check]) -> None:
    """Print all checks, the map, and how many failed."""
    with open_console(stdout, env) as console:
        table = new_table("", "check", "what was found", "s>")
        for check in checks:
            word, style = _WORDS[check.passed]
            table.add_row(Text(word, style), check.name, check.detail, f"{check.elapsed_s:.1f}")
        console.print(table)
        for part in _maps(checks):
            console.print()
            console.print(part)
        console.print()
        n_failed, n_passed = (sum(check.passed is wanted for check in checks) for wanted in (False, True))
        elapsed_s = sum(check.elapsed_s for check in checks)
        if n_failed:
            console.print(Text(f"{n_failed} of {n_failed + n_passed} checks failed ({elapsed_s:.0f} s)", "bold red"))
        else:
            console.print(Text(f"all {n_passed} checks passed ({elapsed_s:.0f} s)", "bold green"))


def _maps(checks: Sequence[Check]) -> Iterator[Table | Text]:
    """How far logits move with the width of a pass, against one-token passes."""
    found = next((check.data["map"] for check in checks if "map" in check.data), None)
    if not isinstance(found, Mapping):
        return
    yield Text("largest difference of a logit against one-token passes (= is none, to the bit)", "bold")
    widths = list(dict.fromkeys(width for lengths in found.values() for row in lengths.values() for width in row))
    table = new_table("caches", "behind>", *(f"{width}>" for width in widths))
    for cache_type, lengths in found.items():
        for i, (length, row) in enumerate(lengths.items()):
            cells = ("=" if row.get(width) == 0 else f"{row[width]:.2g}" if width in row else "" for width in widths)
            table.add_row("" if i else cache_type, f"{length} tokens", *cells)
    yield table
