"""How many tokens to propose, and who proposes them: whatever emits the most tokens per second, by measured profit.

Pure: no clock and no model inside; it is told times and outcomes. Costs are in units of a one-token target pass:
v(n) for a pass over n tokens (v(1) = 1), c for a draft step. A round that proposes k tokens with survival
probabilities s_1 >= s_2 >= ... emits 1 + s_1 + ... + s_k tokens on average and costs k*c + v(1 + k).

    rate R       tokens per unit that is reachable now: what recent rounds brought, at least plain decoding's
    value        expected tokens - R * cost; the best value wins: a draft model, the text itself (n-gram), nobody
    go on        while some longer draft, not just the next token, has more expected extra tokens than R * extra cost
    exploring    whatever is not in use grows stale; a probe may cost what 1% of the time has saved up

v(n) is neither flat nor monotonic, so every length is looked at. Exactness: all of this decides before a token is
drawn, from past rounds, the drafted prefix, and the draft's own distributions (tests enumerate the law with it).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal, NamedTuple

Kind = Literal["none", "draft", "ngram"]

N_SAMPLES = 9  # recent times per width: their median survives a busy machine
EXPLORATION = 0.01  # of the time may go into probes
CREDIT = 2.0  # units that a cold start may spend on finding out
STALE_ROUNDS = 8  # after a probe that failed
FORGET = 0.85  # mean acceptance, per observation: about the last seven count
RATE_FORGET = 0.95  # reachable rate, per round
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 2.0  # before anything was judged
FEED_SHARE = 0.15  # of c, per fed token, until measured
CONFIDENCE_BINS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
N_PLAIN = 32  # rounds between two looks at the one-token pass while speculation pays
MAX_BUDGET = 3.0  # units: how much exploration can be saved up


class CostModel:
    """Robust running estimates of v(n), c and the cost of feeding a draft what it lacks.

    Every time is compared with the present unit, the time of a one-token pass, so that a slow moment or a growing
    context moves all widths together and only ratios are learned.
    """

    def __init__(self) -> None:
        self.unit_s: float | None = None
        self._units: deque[float] = deque(maxlen=N_SAMPLES)
        self._widths: dict[int, deque[float]] = {}
        self._curve: dict[int, float] = {1: 1.0}
        self._cache: dict[int, float] = {}
        self._steps: deque[float] = deque(maxlen=N_SAMPLES)
        self._feeds: deque[float] = deque(maxlen=N_SAMPLES)
        self.c = 0.2
        self.feed: float | None = None  # units per fed token beyond the second; unmeasured: a share of c

    def observe_pass(self, n_tokens: int, seconds: float) -> None:
        """A target pass over ``n_tokens`` took ``seconds`` (host time of the round included)."""
        if seconds <= 0:
            return
        known = self.v(n_tokens)
        if n_tokens == 1 or (self.unit_s is not None and n_tokens in self._curve):
            self._units.append(seconds / known)
            self.unit_s = median(self._units)
        if n_tokens > 1 and self.unit_s is not None:
            samples = self._widths.setdefault(n_tokens, deque(maxlen=N_SAMPLES))
            samples.append(seconds / self.unit_s)
            self._curve[n_tokens] = median(samples)
            self._cache.clear()

    def observe_draft(self, n_steps: int, n_lacking: int, seconds: float) -> None:
        """``n_steps`` draft tokens, the first behind a feed of ``n_lacking`` tokens, took ``seconds``."""
        if self.unit_s is None or n_steps < 1:
            return
        units = seconds / self.unit_s
        if n_lacking <= 2:
            self._steps.append(units / n_steps)
            self.c = median(self._steps)
        else:
            self._feeds.append(max(0.0, units - n_steps * self.c) / (n_lacking - 1))
            self.feed = median(self._feeds)

    def draft_cost(self, n_steps: int, n_lacking: int) -> float:
        """Units that ``n_steps`` draft tokens cost when ``n_lacking`` tokens must be fed first."""
        feed = FEED_SHARE * self.c if self.feed is None else self.feed
        return n_steps * self.c + max(0, n_lacking - 2) * feed

    def v(self, n_tokens: int) -> float:
        """Units of a pass over ``n_tokens``: measured, or on the line between measured neighbours."""
        found = self._cache.get(n_tokens)
        if found is None:
            found = self._cache[n_tokens] = self._interpolated(n_tokens)
        return found

    def _interpolated(self, n: int) -> float:
        if n in self._curve:
            return self._curve[n]
        below = max(width for width in self._curve if width < n)
        above = min((width for width in self._curve if width > n), default=None)
        if above is None:
            slope = (self._curve[below] - 1.0) / (below - 1) if below > 1 else 0.25
            return self._curve[below] + slope * (n - below)
        share = (n - below) / (above - below)
        return self._curve[below] + share * (self._curve[above] - self._curve[below])

    def as_dict(self) -> dict[str, object]:
        """What is kept between runs."""
        return {"v": {str(n): v for n, v in sorted(self._curve.items())}, "c": self.c, "feed": self.feed}

    def restore(self, profile: Mapping[str, object]) -> None:
        """Start from a profile of an earlier run; measured values replace it."""
        curve, c, feed = profile.get("v"), profile.get("c"), profile.get("feed")
        if isinstance(curve, Mapping):
            self._curve = {1: 1.0} | {int(n): float(v) for n, v in curve.items() if float(v) > 0}
            self._cache.clear()
        if isinstance(c, float) and c > 0:
            self.c = c
        if isinstance(feed, float) and feed >= 0:
            self.feed = feed


class Acceptance:
    """The chance that a draft model's token is accepted, given the ones before it: by confidence, and by position."""

    def __init__(self) -> None:
        n_bins = len(CONFIDENCE_BINS) + 1
        self._hits = [0.0] * n_bins
        self._tries = [0.0] * n_bins
        self.mean = PRIOR_ACCEPTANCE

    def at(self, confidence: float) -> float:
        """The calibrated chance for one confidence."""
        i = _bin(confidence)
        prior = 0.5 * (confidence + self.mean)
        return (PRIOR_WEIGHT * prior + self._hits[i]) / (PRIOR_WEIGHT + self._tries[i])

    def look(self, confidence: float) -> None:
        """A row was seen and nothing drawn from it: that tells of the text as well."""
        self.mean = FORGET * self.mean + (1 - FORGET) * self.at(confidence)

    def observe(self, confidences: Sequence[float], n_accepted: int) -> None:
        """A draft was judged: before the first rejection all was right, the rejected one wrong, the rest unknown."""
        for i, confidence in enumerate(confidences[: n_accepted + 1]):
            hit = float(i < n_accepted)
            news = 0.5 * (hit + self.at(confidence))  # the calibrated chance is less noisy than one coin
            self.mean = FORGET * self.mean + (1 - FORGET) * news
            at = _bin(confidence)
            self._hits[at] = 0.97 * self._hits[at] + hit
            self._tries[at] = 0.97 * self._tries[at] + 1.0


