"""How a server shares its time: how much of a prompt to evaluate between two rounds, and whom to let in.

Pure: it is told times and outcomes, and decides. Without bounds (SLA) a prompt may stretch the gap between two bursts
of the answers under way to ``STRETCH`` times the usual one. With a bound on TPOT it may take what the bound leaves; an
answer is let in while the round that it makes longer still keeps the bound.

Where there may be more answers than ever proved fine is tried, one step at a time, and judged before the next one.

    TTFT   arrival -> first token (waiting included)
    TPOT   (last - first token) / (n - 1), ms
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from dataclasses import dataclass, field

STRETCH = 2.0  # times the usual gap that a chunk may add to it: below three times in all, with room for a slow moment
MIN_CHUNK = 16  # tokens: a prompt always goes on
WINDOW_S = 60.0  # of the percentiles
LEVEL = 0.95
N_KEPT = 1 << 15  # values of a window: 500 a second
MOMENT_S = 0.01  # that a sum is kept for
N_SAMPLES = 9  # rounds or chunks whose median counts: a slow moment among them changes nothing
N_SURE = 3  # rounds with so many answers that tell whether there may be so many
RETRY_S = 10.0  # for which a verdict on so many answers holds; what was too slow is tried again then
RETRY_MOST_S = 600.0  # twice as long each time that it is too slow again: a try costs its answers the bound


@dataclass(frozen=True, slots=True)
class Sla:
    """Bounds for 95% of the answers, ms; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None


@dataclass(slots=True)
class _Rounds:
    """Rounds with the same number of answers. ``tokens``: that each of these got. ``last_s``: when there was one.

    ``fine_s``: when they last kept the bound on TPOT. ``barred_s``: until when they count as too slow; ``wait_s``: for
    how long that is.
    """

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=N_SAMPLES))
    tokens: deque[float] = field(default_factory=lambda: deque(maxlen=4 * N_SAMPLES))
    last_s: float = -math.inf
    fine_s: float = -math.inf
    barred_s: float = -math.inf
    wait_s: float = 0.0

    @property
    def usual_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def usual_tokens(self) -> float:
        return statistics.fmean(self.tokens)


