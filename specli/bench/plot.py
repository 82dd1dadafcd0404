"""A bench as a picture: speedup against draft length for each workload, acceptance by position, and what passes cost.

matplotlib is imported when something is drawn (the extra ``plot``), and without pyplot, so that no window
system and no global state is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specli.bench.document import Report
from specli.bench.report import Cell
from specli.bench.workloads import TITLES
from specli.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
_COLORS = {"draft": "#0072B2", "ngram": "#D55E00", "auto": "#009E73"}  # Okabe and Ito: told apart by everyone
_NAMES = {"draft": "draft model", "ngram": "n-gram", "auto": "auto (both, controlled)"}
_STYLES = ("-", "--", ":", "-.")  # one per temperature and verifier
_GREY = "#666666"
_COLUMNS = 4  # panels beside each other


def require_plotting(path: Path) -> None:
    """Raise ``ConfigError`` for a file that cannot be drawn: another format, or matplotlib missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"--plot got {path.name}, expected a file that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib, which is not installed; pip install matplotlib") from error


def draw(report: Report, path: Path) -> None:
    """Write the picture of ``report``. Raises ``ConfigError`` when the file cannot be written."""
    write_picture(lambda: _figure(report), path)


def write_picture(make: Callable[[], Figure], path: Path) -> None:
    """Write the figure that ``make`` makes, in specli's style. Raises ``ConfigError`` when it cannot be written."""
    from matplotlib import rc_context

    with rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "specli"}):
        figure = make()
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"--plot {path} cannot be written: {error.strerror}") from error


def _figure(report: Report) -> Figure:
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(cell.workload for cell in report.cells))
    n_rows, n_columns = math.ceil(len(workloads) / _COLUMNS), min(_COLUMNS, len(workloads))
    figure = Figure(figsize=(max(9.0, 3.0 * n_columns + 1.0), 2.6 * n_rows + 3.7), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[2.6 * n_rows + 0.3, 3.4], squeeze=False)[:, 0]
    axes = upper.subplots(n_rows, n_columns, sharey=True, squeeze=False)
    styles = _line_styles(report.cells)
    for i, axis in enumerate(axes.flat):
        if i >= len(workloads):
            axis.set_axis_off()
            continue
        own = [cell for cell in report.cells if cell.workload == workloads[i]]
        _speedups(axis, own, styles)
        axis.set_title(TITLES.get(workloads[i], workloads[i]), fontsize=10, loc="left")
        if i % n_columns == 0:
            axis.set_ylabel("speedup over plain")
        axis.set_ylim(0, 1.2 * max(1.2, *(cell.speedup.value for cell in report.cells)))  # bands may leave the picture
        if i + n_columns >= len(workloads):
            axis.set_xlabel("draft length K, tokens")
    upper.suptitle(_title(report) + "\n", fontsize=9, color=_GREY)
    _legend(upper, report.cells, styles)
    left, right = lower.subplots(1, 2)
    _acceptance(left, report.cells)
    _costs(right, report)
    return figure


def _speedups(axis: Axes, cells: Sequence[Cell], styles: Mapping[tuple[float, str], str]) -> None:
    """One line per drafter (and temperature) over fixed lengths, with intervals; the controller's as a level."""
    axis.axhline(1.0, color=_GREY, linewidth=0.8)
    for key, own in _by_line(cells).items():
        drafter, temperature, verify = key
        color, style = _COLORS[drafter], styles[temperature, verify]
        fixed = sorted((cell for cell in own if cell.setting.k is not None), key=lambda cell: cell.setting.k or 0)
        if fixed:
            lengths = [cell.setting.k or 0 for cell in fixed]
            values = [cell.speedup.value for cell in fixed]
            axis.plot(lengths, values, style, color=color, marker="o", markersize=3.5, linewidth=1.5)
            ends = [cell.speedup.interval or (cell.speedup.value, cell.speedup.value) for cell in fixed]
            low, high = zip(*ends, strict=True)
            axis.fill_between(lengths, low, high, color=color, alpha=0.15, linewidth=0)
        for cell in own:
            if cell.setting.k is None:
                axis.axhline(cell.speedup.value, color=color, linestyle=style, linewidth=1.5)
                if cell.speedup.interval is not None:
                    axis.axhspan(*cell.speedup.interval, color=color, alpha=0.12, linewidth=0)
    lengths = sorted({cell.setting.k for cell in cells if cell.setting.k})
    if lengths:
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [str(k) for k in lengths])
        axis.set_xlim(lengths[0] / 1.25, lengths[-1] * 1.25)
        axis.minorticks_off()
    else:
        axis.set_xticks([])
    axis.grid(axis="y", alpha=0.25)


