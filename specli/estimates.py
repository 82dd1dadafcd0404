"""What the controller has learned: what passes cost, and how often a draft is right.

Pure: told times and outcomes, it knows no clock and no model. Costs are in units of a one-token target pass.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

N_SAMPLES = 9  # recent times whose median counts: four slow moments among them change nothing
N_TRUSTED = 3  # samples that make a width's cost one to go by, and that one kept from an earlier run stands for
MOST_DOUBTED = 2 * N_TRUSTED  # samples up to which a kept cost stands for one only: runs may have been disturbed
DOUBT = 1.5  # a first time this many times the cost of the same tokens in shorter passes must repeat to be believed
DEFAULT_SLOPE = 0.25  # units per token of a pass while only v(1) is known
DEFAULT_C = 0.2
MIN_FEED = 8  # tokens: what fewer cost is lost in the noise of the step they come with
FEED_SHARE = 0.15  # of c, per fed token, until measured
MAX_KEPT = 100.0  # units: a kept c or feed above it is damage
CONFIDENCES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # upper edges of bins; the last bin is above
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 2.0  # before anything was judged
BIN_MEMORY = 0.93  # per observation: the last 14 of each confidence count
MAX_TRIES = 1.01 / (1 - BIN_MEMORY)
MEAN_MEMORY = 0.85  # per observation: the last 7 count, which follows a change of text within a few rounds


class CostModel:
    """Robust running estimates of v(n), of c, and of feeding a draft's cache with what it lacks.

    The level is what the machine does now: the median of recent times, each divided by its width's relative cost. A
    slow moment or a growing context moves it. What is learned per width, one token included, is the ratio to the
    level of other widths, where these are most of what was seen lately; alone, a width tells of the level only.
    Passes over another number of sequences do not count for that, but for a width's first time: where answers come and
    go the texts are others too, and shorter, and many such steps, each a little off, carried widths that were seen away
    from those that were not (in a server v(5) came to be 3.9 times v(4), in five minutes).
    """

    def __init__(self) -> None:
        self.c = DEFAULT_C  # units of a draft step
        self.knows_c = False  # whether that is measured, here or in an earlier run
        self.feed: float | None = None  # units per token fed beyond the second; None: not measured
        self._level = _Recent()  # seconds / relative cost of passes,
        self._level_of: deque[tuple[int, int]] = deque(maxlen=N_SAMPLES)  # and of what: sequences, slot
        self._samples = {1: _kept(1.0)}
        self._n_seen = {1: N_TRUSTED}  # times per width, those of earlier runs included
        self.n_steps = 0  # the same for c
        self._relative: dict[int, float] = {1: 1.0}
        self._widths = [1]  # of these, ascending
        self._v = [0.0]  # v(n) by n, as far as it was asked for and stands
        self._steps, self._feeds = _Recent(), _Recent()

    @property
    def unit_s(self) -> float | None:
        """Seconds of a one-token target pass, now; None before any pass."""
        return self._unit_s() if self.is_measured else None

    @property
    def is_measured(self) -> bool:
        """Whether there was any pass in this run."""
        return len(self._level) > 0

    def elsewhere(self) -> CostModel:
        """The same ratios to begin with, at another level; new times soon outvote them."""
        other = copy.deepcopy(self)
        other._level = _Recent()
        other._level_of.clear()
        for width, samples in self._samples.items():
            n = N_SAMPLES if width == 1 else len(samples)  # the unit is what others are compared with
            other._samples[width] = _kept(self._relative[width], n)
            other._n_seen[width] = min(n, N_TRUSTED)
        return other

    def _unit_s(self) -> float:
        return self._level.middle * self._relative[1]

    def observe_pass(self, n_tokens: int, seconds: float, n_active: int = 1) -> None:
        """A target pass over ``n_tokens`` of ``n_active`` sequences took ``seconds``, the host's share included."""
        if n_tokens < 1 or not 0 < seconds < math.inf:
            return
        slot = _slot(n_tokens)
        guess = self._interpolated(slot)
        if slot != n_tokens:
            seconds *= guess / self._interpolated(n_tokens)
        samples = self._samples.get(slot)
        is_trusted = samples is not None and len(samples) >= N_TRUSTED
        others = self._others(slot, n_active, is_new=samples is None)
        if others:
            self._learn(slot, seconds / _middle(sorted(others)), guess)
        if is_trusted or not others:
            self._level.add(seconds / guess)
            self._level_of.append((n_active, slot))

    def _others(self, slot: int, n_active: int, *, is_new: bool) -> list[float]:
        """The level as passes of other widths have it; empty where these are not most of those to compare with."""
        others, n_comparable = list[float](), 0
        for (n, width), level_s in zip(self._level_of, self._level.values, strict=True):
            if n == n_active or is_new:
                n_comparable += 1
                if width != slot:
                    others.append(level_s)
        is_enough = len(others) >= N_TRUSTED or n_comparable == len(self._level)
        return others if is_enough and 2 * len(others) > n_comparable else []

    def _learn(self, slot: int, relative: float, guess: float) -> None:
        """A pass over ``slot`` tokens cost ``relative``; ``guess``: what was thought before."""
        samples = self._samples.setdefault(slot, _Recent())
        samples.add(relative)
        self._n_seen[slot] = min(N_SAMPLES, self._n_seen.get(slot, 0) + 1)
        if len(samples) == 1 and relative > DOUBT * self._at_most(slot):
            samples.add(guess)
        self._set(slot, samples.middle)

    def _set(self, slot: int, relative: float) -> None:
        """What ``slot`` costs, relative to the level; a median often stays what it was."""
        before = self._relative.get(slot)
        if before is None:
            insort(self._widths, slot)
        if before != relative:
            self._relative[slot] = relative
            below = self._widths[bisect_left(self._widths, slot) - 1] if slot > 1 else 0
            del self._v[below + 1 :]

    def observe_draft(self, n_steps: int, n_lacking: int, seconds: float) -> None:
        """``n_steps`` draft passes took ``seconds``; the first, or others before it, fed ``n_lacking`` tokens."""
        if not self.is_measured or not 0 <= seconds < math.inf:
            return
        units = seconds / self._unit_s()
        if n_steps > 0 and (n_lacking <= 2 or units < 0.5 * n_steps * self.c):  # fed or not, it took no longer
            self._steps.add(units / n_steps)
            self.n_steps = min(N_SAMPLES, self.n_steps + 1)
            self.c, self.knows_c = self._steps.middle, True
        elif n_lacking >= MIN_FEED:
            self._feeds.add(max(0.0, units - n_steps * self.c) / (n_lacking - 2))
            self.feed = self._feeds.middle

    def draft_cost(self, n_steps: int, n_lacking: int) -> float:
        """Units of ``n_steps`` draft passes, and of feeding ``n_lacking`` tokens before or with the first."""
        return n_steps * self.c + self.catch_up(n_lacking)

    def catch_up(self, n_lacking: int) -> float:
        """Units of feeding ``n_lacking`` tokens, beyond the draft step that two of them come with."""
        return max(0, n_lacking - 2) * (FEED_SHARE * self.c if self.feed is None else self.feed)

    def v(self, n_tokens: int) -> float:
        """Units of a pass over ``n_tokens``: measured, or on the line between measured neighbours; at least 1."""
        return self.curve(n_tokens)[n_tokens]

    def curve(self, n_most: int) -> Sequence[float]:
        """v(n) by n up to ``n_most`` at least, for loops over n; good until the next time is observed."""
        v = self._v
        if len(v) <= n_most:
            unit = self._relative[1]
            v += [max(1.0, self._interpolated(n) / unit) for n in range(len(v), n_most + 1)]
        return v

    def n_samples(self, n_tokens: int) -> int:
        """How many times v(n) rests on, those of earlier runs included."""
        return self._n_seen.get(_slot(n_tokens), 0)

    def _interpolated(self, n: int) -> float:
        curve, widths = self._relative, self._widths
        found = curve.get(n)
        if found is not None:
            return found
        i = bisect_left(widths, n)
        below = widths[i - 1]
        if i == len(widths):
            slope = max(0.0, curve[below] - curve[1]) / (below - 1) if below > 1 else DEFAULT_SLOPE * curve[1]
            return curve[below] + slope * (n - below)
        above = widths[i]
        return curve[below] + (n - below) / (above - below) * (curve[above] - curve[below])

    def _at_most(self, n: int) -> float:
        """The relative cost of ``n`` tokens in passes of the next smaller width that was measured."""
        below = self._widths[max(0, bisect_left(self._widths, n) - 1)]
        return self._relative[below] * n / below

    def break_even(self, k_max: int, n_active: int = 1, c: float | None = None) -> float | None:
        """The acceptance above which some draft of at most ``k_max`` tokens pays; None if not even 1 does."""
        step, base = (self.c if c is None else c) / n_active, self.v(n_active)
        units = [k * step + self.v(n_active + k) - base for k in range(1, k_max + 1)]

        def pays(acceptance: float) -> bool:
            tokens, survival = 0.0, 1.0
            for extra in units:
                survival *= acceptance
                tokens += survival
                if tokens * base > n_active * extra:
                    return True
            return False

        low, high = 0.0, 1.0
        if not pays(high):
            return None
        while high - low > 0.001:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    def as_dict(self) -> dict[str, object]:
        """What is measured, here or in an earlier run: v by width (as text, for JSON), how often, c, feed."""
        return {
            "v": {str(n): self.v(n) for n in self._widths},
            "v_samples": {str(n): self.n_samples(n) for n in self._widths},
            "c": self.c if self.knows_c else None,
            "c_samples": self.n_steps,
            "feed": self.feed,
        }

    def restore(self, kept: object) -> bool:
        """Start from the ``as_dict`` of an earlier run; whether it made sense. New times soon outvote it."""
        if not isinstance(kept, Mapping) or not isinstance(kept.get("v"), Mapping):
            return False
        relative, samples, counts = {1: 1.0}, {1: _kept(1.0)}, kept.get("v_samples")
        n_seen = {1: N_TRUSTED}
        for key, value in kept["v"].items():
            v, is_width = number(value), isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 5
            if not is_width or v is None or not 1 <= v <= 2 * int(key):
                return False
            count = _count(counts.get(key) if isinstance(counts, Mapping) else None)
            relative[int(key)], samples[int(key)], n_seen[int(key)] = v, _kept(v, count), count
        samples[1] = _kept(1.0)  # the unit is what others are compared with
        if len(relative) < 2 or relative[1] != 1:
            return False
        self._relative, self._samples, self._widths, self._n_seen = relative, samples, sorted(relative), n_seen
        del self._v[1:]
        c, feed = number(kept.get("c"), MAX_KEPT), number(kept.get("feed"), MAX_KEPT)
        if c is not None:
            self.n_steps = _count(kept.get("c_samples"))
            self.c, self.knows_c, self._steps = c, True, _kept(c, self.n_steps)
            if feed is not None:
                self.feed, self._feeds = feed, _kept(feed, self.n_steps)
        return True