class Pace:
    """Learns what rounds and prompts cost on this machine, and paces them."""

    def __init__(self, sla: Sla | None = None, *, is_chunked: bool = True) -> None:
        self.sla, self._is_chunked = sla or Sla(), is_chunked
        self._rounds: dict[int, _Rounds] = {}  # by the sequences in them
        self._chunks: deque[float] = deque(maxlen=N_SAMPLES)  # seconds per prompt token
        self._ttft = Window()
        self._tpot = Window()

    def observe_round(self, n_sequences: int, n_emitted: int, seconds: float, at_s: float) -> None:
        """A round over ``n_sequences`` ended at ``at_s``, took ``seconds`` and emitted ``n_emitted`` tokens in all."""
        if n_sequences < 1:
            return
        rounds = self._rounds.setdefault(n_sequences, _Rounds())
        if self.sla.tpot_ms is not None and at_s - rounds.last_s > RETRY_S:  # a new try is judged by itself
            rounds.seconds.clear()
            rounds.tokens.clear()
        rounds.seconds.append(seconds)
        rounds.tokens.append(max(1.0, n_emitted / n_sequences))
        rounds.last_s = at_s
        if self.sla.tpot_ms is not None and len(rounds.seconds) >= N_SURE:
            self._judge(n_sequences, rounds, self.sla.tpot_ms, at_s)

    def _judge(self, n_sequences: int, rounds: _Rounds, bound_ms: float, at_s: float) -> None:
        """Whether so many answers keep the bound. Where they do, fewer do; where they do not, more do not either."""
        n_known = len(rounds.seconds)
        if 1000 * rounds.usual_s / rounds.usual_tokens > bound_ms:
            factor = 2 if n_known == N_SURE else 1  # once per try
            rounds.wait_s = min(max(RETRY_S, factor * rounds.wait_s), RETRY_MOST_S)
            rounds.barred_s, rounds.fine_s = at_s + rounds.wait_s, -math.inf
            return
        rounds.fine_s = at_s
        if n_known == N_SAMPLES:
            rounds.wait_s = 0.0
        for n, fewer in self._rounds.items():
            if n <= n_sequences:
                fewer.barred_s = -math.inf

    def observe_chunk(self, n_tokens: int, seconds: float) -> None:
        """Evaluating ``n_tokens`` of a prompt took ``seconds``. A few tokens tell the price of a pass, not theirs."""
        if n_tokens >= MIN_CHUNK:
            self._chunks.append(seconds / n_tokens)

    @property
    def _token_s(self) -> float | None:
        return statistics.median(self._chunks) if self._chunks else None

    def observe_answer(self, at_s: float, ttft_s: float | None, tpot_ms: float | None) -> None:
        """An answer has ended, or its time was over: then ``ttft_s`` is how long no token came."""
        if ttft_s is not None:
            self._ttft.add(at_s, 1000 * ttft_s)
        if tpot_ms is not None:
            self._tpot.add(at_s, tpot_ms)

    def observe_departure(self, at_s: float, waited_s: float) -> None:
        """A client left without a token: it counts where it had waited longer than the bound on TTFT allows."""
        if self.sla.ttft_ms is not None and 1000 * waited_s > self.sla.ttft_ms:
            self._ttft.add(at_s, 1000 * waited_s)

    def chunk(self, n_decoding: int, n_batch: int, n_left: int = 0, waited_s: float = 0.0) -> int:
        """Prompt tokens to evaluate before the next round of ``n_decoding`` sequences, at most ``n_batch``.

        ``n_left``: tokens that the oldest prompt lacks; ``waited_s``: for how long its client has waited.
        """
        if n_decoding == 0 or not self._is_chunked:
            return n_batch
        token_s = self._token_s
        if token_s is None or token_s <= 0:
            return min(n_batch, MIN_CHUNK)
        n = int(self._spare_s(n_decoding) / token_s)
        if self.sla.tpot_ms is None:
            n = max(n, self._urgent(n_decoding, n_left, waited_s))
        return max(min(MIN_CHUNK, n_batch), min(n, n_batch))

    def _urgent(self, n_decoding: int, n_left: int, waited_s: float) -> int:
        """Tokens per turn by which the oldest prompt still keeps the bound on TTFT; 0 where nothing can or need be."""
        round_s, token_s = self._usual_s(n_decoding), self._token_s
        if self.sla.ttft_ms is None or token_s is None or round_s is None:
            return 0
        spare_s = self.sla.ttft_ms / 1000 - waited_s - n_left * token_s  # for the rounds in between
        return math.ceil(n_left * round_s / spare_s) if spare_s > 0 else 0

    def _spare_s(self, n_decoding: int) -> float:
        """Seconds that may pass between two rounds."""
        round_s = self._usual_s(n_decoding)
        if round_s is None:
            return 0.0
        if self.sla.tpot_ms is None:
            return STRETCH * round_s
        return max(0.0, self.sla.tpot_ms / 1000 * self._tokens(n_decoding) - round_s)

    def may_admit(self, n_active: int, now_s: float) -> bool:
        """Whether one more answer beside ``n_active`` keeps the bound on TPOT, as far as is known.

        One more than is known to be fine is a try: nobody else is let in until it is judged. What was too slow, and
        whatever is more, is tried again after a while: what slowed it may be over.
        """
        if self.sla.tpot_ms is None or n_active == 0:
            return True
        if any(n <= n_active + 1 and now_s <= rounds.barred_s for n, rounds in self._rounds.items()):
            return False
        return any(n >= n_active and now_s - rounds.fine_s <= RETRY_S for n, rounds in self._rounds.items())

    def _nearest(self, n: int) -> _Rounds | None:
        """Rounds over ``n`` sequences or, where there were none, the nearest number of them."""
        if not self._rounds:
            return None
        return self._rounds[min(self._rounds, key=lambda known: (abs(known - n), -known))]

    def _usual_s(self, n: int) -> float | None:
        rounds = self._nearest(n)
        return None if rounds is None else rounds.usual_s

    def _tokens(self, n: int) -> float:
        rounds = self._nearest(n)
        return 1.0 if rounds is None else rounds.usual_tokens

    def wait_s(self, n_waiting: int, n_slots: int, answer_s: float | None) -> int:
        """Whole seconds until half of the queue should have a slot."""
        usual_s = 1.0 if answer_s is None else answer_s
        return max(1, min(600, math.ceil(usual_s * max(1, n_waiting) / max(1, n_slots) / 2)))

    def p95(self, now_s: float) -> tuple[float | None, float | None]:
        """TTFT and TPOT (ms) that 95% of the answers of the last minute stayed within; None where there were none."""
        return self._ttft.quantile(now_s), self._tpot.quantile(now_s)

    def broken(self, now_s: float) -> dict[str, bool]:
        """Per bound that was given, whether the last minute broke it."""
        bounds = {"ttft": self.sla.ttft_ms, "tpot": self.sla.tpot_ms}
        found = dict(zip(bounds, self.p95(now_s), strict=True))
        return {
            name: (value := found[name]) is not None and value > bound
            for name, bound in bounds.items()
            if bound is not None
        }


class Window:
    """Values of the last minute; safe to use from any thread."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=N_KEPT)
        self._lock = threading.Lock()

    def add(self, at_s: float, value: float) -> None:
        """A value at ``at_s`` (s), which never goes back."""
        with self._lock:
            self._values.append((at_s, value))

    def accumulate(self, at_s: float, value: float) -> None:
        """``value`` for ``total`` alone, which needs no single ones: those of one moment are kept as their sum."""
        with self._lock:
            first_s, so_far = self._values[-1] if self._values else (-math.inf, 0.0)
            if at_s - first_s < MOMENT_S:
                self._values[-1] = first_s, so_far + value
            else:
                self._values.append((at_s, value))

    def _recent(self, now_s: float) -> list[float]:
        with self._lock:
            while self._values and self._values[0][0] < now_s - WINDOW_S:
                self._values.popleft()
            return [value for _, value in self._values]

    def quantile(self, now_s: float, level: float = LEVEL) -> float | None:
        """The value that a share of ``level`` stays within (nearest rank); None of nothing."""
        recent = sorted(self._recent(now_s))
        return recent[max(0, math.ceil(level * len(recent)) - 1)] if recent else None

    def mean(self, now_s: float) -> float | None:
        """None of nothing."""
        recent = self._recent(now_s)
        return sum(recent) / len(recent) if recent else None

    def total(self, now_s: float) -> float:
        """Their sum."""
        return sum(self._recent(now_s))
