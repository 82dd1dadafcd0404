"""The controller alone: what it learns of costs and acceptance, what it decides, what it says. No engine, no clock."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specli import controller as module
from specli.controller import ALLOWANCE, COPY_CREDIT, CREDIT, Controller
from specli.estimates import PRIOR_ACCEPTANCE, Acceptance, CostModel, Profit
from specli.record import Outcome, Record

UNIT_S = 0.02
TILES = {1: 1.0, 2: 1.9, 3: 2.4, 4: 1.7, 5: 2.9}  # passes of four tokens are cheaper than those of two


def costs_of(curve: dict[int, float], c: float | None = None, feed: float = 0.0) -> CostModel:
    """Costs that were measured without noise."""
    costs = CostModel()
    for n, v in sorted(curve.items()):
        costs.observe_pass(n, UNIT_S * v)
    if c is not None:
        costs.observe_draft(1, 1, UNIT_S * c)
        costs.observe_draft(1, 22, UNIT_S * (c + 20 * feed))
    return costs


def flat(slope: float, longest: int = 17) -> dict[int, float]:
    return {n: 1 + slope * (n - 1) for n in range(1, longest + 1)}


# Costs


def test_nothing_measured() -> None:
    costs = CostModel()
    assert costs.unit_s is None
    assert [costs.v(n) for n in (1, 2, 5)] == [1.0, 1.25, 2.0]
    assert not costs.knows_c
    assert costs.as_dict() == {"v": {"1": 1.0}, "v_samples": {"1": 3}, "c": None, "c_samples": 0, "feed": None}


def test_exact_times_give_exact_ratios() -> None:
    costs = costs_of(TILES, c=0.3, feed=0.04)
    assert costs.unit_s == pytest.approx(UNIT_S)
    assert [costs.v(n) for n in TILES] == pytest.approx(list(TILES.values()))
    assert (costs.c, costs.feed) == pytest.approx((0.3, 0.04))
    assert costs.draft_cost(3, 12) == pytest.approx(3 * 0.3 + 10 * 0.04)
    assert costs.draft_cost(3, 2) == pytest.approx(0.9)
    assert costs.draft_cost(0, 12) == pytest.approx(10 * 0.04)  # fed alone, in a round without a draft
    assert costs.draft_cost(0, 2) == 0


def test_widths_never_measured_lie_on_the_line_between_their_neighbours() -> None:
    costs = costs_of({1: 1.0, 2: 1.2, 6: 2.0})
    assert [costs.v(n) for n in (3, 4, 6, 7, 11)] == pytest.approx([1.4, 1.6, 2.0, 2.2, 3.0])


def test_no_pass_is_cheaper_than_a_shorter_one_could_ever_be() -> None:
    """Noise at low widths must not make drafting look free."""
    assert costs_of({1: 1.0, 2: 0.9}).v(2) == 1.0


def test_v_is_what_was_measured_last_at_every_width() -> None:
    """v(n) is kept between two times, and a new one moves what lies between its neighbours."""
    rng, costs = np.random.default_rng(0), CostModel()
    for _ in range(300):
        n = int(rng.choice([1, 1, 2, 3, 5, 8, 9, 16, 17, 24, 33]))
        costs.observe_pass(n, UNIT_S * (1 + 0.2 * (n - 1)) * float(np.exp(rng.normal(0, 0.2))))
        kept = costs.as_dict()["v"]
        assert isinstance(kept, dict)
        widths = [int(width) for width in kept]
        relative = [costs._relative[width] / costs._relative[1] for width in widths]
        expected = [max(1.0, v) for v in np.interp(range(1, widths[-1] + 1), widths, relative)]
        assert costs.curve(widths[-1])[1 : widths[-1] + 1] == pytest.approx(expected)


def test_answers_that_come_and_go_do_not_carry_widths_apart() -> None:
    """Texts grow within a batch and begin anew in the next one, so passes on both sides of a change say little."""
    costs = costs_of({**flat(0.25, 9), 6: 3.5, 10: 1.6})  # two of them were disturbed, and 12 is not known at all
    for _ in range(30):
        for n_active in (1, 2, 4, 8):
            for i in range(40):
                n = n_active + (2 + 2 * (i % 20 == 9) if i % 10 == 9 else 0)  # now and then a draft
                costs.observe_pass(n, UNIT_S * (1 + 0.25 * (n - 1)) * (1 + 0.004 * i), n_active)
    expected = [1 + 0.25 * (n - 1) for n in (2, 4, 5, 6, 7, 8, 9, 10, 12)]
    assert [costs.v(n) for n in (2, 4, 5, 6, 7, 8, 9, 10, 12)] == pytest.approx(expected, rel=0.06)


def test_batches_of_a_few_rounds_teach_as_well() -> None:
    costs = costs_of({1: 1.0, 2: 1.3, 4: 1.9, 8: 3.1})
    for i in range(200):
        n_active = 8 - i // 4 % 3  # 8, 7, 6, four rounds each
        for n in (n_active, n_active, n_active, n_active + 4):
            costs.observe_pass(n, UNIT_S * (1 + 0.3 * (n - 1)), n_active)
    assert [costs.v(n) for n in (6, 7, 8, 10, 11, 12)] == pytest.approx([2.5, 2.8, 3.1, 3.7, 4.0, 4.3], rel=0.03)


def test_a_width_that_was_seen_in_a_batch_alone_is_known() -> None:
    """Three answers without a draft, when their texts grow out of what costs hold for."""
    controller = Controller(8, costs_of({1: 1.0, 2: 1.2, 4: 1.7, 8: 2.0}))
    for n_context in (100, 100, 3000):
        controller.begin(3, n_context)
        controller.observe([Outcome("none", [], 0, 0, 1)] * 3, UNIT_S * 1.9, 0.0, 0, 0)
        assert controller.costs.v(3) == pytest.approx(1.9, rel=0.02)


def test_a_copy_below_the_least_chance_cannot_pay() -> None:
    """Whatever the tokens behind the first; above it, one of certain tokens does."""
    rng, n_refused, n_paying = np.random.default_rng(0), 0, 0
    for _ in range(200):
        steps = rng.exponential(0.3, 40) * (rng.random(40) < 0.7)
        controller = Controller(16, costs_of({n + 1: float(1 + steps[:n].sum()) for n in range(41)}))
        controller.begin(int(rng.integers(2, 9)))
        controller.take(int(rng.integers(0, 9)))
        least, width = controller.least_copied(), controller._width
        if least < 1:
            n_refused += 1
            assert controller._best_copy([least, *[1.0] * 15], width)[0] <= 1e-9
        if 0.03 < least < 0.9:
            n_paying += 1
            assert controller._best([min(1.0, 1.01 * least), *[1.0] * 15], 0.0, width)[0] > 0
    assert min(n_refused, n_paying) > 50
    controller.begin(1)
    assert controller.least_copied() == 0  # alone, a look may be worth more


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_passed_over(seconds: float) -> None:
    costs = costs_of(TILES, c=0.3)
    before = costs.as_dict()
    costs.observe_pass(1, seconds)
    costs.observe_pass(4, seconds)
    costs.observe_pass(0, 1.0)
    if seconds != 0:  # a draft without weights takes no time
        costs.observe_draft(1, 1, seconds)
    costs.observe_draft(0, 1, 1.0)
    assert costs.as_dict() == before


def test_a_draft_before_any_pass_teaches_nothing() -> None:
    costs = CostModel()
    costs.observe_draft(1, 1, 0.1)
    assert not costs.knows_c


def noisy(rng: np.random.Generator, spikes: float, noise: float = 0.05) -> float:
    """A disturbance: lognormal, and ten times as long now and then."""
    return float(np.exp(rng.normal(0, noise))) * (10 if rng.random() < spikes else 1)


@pytest.mark.parametrize("seed", range(5))
def test_spikes_of_ten_times_change_nothing(seed: int) -> None:
    """One pass in ten, calibration included."""
    rng, costs = np.random.default_rng(seed), CostModel()
    widths = [1, 1, 2, 3, 4, 5, *rng.choice([1, 2, 3, 4, 5], 150).tolist()]
    for n in widths:
        costs.observe_pass(n, UNIT_S * TILES[n] * noisy(rng, 0.1))
        costs.observe_draft(2, 1, UNIT_S * 0.6 * noisy(rng, 0.1))
        costs.observe_draft(1, 12, UNIT_S * 0.5 * noisy(rng, 0.1))
    for n, v in TILES.items():
        assert costs.v(n) == pytest.approx(v, rel=0.15)
    assert costs.c == pytest.approx(0.3, rel=0.15)
    assert costs.feed == pytest.approx(0.02, rel=0.4)  # of 0.2 beyond the step


@pytest.mark.parametrize("n", [2, 4, 9])
def test_a_first_time_that_no_width_can_take_is_believed_when_it_repeats(n: int) -> None:
    costs = costs_of({1: 1.0, 2: 1.5} if n > 2 else {1: 1.0})
    before = costs.v(n)
    costs.observe_pass(n, UNIT_S * 20)
    assert costs.v(n) == pytest.approx(before)
    for _ in range(2):
        costs.observe_pass(n, UNIT_S * 20)
    assert costs.v(n) == pytest.approx(20)


def test_a_growing_context_moves_all_widths_together() -> None:
    """Passes get five times slower while only width 4 is used, and one token now and then: no ratio changes."""
    rng, costs = np.random.default_rng(1), costs_of(TILES)
    for t in range(1000):
        n = 1 if t % 64 == 63 else 4
        costs.observe_pass(n, UNIT_S * TILES[n] * (1 + t / 250) * noisy(rng, 0))
    for n, v in TILES.items():
        assert costs.v(n) == pytest.approx(v, rel=0.1)
    assert costs.unit_s == pytest.approx(UNIT_S * 5, rel=0.1)


def test_a_ratio_that_changes_is_followed() -> None:
    costs = costs_of(TILES)
    for t in range(600):
        n = 1 if t % 24 == 0 else 4
        costs.observe_pass(n, UNIT_S * (1 if n == 1 else 3.0))
    assert costs.v(4) == pytest.approx(3.0, rel=0.02)


def test_large_batches_share_their_estimates() -> None:
    """Batches of many sequences seldom have the same width twice."""
    rng, costs = np.random.default_rng(2), CostModel()
    curve = lambda n: 1 + 0.05 * n  # noqa: E731
    for n in (1, 1, 8, 16, 32, 64):
        costs.observe_pass(n, UNIT_S * curve(n))
    for n in rng.integers(40, 64, 200):
        costs.observe_pass(int(n), UNIT_S * curve(int(n)) * noisy(rng, 0))
    for n in range(40, 64):
        assert costs.v(n) == pytest.approx(curve(n) / curve(1), rel=0.08)
    assert len(costs.as_dict()["v"]) < 14  # type: ignore[arg-type]


def test_break_even_right_values() -> None:
    costs = costs_of(flat(0.1), c=0.3)
    assert costs.break_even(1) == pytest.approx(0.4, abs=2e-3)  # c + v(2) - 1
    assert costs.break_even(8) == pytest.approx(0.4, abs=2e-3)  # longer drafts need no less
    tiles = costs_of(TILES, c=0.0)
    assert tiles.break_even(1) == pytest.approx(0.9, abs=2e-3)
    p = tiles.break_even(3)
    assert p is not None
    assert p + p**2 + p**3 == pytest.approx(0.7, abs=5e-3)  # v(4) - 1
    assert tiles.break_even(3, c=0.2) == pytest.approx(0.637, abs=3e-3)  # p + p^2 + p^3 = 1.3
    assert costs_of(flat(1.2)).break_even(8) is None
    assert costs_of(flat(0.1), c=0.3).break_even(1, n_active=4) == pytest.approx(4 / 1.3 * 0.175, abs=2e-3)


# Acceptance


def test_before_anything_was_judged_the_confidence_and_the_prior_count_alike() -> None:
    acceptance = Acceptance()
    assert acceptance.at(0.9) == pytest.approx((0.9 + PRIOR_ACCEPTANCE) / 2)
    assert not acceptance.is_known


def test_acceptance_is_learned_by_confidence() -> None:
    """An overconfident draft: right in 0.5 where it says 0.95, in 0.1 where it says 0.35."""
    rng, acceptance = np.random.default_rng(3), Acceptance()
    for _ in range(600):
        confidences = rng.choice([0.95, 0.35], 4).tolist()
        hits = [rng.random() < (0.5 if confidence > 0.9 else 0.1) for confidence in confidences]
        acceptance.observe(confidences, next((i for i, hit in enumerate(hits) if not hit), 4))
    assert acceptance.at(0.95) == pytest.approx(0.5, abs=0.15)
    assert acceptance.at(0.35) == pytest.approx(0.1, abs=0.15)
    assert acceptance.is_known


def test_tokens_behind_a_rejection_are_unknown() -> None:
    one, two = Acceptance(), Acceptance()
    one.observe([0.8, 0.8], 1)
    two.observe([0.8, 0.8, 0.2, 0.9], 1)
    assert vars(one) == vars(two)


def test_the_mean_follows_a_change_within_ten_tokens() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.observe([0.9], 1)
    assert acceptance.mean > 0.9
    for _ in range(10):
        acceptance.observe([0.2], 0)
    assert acceptance.mean < 0.35


# Decisions


def ready(
    curve: dict[int, float], c: float | None = None, k_max: int = 8, mean: float | None = None, n_active: int = 1
) -> Controller:
    """A controller at the beginning of a round that knows the costs, and perhaps the acceptance."""
    controller = Controller(k_max, costs_of(curve, c))
    if mean is not None:
        controller.acceptance.mean = mean
    controller.begin(n_active)
    return controller


def draws(controller: Controller, grown: list[float], confidence: float) -> bool:
    """Whether a draft that grows alone has another token."""
    controller.begin_pass(1)
    controller.begin_turn()
    return controller.may_draw(grown, confidence)


def test_all_lengths_are_looked_at() -> None:
    """v(3) > v(4): one token does not pay, two do not, three do."""
    assert ready(TILES).plan(None, [0.6] * 3, 8) == ("ngram", 3)
    assert ready(TILES).plan(None, [0.6] * 2, 8) == ("none", 0)
    assert ready(TILES).plan(None, [0.6] * 3, 2) == ("none", 0)  # no room for three
    assert ready(TILES, k_max=2).plan(None, [0.6] * 3, 8) == ("none", 0)
    assert ready(TILES).plan(None, [0.6, 0.6, 0.6, 0.2], 8) == ("ngram", 3)


def test_a_model_draft_grows_over_a_length_that_does_not_pay() -> None:
    controller = ready(TILES, c=0.05, mean=0.8)
    assert controller.plan(1, None, 8) == ("draft", 8)
    grown: list[float] = []
    while draws(controller, grown, 0.8):
        grown.append(0.8)
        controller.take(1)
        if not controller.may_step(grown):
            break
    assert len(grown) == 3


@pytest.mark.parametrize(("c", "mean", "kind"), [(0.3, 0.45, "draft"), (0.3, 0.35, "none"), (0.02, 0.15, "draft")])
def test_a_draft_model_is_asked_above_break_even(c: float, mean: float, kind: str) -> None:
    controller = ready(flat(0.1), c, mean=mean)
    controller._n_drafts = module.N_COLD  # no probes of a cold start
    assert controller.plan(1, None, 8).kind == kind
    assert (mean > (controller.break_even or 1)) == (kind == "draft")


def test_the_better_drafter_is_chosen() -> None:
    """By value: a sure copy beats a middling draft, a doubtful one does not."""
    for chances, kind in (([0.95] * 8, "ngram"), ([0.2], "draft"), ([], "draft")):
        assert ready(flat(0.05), c=0.2, mean=0.7).plan(1, chances, 8).kind == kind


def test_what_the_draft_lacks_is_part_of_its_cost() -> None:
    costs = costs_of(flat(0.1), c=0.2, feed=0.03)
    for n_lacking, n_emitted, kind in ((1, 0, "draft"), (40, 0, "draft"), (1000, 0, "none"), (1000, 500, "draft")):
        controller = Controller(8, costs)
        controller._account, controller._n_drafts = 8.0, 10
        controller.begin(1)
        assert controller.plan(n_lacking, None, 8, n_emitted=n_emitted).kind == kind  # an answer that goes on repays it


def test_a_catch_up_is_worth_what_the_answer_has_left_whatever_the_batch_leaves_of_the_draft() -> None:
    costs = costs_of(flat(0.1), c=0.2, feed=0.03)
    for budget, n_left, kind in ((8, None, "draft"), (3, None, "draft"), (3, 400, "draft"), (8, 9, "none")):
        controller = Controller(8, costs)
        controller._account, controller._n_drafts = 8.0, 10
        controller.begin(1)
        assert controller.plan(300, None, budget, n_emitted=400, n_left=n_left).kind == kind


def test_long_texts_have_costs_of_their_own_and_they_are_kept() -> None:
    """Four tokens cost 1.3 passes of a short text, and 2.2 of a long one, where attention is what takes time."""
    controller = Controller(8)
    for n_context, curve in ((100, flat(0.1)), (9000, flat(0.4))):
        controller.begin(1, n_context)
        for _ in range(25):
            for n in (1, 2, 4):
                controller.costs.observe_pass(n, UNIT_S * (1 + n_context / 5000) * curve[n])
    again = Controller(8)
    assert again.restore(kept_by(controller))
    for one in (controller, again):
        for n_context, v in ((0, 1.3), (2047, 1.3), (8192, 2.2), (32_767, 2.2), (100, 1.3)):
            one.begin(1, n_context)
            assert one.costs.v(4) == pytest.approx(v, rel=0.02)
    again.begin(1, 1 << 20)  # never seen: the last ones are where it starts from
    assert again.costs.v(4) == pytest.approx(1.3, rel=0.02)


def test_who_is_left_alone_has_the_rate_of_one() -> None:
    """Eight answers that copies served well; seven end. The last goes on with copies as long as if always alone."""
    controller = Controller(16, costs_of(flat(0.02), c=0.05))
    lengths = []
    for t in range(40):
        n_active = 8 if t < 20 else 1
        controller.begin(n_active)
        plans = [controller.plan(None, [0.99] * 16, 16) for _ in range(n_active)]
        outcomes = [Outcome("ngram", [0.99] * plan.k, plan.k, plan.k, 1 + plan.k) for plan in plans]
        controller.observe(outcomes, UNIT_S * (1 + 0.02 * (sum(plan.k + 1 for plan in plans) - 1)), 0.0, 0, 2)
        lengths.append(plans[0].k)
    assert lengths[20:30] == [16] * 10
    assert lengths[20:].count(16) >= 18  # and two looks at plain passes


def test_what_drafts_brought_alone_says_nothing_of_a_full_batch() -> None:
    """Eight tokens fill the kernel's tiles, a ninth costs as much as five: what paid alone does not."""
    tiles = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4, 8: 2.5, 9: 4.1, 10: 4.2, 16: 5.0}
    controller = Controller(4, costs_of(tiles, c=0.05))
    play(controller, lambda n: 1 + 0.1 * (n - 1), 0.05, 60, lambda _t, _i: True)
    for _ in range(20):
        controller.begin(8)
        assert {controller.plan(1, None, 4).kind for _ in range(8)} == {"none"}
        controller.observe([Outcome("none", (), 0, 0, 1)] * 8, UNIT_S * 2.5, 0.0, 0, 2)
    controller.begin(1)
    assert controller.plan(1, None, 4).kind == "draft"