class Acceptance:
    """The chance that a draft model's token is accepted, given the ones before it: by its confidence, and lately.

    Its position is in the confidence already: a learned offset for each took the log loss of 2,056 greedy tokens from
    0.478 to 0.481, and of 2,100 tokens at temperature 0.8 from 0.5615 to 0.5614 (without confidence 0.63 and 0.67).
    """

    def __init__(self) -> None:
        self.mean = PRIOR_ACCEPTANCE
        self._hits = [0.0] * (len(CONFIDENCES) + 1)
        self._tries = [0.0] * (len(CONFIDENCES) + 1)
        self._at: dict[float, float] = {}  # chances as asked for since the last change

    @property
    def is_known(self) -> bool:
        """Whether any draft was judged, here or in an earlier run."""
        return sum(self._tries) > 0

    def at(self, confidence: float) -> float:
        """The calibrated chance for one confidence."""
        found = self._at.get(confidence)
        if found is None:
            found = self._at[confidence] = self._calibrated(confidence, bisect_left(CONFIDENCES, confidence))
        return found

    def _calibrated(self, confidence: float, at: int) -> float:
        """The chance for a confidence of bin ``at``."""
        prior = 0.5 * (confidence + self.mean)
        return (PRIOR_WEIGHT * prior + self._hits[at]) / (PRIOR_WEIGHT + self._tries[at])

    def look(self, confidence: float) -> None:
        """A row was seen and nothing drawn from it: that tells of the text as well."""
        self.mean = MEAN_MEMORY * self.mean + (1 - MEAN_MEMORY) * self.at(confidence)
        self._at.clear()

    def observe(self, confidences: Sequence[float], n_accepted: int) -> None:
        """A draft was judged: right up to the first rejection, wrong there, unknown behind it."""
        self._at.clear()
        for i, confidence in enumerate(confidences[: n_accepted + 1]):
            hit, at = float(i < n_accepted), bisect_left(CONFIDENCES, confidence)
            news = 0.5 * (hit + self._calibrated(confidence, at))  # that is less noisy than one coin
            self.mean = MEAN_MEMORY * self.mean + (1 - MEAN_MEMORY) * news
            self._hits[at] = BIN_MEMORY * self._hits[at] + hit
            self._tries[at] = BIN_MEMORY * self._tries[at] + 1.0

    def as_dict(self) -> dict[str, object]:
        """What is kept between runs: accepted and judged tokens by confidence, forgetting."""
        return {"hits": list(self._hits), "tries": list(self._tries)}

    def restore(self, kept: object) -> bool:
        """Start from the ``as_dict`` of an earlier run; whether it made sense and had seen anything."""
        if not isinstance(kept, Mapping):
            return False
        hits, tries = (numbers(kept.get(name), MAX_TRIES) for name in ("hits", "tries"))
        if len(hits) != len(self._hits) or len(tries) != len(self._tries) or not sum(tries) > 0:
            return False
        if any(hit > n for hit, n in zip(hits, tries, strict=True)):
            return False
        self._hits, self._tries = hits, tries
        self._at.clear()
        self.mean = (PRIOR_WEIGHT * PRIOR_ACCEPTANCE + sum(hits)) / (PRIOR_WEIGHT + sum(tries))
        return True


