"""Counters and clock marks of one sequence, and every figure derived from them, once.

Definitions (the field's names; units in the name). Undefined is None, never NaN, inf or 0.

    draft acceptance rate      accepted / proposed tokens
    per-position acceptance    rounds with accepted length >= i / rounds that proposed >= i tokens
    mean accepted length       accepted / rounds with k >= 1; without the recovered or bonus token, in [0, K]
    block efficiency (tau)     tokens emitted by rounds / rounds, in [1, K+1]
    TTFT (s)                   request accepted -> first token: tokenizing and prefill in, model loading out
    TPOT (ms/token)            (t_last - t_first) / (n - 1); undefined for n = 1
    decode rate (tok/s)        1000 / TPOT: prompt time is never inside
    ITL (ms)                   gap between emitted bursts; per token: a burst's gap shared out over its tokens
    prefill rate (tok/s)       evaluated prompt tokens / seconds of evaluating them; those reused from a cache are not

EOS counts as a token. Tokens taken back by a stop string count nowhere: not as tokens, not as proposed or accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from specli.events import Event, Finished, FinishReason, Logprobs, PrefillDone, RoundDone, TokenLogprob

N_IDLE = 8  # rounds without a single draft that are called off


@dataclass(slots=True)
class Round:
    """A round's counts for this sequence, and when it ended (clock mark, s)."""

    proposed: int
    accepted: int
    emitted: int
    at_s: float