def test_a_catch_up_over_several_rounds_is_paid_when_it_is_made_and_not_left_halfway() -> None:
    """Eight units in seven rounds, on credit while the account holds one; nobody drafts meanwhile."""
    controller = Controller(8, costs_of(flat(0.02), c=0.1, feed=0.01))
    controller._account, controller._n_drafts = 1.0, 10
    n_lacking = 850
    for _ in range(6):
        controller.begin(1)
        assert controller.plan(n_lacking, None, 8).kind == "draft"
        controller.observe([Outcome("none", (), 0, 0, 1)], UNIT_S, UNIT_S * 1.28, 0, 130)
        n_lacking -= 128
    assert controller.costs.feed == pytest.approx(0.01)
    assert controller._debt == pytest.approx(6 * 1.28, abs=0.2)
    assert controller._account >= 1  # what was fed is spent: it does not stop what goes on
    controller.begin(1)
    assert controller.plan(n_lacking, None, 8).kind == "draft"
    assert "catching up" in controller._why_off()


def grow(controller: Controller, confidence: float, k_max: int) -> int:
    """The length of the one draft that is being made."""
    grown: list[float] = []
    while len(grown) < k_max and draws(controller, grown, confidence):
        grown.append(confidence)
        controller.take(1)
        if len(grown) == k_max or not controller.may_step(grown):
            break
    return len(grown)