def _by_line(cells: Sequence[Cell]) -> dict[tuple[str, float, str], list[Cell]]:
    lines: dict[tuple[str, float, str], list[Cell]] = {}
    for cell in cells:
        setting = cell.setting
        if setting.drafter in _COLORS:
            lines.setdefault((setting.drafter, setting.temperature, setting.verify), []).append(cell)
    return lines


def _line_styles(cells: Sequence[Cell]) -> dict[tuple[float, str], str]:
    kinds = dict.fromkeys((cell.setting.temperature, cell.setting.verify) for cell in cells)
    return {kind: _STYLES[i % len(_STYLES)] for i, kind in enumerate(kinds)}


def _legend(figure: object, cells: Sequence[Cell], styles: Mapping[tuple[float, str], str]) -> None:
    from matplotlib.lines import Line2D

    shown = [name for name in _COLORS if any(cell.setting.drafter == name for cell in cells)]
    lines = [Line2D([], [], color=_COLORS[name], linewidth=2, label=_NAMES[name]) for name in shown]
    lines.append(Line2D([], [], color=_GREY, linewidth=0.8, label="plain decoding"))
    if len(styles) > 1:
        for (temperature, verify), style in styles.items():
            name = f"temperature {temperature:g}, {verify}"
            lines.append(Line2D([], [], color=_GREY, linestyle=style, label=name))  # type: ignore[arg-type]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), frameon=False)  # type: ignore[attr-defined]


def _acceptance(axis: Axes, cells: Sequence[Cell]) -> None:
    """Acceptance by position at the longest fixed length: thin lines are workloads, the thick one their mean."""
    several = " (thin: each workload)" if len({cell.workload for cell in cells}) > 1 else ""
    axis.set_title(f"acceptance by position{several}", fontsize=10, loc="left")
    longest = 1
    for drafter in ("draft", "ngram"):
        own = [cell for cell in cells if cell.setting.drafter == drafter and cell.setting.k]
        k = max((cell.setting.k or 0 for cell in own), default=0)
        lines = [cell.counts.per_position_acceptance for cell in own if cell.setting.k == k]
        for line in lines:
            axis.plot(range(1, len(line) + 1), line, color=_COLORS[drafter], linewidth=0.7, alpha=0.35)
        reached = [[line[i] for line in lines if i < len(line)] for i in range(k)]
        mean = [sum(values) / len(values) for values in reached if values]
        axis.plot(range(1, len(mean) + 1), mean, color=_COLORS[drafter], linewidth=2.2, marker="o", markersize=4)
        longest = max(longest, len(mean))
    axis.set_ylim(0, 1)
    axis.set_xlim(0.7, longest + 0.3)
    axis.set_xticks(range(1, longest + 1))
    axis.set_xlabel("position in the draft")
    axis.set_ylabel("accepted up to here")
    axis.grid(axis="y", alpha=0.25)


def _costs(axis: Axes, report: Report) -> None:
    """v(n), and what a round with the draft model costs, against the tokens that it can bring at most."""
    axis.set_title("cost of a round, in one-token passes", fontsize=10, loc="left")
    curve = report.costs.curve
    widths = sorted(curve)
    axis.plot(widths, [curve[n] for n in widths], color="black", marker="o", markersize=4, label="v(n): target pass")
    c, highest = report.costs.c, max(curve.values())
    drafted = sorted({1 + (cell.setting.k or 0) for cell in report.cells if cell.setting.drafter == "draft"} - {1})
    priced = [n for n in drafted if n in curve]
    if c is not None and priced:
        totals = [curve[n] + (n - 1) * c for n in priced]
        highest = max(highest, *totals)
        axis.plot(
            priced, totals, color=_COLORS["draft"], marker="s", markersize=4, label=f"with the draft, c = {c:.2f}"
        )
    end = max(widths[-1], 2)
    axis.plot([1, end], [1, end], color=_GREY, linestyle=":", linewidth=1, label="n: nothing to gain above")
    axis.axhline(1.0, color=_GREY, linewidth=0.8)
    axis.set_ylim(0, max(1.5, 1.1 * highest))
    axis.set_xlabel("tokens in the pass")
    axis.grid(axis="y", alpha=0.25)
    axis.legend(frameon=False, loc="upper left", fontsize=8)


def _title(report: Report) -> str:
    models, hardware = report.circumstances.get("models"), report.circumstances.get("hardware")
    names = [
        str(model["name"])
        for model in (models.values() if isinstance(models, Mapping) else ())
        if isinstance(model, Mapping)
    ]
    cpu = hardware.get("cpu") if isinstance(hardware, Mapping) else None
    date = str(report.circumstances.get("date", ""))[:10]
    return " · ".join(str(part) for part in (*names, cpu, f"specli {report.circumstances.get('specli')}", date) if part)