class Plan(NamedTuple):
    """What one sequence does this round. ``k``: how many n-gram tokens to keep, or the longest model draft."""

    kind: Kind
    k: int


@dataclass(slots=True)
class Record:
    """What was decided, for the explanation at the end. Counts of rounds and tokens."""

    rounds: int = 0
    speculated: int = 0
    proposed: int = 0
    kinds: dict[str, int] = field(default_factory=lambda: {"none": 0, "draft": 0, "ngram": 0})
    off_since: int | None = None
    stretches: list[tuple[int, int, float, float]] = field(default_factory=list)  # first, last, acceptance, break-even


class Controller:
    """Decides, learns, explains. One for all sequences of a batch: costs belong to the batch."""

    def __init__(self, k_max: int, costs: CostModel | None = None) -> None:
        self.k_max = k_max
        self.costs = costs or CostModel()
        self.acceptance = Acceptance()
        self.record = Record()
        self._rounds_before = 0  # of earlier answers
        self.rate = 1.0
        self._ngram_bias = (1.0, 1.0)  # accepted and expected n-gram tokens, forgetting
        self._brought, self._spent = 0.0, 0.0
        self._budget = CREDIT
        self._stale_since: dict[str, int] = {"none": 0, "draft": 0, "ngram": 0}
        self._probing: Kind | None = None
        self._width = 1  # tokens of the batch under construction

    @property
    def break_even(self) -> float:
        """The acceptance at which one model-drafted token pays: c + v(2) - 1."""
        return self.costs.c + self.costs.v(2) - 1.0

    def begin(self, n_active: int) -> None:
        """A round begins: every sequence has its own token in the batch."""
        self._width = n_active
        plain = n_active / self.costs.v(n_active)
        self.rate = max(plain, self._brought / self._spent if self._spent > 0 else plain)

    def plan(self, has_model: bool, n_lacking: int, ngram: Sequence[float], budget: int) -> Plan:
        """Choose for one sequence before anything is drawn.

        ``n_lacking``: tokens that the draft's cache lacks. ``ngram``: chances of the n-gram draft's tokens, each
        given the ones before. ``budget``: the longest draft that fits.
        """
        budget = min(budget, self.k_max)
        if budget < 1:
            return Plan("none", 0)
        values: dict[Kind, tuple[float, int]] = {"none": (0.0, 0)}
        if ngram:
            values["ngram"] = self._best(self._trusted(ngram[:budget]), 0.0, 0.0)
        if has_model:
            survival = [self.acceptance.mean] * budget
            fixed = self.costs.draft_cost(0, n_lacking)
            values["draft"] = self._best(survival, self.costs.c, fixed)
        best = max(values, key=lambda kind: values[kind][0])
        kind = self._probe(values, best) or best
        k = values[kind][1]
        if kind == "draft":
            k = budget  # how far, the draft's own confidence tells as it grows
        return Plan(kind, max(k, 1) if kind != "none" else 0)

    def _trusted(self, chances: Sequence[float]) -> list[float]:
        accepted, expected = self._ngram_bias
        return [min(0.99, chance * accepted / expected) for chance in chances]

    def _best(self, chances: Sequence[float], step: float, fixed: float) -> tuple[float, int]:
        """The best value over all lengths, relative to proposing nothing, and its length (>= 1)."""
        best, best_k, tokens, survival = -math.inf, 1, 0.0, 1.0
        for k, chance in enumerate(chances, start=1):
            survival *= chance
            tokens += survival
            cost = fixed + k * step + self.costs.v(self._width + k) - self.costs.v(self._width)
            value = tokens - self.rate * cost
            if value > best:
                best, best_k = value, k
        return best, best_k

    def _probe(self, values: Mapping[Kind, tuple[float, int]], best: Kind) -> Kind | None:
        """What to try although it is not best: the stalest kind whose loss the saved-up budget covers."""
        now = self._now
        self._probing = None
        for kind in sorted(values, key=lambda kind: self._stale_since[kind]):
            loss = (values[best][0] - values[kind][0]) / self.rate
            wait = N_PLAIN if kind == "none" else 0
            if kind != best and now >= self._stale_since[kind] + wait and loss <= self._budget:
                self._probing = kind
                return kind
        return None

    def take(self, k: int) -> None:
        """``k`` more tokens are in the batch."""
        self._width += k

    def may_draw(self, confidences: Sequence[float], confidence: float) -> bool:
        """Whether to draw a token of this ``confidence`` behind those of ``confidences``; its row is paid for."""
        goes_on = self._goes_on(confidences, self.acceptance.at(confidence), is_paid=True)
        if not goes_on:
            self.acceptance.look(confidence)
        return goes_on

    def may_step(self, confidences: Sequence[float]) -> bool:
        """Whether another draft pass is worth it behind tokens of ``confidences``."""
        return self._goes_on(confidences, self._ahead(confidences[-1]), is_paid=False)

    def _ahead(self, confidence: float) -> float:
        """The chance of a token not looked at yet, behind one of ``confidence``."""
        return 0.5 * (self.acceptance.mean + self.acceptance.at(confidence))

    def _goes_on(self, confidences: Sequence[float], chance: float, is_paid: bool) -> bool:
        """Some longer draft has more expected extra tokens than R times its extra cost."""
        survival = math.prod(self.acceptance.at(confidence) for confidence in confidences)
        base, tokens, ahead = self.costs.v(self._width), 0.0, 0.5 * (self.acceptance.mean + chance)
        for extra in range(1, self.k_max - len(confidences) + 1):
            survival *= chance if extra == 1 else ahead
            tokens += survival
            cost = (extra - is_paid) * self.costs.c + self.costs.v(self._width + extra) - base
            if tokens > self.rate * cost:
                return True
        return False

    def observe_round(self, n_tokens: int, emitted: int, pass_s: float, draft_s: float) -> None:
        """The round's batch held ``n_tokens``, emitted ``emitted``, and took ``pass_s`` and ``draft_s`` seconds."""
        self.costs.observe_pass(n_tokens, pass_s)
        unit_s = self.costs.unit_s
        if unit_s:
            units = self.costs.v(n_tokens) + draft_s / unit_s  # by the estimate: one slow pass is no news of the text
            self._brought = RATE_FORGET * self._brought + emitted
            self._spent = RATE_FORGET * self._spent + units
            self._budget = min(MAX_BUDGET, self._budget + EXPLORATION * units)
            if self._probing is not None:  # what the probe really lost; a good one costs nothing
                self._budget -= units - emitted / self.rate

    def observe_draft(self, kind: Kind, chances: Sequence[float], n_accepted: int) -> None:
        """A draft of ``kind``, with the drafter's own ``chances`` for its tokens, had ``n_accepted`` accepted."""
        paid = n_accepted > 0 or kind == "none"
        self._stale_since[kind] = self._now + (0 if paid else STALE_ROUNDS)
        if kind == "draft":
            self.acceptance.observe(chances, n_accepted)
        elif kind == "ngram" and chances:
            accepted, expected = self._ngram_bias
            judged = chances[: n_accepted + 1]
            self._ngram_bias = (
                FORGET * accepted + (1 - FORGET) * min(n_accepted, len(judged)),
                FORGET * expected + (1 - FORGET) * max(sum(judged), 1e-3),
            )

    def note(self, kind: Kind, k: int) -> None:
        """Record one sequence's decision of this round."""
        record = self.record
        record.rounds += 1
        record.kinds[kind] += 1
        record.proposed += k
        if k > 0:
            record.speculated += 1
            self._close_stretch()
        elif record.off_since is None:
            record.off_since = record.rounds

    def begin_answer(self) -> None:
        """Decisions are told from here on; what was learned stays."""
        self._rounds_before = self._now
        self.record = Record()

    @property
    def _now(self) -> int:
        """Rounds so far."""
        return self._rounds_before + self.record.rounds

    def explain(self) -> str:
        """One line on this answer: how much was speculated, and where it was off and why."""
        record = self.record
        if not record.rounds:
            return ""
        share = record.speculated / record.rounds
        line = f"speculated in {share:.0%} of rounds"
        if record.speculated:
            line += f", mean K {record.proposed / record.speculated:.1f}"
        for first, last, acceptance, break_even in sorted(record.stretches, key=lambda s: s[0] - s[1])[:2]:
            line += f"; off for rounds {first}-{last}: acceptance {acceptance:.2f} < break-even {break_even:.2f}"
        return line

    def report(self) -> dict[str, object]:
        """What was decided and measured, JSON types only."""
        return {"rounds": dict(self.record.kinds), "break_even": self.break_even, **self.costs.as_dict()}

    def profile(self) -> dict[str, object]:
        """What is kept between runs."""
        return self.costs.as_dict()

    def restore(self, profile: Mapping[str, object]) -> bool:
        """Start from what an earlier run kept; whether that was usable."""
        self.costs.restore(profile)
        return "v" in profile

    def _close_stretch(self) -> None:
        record = self.record
        if record.off_since is not None and record.rounds - record.off_since >= STALE_ROUNDS:
            last = record.rounds - 1
            record.stretches.append((record.off_since, last, self.acceptance.mean, self.break_even))
        record.off_since = None


def _bin(confidence: float) -> int:
    return sum(confidence > edge for edge in CONFIDENCE_BINS)