class Profit(NamedTuple):
    """What model drafts add to a round of one sequence."""

    tokens: float
    units: float

    def worth(self, rate: float) -> float:
        """Tokens beyond those that ``rate`` (tokens per unit) makes of the same time."""
        return self.tokens - rate * self.units

    def moved(self, news: Profit, memory: float) -> Profit:
        """The running mean with ``news`` in it."""
        (tokens, units), rest = self, 1 - memory
        return Profit(memory * tokens + rest * news.tokens, memory * units + rest * news.units)

    @classmethod
    def restored(cls, kept: object, k_max: int) -> Profit | None:
        """An earlier run's, as JSON; None if it makes no sense for drafts of up to ``k_max`` tokens."""
        kept = numbers(kept, MAX_KEPT)
        return cls(*kept) if len(kept) == 2 and kept[0] <= k_max else None


def survivors(chances: Iterable[float]) -> float:
    """Tokens that stand on average, given the chance of each behind the ones before."""
    tokens, survival = 0.0, 1.0
    for chance in chances:
        survival *= chance
        tokens += survival
    return tokens


class _Recent:
    """The last ``N_SAMPLES`` values; ``middle``: their median, which a round asks for several times; 0.0 before any."""

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.values = deque(values, N_SAMPLES)
        self._sorted = sorted(self.values)
        self.middle = _middle(self._sorted) if self._sorted else 0.0

    def __len__(self) -> int:
        return len(self.values)

    def add(self, value: float) -> None:
        if len(self.values) == N_SAMPLES:
            del self._sorted[bisect_left(self._sorted, self.values[0])]
        self.values.append(value)
        insort(self._sorted, value)
        self.middle = _middle(self._sorted)