def trusted(account: float, c: float = 0.2, n_active: int = 1, k_max: int = 16) -> Controller:
    """Knows a draft that has always been right so far; 0.15 units per token of a pass."""
    controller = Controller(k_max, costs_of(flat(0.15), c))
    controller._account, controller._n_drafts = account, 10
    for _ in range(20):
        controller.acceptance.observe([0.99] * 8, 8)
    controller.begin(n_active)
    return controller


def test_no_draft_costs_more_than_the_account_or_a_credit() -> None:
    """However sure it is of itself; a token costs 0.35 units."""
    ks = []
    for account in (8.0, 4.0, 2.0, 0.1):
        controller = trusted(account)
        assert controller.plan(1, None, 16).kind == "draft"
        ks.append(grow(controller, 0.99, 16))
    assert ks == [16, 11, 5, 5]


def test_lengths_beyond_one_that_is_too_dear_are_looked_at() -> None:
    """v(3) > v(4): two tokens would cost more than the credit, three do not."""
    controller = trusted(0.1, c=0.3)
    controller.costs = costs_of(TILES | {3: 2.6}, c=0.3)
    assert controller.plan(1, None, 4).kind == "draft"
    assert grow(controller, 0.99, 4) == 3


def test_a_batch_has_the_funds_of_a_batch_and_neighbours_copies_are_not_charged() -> None:
    for n_active in (8, 16):
        controller = trusted(2.0, c=0.05, n_active=n_active)
        plans = [controller.plan(1, None, 16).kind for _ in range(n_active)]
        assert plans == ["draft"] * n_active
        controller.begin_pass(n_active)
        for _ in range(n_active):
            controller.begin_turn()
            assert controller.may_draw([], 0.99)  # none is left out for coming late
    controller = trusted(2.0, n_active=2)
    kind, k = controller.plan(1, [0.99] * 16, 16)
    assert (kind, k) == ("ngram", 16)
    controller.take(k)
    assert controller.plan(1, None, 16).kind == "draft"
    assert grow(controller, 0.99, 16) >= 3


