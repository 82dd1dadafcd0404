"""The one line below a growing answer: what matters most stands left, what does not fit falls off on the right."""

from __future__ import annotations

from specli.events import SpeculationState
from specli.render.summary import bar, percent, time_shares
from specli.stats import Stats

SYMBOLS = "·τ…"


def status_line(stats: Stats, state: SpeculationState | None, width: int, *, use_symbols: bool = True) -> str:
    """At most ``width`` characters (one cell each): the leading parts that fit, figures not yet defined left out."""
    separator = " · " if use_symbols else " | "
    line = ""
    for part in _parts(stats, state, "τ" if use_symbols else "tau"):
        longer = line + separator + part if line else part
        if len(longer) > width:
            break
        line = longer
    return line


def progress_line(label: str, fraction: float | None, width: int, *, use_symbols: bool = True) -> str:
    """A label, and a bar with a percentage when the fraction is known; at most ``width`` characters."""
    if fraction is None:
        return (label + (" …" if use_symbols else " ..."))[:width]
    done = percent(min(max(fraction, 0.0), 1.0)).rjust(4)
    bar_width = min(30, width - len(label) - len(done) - 2)
    if bar_width < 5:
        return f"{label} {done}"[:width]
    return f"{label} {bar(fraction, bar_width, use_blocks=use_symbols)} {done}"


def _parts(stats: Stats, state: SpeculationState | None, tau: str) -> list[str]:
    """Most important first."""
    parts: list[str] = []
    if (rate := stats.decode_tok_s) is not None:
        parts.append(f"{rate:.0f} tok/s" if rate >= 9.95 else f"{rate:.1f} tok/s")
    if state is not None and not state.active:
        parts.append("speculation off")
    if (accepted := stats.acceptance_rate) is not None:
        parts.append(f"accept {percent(accepted)}")
    if state is not None and state.active:
        if (efficiency := stats.block_efficiency) is not None:
            parts.append(f"{tau} {efficiency:.1f}")
        if state.is_fixed:
            parts.append(f"K {state.k}")
        elif stats.state:
            mean_k = "" if stats.mean_k is None else f"K {stats.mean_k:.1f} "
            parts.append(f"{mean_k}{stats.state}")
    shares = {name: share for name, share in time_shares(stats).items() if share}
    if shares:
        parts.append(" ".join(f"{name} {percent(share)}" for name, share in shares.items()))
    if state is not None and state.n_ctx and stats.n_prompt is not None:
        parts.append(f"ctx {stats.n_prompt + stats.n_tokens}/{state.n_ctx}")
    return parts
