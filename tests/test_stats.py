"""Every figure of ``Stats`` against a fake clock. J*: public reports of wrong numbers elsewhere."""

from __future__ import annotations

import json

import pytest

from specli.events import Finished, PrefillDone, Provenance, RoundDone, SequenceRound, Span, Text
from specli.stats import Stats


def feed(rounds, *, prefill_s=2.0, round_s=0.1, n_prompt=10, finished=True, n_cut=0, reason="length", end_s=None):
    """Stats of one sequence: ``rounds`` are (proposed, accepted) or (proposed, accepted, emitted), each ``round_s``."""
    stats, now_s = Stats(), 100.0
    stats.observe(PrefillDone(0, n_prompt, now_s, now_s + prefill_s, prefill_s=prefill_s / 2))
    now_s += prefill_s
    step_s = round_s if end_s is None else (end_s / len(rounds))
    for i, (proposed, accepted, *emitted) in enumerate(rounds, start=1):
        part = SequenceRound(0, proposed, accepted, *(emitted or [accepted + 1]))
        stats.observe(RoundDone((part,), now_s + i * step_s, 0.2 * step_s, 0.7 * step_s, 0.1 * step_s))
    if finished:
        n_tokens = max(stats.n_tokens - n_cut, 0)
        stats.observe(Finished(0, reason, tuple(range(n_tokens)), now_s + len(rounds) * step_s, n_cut=n_cut))
    return stats


