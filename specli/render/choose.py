"""Which renderer a pair of streams gets."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Literal, TextIO

from specli.render.base import Renderer, is_terminal
from specli.render.plain import PlainRenderer

ColorMode = Literal["auto", "on", "off"]


def choose(
    stdout: TextIO,
    stderr: TextIO | None,
    env: Mapping[str, str],
    *,
    color: ColorMode = "auto",
    show_summary: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Renderer:
    """The live renderer when stdout is a capable terminal, else the plain one.

    ``color`` auto means tinted unless NO_COLOR is set and not empty (no-color.org); on and off overrule it. It never
    brings escape codes into a pipe. ``show_summary`` prints the figures on stderr at the end.
    """
    if not is_terminal(stdout) or _is_dumb(env):
        return PlainRenderer(stdout, stderr, show_summary=show_summary)
    from specli.render.live import LiveRenderer, terminal_console  # rich costs 50 ms: only for a terminal

    tint = color == "on" or (color == "auto" and not env.get("NO_COLOR"))
    console = terminal_console(stdout, env, tint=tint)
    if console.legacy_windows:  # obeys no escape code
        return PlainRenderer(stdout, stderr, show_summary=show_summary)
    return LiveRenderer(console, stderr, env=env, show_summary=show_summary, clock=clock)


def _is_dumb(env: Mapping[str, str]) -> bool:
    """A terminal that says it cannot move its cursor, or (but on Windows) does not say what it is."""
    term = env.get("TERM", "").lower()
    return term in ("dumb", "unknown") or (not term and os.name != "nt")
