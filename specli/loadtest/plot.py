"""A load test as a picture: latencies against load with their bounds, and what the server brings.

matplotlib is imported when something is drawn (the extra ``plot``), without pyplot, as ``bench.plot``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specli.bench.plot import write_picture
from specli.loadtest.document import LoadReport
from specli.loadtest.figures import INSIDE, Figures, Latency

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"p50": "#0072B2", "p95": "#E69F00", "p99": "#D55E00"}  # Okabe and Ito: told apart by everyone
_GREEN, _GREY = "#009E73", "#666666"


def draw(report: LoadReport, path: Path) -> None:
    """Write the picture of ``report``. Raises ``ConfigError`` when the file cannot be written."""
    write_picture(lambda: _figure(report), path)


def _figure(report: LoadReport) -> Figure:
    from matplotlib.figure import Figure

    steps = sorted((step for step in report.steps if step.n_ok), key=lambda step: step.load)
    settings = report.circumstances.get("settings")
    bounds = settings if isinstance(settings, Mapping) else {}
    figure = Figure(figsize=(10.0, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, squeeze=False)
    _latency(axes[0, 0], steps, "TTFT, ms", lambda step: step.ttft_ms, bounds.get("sla_ttft_ms"))
    _latency(axes[0, 1], steps, "TPOT, ms per token", lambda step: step.tpot_ms, bounds.get("sla_tpot_ms"))
    _latency(axes[1, 0], steps, "E2E, ms", lambda step: step.e2e_ms, None)
    _throughput(axes[1, 1], steps)
    for axis in axes.flat:
        _loads(axis, steps)
    figure.suptitle(_title(report), fontsize=9, color=_GREY)
    return figure


def _latency(
    axis: Axes, steps: Sequence[Figures], title: str, of: Callable[[Figures], Latency | None], bound: object
) -> None:
    axis.set_title(title, fontsize=10, loc="left")
    found = [(step.load, latency) for step in steps if (latency := of(step)) is not None]
    loads = [load for load, _ in found]
    for name, color in _COLORS.items():
        values = [getattr(latency, name) for _, latency in found]
        axis.plot(loads, values, color=color, marker="o", markersize=3.5, linewidth=1.5, label=name)
    for name in ("p50", "p95"):
        ends = [(load, *interval) for load, latency in found if (interval := getattr(latency, f"{name}_interval"))]
        if ends:
            at, low, high = zip(*ends, strict=True)
            axis.fill_between(at, low, high, color=_COLORS[name], alpha=0.15, linewidth=0)
    if isinstance(bound, int | float):
        axis.axhline(bound, color=_GREY, linestyle="--", linewidth=1, label=f"bound, {bound:g} ms")
    axis.set_ylim(bottom=0)
    if found:
        axis.legend(frameon=False, fontsize=8)


def _throughput(axis: Axes, steps: Sequence[Figures]) -> None:
    """Output tokens/s (requests/s without usage), and the share of requests inside the bounds."""
    has_tokens = any(step.output_tok_s is not None for step in steps)
    axis.set_title("output tokens/s" if has_tokens else "requests/s", fontsize=10, loc="left")
    rates = [(step.load, step.output_tok_s if has_tokens else step.requests_s) for step in steps]
    known = [(load, rate) for load, rate in rates if rate is not None]
    axis.plot(
        [load for load, _ in known],
        [rate for _, rate in known],
        color="black",
        marker="o",
        markersize=4,
        linewidth=1.8,
        label="throughput",
    )
    axis.set_ylim(bottom=0)
    shares = [(step.load, 100 * step.goodput) for step in steps if step.goodput is not None]
    if shares:
        other = axis.twinx()
        other.plot(*zip(*shares, strict=True), color=_GREEN, marker="s", markersize=3.5, linestyle=":")
        other.axhline(100 * INSIDE, color=_GREEN, linewidth=0.6, linestyle="--")
        other.set_ylim(0, 105)
        other.set_ylabel("inside the bounds, %", color=_GREEN)


def _loads(axis: Axes, steps: Sequence[Figures]) -> None:
    loads = [step.load for step in steps]
    axis.set_xlabel("requests/s" if any(step.is_open for step in steps) else "requests in flight")
    axis.grid(axis="y", alpha=0.25)
    if loads:
        axis.set_xscale("log", base=2)
        axis.set_xticks(loads, [f"{load:g}" for load in loads])
        axis.set_xlim(min(loads) / 1.2, max(loads) * 1.2)
        axis.minorticks_off()


def _title(report: LoadReport) -> str:
    known = report.circumstances
    date = str(known.get("date", ""))[:10]
    parts = (known.get("model"), known.get("url"), known.get("server"), f"specli {known.get('specli')}", date)
    return " · ".join(str(part) for part in parts if part)
