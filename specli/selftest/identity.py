"""Is the text plain decoding's own? Exactly, where passes of all widths agree to the bit; else up to what is undecided.

The map says how far logits move with the width of a pass, at which length and with which cache type. Where it says
"not at all", every difference is a fault. Where logits move, two choices that lie closer together than a difference of
two logits moves may be swapped (it happens between batch sizes of llama.cpp itself), and nothing else may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specli import bits
from specli.samplers import Row, top_ids
from specli.sampling import Sampler, gumbel_noise
from specli.selftest.subject import Check, Subject

WIDTHS = (2, 3, 4, 5, 6, 8, 9, 12, 16, 17)  # tokens in a pass
CACHE_TYPES = ("f16", "q8_0")
GREEDY = Sampler(0.0)
SAMPLED = Sampler(0.8, 40, 1.0, 0.05)  # no top-p: its edge moves by mass, which no distance of logits tells
N_TOKENS = 48  # of a generation
SETTINGS = {"draft": (1, 3, 8), "ngram": (4, 8)}  # K
SEED = 7


@dataclass(frozen=True)
class BitMap:
    """``shifts``: cache type -> length -> width -> shift."""

    shifts: Mapping[str, Mapping[int, Mapping[int, bits.Shift]]]

    def allowed(self, cache_type: str, k: int, length: int) -> bits.Shift:
        """How far logits may move in a text of ``length`` tokens with drafts of up to ``k``: the most that was seen."""
        found = bits.NONE
        for start in self.lengths(cache_type, length):
            widths = self.shifts[cache_type][start]
            used = {width: shift for width, shift in widths.items() if width <= max(2, k + 1)}
            worst = bits.largest(used)
            found = bits.Shift(max(found.largest, worst.largest), max(found.spread, worst.spread))
        return found

    def lengths(self, cache_type: str, length: int) -> list[int]:
        """Measured lengths that speak for a text of ``length``: from the shortest to the first that reaches so far."""
        measured = sorted(self.shifts[cache_type])
        short = [start for start in measured if start + bits.MAX_WIDTH < length]
        return measured[: len(short) + 1]

    def words(self) -> str:
        """One line."""
        parts = []
        for cache_type, by_length in self.shifts.items():
            exact = [length for length, widths in by_length.items() if bits.largest(widths).is_identical]
            worst = max((bits.largest(widths).largest for widths in by_length.values()), default=0.0)
            if len(exact) == len(by_length):
                parts.append(f"{cache_type}: identical at every width and length")
            else:
                where = f"identical behind {', '.join(map(str, exact))} tokens, else " if exact else ""
                parts.append(f"{cache_type}: {where}logits move by up to {worst:.2g}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, object]:
        """Cache type -> length -> width -> largest difference of a logit."""
        return {
            cache_type: {
                str(length): {str(width): shift.largest for width, shift in widths.items()}
                for length, widths in by_length.items()
            }
            for cache_type, by_length in self.shifts.items()
        }


def measure_map(subject: Subject) -> BitMap:
    """Measure the subject's own cache type, and the others where an engine can be made for them."""
    found: dict[str, dict[int, dict[int, bits.Shift]]] = {}
    types = dict.fromkeys([subject.cache_type, *(CACHE_TYPES if subject.open_engine is not None else ())])
    for i, cache_type in enumerate(types):
        engine = subject.target
        if cache_type != subject.cache_type and subject.open_engine is not None:
            engine = subject.open_engine(cache_type)
        try:
            engine.rollback(0, 0)
            widths = [width for width in WIDTHS if width <= min(engine.n_rows_max, engine.n_batch)]
            lengths = bits.lengths_within(min(engine.n_ctx, len(subject.text)), max(widths))
            found[cache_type] = {}
            for j, length in enumerate(lengths):
                found[cache_type][length] = bits.measure(engine, subject.text, length, widths)
                subject.progress((i + (j + 1) / len(lengths)) / len(types))
            engine.rollback(0, 0)
        finally:
            if engine is not subject.target:
                engine.close()
    return BitMap(found)


