"""Are sampled tokens distributed as the target says? Real logits, the real loop, many seeded draws.

Each draw continues a prompt by three tokens at temperature 1: the first is plain, the next two are drafted and judged.
Logits are a function of the text, so each text is evaluated once and remembered; the drafter, the verifier and the loop
work as always. The counts are compared with the product of the target's own probabilities by a chi-square test and by
their total variation distance. Seeds are fixed: on the same logits the result is always the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from specli.engine.base import CacheLedger, Engine, Evaluation, Row, Slice
from specli.sampling import Sampler
from specli.selftest.subject import Check, Subject

FALSE_ALARM = 1e-4  # of each of the two tests, were the seeds not fixed
N_DRAWS = 2000
SAMPLER = Sampler(1.0, top_k=4, top_p=1.0, min_p=0.0)  # few enough texts to evaluate them all
_N_TOKENS = 3
_N_SIMULATED = 20_000
_MIN_EXPECTED = 5.0
Chances = NDArray[np.float64]


class MemoEngine(CacheLedger):
    """``engine`` with a memory for rows: a text of sequence 0 that was seen before is not evaluated again."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.n_ctx, engine.n_batch, engine.n_rows_max, 1, engine.n_vocab)
        self.busy_s = 0.0
        self._engine = engine
        self._rows: dict[tuple[int, ...], Row] = {}
        self._history: list[int] = []
        self._held: list[int] = []  # what the engine's own cache holds
        engine.rollback(0, 0)

    def evaluate(self, slices: Sequence[Slice], interruptible: bool = False) -> Evaluation:
        """See ``Engine.evaluate``."""
        self.check(slices)
        found = []
        for part in slices:
            rows = []
            for i, token in enumerate(part.tokens):
                self._history.append(int(token))
                if i >= len(part.tokens) - part.n_rows:
                    rows.append(self._row())
            found.append(np.stack(rows) if rows else np.empty((0, self.n_vocab), np.float32))
        self.advance(slices)
        return Evaluation(found)

    def rollback(self, sequence: int, n_past: int) -> None:
        """Keep the first ``n_past`` tokens; the engine's own cache follows when it is asked next."""
        self.cut(sequence, n_past)
        del self._history[n_past:]

    def close(self) -> None:
        """The engine is somebody else's."""

    def _row(self) -> Row:
        key = tuple(self._history)
        if key not in self._rows:
            shared = 0
            while shared < min(len(self._held), len(key) - 1) and self._held[shared] == key[shared]:
                shared += 1
            self._engine.rollback(0, shared)
            self._rows[key] = self._last_row(key, shared)
            self._held = list(key)
        return self._rows[key]

    def _last_row(self, text: tuple[int, ...], start: int) -> Row:
        row: Row = np.empty(0, np.float32)
        while start < len(text):
            part = text[start : start + self.n_batch]
            row = self._engine.evaluate([Slice(0, part, start, 1)]).rows[0][0].copy()
            start += len(part)
        return row


def check_continuations(subject: Subject, verify: str) -> Check:
    """Draw, count, and compare with the target's own law."""
    name = f"sampled text, {verify}"
    prompt = list(subject.prompts[0])
    target = MemoEngine(subject.target)
    draft = MemoEngine(subject.draft) if subject.draft is not None else None
    remembered = subject.with_engines(target, draft)
    kind, counts = subject.drafters[0], Counter[tuple[int, ...]]()
    first_seed = sum(name.encode()) * N_DRAWS  # other coins for each verifier
    for seed in range(first_seed, first_seed + N_DRAWS):
        # one token more than is looked at, so that the loop may draft two tokens behind the first
        tokens = remembered.decode(prompt, _N_TOKENS + 1, kind, 2, sampler=SAMPLER, verify=verify, seed=seed)
        counts[tokens[:_N_TOKENS]] += 1
        if seed % 100 == 0:
            subject.progress((seed - first_seed) / N_DRAWS)
    law = _law(target, prompt, subject.end_ids)
    subject.target.rollback(0, 0)
    if subject.draft is not None:
        subject.draft.rollback(0, 0)
    return _judge(name, counts, law)