def _kept(value: float, n: int = N_SAMPLES) -> _Recent:
    """Samples that stand for a value that rests on ``n``: never many, so that new ones soon count."""
    return _Recent([value] * (1 if n <= MOST_DOUBTED else N_TRUSTED))


def _count(kept: object) -> int:
    """How many times an earlier run's value rests on."""
    return min(N_SAMPLES, max(1, int(number(kept) or 1)))


def _slot(n_tokens: int) -> int:
    """The width that stands for ``n_tokens``: itself up to 17, then 8 per octave, or batches would never repeat one."""
    if n_tokens <= 17:
        return n_tokens
    step = 1 << (n_tokens.bit_length() - 4)
    return (n_tokens + step // 2) // step * step


def _middle(values: Sequence[float]) -> float:
    """The median of sorted values; of two the lower, since what disturbs a time makes it longer."""
    half = len(values) // 2
    if len(values) % 2:
        return values[half]
    return values[0] if half == 1 else 0.5 * (values[half - 1] + values[half])


def number(value: object, highest: float = 1e9, lowest: float = 0.0) -> float | None:
    """``value`` as a float if it is a number in [``lowest``, ``highest``], or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and lowest <= value <= highest
    return float(value) if is_number else None  # type: ignore[arg-type]


def numbers(values: object, highest: float = 1e9) -> list[float]:
    """The numbers in [0, ``highest``] of a list; empty if it is none or holds anything else."""
    found = [number(value, highest) for value in values] if isinstance(values, list | tuple) else []
    return [] if None in found else [value for value in found if value is not None]
