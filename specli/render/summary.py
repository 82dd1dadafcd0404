"""The figures of one run as plain rows, and the one layout that plain and live renderers share.

It tells what was measured. Whether speculation paid cannot be known from one run, so it does not say.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specli.events import SpeculationState
from specli.render.base import one_line
from specli.stats import Stats, Totals

NA = "n/a"
BLOCKS = "▏▎▍▌▋▊▉█"  # eighths of a cell
MIN_BAR, MAX_BAR = 8, 24  # cells
GAP = 4  # cells between the two columns

Role = Literal["head", "label", "value", "bar", "time", "space"]
Line = list[tuple[str, Role]]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``fraction`` in [0, 1] is drawn as a bar; None draws none."""

    label: str
    value: str
    fraction: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """What speculation did, plain figures, and two groups of shares that are drawn as bars."""

    head: str
    figures: tuple[Row, ...]
    acceptance: tuple[Row, ...]
    times: tuple[Row, ...]


def summary(stats: Stats, state: SpeculationState | None) -> Summary:
    """The rows of ``stats``; undefined figures read "n/a"."""
    drafted = f"{stats.accepted} of {stats.proposed} accepted" if stats.proposed else NA
    figures = (
        Row("decode", _figure(stats.decode_tok_s, " tok/s")),
        Row("TPOT", _figure(stats.tpot_ms, " ms/token")),
        Row("TTFT", _figure(stats.ttft_s, " s")),
        Row("prefill", _figure(stats.prefill_tok_s, " tok/s")),
        Row("prompt", _prompt(stats)),
        Row("generated", f"{stats.n_tokens} tokens"),
        Row("finish", stats.finish_reason or NA),
        Row("drafted", drafted),
        Row("mean accepted length", _figure(stats.mean_accepted_length, "")),
        Row("block efficiency τ", _figure(stats.block_efficiency, " tokens/round")),
    )
    positions = [Row(f"position {i}", percent(p, 1), p) for i, p in enumerate(stats.per_position_acceptance, start=1)]
    overall = Row("acceptance", percent(stats.acceptance_rate, 1), stats.acceptance_rate)
    times = [Row(f"{name} time", percent(share, 1), share) for name, share in time_shares(stats).items()]
    head = speculation_line(state, is_idle=stats.is_idle)
    head += f"; {one_line(stats.explanation)}" if stats.explanation else ""
    return Summary(head, figures, (overall, *positions), tuple(times))


def totals_line(totals: Totals) -> str:
    """One line: what a conversation has taken and brought so far."""
    drafted = f"; drafted {totals.accepted} of {totals.proposed} accepted, {percent(totals.acceptance_rate, 1)}"
    answers = "1 answer" if totals.turns == 1 else f"{totals.turns} answers"
    return (
        f"conversation: {answers}, {totals.generated} tokens generated; prompts {totals.evaluated} tokens "
        f"evaluated, {totals.reused} reused" + (drafted if totals.proposed else "")
    )


def speculation_line(state: SpeculationState | None, *, is_idle: bool = False) -> str:
    """One line: who drafts, how much and who judges, or why nobody does. ``is_idle``: nothing was drafted so far."""
    if state is None:
        return "speculation: off: nothing was loaded"
    if not state.active:
        return one_line(f"speculation: off: {state.reason}")
    length = f"K {state.k}" if state.is_fixed else f"K auto up to {state.k}"
    word = "off in every round" if is_idle else "active"
    return one_line(f"speculation: {word} ({state.drafter}, {length}, {state.verify})")


def time_shares(stats: Stats) -> dict[str, float | None]:
    """Draft, verify and host seconds, each ÷ the seconds of all rounds; None before the first round."""
    seconds = {"draft": stats.draft_s, "verify": stats.verify_s, "host": stats.host_s}
    total_s = sum(seconds.values())
    return {name: part_s / total_s if total_s > 0 else None for name, part_s in seconds.items()}


def percent(fraction: float | None, decimals: int = 0) -> str:
    """A fraction as percent, or n/a."""
    return NA if fraction is None else f"{100 * fraction:.{decimals}f}%"