def test_a_long_catch_up_falls_due_as_slowly_as_it_was_granted() -> None:
    """Thirty units, of a draft that saves 0.3 a round, in an answer that has come far: drafting goes on, and repays."""
    controller = Controller(1, costs_of(flat(0.1), c=0.2, feed=0.03))
    controller._account, controller._n_drafts, n_drafted = 8.0, 10, 0
    for i in range(250):
        controller.begin(1)
        n_lacking = 1000 if i == 0 else 1
        plan = controller.plan(n_lacking, None, 1, n_emitted=500 + i)
        drafts = plan.kind == "draft"
        n_drafted += drafts
        outcome = Outcome(plan.kind, [0.6] * drafts, drafts, drafts and i % 5 != 0, 1 + (drafts and i % 5 != 0))
        draft_s = UNIT_S * (0.2 + 0.03 * max(0, n_lacking - 2)) * drafts
        controller.observe([outcome], UNIT_S * (1 + 0.1 * drafts), draft_s, int(drafts), n_lacking if drafts else 1)
    assert n_drafted > 200


def test_a_width_that_was_seen_once_is_looked_at_by_a_probe_whatever_it_seems_to_cost() -> None:
    """v(2) = 2.5 cannot pay. It is 1.1."""
    controller = Controller(8, costs_of({1: 1.0, 2: 2.5, 4: 4.5}, c=0.1))
    controller._n_drafts = 10
    ks = play(controller, lambda n: 1 + 0.1 * (n - 1), 0.1, 300, lambda _t, _i: True)[2]
    assert ks[0] == 0
    assert controller.costs.v(2) == pytest.approx(1.1, rel=0.05)
    assert np.mean(ks[200:]) > 0.9  # the second start has a look at longer ones


def lost_by(n_lacking: int, kept: str, n_rounds: int = 300) -> tuple[float, int]:
    """Units that a draft which is never right loses behind a prompt, 0.03 units for each token of it; drafts made."""
    controller = Controller(8, costs_of(flat(0.1), c=0.2, feed=0.03))
    if kept == "warm":
        controller._n_drafts, controller._account = 10, 2.0
        for _ in range(20):
            controller.acceptance.observe([0.9] * 4, 4)
    elif kept == "known loss":
        controller._n_drafts, controller._usual, controller._account = 10, Profit(0.1, 0.5), 8.0
        for _ in range(20):
            controller.acceptance.observe([0.9], 0)
        before, controller = controller, Controller(8)
        assert controller.restore(kept_by(before))
        assert controller._is_known_loss
    lost, n_drafts, lacks = 0.0, 0, n_lacking
    for t in range(n_rounds):
        controller.begin(1)
        plan, k = controller.plan(lacks, None, 8, n_emitted=t), 0
        if drafts := plan.kind == "draft":
            k = grow(controller, 0.9, 8)
            n_drafts += 1
        units = (0.2 * max(1, k) + 0.03 * max(0, lacks - 2) if drafts else 0.0) + 0.1 * k
        lost += units
        outcome = Outcome(plan.kind, [0.9] * k, k, 0, 1)
        draft_s = UNIT_S * (units - 0.1 * k)
        controller.observe([outcome], UNIT_S * (1 + 0.1 * k), draft_s, max(1, k) * drafts, lacks if drafts else 0)
        lacks = 1 if drafts else lacks + 1
    return lost, n_drafts


@pytest.mark.parametrize("n_lacking", [10, 100, 500, 1000, 3000])
@pytest.mark.parametrize("kept", ["", "warm", "known loss"])
def test_a_catch_up_that_earns_nothing_costs_no_more_than_credit_and_answer_allow(n_lacking: int, kept: str) -> None:
    lost, _n_drafts = lost_by(n_lacking, kept)
    most = {"": 2.0 + 0.05 * 300, "warm": 1.9 * 300 / 4, "known loss": 4.0}[kept]  # 1.9: tokens that drafts should add
    assert lost <= most + 0.02 * 300 + 3.0  # and 1% of the time, probes, the draft that ends it


@pytest.mark.parametrize(("n_lacking", "kept"), [(150, ""), (200, "warm"), (1000, "warm"), (60, "known loss")])
def test_a_long_prompt_keeps_no_draft_out_for_good(n_lacking: int, kept: str) -> None:
    """Cold: once the answer has come far enough. Known as a loss: where 1% of the time has paid for the look."""
    assert lost_by(n_lacking, kept)[1] > 0


def test_what_was_fed_does_not_stop_a_draft_that_saves_less_than_it_cost() -> None:
    """Fifteen units for the prompt; each round with a draft saves 0.3 units: to stop would only lose these as well."""
    controller = Controller(1, costs_of(flat(0.1), c=0.2, feed=0.03))
    controller._account, controller._n_drafts, kinds = 8.0, 10, []
    for _ in range(20):
        controller.acceptance.observe([0.9], 1)
    for i in range(100):
        controller.begin(1)
        n_lacking = 500 if i == 0 else 1
        drafts = controller.plan(n_lacking, None, 1, n_emitted=2 * i).kind == "draft"
        stands = drafts and i % 5 < 3
        draft_s = UNIT_S * (0.2 + 0.03 * max(0, n_lacking - 2)) * drafts
        outcome = Outcome("draft" if drafts else "none", [0.9] * drafts, drafts, stands, 1 + stands)
        controller.observe([outcome], UNIT_S * (1 + 0.1 * drafts), draft_s, int(drafts), n_lacking if drafts else 1)
        kinds.append(drafts)
    assert kinds.count(True) > 90


def test_shortest_drafts_are_a_part_of_the_plan() -> None:
    """Two tokens would be best, but four are the least that may be proposed: four, where they pay, or none at all."""
    steps = {1: 1.0, 2: 1.05, 3: 1.1, 4: 2.1, 5: 3.2, 9: 6.0}
    for n_min, chance, expected in ((0, 0.9, 2), (4, 0.9, 4), (4, 0.5, 0)):
        controller = Controller(4, costs_of(steps, c=0.0), n_min=n_min)
        controller._n_drafts = 10
        controller.begin(1)
        kind, k = controller.plan(None, [chance] * 4, 4)
        assert (kind, k if kind == "ngram" else 0) == ("ngram" if expected else "none", expected)
    for n_min, expected in ((0, 2), (4, 4)):
        controller = Controller(4, costs_of(steps, c=0.0), n_min=n_min)
        controller._n_drafts, controller._account = 10, 8.0
        for _ in range(40):
            controller.acceptance.observe([0.9] * 4, 4)
        controller.begin(1)
        controller.plan(1, None, 4)
        assert grow(controller, 0.9, 4) == expected, n_min


