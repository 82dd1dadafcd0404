"""Evaluate, roll back, evaluate: must be as if nothing had happened."""

from __future__ import annotations

import numpy as np

from specli.engine.base import Engine, Rows, Slice
from specli.selftest.subject import Check, Subject

PREFIX, HALF = 64, 32  # tokens
WRONG = (1, 2, 4, 8, 16)  # tokens that are evaluated and dropped
WIDTHS = (1, 4)  # of the passes that are compared


def check_rollback(subject: Subject, role: str) -> Check:
    """Whether the target's or the draft's cache forgets what is dropped, to the bit."""
    engine = subject.target if role == "target" else subject.draft
    name = f"rollback of the {role}"
    if engine is None:
        return Check(name, None, "there is no draft model")
    prefix = min(PREFIX, (engine.n_ctx - max(WRONG)) // 2)
    text = [token if token < engine.n_vocab else 0 for token in subject.text[: prefix + max(WIDTHS)]]
    worst, n_cases = 0.0, 0
    for width in WIDTHS:
        if width > engine.n_rows_max:
            continue
        fresh = _fresh(engine, text, prefix, width)
        for n_wrong in (n for n in WRONG if n <= engine.n_batch):
            wrong = [(token + 1) % engine.n_vocab for token in text[:n_wrong]]
            engine.rollback(0, prefix)
            engine.evaluate([Slice(0, wrong, prefix, 0)])
            engine.rollback(0, prefix)
            worst = max(worst, _difference(fresh, _rows(engine, text, prefix, width)))
            n_cases += 1
        engine.rollback(0, prefix // 2)  # far back: over the prefix's second half, fed again in the same chunk
        _feed(engine, text, prefix)
        worst = max(worst, _difference(fresh, _rows(engine, text, prefix, width)))
        n_cases += 1
    engine.rollback(0, 0)
    detail = f"{n_cases} times evaluated, rolled back and evaluated: "
    detail += "bit for bit as from an empty cache" if worst == 0 else f"logits differ by up to {worst:.3g}"
    return Check(name, worst == 0, detail, {"cases": n_cases, "largest_difference": worst})


def _fresh(engine: Engine, text: list[int], prefix: int, width: int) -> Rows:
    engine.rollback(0, 0)
    _feed(engine, text, prefix // 2)
    _feed(engine, text, prefix)
    return _rows(engine, text, prefix, width)


def _feed(engine: Engine, text: list[int], end: int) -> None:
    while (start := engine.n_past(0)) < end:
        engine.evaluate([Slice(0, text[start : min(end, start + engine.n_batch)], start, 0)])


def _rows(engine: Engine, text: list[int], start: int, width: int) -> Rows:
    n_rows = min(width, engine.n_rows_max)
    rows: Rows = engine.evaluate([Slice(0, text[start : start + width], start, n_rows)]).rows[0].copy()
    return rows


def _difference(one: Rows, other: Rows) -> float:
    return float(np.abs(one.astype(np.float64) - other).max())