def _law(target: MemoEngine, prompt: Sequence[int], end_ids: frozenset[int]) -> dict[tuple[int, ...], float]:
    """The target's own law of the continuations; those that end early are shorter."""
    target.rollback(0, 0)
    unfinished: dict[tuple[int, ...], float] = {(): 1.0}
    law: dict[tuple[int, ...], float] = {}
    while unfinished:
        tokens, chance = unfinished.popitem()
        if len(tokens) == _N_TOKENS or (tokens and tokens[-1] in end_ids):
            law[tokens] = chance
            continue
        target.rollback(0, 0)
        distribution = SAMPLER.distribution(_last_row(target, [*prompt, *tokens]).copy())
        for token, part in zip(distribution.ids, distribution.probs, strict=True):
            longer = (*tokens, int(token))
            unfinished[longer] = chance * float(part)
    return law


def _last_row(target: MemoEngine, text: Sequence[int]) -> Row:
    """The row behind ``text``, from an empty cache."""
    row: Row = np.empty(0, np.float32)
    for start in range(0, len(text), target.n_batch):
        part = text[start : start + target.n_batch]
        is_last = start + len(part) == len(text)
        evaluation = target.evaluate([Slice(0, part, start, int(is_last))])
        row = evaluation.rows[0][0] if is_last else row
    return row


def _judge(name: str, counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> Check:
    impossible = [tokens for tokens in counts if law.get(tokens, 0.0) == 0.0]
    if impossible:
        detail = f"drew {impossible[0]}, which the target never says"
        return Check(name, False, detail, {"draws": N_DRAWS, "impossible": len(impossible)})
    texts = sorted(law, key=lambda tokens: -law[tokens])
    chances, seen = np.array([law[tokens] for tokens in texts]), np.array([counts[tokens] for tokens in texts], float)
    chances, seen = pooled(chances, seen, _MIN_EXPECTED / N_DRAWS)
    p_value = chi_square_p(seen, N_DRAWS * chances)
    distance = float(np.abs(seen / N_DRAWS - chances).sum() / 2)
    limit = distance_limit(chances, N_DRAWS)
    passed = p_value > FALSE_ALARM and distance <= limit
    detail = (
        f"{N_DRAWS} draws of {len(texts)} texts: chi-square p = {p_value:.2g}, total variation {distance:.3f} of at "
        f"most {limit:.3f} (false alarms: {FALSE_ALARM:g} each)"
    )
    data = {"draws": N_DRAWS, "cells": int(chances.size), "p": p_value, "distance": distance, "limit": limit}
    return Check(name, passed, detail, {**data, "false_alarm": FALSE_ALARM})


def pooled(chances: Chances, seen: Chances, least: float) -> tuple[Chances, Chances]:
    """All cells below ``least`` chance in one; both float64 ``(n,)``."""
    rare = chances < least
    if rare.sum() < 2:
        return chances, seen
    return np.append(chances[~rare], chances[rare].sum()), np.append(seen[~rare], seen[rare].sum())


def chi_square_p(seen: Chances, expected: Chances) -> float:
    """The p-value of ``seen`` counts under ``expected`` ones, by the approximation of Wilson and Hilferty."""
    degrees = seen.size - 1
    if degrees == 0:
        return 1.0
    statistic = float(((seen - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return 1 - NormalDist().cdf(((statistic / degrees) ** (1 / 3) - (1 - spread)) / spread**0.5)


def distance_limit(chances: Chances, n_draws: int) -> float:
    """The total variation distance that ``n_draws`` draws from ``chances`` exceed with chance ``FALSE_ALARM``."""
    drawn = np.random.default_rng(0).multinomial(n_draws, chances / chances.sum(), _N_SIMULATED)
    distances = np.abs(drawn / n_draws - chances).sum(axis=1) / 2
    return float(np.quantile(distances, 1 - FALSE_ALARM))