@pytest.mark.parametrize("cost", [0.2, 0.4, 0.6, 0.8, 1.0, 2.0])
def test_losing_copies_stop_each_other_whatever_their_chances_say(cost: float) -> None:
    controller = Controller(4, costs_of({n: 1 + cost * (n > 1) for n in (1, 2, 3, 5)}))
    lost = 0.0
    for _ in range(100):
        controller.begin(1)
        kind, k = controller.plan(None, [0.95] * 4, 4)
        lost += cost * (kind == "ngram")
        taken = k if kind == "ngram" else 0
        controller.observe([Outcome(kind, [0.95] * taken, taken, 0, 1)], UNIT_S * (1 + cost * (taken > 0)), 0.0, 0, 0)
        controller.foretold([0.95] * 4, 0)
    assert lost <= COPY_CREDIT + 1 + cost  # and 1% of the time


def test_the_actual_gain_is_of_the_time_that_it_took() -> None:
    """Rounds of two tokens took 1.6 units where 1.1 were expected: the gain is 2 / 1.6 - 1."""
    controller = Controller(1, costs_of(flat(0.0), c=0.1))
    for _ in range(4):
        controller.begin(1)
        controller.observe([Outcome("draft", [0.9], 1, 1, 2)], UNIT_S * 1.0, UNIT_S * 0.6, 1, 1)
    gain = controller.report()["gain_tokens_per_unit"]
    assert gain["actual"] == pytest.approx(2 / 1.6 - 1, rel=0.02)  # type: ignore[index]


def trusted_long(n_active: int = 1) -> Controller:
    """Knows a draft that is nearly always right; feeding costs 0.01 units per token."""
    controller = Controller(8, costs_of(flat(0.05, 33), c=0.1, feed=0.01))
    controller._n_drafts, controller._account = 20, 8.0
    for _ in range(20):
        controller.acceptance.observe([0.95] * 4, 4)
    controller.begin(n_active)
    return controller


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_neighbour_whose_prompt_waits_does_not_keep_others_from_drafting(order: tuple[int, int]) -> None:
    """One lacks 9,000 tokens, which is too much in debt; the other lacks one."""
    controller = trusted_long(2)
    controller._debt = 9.0
    asked = [(9000, 10), (1, 100)]
    kinds = {i: controller.plan(asked[i][0], None, 8, n_emitted=asked[i][1], n_left=500).kind for i in order}
    assert kinds == {0: "none", 1: "draft"}


def test_two_long_prompts_are_not_fed_on_one_credit() -> None:
    controller = trusted_long(2)
    controller._account = 1.0
    kinds = [controller.plan(1500, None, 8, n_emitted=10, n_left=500).kind for _ in range(2)]
    assert kinds == ["draft", "none"]


def test_a_slow_first_pass_stays_no_unit_in_the_next_run() -> None:
    """The first pass of a run pays for page faults: half as much again. Then plain decoding only."""
    times = ((1, 1.5), (1, 1.0), (2, 1.9), (4, 3.8))
    first, second = CostModel(), CostModel()
    for n, units in times:
        first.observe_pass(n, UNIT_S * units)
    assert second.restore(first.as_dict())
    for n, units in times:
        second.observe_pass(n, UNIT_S * units)
    second.observe_draft(1, 1, UNIT_S * 0.6)
    for _ in range(5):
        second.observe_pass(1, UNIT_S)
    assert second.unit_s == pytest.approx(UNIT_S)
    assert [second.v(2), second.v(4)] == pytest.approx([1.9, 3.8])


def test_longer_texts_have_a_unit_of_their_own() -> None:
    """One-token passes that take twice as long: what costs 0.4 of the first unit costs 0.2 of the new one."""
    costs = costs_of(flat(0.1)).elsewhere()
    for _ in range(10):
        costs.observe_pass(1, 2 * UNIT_S)
    costs.observe_draft(1, 1, 0.4 * UNIT_S)
    assert costs.unit_s == pytest.approx(2 * UNIT_S)
    assert costs.c == pytest.approx(0.2)


def test_a_batch_of_a_size_that_was_never_measured_drafts() -> None:
    controller = Controller(8, costs_of({1: 1.0, 2: 1.05, 4: 1.15, 8: 1.4}, c=0.1, feed=0.01))
    controller._n_drafts, controller._account, n_drafted = 20, 8.0, 0
    for _ in range(20):
        controller.acceptance.observe([0.95] * 4, 4)
    for i in range(100):
        controller.begin(3, 5000)
        drafts = next(controller.plan(1, None, 8, n_emitted=i, n_left=500).kind == "draft" for _ in range(3))
        n_drafted += drafts
        outcome = Outcome("draft", [0.95] * 2, 2, 2, 3) if drafts else Outcome("none", (), 0, 0, 1)
        controller.observe([outcome] * 3, UNIT_S * (1.4 if drafts else 1.1), UNIT_S * 0.2 * drafts, 2 * drafts, 1)
    assert n_drafted > 80


def test_what_copies_lost_is_known_in_the_next_run() -> None:
    first = Controller(4, costs_of({1: 1.0, 2: 1.9, 3: 2.6, 5: 3.0}))
    for _ in range(20):
        first.begin(1)
        kind, k = first.plan(None, [0.95] * 4, 4)
        first.observe([Outcome(kind, [0.95] * k, k, 0, 1)], UNIT_S * first.costs.v(1 + k), 0.0, 0, 0)
        first.foretold([0.95] * 4, 0)
    second = Controller(4)
    second.restore(kept_by(first))
    second.begin(1)
    assert second.plan(None, [0.95] * 4, 4).kind == "none"
    for _ in range(2):
        second.foretold([0.95] * 4, 4)  # the text would have said so twice
    assert second.plan(None, [0.95] * 4, 4).kind == "ngram"


def test_plain_decoding_has_no_gain_however_uneven_its_times() -> None:
    """One pass in five takes twice as long: the mean is above the median, of plain decoding as well."""
    controller = Controller(4, costs_of(flat(0.1)))
    for i in range(50):
        controller.begin(1)
        controller.observe([Outcome("none", (), 0, 0, 1)], UNIT_S * (2.0 if i % 5 == 0 else 1.0), 0.0, 0, 0)
    gain = controller.report()["gain_tokens_per_unit"]
    assert gain["actual"] == pytest.approx(0, abs=0.01)  # type: ignore[index]


def test_a_batch_makes_no_passes_only_to_look_at_widths() -> None:
    """Alone a width that was seen once is looked at; eight have too many widths for that."""
    kinds = {}
    for n_active in (1, 8):
        controller = Controller(4, costs_of({1: 1.0, 2: 1.9, 3: 2.4, 5: 3.0, 8: 4.0, 9: 7.0}))
        controller._round = 1000
        controller.begin(n_active)
        kinds[n_active] = controller.plan(None, [0.5] * 4, 4).kind
    assert kinds == {1: "ngram", 8: "none"}


def test_no_draft_is_begun_that_would_be_too_short() -> None:
    """The end of an answer, and funds that the shortest draft is beyond: no draft pass is made for nothing."""
    for budget, slope, c, account in ((3, 0.1, 0.1, 8.0), (8, 0.25, 0.35, 2.0)):
        controller = Controller(8, costs_of(flat(slope), c=c), n_min=4)
        controller._n_drafts, controller._account = 20, account
        for _ in range(20):
            controller.acceptance.observe([0.97] * 4, 4)
        controller.begin(1)
        assert controller.plan(1, None, budget).kind == "none"


def test_no_room_no_draft() -> None:
    controller = ready(flat(0.0), c=0.0, mean=1.0)
    assert controller.plan(1, [0.99] * 4, 0) == ("none", 0)
    assert controller.plan(None, None, 8) == ("none", 0)
    assert controller.plan(None, [], 8) == ("none", 0)


