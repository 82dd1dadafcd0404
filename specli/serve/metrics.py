"""What Prometheus reads at ``/metrics``.

Names follow vLLM's and the conventions of Prometheus: no colons, base units, ``_total`` on counters. Every name is
there from the first scrape on; a gauge whose value is undefined (no answer in the last minute) is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from specli import __version__
from specli.events import FinishReason, RoundDone
from specli.serve.pace import Window
from specli.stats import Round, Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISHES: tuple[FinishReason, ...] = ("eos", "stop", "length", "cancelled")
REFUSALS = (
    *("queue_full", "invalid", "unauthorized", "too_large", "too_long", "timeout", "unavailable"),
    *("engine", "internal"),
)
STATES = ("draft", "n-gram", "off", "probe")
_LATENCIES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class Metrics:
    """Counters, gauges and histograms of one server; safe to use from any thread."""

    def __init__(self, k_max: int, n_slots: int) -> None:
        """``k_max``: the longest draft, tokens."""
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each that nobody reads
        self.registry = registry = CollectorRegistry()

        def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"specli_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"specli_{name}", help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"specli_{name}", help, buckets=buckets, registry=registry)

        gauge("build_info", "Always 1; the version is a label.", ["version"]).labels(__version__).set(1)
        self._drafts = counter("spec_decode_num_drafts", "Drafts that the target judged.")
        self._proposed = counter("spec_decode_num_draft_tokens", "Draft tokens that the target judged.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Draft tokens that the target accepted.")
        judged = counter("spec_decode_num_draft_tokens_per_pos", "Judged draft tokens by position.", ["position"])
        passed = counter("spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position.", ["position"])
        self._judged, self._passed = ([one.labels(str(i)) for i in range(k_max)] for one in (judged, passed))
        self._acceptance = gauge("spec_decode_acceptance_rate", "Accepted / judged draft tokens of the last minute.")
        self._tau = gauge("spec_decode_block_efficiency", "Tokens per sequence and round of the last minute.")
        self._rounds = counter("rounds", "Rounds, each one pass of the target over all running sequences.")
        self._speculated = counter("speculated_rounds", "Rounds in which at least one sequence had a draft.")
        state = gauge("controller_state", "1 for what the controller did in the last round.", ["state"])
        self._states = {name: state.labels(name) for name in STATES}
        seconds = counter("round_seconds", "Seconds of rounds by part.", ["part"])
        self._seconds = {part: seconds.labels(part) for part in ("draft", "verify", "host")}
        self._prefill_s = counter("prefill_seconds", "Seconds of evaluating prompts.")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", _LATENCIES)
        self._tpot = histogram("time_per_output_token_seconds", "(last - first token) / (n - 1), per answer.", _GAPS)
        self._itl = histogram(
            "inter_token_latency_seconds", "Gaps between bursts, shared out over their tokens.", _GAPS
        )
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _LATENCIES)
        self._wait = histogram("request_queue_time_seconds", "From arrival to a slot.", _LATENCIES)
        self._running = gauge("requests_running", "Answers that have a slot.")
        self._waiting = gauge("requests_waiting", "Answers that wait for a slot.")
        self._kv_usage = gauge("kv_cache_usage_ratio", "Tokens in the caches / tokens that fit.")
        self._prompt = counter("prompt_tokens", "Prompt tokens, those from a slot's cache included.")
        self._cached = counter("prompt_tokens_cached", "Prompt tokens that a slot's cache held.")
        self._generated = counter("generation_tokens", "Tokens of answers.")
        finished = counter("requests_finished", "Answers that ended, by reason.", ["reason"])
        self._finished = {reason: finished.labels(reason) for reason in FINISHES}
        self._aborted = counter("requests_aborted", "Answers whose client went away.")
        refused = counter(
            "requests_refused", "Requests, or answers begun for one, that got an error, by kind.", ["kind"]
        )
        self._refused = {kind: refused.labels(kind) for kind in REFUSALS}
        self._failed = gauge("engine_failed", "1 once the engine has failed for good: restart the server.")
        self._slots = gauge("slots", "Answers that can be made at a time.")
        self._slots.set(n_slots)
        p95 = gauge("sla_p95_seconds", "What 95% of the answers of the last minute stayed within.", ["objective"])
        bound = gauge("sla_bound_seconds", "The bound that was asked for; NaN without one.", ["objective"])
        broken = gauge("sla_broken", "1 while the last minute breaks the bound.", ["objective"])
        self._p95, self._bound, self._broken = (
            {name: one.labels(name) for name in ("ttft", "tpot")} for one in (p95, bound, broken)
        )
        self._recent_proposed, self._recent_accepted = Window(), Window()
        self._recent_emitted, self._recent_rounds = Window(), Window()

    def set_bounds(self, ttft_ms: float | None, tpot_ms: float | None) -> None:
        """Tell the SLA's bounds."""
        for name, bound_ms in (("ttft", ttft_ms), ("tpot", tpot_ms)):
            self._bound[name].set(math.nan if bound_ms is None else bound_ms / 1000)

    def observe_round(self, outcome: RoundDone, state: str) -> None:
        """Count one round of all, not what it was for each. ``state``: what the controller did."""
        self._rounds.inc()
        self._speculated.inc(any(part.proposed for part in outcome.sequences))
        for part_name, part_s in zip(self._seconds, (outcome.draft_s, outcome.verify_s, outcome.host_s), strict=True):
            self._seconds[part_name].inc(max(0.0, part_s))
        for name, gauge in self._states.items():
            gauge.set(name == state)

    def observe_settled(self, rounds: Sequence[Round], at_s: float) -> None:
        """Count one answer's part of ``rounds``, once (``at_s``) no stop string can take anything of it back."""
        for part in rounds:
            self._drafts.inc(part.proposed > 0)
            self._proposed.inc(part.proposed)
            self._accepted.inc(part.accepted)
            for position in (*self._judged[: part.proposed], *self._passed[: part.accepted]):
                position.inc()
            self._recent_proposed.accumulate(at_s, part.proposed)
            self._recent_accepted.accumulate(at_s, part.accepted)
            self._recent_emitted.accumulate(at_s, part.emitted)
            self._recent_rounds.accumulate(at_s, 1)

    def observe_start(self, waited_s: float) -> None:
        """An answer got a slot."""
        self._wait.observe(waited_s)

    def observe_prefill(self, seconds: float) -> None:
        """Prompts were evaluated."""
        self._prefill_s.inc(max(0.0, seconds))

    def observe_failure(self, has_failed: bool) -> None:
        """Whether the engine has failed for good."""
        self._failed.set(has_failed)

    def observe_load(self, n_running: int, n_waiting: int, kv_usage: float) -> None:
        """What there is to do now. ``kv_usage``: tokens in the caches / tokens that fit."""
        self._running.set(n_running)
        self._waiting.set(n_waiting)
        self._kv_usage.set(kv_usage)

    def observe_answer(self, stats: Stats, arrived_s: float, ended_s: float, *, has_left: bool) -> None:
        """An answer has ended, or its client left (``has_left``). Latencies count answers that were given whole."""
        self.observe_tokens(stats)
        reason: FinishReason = stats.finish_reason or "cancelled"
        self._finished[reason].inc()
        self._aborted.inc(has_left)
        if reason == "cancelled":
            return
        if stats.ttft_s is not None:
            self._ttft.observe(stats.ttft_s)
        if stats.tpot_ms is not None:
            self._tpot.observe(stats.tpot_ms / 1000)
        for gap_ms in stats.itl_token_ms:
            self._itl.observe(gap_ms / 1000)
        self._e2e.observe(ended_s - arrived_s)

    def observe_tokens(self, stats: Stats) -> None:
        """The tokens of an answer that has ended, well or not."""
        if stats.n_prompt is not None:
            self._prompt.inc(stats.n_prompt)
            self._cached.inc(stats.n_reused)
        self._generated.inc(stats.n_tokens)

    def refuse(self, kind: str) -> None:
        """A request got an error of ``kind``."""
        self._refused[kind].inc()

    def expose(self, now_s: float, p95_ms: tuple[float | None, float | None], broken: Mapping[str, bool]) -> bytes:
        """The text of a scrape."""
        proposed, rounds = self._recent_proposed.total(now_s), self._recent_rounds.total(now_s)
        self._acceptance.set(self._recent_accepted.total(now_s) / proposed if proposed else math.nan)
        self._tau.set(self._recent_emitted.total(now_s) / rounds if rounds else math.nan)
        for name, value_ms in zip(("ttft", "tpot"), p95_ms, strict=True):
            self._p95[name].set(math.nan if value_ms is None else value_ms / 1000)
            self._broken[name].set(broken.get(name, False))
        return generate_latest(self.registry)
