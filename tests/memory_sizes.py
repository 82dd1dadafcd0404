"""What llama.cpp says it would allocate, and what it then allocates, by kind and buffer."""

from __future__ import annotations

import re
from collections import Counter, deque
from contextlib import closing

from specli.config import ModelOptions
from specli.engine.llama import LlamaEngine, LlamaModel
from specli.engine.log import LOG
from specli.engine.sizing import LlamaSizer
from specli.memory_plan import MIB

N_ROWS = 4
Sizes = Counter[tuple[str, str]]  # (kind, buffer) -> hundredths of a MiB, what the log is rounded to

_SIZE = re.compile(r"\w+: +(.+?) +(model|KV|RS|compute|output) buffer size = +([\d.]+) MiB")
_KINDS = {"model": "weights", "KV": "kv", "RS": "state", "compute": "compute", "output": "output"}


def planned(options: ModelOptions) -> Sizes:
    """Without loading a weight."""
    with LlamaSizer() as sizer:
        buffers = sizer.measure(options, N_ROWS).buffers
    sizes: Sizes = Counter()
    for part in buffers:
        n_bytes = part.n_bytes // N_ROWS if part.kind == "output" else part.n_bytes  # it begins with one row
        sizes[part.kind, part.name] += round(100 * n_bytes / MIB)
    return sizes


def allocated(options: ModelOptions) -> Sizes:
    """The same of a real load, from its log."""
    lines, LOG.lines = LOG.lines, deque()
    LOG.clear = lambda: None  # type: ignore[method-assign]
    try:
        with (
            closing(LlamaModel(options, lambda _fraction: None, lambda: False)) as model,
            closing(LlamaEngine(model, options, N_ROWS, lambda: False)),
        ):
            text = [line for _level, line in LOG.lines]
    finally:
        del LOG.clear
        LOG.lines = lines
    sizes: Sizes = Counter()
    for line in text:
        if match := _SIZE.match(line):
            sizes[_KINDS[match[2]], match[1]] += round(100 * float(match[3]))
    return sizes