def test_k_max_of_one() -> None:
    controller = ready(flat(0.1), c=0.1, k_max=1, mean=0.9)
    assert controller.plan(1, None, 8) == ("draft", 1)
    assert draws(controller, [], 0.9)
    controller.take(1)
    assert not controller.may_step([0.9])
    assert ready(flat(0.1), k_max=1).plan(None, [0.9] * 4, 8) == ("ngram", 1)


def lengths(curve: dict[int, float], n_active: int) -> list[int]:
    """How many n-gram tokens each of ``n_active`` sequences may propose."""
    controller, ks = ready(curve, n_active=n_active), []
    for _ in range(n_active):
        plan = controller.plan(None, [0.7] * 8, 8)
        controller.take(plan.k)
        ks.append(plan.k)
    return ks


def test_more_sequences_get_shorter_drafts_and_a_compute_bound_batch_gets_none() -> None:
    knee = {n: 1 + 0.005 * (n - 1) + 0.12 * max(0, n - 16) for n in (*range(1, 18), 24, 32, 48, 64)}
    means = [float(np.mean(lengths(knee, n))) for n in (1, 2, 4, 8, 16)]
    assert means == sorted(means, reverse=True)
    assert means[0] >= 4
    assert sum(lengths(knee, 8)) == 8  # up to the knee
    assert lengths(knee, 16) == [0] * 16
    assert lengths(flat(1.0, 40), 4) == [0] * 4


def test_drafts_that_grow_together_leave_room_for_each_other() -> None:
    """Eight sequences before a knee at 16 tokens: one token each, and no second draft pass for nothing."""
    knee = {n: 1 + 0.005 * (n - 1) + 0.12 * max(0, n - 16) for n in (*range(1, 18), 24, 32)}
    controller = ready(knee, c=0.1, mean=0.85, n_active=8)
    assert {controller.plan(1, None, 8).kind for _ in range(8)} == {"draft"}
    controller.begin_pass(8)
    for _ in range(8):
        controller.begin_turn()
        assert controller.may_draw([], 0.85)
        controller.take(1)
        assert not controller.may_step([0.85])


# Learning from rounds, and the account


def play(
    controller: Controller,
    v: Callable[[int], float],
    c: float,
    n_rounds: int,
    is_right: Callable[[int, int], bool],
    confidence: float = 0.9,
    rounds: list[tuple[float, float]] | None = None,
) -> tuple[float, float, list[int]]:
    """Rounds of one sequence; ``is_right(round, i)`` says whether drafted token i stands. (tokens, units, lengths).

    ``rounds``, if given, gets the tokens and units of each.
    """
    tokens = units = 0.0
    ks, n_lacking = [], 1
    for t in range(n_rounds):
        controller.begin(1)
        plan, grown, n_steps = controller.plan(n_lacking, None, 8), list[float](), 0
        while plan.kind == "draft" and len(grown) < plan.k:
            n_steps += 1
            if not draws(controller, grown, confidence):
                break
            grown.append(confidence)
            controller.take(1)
            if len(grown) == plan.k or not controller.may_step(grown):
                break
        k = len(grown)
        n_accepted = next((i for i in range(k) if not is_right(t, i)), k)
        fed = n_lacking if n_steps else 0
        controller.observe(
            [Outcome(plan.kind, grown, k, n_accepted, n_accepted + 1)],
            UNIT_S * v(1 + k),
            UNIT_S * c * n_steps,
            n_steps,
            fed,
        )
        n_lacking = 1 + (n_accepted == k) if n_steps else n_lacking + 1
        tokens, units = tokens + n_accepted + 1, units + v(1 + k) + c * n_steps
        ks.append(k)
        if rounds is not None:
            rounds.append((n_accepted + 1, v(1 + k) + c * n_steps))
    return tokens, units, ks