def floats(value):
    """All numbers of a JSON value that are floats."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in floats(item)]
    return [value] if isinstance(value, float) else []


UNDEFINED = [
    "acceptance_rate",
    "mean_accepted_length",
    "block_efficiency",
    "ttft_s",
    "tpot_ms",
    "decode_tok_s",
    "prefill_tok_s",
    "host_share",
]


@pytest.mark.parametrize("name", UNDEFINED)
def test_nothing_observed_is_none_everywhere(name):
    assert getattr(Stats(), name) is None


def test_nothing_observed_counts_zero():
    stats = Stats()
    assert (stats.rounds, stats.proposed, stats.accepted, stats.n_tokens) == (0, 0, 0, 0)
    assert stats.per_position_acceptance == []


def test_j1_acceptance_never_counts_the_targets_own_tokens():
    stats = feed([(4, 4), (4, 1), (0, 0)])
    assert (stats.proposed, stats.accepted, stats.rounds) == (8, 5, 3)
    assert stats.acceptance_rate == 0.625
    assert stats.n_tokens == 8 + 1  # 8 committed by rounds, 1 by the prefill
    assert stats.block_efficiency == pytest.approx(8 / 3)
    assert stats.mean_accepted_length == 2.5  # the round without a draft is no round that accepted none


def test_per_position_acceptance_divides_by_the_rounds_that_proposed_so_many():
    stats = feed([(4, 4), (4, 1), (2, 1), (1, 0), (0, 0)])
    assert stats.per_position_acceptance == [3 / 4, 1 / 3, 1 / 2, 1 / 2]


def test_j3_eos_inside_a_run_ends_the_count_there():
    # drafted [d1, d2, EOS, d4, d5], all matching: the loop reports what stands before and at EOS
    stats = feed([(3, 3, 3)], reason="eos")
    assert stats.n_tokens == len(stats.tokens) == 1 + 3
    assert (stats.proposed, stats.accepted) == (3, 3)
    assert stats.mean_accepted_length == 3
    assert stats.block_efficiency == 3
    assert stats.finish_reason == "eos"


def test_j4_a_draft_thrown_away_before_it_was_judged_is_no_rejection():
    stats = feed([(0, 0), (0, 0)])
    assert stats.proposed == 0
    assert stats.acceptance_rate is None
    assert stats.mean_accepted_length is None
    assert stats.per_position_acceptance == []
    assert stats.block_efficiency == 1


def test_a_rejected_draft_is_zero_not_none():
    stats = feed([(3, 0)])
    assert stats.acceptance_rate == 0
    assert stats.mean_accepted_length == 0


def no_tokens():
    stats = Stats()
    stats.observe(Finished(0, "length", (), 100.0))
    return stats


def at_one_moment():
    return feed([(0, 0), (2, 1)], prefill_s=0.0, round_s=0.0)


J5 = {
    "-n 0": no_tokens,
    "-n 1": lambda: feed([]),
    "immediate EOS": lambda: feed([], reason="eos"),
    "no draft": lambda: feed([(0, 0)] * 3),
    "first token taken back": lambda: feed([(2, 2)], n_cut=4),
    "no time passes": at_one_moment,
    "nothing": Stats,
}


@pytest.mark.parametrize("name", J5)
def test_j5_json_holds_numbers_or_null(name):
    stats = J5[name]()
    text = json.dumps(stats.as_dict(), allow_nan=False)  # raises ValueError for NaN and Infinity
    assert json.loads(text) == stats.as_dict()


@pytest.mark.parametrize("name", ["-n 0", "-n 1", "immediate EOS"])
def test_j5_no_interval_no_rate(name):
    stats = J5[name]()
    assert stats.tpot_ms is None
    assert stats.decode_tok_s is None
    assert stats.block_efficiency is None


def test_no_time_no_rate():
    stats = at_one_moment()
    assert stats.decode_tok_s is None
    assert stats.prefill_tok_s is None
    assert stats.host_share is None


def test_j7_speed_is_of_the_tokens_generated_not_of_those_asked_for():
    stats = feed([(0, 0)] * 78, end_s=59.05, reason="eos")  # -n 387 was asked for
    assert stats.n_tokens == 79
    assert stats.decode_tok_s == pytest.approx(78 / 59.05)
    assert round(stats.decode_tok_s, 2) == 1.32


def test_j8_prompt_time_and_loading_stay_out_of_the_decode_rate():
    stats = feed([(0, 0)] * 9)  # 2 s of prompt, then 9 more tokens at 0.1 s
    stats.load_s = 30.0
    assert stats.n_tokens == 10
    assert stats.ttft_s == pytest.approx(2.0)
    assert stats.tpot_ms == pytest.approx(100)  # (t_last - t_first) / (n - 1) = 0.9 s / 9
    assert stats.decode_tok_s == pytest.approx(10)
    assert stats.prefill_tok_s == pytest.approx(10 / 1.0)  # evaluation only, not tokenizing


def test_tpot_divides_by_tokens_not_by_rounds():
    stats = feed([(3, 3), (3, 1)], round_s=0.3)
    assert stats.tpot_ms == pytest.approx(1000 * 0.6 / 6)


def test_times_add_up_and_host_share_is_of_rounds():
    stats = feed([(1, 1)] * 4)
    assert (stats.draft_s, stats.verify_s, stats.host_s) == pytest.approx((0.08, 0.28, 0.04))
    assert stats.host_share == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("n_cut", "n_tokens", "proposed", "accepted", "rounds"),
    [
        (0, 8, 7, 5, 2),
        (1, 7, 5, 5, 2),  # the second round's recovered token: d3, rejected at its place, went with it
        (2, 6, 4, 4, 2),
        (3, 5, 3, 3, 1),  # the whole second round
        (4, 4, 3, 3, 1),  # and the first one's bonus token
        (6, 2, 1, 1, 1),
        (7, 1, 0, 0, 0),
        (8, 0, 0, 0, 0),  # the prefill's token too
    ],
)
def test_a_stop_string_takes_tokens_back_from_the_tail(n_cut, n_tokens, proposed, accepted, rounds):
    stats = feed([(3, 3), (4, 2)], n_cut=n_cut, reason="stop")
    assert (stats.n_tokens, stats.rounds) == (n_tokens, rounds)
    assert (stats.proposed, stats.accepted) == (proposed, accepted)
    assert len(stats.tokens) == n_tokens
    assert stats.accepted <= stats.proposed <= stats.n_tokens or n_cut == 0


def test_rounds_taken_back_move_the_last_token_back():
    stats = feed([(0, 0)] * 5, n_cut=2)
    assert stats.tpot_ms == pytest.approx(100)
    assert stats.n_tokens == 4


def test_the_first_token_taken_back_leaves_no_time_to_it():
    stats = feed([(1, 1)], n_cut=3)
    assert stats.ttft_s is None
    assert stats.n_tokens == 0


def test_events_of_other_sequences_do_not_count():
    stats = Stats(sequence=1)
    stats.observe(PrefillDone(0, 99, 0.0, 9.0, 9.0))
    stats.observe(PrefillDone(1, 5, 0.0, 1.0, 0.5))
    both = (SequenceRound(0, 4, 4, 5), SequenceRound(1, 2, 1, 2))
    stats.observe(RoundDone(both, 1.5, 0.1, 0.3, 0.1))
    stats.observe(Text(0, (Span("no", Provenance.TARGET),)))
    stats.observe(Finished(0, "eos", (1, 2, 3), 2.0, n_cut=3))
    assert (stats.n_prompt, stats.proposed, stats.accepted, stats.n_tokens) == (5, 2, 1, 3)
    assert stats.finish_reason is None
    assert stats.verify_s == 0.3  # a batch's time belongs to all of its sequences


def test_as_dict_names_every_figure_and_its_unit():
    figures = feed([(4, 4), (4, 1), (0, 0)]).as_dict()
    assert figures["prompt_tokens"] == 10
    assert figures["tokens"] == list(range(9))
    assert figures["acceptance_rate"] == 0.625
    assert figures["per_position_acceptance"] == [1.0, 0.5, 0.5, 0.5]
    assert set(figures["time_s"]) == {"load", "prefill", "draft", "verify", "host"}
    assert figures["time_s"]["load"] is None
    assert all(number == number and abs(number) < float("inf") for number in floats(figures))