def check_map(subject: Subject) -> tuple[Check, BitMap]:
    """The map is a measurement: it cannot fail, and says what the other checks may ask for."""
    found = measure_map(subject)
    return Check("bit identity of widths", True, found.words(), {"map": found.as_dict()}), found


def check_greedy(subject: Subject, known: BitMap) -> Check:
    """Greedy texts of every drafter and K against plain decoding."""
    return _check(subject, known, "greedy text", GREEDY, "greedy", 0)


def check_seed(subject: Subject, known: BitMap) -> Check:
    """One seed at temperature 0.8, without a draft, with any drafter and K."""
    return _check(subject, known, f"text of seed {SEED}", SAMPLED, "coupled", SEED)


def _check(subject: Subject, known: BitMap, name: str, sampler: Sampler, verify: str, seed: int) -> Check:
    faults: list[str] = []
    swapped: list[float] = []
    n_same = n_runs = 0
    allowed_most = 0.0
    for i, prompt in enumerate(subject.prompts):
        plain = subject.decode(prompt, N_TOKENS, "none", 0, sampler=sampler, verify=verify, seed=seed)
        for kind in subject.drafters:
            for k in SETTINGS[kind]:
                tokens = subject.decode(prompt, N_TOKENS, kind, k, sampler=sampler, verify=verify, seed=seed)
                n_runs += 1
                if tokens == plain:
                    n_same += 1
                    continue
                shift = known.allowed(subject.cache_type, k, len(prompt) + len(plain))
                allowed_most = max(allowed_most, shift.spread)
                at, margin = _difference(subject, prompt, plain, tokens, sampler, seed, shift)
                if margin <= shift.spread and not shift.is_identical:
                    swapped.append(margin)
                else:
                    faults.append(f"prompt {i + 1}, {kind} K {k}, token {at + 1}, margin {margin:.3g}")
        subject.progress((i + 1) / len(subject.prompts))
    return Check(
        name,
        not faults,
        _words(n_same, n_runs, swapped, allowed_most, faults),
        {"same": n_same, "runs": n_runs, "swapped_margins": swapped, "faults": faults},
    )


def _words(n_same: int, n_runs: int, swapped: Sequence[float], allowed: float, faults: Sequence[str]) -> str:
    words = f"{n_same} of {n_runs} texts are plain decoding's own, token for token"
    if swapped:
        words += (
            f"; in {len(swapped)} an undecided token was swapped (margin up to {max(swapped):.3g}, widths move "
            f"differences of logits by up to {allowed:.3g})"
        )
    return words + (f"; first fault: {faults[0]}" if faults else "")


def _difference(
    subject: Subject,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    sampler: Sampler,
    seed: int,
    shift: bits.Shift,
) -> tuple[int, float]:
    """Where two texts part, and by how much plain's choice led there, in logits; infinite where one just ends."""
    at = next((i for i, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return min(len(plain), len(other)), float("inf")
    row = subject.row_after(prompt, plain[:at])
    mine, theirs = plain[at], other[at]
    lead = float(row[mine]) - float(row[theirs])
    if sampler.is_greedy:
        return at, abs(lead)
    noise = gumbel_noise(seed, len(prompt) + at, np.array([mine, theirs]))
    lead += sampler.temperature * float(noise[0] - noise[1])
    edge = _edge(row, sampler)
    if row[theirs] < edge:  # it was cut off; another width may have let it in
        return at, edge - float(row[theirs])
    if row[mine] < edge + shift.spread:  # another width may have cut off plain's choice
        return at, float(row[mine]) - edge
    return at, lead if lead >= 0 else float("inf")  # plain must have chosen the best of its own row


def _edge(row: Row, sampler: Sampler) -> float:
    """The lowest logit that top-k and min-p let in."""
    return max(float(row[top_ids(row, sampler.top_k)[-1]]), float(row.max() + np.log(np.float32(sampler.min_p))))