@pytest.mark.parametrize("c", [0.02, 0.1, 0.4, 1.5])
@pytest.mark.parametrize("slope", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("confidence", [0.05, 0.5, 0.99])
def test_a_hopeless_draft_costs_no_more_than_the_account(c: float, slope: float, confidence: float) -> None:
    """Never right, whatever it says of itself: the credit, 1% of the time, and the round that empties the account."""
    controller = Controller(8, costs_of(flat(slope), c))
    tokens, units, ks = play(controller, lambda n: 1 + slope * (n - 1), c, 400, lambda _t, _i: False, confidence)
    last = min(8 * (c + slope), max(CREDIT, c))  # the first pass is made before anything is known
    assert units - tokens <= CREDIT + ALLOWANCE * units + last + 1e-6
    assert sum(k > 0 for k in ks[200:]) <= 25 or c + slope < 0.1


def test_a_perfect_draft_is_used_to_its_full_length() -> None:
    controller = Controller(8, costs_of(flat(0.02), 0.1))
    _tokens, _units, ks = play(controller, lambda n: 1 + 0.02 * (n - 1), 0.1, 60, lambda _t, _i: True)
    assert set(ks[10:]) <= {8, 0}  # 0: a look at the one-token pass
    assert ks[10:].count(0) <= 3


@pytest.mark.parametrize("c", [0.02, 0.05, 0.1])
def test_a_change_of_text_is_followed_within_ten_rounds(c: float) -> None:
    """On a curve where catching up is cheap: prose, code, prose, the draft as confident in all of them.

    From the tenth round of each on, it comes within 5% of the best fixed length for that text (mean of six seeds).
    """
    v = lambda n: 1 + 0.01 * (n - 1)  # noqa: E731
    shares = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        right = rng.random((300, 8)) < np.where((np.arange(300) // 100) % 2, 0.85, 0.2)[:, None]
        stands = np.cumprod(right, axis=1).sum(axis=1)  # tokens of a full draft, per round
        controller = Controller(8, costs_of(flat(0.01), c))
        rounds: list[tuple[float, float]] = []
        play(controller, v, c, 300, lambda t, i, right=right: bool(right[t, i]), 0.8, rounds)
        for first, last in ((10, 100), (110, 200), (210, 300)):
            got = sum(tokens for tokens, _ in rounds[first:last]) / sum(units for _, units in rounds[first:last])
            best = max(float((1 + np.minimum(stands[first:last], k)).mean()) / (v(1 + k) + c * k) for k in range(9))
            shares.append(got / best)
    assert np.reshape(shares, (6, 3)).mean(axis=0).min() > 0.95


def test_what_fell_into_disuse_is_tried_again_the_sooner_the_less_it_costs() -> None:
    def waits(c: float) -> float:
        controller = Controller(8, costs_of(flat(0.02), c))
        play(controller, lambda n: 1 + 0.02 * (n - 1), c, 400, lambda _t, _i: False, 0.3)
        return 400 / max(1, controller.record.probes)

    assert waits(0.05) < waits(0.2) < waits(0.8)


def test_the_one_token_pass_is_looked_at_while_drafting_pays() -> None:
    controller = Controller(8, costs_of(flat(0.02), 0.1))
    _tokens, _units, ks = play(controller, lambda n: 1 + 0.02 * (n - 1), 0.1, 300, lambda _t, i: i < 3)
    assert 3 <= ks[20:].count(0) <= 10


def test_times_that_are_never_known_change_no_decision_rule() -> None:
    """A fake engine takes no time: guesses stand, nothing fails, the gain is undefined."""
    controller = Controller(4)
    for _ in range(20):
        controller.begin(1)
        plan = controller.plan(1, None, 4)
        n_steps = int(plan.kind == "draft")
        grown = [0.9] if n_steps and draws(controller, [], 0.9) else []
        controller.observe([Outcome(plan.kind, grown, len(grown), 0, 1)], 0.0, 0.0, n_steps, 1)
    gain = controller.report()["gain_tokens_per_unit"]
    assert gain == {"predicted": None, "actual": None}
    json.dumps(controller.report(), allow_nan=False)


# What it says


def noted(rounds: Sequence[tuple[str, int]], probes: Sequence[int] = ()) -> Record:
    """A record of single-sequence rounds, (kind, k) each; ``probes`` counts from 1."""
    record = Record(has_model=True)
    for t, (kind, k) in enumerate(rounds, start=1):
        outcome = Outcome(kind, [0.5] * k, k, 0, 1)  # type: ignore[arg-type]
        record.note([outcome], t in probes, lambda: "acceptance 0.21 < break-even 0.48")
    return record


def test_the_explanation_of_the_issue() -> None:
    rounds = [("draft", 3)] * 39 + [("none", 0)] * 51 + [("draft", 3)] * 26 + [("draft", 4)] * 15
    assert noted(rounds).explain() == (
        "speculated in 61% of rounds, mean K 3.2; off for rounds 40–90: acceptance 0.21 < break-even 0.48"
    )


def test_probes_do_not_break_a_stretch() -> None:
    rounds = [("draft", 2)] * 5 + [("none", 0)] * 20 + [("draft", 1)] + [("none", 0)] * 24
    record = noted(rounds, probes=[26])
    assert [(stretch.first, stretch.last) for stretch in record.stretches] == [(6, 50)]
    assert record.probes == 1
    assert [(s.first, s.last) for s in noted(rounds).stretches] == [(6, 25), (27, 50)]


def test_short_stretches_are_not_told_and_of_the_others_the_longest_two_in_order() -> None:
    on, rounds = [("draft", 1)], list[tuple[str, int]]()
    for length in (20, 7, 9, 30, 8):
        rounds += on + [("none", 0)] * length
    record = noted(rounds)
    assert [stretch.last - stretch.first + 1 for stretch in record.stretches] == [20, 9, 30, 8]
    assert [part.split(":")[0] for part in record.explain().split("; ")[1:]] == [
        "off for rounds 2–21",
        "off for rounds 41–70",
        "off in 2 more stretches",
    ]


def test_with_two_drafters_it_says_who_was_used() -> None:
    record = noted([("draft", 2)] * 2 + [("ngram", 6)] + [("none", 0)] + [("draft", 0)])
    assert record.explain() == "speculated in 60% of rounds, mean K 3.3"
    record.has_ngram = True
    assert record.explain() == "speculated in 60% of rounds (draft model 40%, n-gram 20%), mean K 3.3"
    assert record.as_dict()["decisions"] == {"none": 2, "draft": 2, "ngram": 1, "given_up": 1}
    assert noted([("ngram", 6)]).state == "n-gram"


def test_accepted_tokens_are_counted_by_who_proposed_them() -> None:
    record = Record()
    record.note([Outcome("draft", [0.9] * 4, 4, 1, 2), Outcome("ngram", [0.9] * 3, 2, 2, 2)], False, str)
    record.note([Outcome("draft", [0.9] * 2, 2, 2, 3), Outcome("none", [], 0, 0, 1)], False, str)
    assert record.as_dict()["drafted"] == {
        "draft": {"proposed": 6, "accepted": 3},
        "ngram": {"proposed": 2, "accepted": 2},
    }


def test_nothing_happened() -> None:
    controller = Controller(4)
    assert controller.explain() == ""
    report = controller.report()
    assert {name: report[name] for name in ("rounds", "mean_k", "c", "acceptance", "break_even")} == {
        "rounds": 0,
        "mean_k": None,
        "c": None,
        "acceptance": None,
        "break_even": None,
    }
    json.dumps(report, allow_nan=False)


def test_the_reason_for_a_stretch() -> None:
    controller = Controller(8, costs_of(flat(0.1), 0.4))
    play(controller, lambda n: 1 + 0.1 * (n - 1), 0.4, 200, lambda _t, _i: False)
    stretch = max(controller.record.stretches, key=lambda stretch: stretch.last - stretch.first)
    assert stretch.reason.startswith("expected acceptance 0.")
    assert stretch.reason.endswith("< break-even 0.50")
    for curve, n_lacking, reason in (
        (flat(1.2), 1, "even certain acceptance would not pay"),
        (flat(0.1), 2000, "the draft lags behind; to catch up costs 119.9 target passes"),  # 1998 * 0.06
        (flat(0.1), None, "nothing in the text was worth copying"),
    ):
        controller = Controller(8, costs_of(curve, 0.1, feed=0.06))
        controller.acceptance.mean = 0.9
        for _ in range(10):
            controller.begin(1)
            controller.plan(n_lacking, [], 8)
            controller._probing = None  # a cold start tries even what cannot pay; not here
            controller.observe([Outcome("none", (), 0, 0, 1)], UNIT_S, 0.0, 0, 0)
        assert [stretch.reason for stretch in controller.record.stretches] == [reason]


def test_the_report_says_what_was_foreseen_and_what_came() -> None:
    rng = np.random.default_rng(4)
    controller = Controller(8, costs_of(flat(0.05), 0.1))
    right = rng.random((500, 8)) < 0.7
    tokens, units, ks = play(controller, lambda n: 1 + 0.05 * (n - 1), 0.1, 500, lambda t, i: bool(right[t, i]), 0.7)
    report = controller.report()
    gain = report["gain_tokens_per_unit"]
    assert isinstance(gain, dict)
    assert gain["actual"] == pytest.approx(tokens / units - 1, rel=1e-3)
    assert gain["predicted"] == pytest.approx(gain["actual"], rel=0.1)
    assert report["rounds"] == 500
    assert report["mean_k"] == pytest.approx(np.mean([k for k in ks if k]))
    assert report["c"] == pytest.approx(0.1)
    assert report["v"]["5"] == pytest.approx(1.2)  # type: ignore[index]
    assert report["break_even"] == pytest.approx(0.15, abs=2e-3)
    assert report["acceptance"] == pytest.approx(0.7, abs=0.25)
    json.dumps(report, allow_nan=False)


def test_an_answer_is_told_of_apart() -> None:
    controller = Controller(8, costs_of(flat(0.05), 0.1))
    play(controller, lambda n: 1 + 0.05 * (n - 1), 0.1, 30, lambda _t, _i: True)
    known = controller.acceptance.mean
    controller.begin_answer()
    assert (controller.explain(), controller.acceptance.mean) == ("", known)
    play(controller, lambda n: 1 + 0.05 * (n - 1), 0.1, 5, lambda _t, _i: True)
    assert controller.report()["rounds"] == 5


@pytest.mark.parametrize(
    ("temperature", "c", "words"),
    [
        (0.0, None, None),
        (0.4, 1 / 3, None),
        (0.8, 0.1, "at temperature 0.8 fewer drafted tokens are accepted than at 0"),
        (0.0, 0.5, "a draft step costs 0.50 of a target pass, over a third: it pays above an acceptance of 0.60"),
        (0.0, 1.0, "a draft step costs 1.00 of a target pass, over a third: it cannot pay"),
    ],
)
def test_what_to_expect_beforehand(temperature: float, c: float | None, words: str | None) -> None:
    controller = Controller(8, costs_of(flat(0.1)))
    controller.costs.n_steps = 9
    assert controller.expectation(temperature, c) == words
    controller.costs.n_steps = 2  # of one calibration, which something else may have disturbed
    again = " (specli tune measures it anew)" if c is not None and c > 0.4 else ""
    assert controller.expectation(temperature, c) == (words and words + again)


def test_both_reasons_for_doubt() -> None:
    note = Controller(8, costs_of(flat(0.1))).expectation(1.0, 0.4)
    assert note is not None
    assert note.count(";") == 1


# Kept between runs


def learned() -> Controller:
    controller = Controller(8, costs_of(TILES | {9: 3.5}, 0.1, feed=0.01))
    rng = np.random.default_rng(5)
    right = rng.random((300, 8)) < 0.8
    play(controller, lambda n: 1 + 0.3 * (n - 1), 0.1, 300, lambda t, i: bool(right[t, i]), 0.8)
    return controller


def kept_by(controller: Controller) -> dict[str, object]:
    kept: dict[str, object] = json.loads(json.dumps(controller.profile(), allow_nan=False))
    return kept


def test_a_profile_brings_back_costs_and_acceptance() -> None:
    before, after = learned(), Controller(8)
    assert after.restore(kept_by(before))
    assert [after.costs.v(n) for n in range(1, 12)] == pytest.approx([before.costs.v(n) for n in range(1, 12)])
    assert (after.costs.c, after.costs.feed) == pytest.approx((before.costs.c, before.costs.feed))
    assert [after.acceptance.at(x) for x in (0.75, 0.8)] == pytest.approx(
        [before.acceptance.at(x) for x in (0.75, 0.8)], abs=0.05
    )
    assert after.acceptance.mean == pytest.approx(0.8, abs=0.1)
    assert after._profit == pytest.approx(before._usual)
    assert after._account == min(before._account, CREDIT)  # a warm start gets no credit
    assert kept_by(after)["costs"] == kept_by(before)["costs"]


def test_new_times_outvote_a_profile() -> None:
    controller = Controller(8)
    assert controller.restore(kept_by(learned()))
    for t in range(60):
        n = (1, 2, 4)[t % 3]
        controller.costs.observe_pass(n, 0.5 * flat(0.05)[n])
        controller.costs.observe_draft(1, 1, 0.5 * 0.4)
    assert controller.costs.v(4) == pytest.approx(1.15, rel=0.03)
    assert controller.costs.c == pytest.approx(0.4, rel=0.03)


def test_a_width_that_was_measured_once_is_corrected_by_two_more_times_in_the_next_run() -> None:
    first, second = Controller(8, costs_of({1: 1.0, 2: 2.4, 4: 2.0})), Controller(8)
    assert second.restore(kept_by(first))
    for _ in range(2):
        second.costs.observe_pass(2, UNIT_S * 1.2)
        second.costs.observe_pass(1, UNIT_S)
        second.costs.observe_pass(1, UNIT_S)
    assert second.costs.v(2) == pytest.approx(1.2, rel=0.01)


def test_a_warm_start_knows_a_hopeless_draft_and_a_good_one() -> None:
    for right, share in ((False, 0.1), (True, 0.9)):
        first = Controller(8, costs_of(flat(0.1), 0.3))
        play(first, lambda n: 1 + 0.1 * (n - 1), 0.3, 200, lambda _t, _i, right=right: right)
        second = Controller(8)
        assert second.restore(kept_by(first))
        tokens, units, ks = play(second, lambda n: 1 + 0.1 * (n - 1), 0.3, 50, lambda _t, _i, right=right: right)
        assert (np.mean(np.array(ks) > 0) >= share) == right
        assert tokens / units > 0.96


def test_a_run_that_never_drafted_leaves_the_credit_to_the_next() -> None:
    first = Controller(8, costs_of(flat(0.1), 0.3, feed=0.1))
    for _ in range(300):
        first.begin(1)
        assert first.plan(5000, None, 8).kind == "none"
        first.observe([Outcome("none", (), 0, 0, 1)], UNIT_S, 0.0, 0, 0)
    second = Controller(8)
    second.restore(kept_by(first))
    assert second._account == pytest.approx(CREDIT + 3.0)  # and what 300 rounds put by


def test_without_a_draft_model_a_profile_keeps_the_curve() -> None:
    controller = Controller(8)
    assert controller.restore(kept_by(Controller(8, costs_of(TILES))))
    assert controller.costs.v(4) == pytest.approx(1.7)
    assert not controller.costs.knows_c


DAMAGES: list[Callable[[dict[str, object]], object]] = [
    lambda kept: kept.clear(),
    lambda kept: kept.update(costs=None),
    lambda kept: kept.update(costs=[1, 2]),
    lambda kept: kept.update(costs={"x": 1, "-1": {}, "99": {}, "0": None}),
    lambda kept: kept.update(acceptance="no", profit="no", account="no", drafts="no"),
    lambda kept: kept.update(profit=[1e300, -1], account=-5, drafts=-3),
    lambda kept: kept.update(profit=[90.0, 0.1], account=1e8, drafts=1e9),
    lambda kept: kept.update(profit=[1.0], account=True),
    lambda kept: kept["costs"]["0"].update(v={"1": 1.0, "4": -2.0}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v={"1": 1.0, "4": 1e5}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v={"1": 3.0, "4": 2.0}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v={"one": 1.0, "²": 2.0}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v={"1": 1.0, "4": float("nan")}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v={}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v={"0": 1.0, "1": 1.0, "2": 1.2}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(c=-1.0, feed="x"),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v_samples=[3]),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(v_samples={"2": -1, "3": 1e9, "4": "x"}),  # type: ignore[index]
    lambda kept: kept["costs"]["0"].update(c=10**400, feed=1e30),  # type: ignore[attr-defined]
    lambda kept: kept["acceptance"].update(hits=[1.0]),  # type: ignore[attr-defined]
    lambda kept: kept["acceptance"].update(hits=[9.0] * 11, tries=[1.0] * 11),  # type: ignore[attr-defined]
    lambda kept: kept["acceptance"].update(tries=[1e8] * 11),  # type: ignore[attr-defined]
    lambda kept: kept["acceptance"].update(tries=[None] * 11),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_profile_is_as_good_as_none_where_it_is_damaged(
    damage: Callable[[dict[str, object]], object],
) -> None:
    kept = kept_by(learned())
    damage(kept)
    controller = Controller(8)
    has_costs = controller.restore(kept)
    curve = [controller.costs.v(n) for n in range(1, 18)]
    assert all(1 <= v <= 2 * n for n, v in enumerate(curve, start=1))
    assert has_costs == (len(controller.costs.as_dict()["v"]) > 1)  # type: ignore[arg-type]
    assert 0 <= controller.costs.c <= 100
    assert 0 <= controller.acceptance.at(0.5) <= 1
    assert 0 <= controller._account <= module.MAX_ACCOUNT
    assert controller._profit is None or controller._profit.tokens <= 8
    tokens, units, _ks = play(controller, lambda n: 1 + 0.2 * (n - 1), 0.1, 300, lambda _t, _i: False)
    assert tokens / units > 0.93  # whatever it believed at first
    tokens, units, _ks = play(controller, lambda n: 1 + 0.2 * (n - 1), 0.1, 300, lambda _t, _i: True)
    assert tokens / units > 1.5


def test_profits_move_by_their_memory() -> None:
    assert Profit(1.0, 0.5).moved(Profit(0.0, 1.0), 0.8) == pytest.approx((0.8, 0.6))
