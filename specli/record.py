"""What a controller decided over a run, and how it says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Kind = Literal["none", "draft", "ngram"]

N_PLAIN_ENOUGH = 8  # rounds without a draft whose mean time is one to compare with
N_STRETCH = 8  # rounds in a row without a draft that are worth a word
N_TOLD = 2  # of the longest stretches


class Plan(NamedTuple):
    """What one sequence does this round. ``k``: how many n-gram tokens to keep, or the longest model draft."""

    kind: Kind
    k: int


class Outcome(NamedTuple):
    """What came of one sequence's part in a round, in tokens.

    ``chances`` of the proposed tokens, as their drafter saw them; ``n_judged`` of these count (fewer at a text's end).
    """

    kind: Kind
    chances: Sequence[float]
    n_judged: int
    n_accepted: int
    n_emitted: int


@dataclass(slots=True)
class Stretch:
    """Rounds ``first`` to ``last``, counted from 1, had no draft (probes apart), and why."""

    first: int
    last: int
    reason: str


@dataclass(slots=True)
class Record:
    """Counts of one answer: per sequence and round, unless said otherwise. Tokens and units are sums, for the gain."""

    rounds: int = 0
    speculated: int = 0  # proposed at least one token
    proposed: int = 0  # tokens
    given_up: int = 0  # a draft pass was made, but its row did not promise enough to propose a token
    probes: int = 0  # rounds of the batch
    by_kind: dict[Kind, int] = field(default_factory=lambda: {"none": 0, "draft": 0, "ngram": 0})  # who proposed
    judged: dict[Kind, int] = field(default_factory=lambda: {"draft": 0, "ngram": 0})  # tokens, by who proposed them
    accepted: dict[Kind, int] = field(default_factory=lambda: {"draft": 0, "ngram": 0})
    has_ngram: bool = False
    has_model: bool = False
    emitted: float = 0.0  # tokens
    predicted: float = 0.0  # tokens, before the target judged
    plain: float = 0.0  # tokens of plain decoding in units
    units: float = 0.0  # as v(n), c and the feed have it
    plain_taken: float = 0.0  # tokens of plain decoding in taken
    taken: float = 0.0  # units of the time that it took, by the median one-token pass
    of_plain: tuple[int, float, float] = (0, 0.0, 0.0)  # rounds without a draft; units foreseen and taken of these
    stretches: list[Stretch] = field(default_factory=list)
    state: str = ""  # of the last round: draft, n-gram, off, probe
    _n: int = 0  # rounds of the batch
    _off_since: int | None = None
    _off: Stretch | None = None

    def note(self, outcomes: Sequence[Outcome], is_probe: bool, why_off: Callable[[], str]) -> None:
        """Count one round of all sequences."""
        self._n += 1
        self.probes += is_probe
        self.rounds += len(outcomes)
        kinds = set[Kind]()
        for outcome in outcomes:
            kind, k = outcome.kind, len(outcome.chances)
            kinds.add(kind)
            if k > 0:
                self.proposed += k
                self.speculated += 1
                self.by_kind[kind] += 1
                self.judged[kind] += outcome.n_judged
                self.accepted[kind] += outcome.n_accepted
            else:
                self.given_up += kind != "none"
                self.by_kind["none"] += 1
        self.state = "probe" if is_probe else "draft" if "draft" in kinds else "n-gram" if "ngram" in kinds else "off"
        if is_probe:
            return
        if kinds != {"none"}:
            self._off_since, self._off = None, None
        elif self._off is not None:
            self._off.last = self._n
        elif self._off_since is None:
            self._off_since = self._n
        elif self._n - self._off_since + 1 >= N_STRETCH:
            self._off = Stretch(self._off_since, self._n, why_off())
            self.stretches.append(self._off)

    def book(
        self,
        emitted: float,
        predicted: float,
        units: float,
        plain_rate: float,
        seconds: float,
        unit_s: float,
        is_plain: bool,
    ) -> None:
        """Add up a round; ``plain_rate``: tokens per unit of plain decoding. It took ``seconds``, a unit ``unit_s``."""
        taken = seconds / unit_s
        if is_plain:
            n, foreseen, took = self.of_plain
            self.of_plain = n + 1, foreseen + units, took + taken
        self.emitted += emitted
        self.predicted += predicted
        self.units += units
        self.plain += units * plain_rate
        self.taken += taken
        self.plain_taken += taken * plain_rate

    @property
    def gain(self) -> tuple[float, float] | None:
        """Tokens per unit over plain decoding, as foreseen and as it came; None before any cost is known."""
        if self.units == 0 or self.taken == 0:
            return None
        n, foreseen, took = self.of_plain  # a mean is above the median: plain decoding is slowed by the same moments
        slow = took / foreseen if n >= N_PLAIN_ENOUGH else 1.0
        actual = (self.emitted - self.plain_taken / slow) / (self.taken / slow)
        return (self.predicted - self.plain) / self.units, actual

    def explain(self) -> str:
        """One line: how often, how far, by whom, the longest stretches without a draft; empty without rounds."""
        if self.rounds == 0:
            return ""
        share = {kind: f"{n / self.rounds:.0%}" for kind, n in self.by_kind.items()}
        text = f"speculated in {self.speculated / self.rounds:.0%} of rounds"
        if self.has_model and self.has_ngram:
            text += f" (draft model {share['draft']}, n-gram {share['ngram']})"
        if self.speculated:
            text += f", mean K {self.proposed / self.speculated:.1f}"
        longest = sorted(self.stretches, key=lambda stretch: stretch.first - stretch.last)[:N_TOLD]
        for stretch in sorted(longest, key=lambda stretch: stretch.first):
            text += f"; off for rounds {stretch.first}–{stretch.last}: {stretch.reason}"
        if n_more := len(self.stretches) - len(longest):
            text += f"; off in {n_more} more stretch{'es' if n_more > 1 else ''}"
        return text

    def as_dict(self) -> dict[str, object]:
        """JSON types only; undefined figures are None."""
        predicted, actual = self.gain or (None, None)
        decisions = {str(kind): n for kind, n in self.by_kind.items()}
        return {
            "rounds": self.rounds,
            "speculated": self.speculated,
            "mean_k": self.proposed / self.speculated if self.speculated else None,
            "decisions": decisions | {"given_up": self.given_up},
            "drafted": {str(kind): {"proposed": n, "accepted": self.accepted[kind]} for kind, n in self.judged.items()},
            "probes": self.probes,
            "gain_tokens_per_unit": {"predicted": predicted, "actual": actual},
            "off": [[stretch.first, stretch.last, stretch.reason] for stretch in self.stretches],
        }