def lay_out(rows: Summary, width: int, *, use_blocks: bool) -> list[Line]:
    """Lines of at most ``width`` cells: figures beside bars where both fit, else below each other.

    ``use_blocks`` False keeps to ASCII.
    """
    figures = [row if use_blocks else Row(row.label.replace("τ", "tau"), row.value) for row in rows.figures]
    left = _figure_lines(figures, width)
    left_width = max(_cells(line) for line in left)
    labels = _label_width([*rows.acceptance, *rows.times])
    beside = width - left_width - GAP - labels
    bar_width = min(beside if beside >= MIN_BAR else width - labels, MAX_BAR)
    right: list[Line] = [_share_line(row, labels, bar_width, "bar", use_blocks) for row in rows.acceptance]
    right += [[], *(_share_line(row, labels, bar_width, "time", use_blocks) for row in rows.times)]
    head = [*_head_lines(rows.head, width), list[tuple[str, Role]]()]
    if beside >= MIN_BAR:
        return head + _side_by_side(left, right, left_width + GAP)
    return [*head, *left, [], *right]


def plain_text(line: Line) -> str:
    """A line without its roles."""
    return "".join(text for text, _ in line).rstrip()


def bar(fraction: float, width: int, *, use_blocks: bool) -> str:
    """``fraction`` of ``width`` cells, filled from the left: eighths of a cell, or # without blocks."""
    if width <= 0:
        return ""
    fraction = min(max(fraction, 0.0), 1.0)
    if not use_blocks:
        return ("#" * round(fraction * width)).ljust(width)
    full, eighths = divmod(round(fraction * width * 8), 8)
    return (BLOCKS[-1] * full + (BLOCKS[eighths - 1] if eighths else "")).ljust(width)


def _prompt(stats: Stats) -> str:
    if stats.n_prompt is None:
        return NA
    return f"{stats.n_prompt} tokens" + (f", {stats.n_reused} reused" if stats.n_reused else "")


def _figure(value: float | None, unit: str) -> str:
    """Three digits that matter, and the unit."""
    if value is None:
        return NA
    decimals = 0 if value >= 99.95 else 1 if value >= 9.995 else 2 if value >= 0.0995 else 4
    return f"{value:.{decimals}f}{unit}"


def _head_lines(head: str, width: int) -> list[Line]:
    """The head, folded between words; "K 3" is one word."""
    parts = textwrap.wrap(head.replace(" K ", " K\xa0"), width, subsequent_indent="  ", break_on_hyphens=False)
    return [[(part.replace("\xa0", " "), "head")] for part in parts]


def _figure_lines(rows: Sequence[Row], width: int) -> list[Line]:
    """Label and value in columns; one below the other where that is too wide."""
    label, value = max(len(row.label) for row in rows), max(len(row.value) for row in rows)
    if label + 2 + value <= width:
        return [[(row.label.ljust(label + 2), "label"), (row.value, "value")] for row in rows]
    lines: list[Line] = []
    for row in rows:
        lines += [[(row.label[:width], "label")], [("  ", "space"), (row.value[: max(width - 2, 0)], "value")]]
    return lines


def _share_line(row: Row, labels: int, bar_width: int, role: Role, use_blocks: bool) -> Line:
    """Label and value in ``labels`` cells together, and a bar."""
    drawn = "" if row.fraction is None else bar(row.fraction, bar_width, use_blocks=use_blocks)
    return [(row.label, "label"), (row.value.rjust(labels - 2 - len(row.label)), "value"), ("  " + drawn, role)]


def _label_width(rows: Sequence[Row]) -> int:
    """Cells of the longest label and value, with two spaces after each."""
    return max(len(row.label) for row in rows) + max(len(row.value) for row in rows) + 4


def _side_by_side(left: list[Line], right: list[Line], left_width: int) -> list[Line]:
    lines: list[Line] = []
    for i in range(max(len(left), len(right))):
        line: Line = list(left[i]) if i < len(left) else []
        if i < len(right):
            line += [(" " * (left_width - _cells(line)), "space"), *right[i]]
        lines.append(line)
    return lines


def _cells(line: Line) -> int:
    return sum(len(text) for text, _ in line)