@dataclass(slots=True)
class Stats:
    """Feed it the events of one sequence with ``observe``; read the properties at any time."""

    sequence: int = 0
    load_s: float | None = None
    n_prompt: int | None = None
    n_reused: int = 0  # prompt tokens that the cache held already
    started_at_s: float | None = None
    first_at_s: float | None = None
    prefill_s: float | None = None
    draft_s: float = 0.0
    verify_s: float = 0.0
    host_s: float = 0.0
    finish_reason: FinishReason | None = None
    tokens: tuple[int, ...] | None = None
    explanation: str = ""
    state: str = ""  # of the last round: who drafts, as a controller has it
    logprobs: list[TokenLogprob] | None = None  # one per token, where they were asked for
    proposed: int = 0  # draft tokens that the target judged
    accepted: int = 0  # draft tokens that it accepted
    _emitted: int = 0  # by rounds
    _rounds: list[Round] = field(default_factory=list)
    _reached: list[int] = field(default_factory=list)  # per position: rounds that proposed at least so many tokens
    _passed: list[int] = field(default_factory=list)  # per position: rounds that accepted at least so many

    def observe(self, event: Event) -> None:
        """Count one event; events of other sequences are passed over."""
        if isinstance(event, RoundDone):
            self.state = event.state
            for part in event.sequences:
                if part.sequence == self.sequence:
                    self._rounds.append(Round(part.proposed, part.accepted, part.emitted, event.at_s))
                    self._count(self._rounds[-1], 1)
                    self.draft_s += event.draft_s
                    self.verify_s += event.verify_s
                    self.host_s += event.host_s
        elif event.sequence != self.sequence:
            return
        elif isinstance(event, PrefillDone):
            self.n_prompt, self.n_reused, self.started_at_s = event.n_prompt, event.n_reused, event.started_at_s
            self.first_at_s, self.prefill_s = event.at_s, event.prefill_s
        elif isinstance(event, Logprobs):
            self.logprobs = self.logprobs or []
            self.logprobs.extend(event.tokens)
        elif isinstance(event, Finished):
            self.finish_reason, self.tokens, self.explanation = event.reason, event.tokens, event.explanation
            self._take_back(event.n_cut)
            if self.logprobs is not None:
                del self.logprobs[len(event.tokens) :]

    def _count(self, r: Round, sign: int) -> None:
        """Add a round to the counters (``sign`` 1) or take it out (-1): reading them costs the same at any length."""
        self.proposed += sign * r.proposed
        self.accepted += sign * r.accepted
        self._emitted += sign * r.emitted
        missing = r.proposed - len(self._reached)
        if missing > 0:
            self._reached += [0] * missing
            self._passed += [0] * missing
        for i in range(r.proposed):
            self._reached[i] += sign
            self._passed[i] += sign * (i < r.accepted)

    def _take_back(self, n_cut: int) -> None:
        """Remove ``n_cut`` tokens from the last rounds: tokens behind a cut are neither proposed nor accepted."""
        while n_cut > 0 and self._rounds:
            last = self._rounds.pop()
            self._count(last, -1)
            if n_cut < last.emitted:
                kept = last.emitted - n_cut
                shorter = Round(min(last.proposed, kept), min(last.accepted, kept), kept, last.at_s)
                self._rounds.append(shorter)
                self._count(shorter, 1)
            n_cut -= min(n_cut, last.emitted)
        if n_cut > 0:  # the first token itself was taken back
            self.first_at_s = None

    def settled(self, start: int, n_open: int = 0) -> list[Round]:
        """Rounds from the ``start``-th on that stay whatever of the last ``n_open`` tokens is taken back."""
        end = len(self._rounds)
        while end > start and n_open > 0:
            end -= 1
            n_open -= self._rounds[end].emitted
        return self._rounds[start:end]

    @property
    def rounds(self) -> int:
        """Rounds after the prefill."""
        return len(self._rounds)

    @property
    def n_tokens(self) -> int:
        """Tokens generated so far, the prefill's first token included."""
        return self._emitted + (self.first_at_s is not None)

    @property
    def is_idle(self) -> bool:
        """Whether nothing was drafted, in enough rounds to say so."""
        return self.rounds >= N_IDLE and self.proposed == 0

    def fills(self, n_ctx: int) -> bool:
        """Whether the end of a context of ``n_ctx`` tokens cut the text off; its last token needs no cell."""
        return self.finish_reason == "length" and (self.n_prompt or 0) + self.n_tokens > n_ctx

    @property
    def n_evaluated(self) -> int | None:
        """Prompt tokens that were evaluated: all that the cache did not hold."""
        return None if self.n_prompt is None else self.n_prompt - self.n_reused

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed tokens."""
        return _ratio(self.accepted, self.proposed)

    @property
    def mean_draft_length(self) -> float | None:
        """Proposed tokens / rounds, those that proposed none included."""
        return _ratio(self.proposed, self.rounds)

    @property
    def mean_k(self) -> float | None:
        """Proposed tokens / rounds that proposed at least one."""
        return _ratio(self.proposed, self._reached[0] if self._reached else 0)

    @property
    def mean_accepted_length(self) -> float | None:
        """Accepted tokens / rounds that proposed at least one."""
        return _ratio(self.accepted, self._reached[0] if self._reached else 0)

    @property
    def block_efficiency(self) -> float | None:
        """Tokens emitted by rounds / rounds (tau)."""
        return _ratio(self._emitted, self.rounds)

    @property
    def per_position_acceptance(self) -> list[float]:
        """For i = 1, 2, …: rounds with accepted length >= i / rounds that proposed >= i tokens."""
        return [passed / reached for passed, reached in zip(self._passed, self._reached, strict=True) if reached]

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the accepted request to the first token."""
        if self.first_at_s is None or self.started_at_s is None:
            return None
        return self.first_at_s - self.started_at_s

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first."""
        if self.first_at_s is None or not self._rounds:
            return None
        seconds = _ratio(self._rounds[-1].at_s - self.first_at_s, self.n_tokens - 1)
        return None if seconds is None else 1000 * seconds

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens per second after the first."""
        tpot_ms = self.tpot_ms
        return _ratio(1000, tpot_ms) if tpot_ms is not None else None

    @property
    def itl_burst_ms(self) -> list[float]:
        """Milliseconds from each emitted burst to the next; the prefill's token is the first burst."""
        return [1000 * gap_s for gap_s, _ in self._bursts()]

    @property
    def itl_token_ms(self) -> list[float]:
        """Milliseconds per token after the first: the gap before its burst, shared out over the burst's tokens."""
        return [1000 * gap_s / emitted for gap_s, emitted in self._bursts() for _ in range(emitted)]

    def _bursts(self) -> Iterator[tuple[float, int]]:
        """The gap before each burst that a round emitted (s), and its tokens."""
        last_s = self.first_at_s
        if last_s is None:
            return
        for r in self._rounds:
            if r.emitted:
                yield r.at_s - last_s, r.emitted
                last_s = r.at_s

    @property
    def prefill_tok_s(self) -> float | None:
        """Evaluated prompt tokens per second of evaluating them."""
        if self.n_evaluated is None or self.prefill_s is None:
            return None
        return _ratio(self.n_evaluated, self.prefill_s)

    @property
    def host_share(self) -> float | None:
        """Host seconds / seconds of all rounds."""
        return _ratio(self.host_s, self.draft_s + self.verify_s + self.host_s)

    def as_dict(self) -> dict[str, object]:
        """The measured part of ``--stats-json``: JSON types only, undefined figures are None."""
        return {
            "tokens": None if self.tokens is None else list(self.tokens),
            "prompt_tokens": self.n_prompt,
            "reused_tokens": self.n_reused,
            "rounds": self.rounds,
            "proposed": self.proposed,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "mean_accepted_length": self.mean_accepted_length,
            "block_efficiency": self.block_efficiency,
            "per_position_acceptance": self.per_position_acceptance,
            "ttft_s": self.ttft_s,
            "tpot_ms": self.tpot_ms,
            "decode_tok_s": self.decode_tok_s,
            "prefill_tok_s": self.prefill_tok_s,
            "time_s": {
                "load": self.load_s,
                "prefill": self.prefill_s,
                "draft": self.draft_s,
                "verify": self.verify_s,
                "host": self.host_s,
            },
            "finish_reason": self.finish_reason,
        }


@dataclass(slots=True)
class Totals:
    """Sums over the turns of a conversation; rates by the definitions above."""

    turns: int = 0
    evaluated: int = 0  # prompt tokens
    reused: int = 0  # prompt tokens
    generated: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, stats: Stats) -> None:
        """Count one turn that has ended."""
        self.turns += 1
        self.evaluated += stats.n_evaluated or 0
        self.reused += stats.n_reused
        self.generated += stats.n_tokens
        self.proposed += stats.proposed
        self.accepted += stats.accepted

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / proposed tokens."""
        return _ratio(self.accepted, self.proposed)


def _ratio(numerator: float, denominator: float) -> float | None:
    """The quotient, or None where it is undefined."""
    return numerator / denominator if denominator > 0 else None
