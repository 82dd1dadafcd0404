"""The harness: order, pairs, budget; its figures against a fake clock and known truths."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from fakes import FakeDrafter
from simulated import PLAIN, UNIT_S, Machine, draft_of

from specli.bench import report
from specli.bench.harness import GROUP, Interrupted, Plan, Progress, Setting, n_runs, order, record
from specli.bench.statistics import speedup
from specli.bench.workloads import Prompt
from specli.decode import Decoder
from specli.drafters.base import SequenceState
from specli.engine.table import TableEngine, scripted_logits
from specli.errors import ContextOverflow
from specli.request import Request
from specli.sampling import Sampler
from specli.verify import make_verifier

N_SEEDS = 200
EXACT = {"noise": 0.0}


def prompts(*workloads: str, n: int = 3) -> list[Prompt]:
    return [Prompt(name, f"{name} {i}", "1 2") for name in workloads for i in range(n)]


def cell_of(outcome):
    return report.cells(outcome.trials, report.costs(outcome.trials))[0]


# -- order


def test_every_setting_runs_once_per_prompt_and_repetition_beside_plain_decoding():
    settings = [draft_of(k) for k in range(1, 8)] + [
        Setting("draft", 2, 0.8, verify) for verify in ("block", "coupled")
    ]
    groups = list(order(Plan(prompts("a", "b"), settings, 2)))
    seen = Counter()
    assert sum(len(group.settings) for group in groups) == n_runs(Plan(prompts("a", "b"), settings, 2))
    for group in groups:
        others = [setting for i, setting in enumerate(group.settings) if i != group.plain_at]
        assert 1 <= len(others) <= GROUP
        assert group.settings[group.plain_at].drafter == "none"
        assert {setting.plain for setting in others} == {group.settings[group.plain_at]}
        seen.update((group.prompt.name, group.repetition, setting) for setting in others)
    assert set(seen.values()) == {1}
    assert len(seen) == 6 * 2 * len(settings)


def test_breadth_comes_first_and_the_order_is_shuffled_and_seeded():
    plan = Plan(prompts("a", "b", "c"), [draft_of(1)], 2, seed=5)
    names = [(group.repetition, group.prompt.name[-1]) for group in order(plan)]
    assert names == sorted(names)  # first prompts of all workloads, then the second ones; repetitions last
    firsts = {
        tuple(group.prompt.workload for group in order(Plan(plan.prompts, plan.settings, 1, seed)))[:3]
        for seed in range(9)
    }
    assert len(firsts) > 2
    assert [group.seed for group in order(plan)] == [group.seed for group in order(plan)]
    places = {group.plain_at for seed in range(9) for group in order(Plan(plan.prompts, plan.settings, 1, seed))}
    assert places == {0, 1}


def test_groups_of_one_prompt_and_repetition_share_their_seed():
    plan = Plan(prompts("a"), [draft_of(k) for k in range(1, 10)], 1)
    seeds = {}
    for group in order(plan):
        seeds.setdefault(group.prompt.name, set()).add(group.seed)
    assert all(len(found) == 1 for found in seeds.values())
    assert len({next(iter(found)) for found in seeds.values()}) == 3


# -- ends


def test_it_ends_before_a_group_that_would_end_too_late():
    machine = Machine(n_prompts=50, **EXACT)
    outcome = machine.bench(draft_of(2), deadline_s=10.0)
    assert outcome.ending == "time"
    assert 8.0 < machine.now_s <= 10.0
    assert 0 < len(outcome.trials) < 50
    assert outcome.n_done == 2 * len(outcome.trials)


def test_a_prompt_that_does_not_fit_is_told_and_others_go_on():
    machine = Machine()
    decode = machine.decode

    def refuse(prompt, setting, seed):
        if prompt.name == "work 3":
            raise ContextOverflow("too long")
        return decode(prompt, setting, seed)

    machine.decode = refuse
    outcome = machine.bench(draft_of(2))
    assert outcome.skipped == {"work 3": "too long"}
    assert {trial.prompt.name for trial in outcome.trials} == {f"work {i}" for i in range(8) if i != 3}
    assert outcome.ending == "done"


def test_an_answer_of_one_token_has_no_time_and_is_told():
    outcome = Machine(n_tokens=1).bench(draft_of(2))
    assert not outcome.trials
    assert set(outcome.skipped.values()) == {"an answer of one token has no time per token"}


@pytest.mark.parametrize("by_user", [True, False])
def test_a_run_that_was_stopped_half_way_is_dropped(by_user):
    machine, stop = Machine(), []
    decode = machine.decode

    def stopping(prompt, setting, seed):
        if machine.now_s > 5:
            stop.append(True)
            raise Interrupted
        return decode(prompt, setting, seed)

    machine.decode = stopping
    outcome = machine.bench(draft_of(2), stopped=lambda: by_user and bool(stop))
    assert outcome.ending == ("interrupted" if by_user else "time")
    assert 0 < len(outcome.trials) < 8


def test_progress_tells_what_is_left():
    machine, steps = Machine(**EXACT), list[Progress]()
    outcome = machine.bench(draft_of(2), draft_of(4), on_step=steps.append)
    assert len(steps) == outcome.n_planned == 8 * 3
    assert (steps[0].left_s, steps[0].fraction) == (None, 0.0)
    assert [step.n_done for step in steps] == list(range(24))
    whole_s = machine.now_s
    assert steps[12].left_s == pytest.approx(whole_s / 2, rel=0.2)
    assert steps[-1].left_s < whole_s / 12
    assert steps[-1].fraction > 0.9
    assert all(step.fraction <= 1 for step in steps)


# -- figures, every definition of DESIGN, section 2, on a clock that moves by known steps


def scripted(rounds, *, prefill_s=2.0, verify_s=0.08, draft_s=0.01, host_s=0.01):
    """One run whose rounds propose and accept as told; every round takes the same time per part."""
    script = [1, 2, 3, 1, 2, 3, 1, 1, 2, 3, 2, 1, 3, 2, 1] * 9
    clock = {"s": 100.0}
    waiting = iter(rounds)

    class Drafter(FakeDrafter):
        busy_s = 0.0

        def propose(self, sequences, budgets):
            proposed, accepted = next(waiting)
            at = len(sequences[0].tokens)
            self.plan = [script[at + i] if i < accepted else 0 for i in range(proposed)]
            self.busy_s += draft_s
            clock["s"] += draft_s + host_s
            if not proposed:
                from specli.drafters.base import EMPTY

                return [EMPTY]
            from specli.drafters.base import Draft

            return [Draft(self.plan, [None] * proposed)]

    def pass_s(n):
        seconds = prefill_s if clock["s"] == 100.0 else verify_s
        clock["s"] += seconds
        return seconds

    engine = TableEngine(scripted_logits(4, lambda t: script[t]), 4, pass_s=pass_s)
    emitted = sum(accepted + 1 for _, accepted in rounds)
    decoder = Decoder(
        engine,
        make_verifier("greedy", Sampler(0)),
        lambda _t: b"x",
        Drafter(lambda _h: None),
        8,
        clock=lambda: clock["s"],
    )
    return record(decoder.run([Request(SequenceState(0, script[:5]), 100.0, 1 + emitted)]))


def test_every_definition_on_one_run():
    run = scripted([(4, 4), (4, 1), (0, 0), (2, 0), (3, 3)])
    stats = run.stats
    assert stats.rounds == len(run.rounds) == 5
    assert (stats.proposed, stats.accepted) == (13, 8)
    assert stats.acceptance_rate == pytest.approx(8 / 13)
    assert stats.per_position_acceptance == pytest.approx([3 / 4, 2 / 4, 2 / 3, 1 / 2])
    assert stats.mean_accepted_length == pytest.approx(8 / 4)  # rounds that proposed; the target's own token left out
    assert stats.block_efficiency == pytest.approx(13 / 5)
    assert stats.n_tokens == 14
    assert stats.ttft_s == pytest.approx(2.0)
    assert stats.tpot_ms == pytest.approx(1000 * 5 * 0.1 / 13)
    assert stats.decode_tok_s == pytest.approx(13 / 0.5)
    assert stats.itl_burst_ms == pytest.approx([100.0] * 5)
    shares = [100 / 5] * 5 + [100 / 2] * 2 + [100 / 1] * 2 + [100 / 4] * 4
    assert stats.itl_token_ms == pytest.approx(shares)
    assert sum(stats.itl_token_ms) == pytest.approx(sum(stats.itl_burst_ms))
    seconds = (stats.draft_s, stats.verify_s, stats.host_s)
    assert seconds == pytest.approx((0.05, 0.4, 0.05))


def test_j8_the_prompts_time_is_not_in_the_rate():
    stats = scripted([(0, 0)] * 10, verify_s=0.1, draft_s=0.0, host_s=0.0).stats
    assert (stats.ttft_s, stats.tpot_ms) == (pytest.approx(2.0), pytest.approx(100.0))
    assert stats.decode_tok_s == pytest.approx(10.0)


def test_j7_the_rate_counts_what_was_generated():
    machine = Machine(n_tokens=5, **EXACT)
    run = machine.decode(machine.prompts()[0], PLAIN, 0)
    assert run.stats.n_tokens == 5
    assert run.stats.decode_tok_s == pytest.approx(1 / UNIT_S)


def test_costs_are_measured_in_plain_passes():
    curve = {1: 1.0, 2: 1.6, 3: 2.4, 4: 2.2, 5: 3.0}
    machine = Machine(c=0.25, v=lambda n: curve[n], noise=0.0)
    outcome = machine.bench(*(draft_of(k) for k in (1, 2, 3, 4)))
    found = report.costs(outcome.trials)
    assert found.c == pytest.approx(0.25)
    assert {n: cost for n, (cost, _) in found.v.items()} == pytest.approx(curve)
    assert all(passes > 20 for n, (_, passes) in found.v.items() if n > 1)
    assert found.round_cost(2, uses_model=True) == pytest.approx(2.4 + 0.5)
    assert found.round_cost(2, uses_model=False) == pytest.approx(2.4)
    assert found.round_cost(6, uses_model=False) is None
    for cell in report.cells(outcome.trials, found):
        k = cell.setting.k
        assert cell.c == pytest.approx(0.25)
        assert cell.predicted == pytest.approx(cell.speedup.value, rel=0.02)
        assert cell.shares["draft"] == pytest.approx(0.25 * k / (0.25 * k + curve[k + 1]), rel=0.05)
        assert sum(cell.shares.values()) == pytest.approx(1)
        assert cell.identity.n_same == cell.identity.n_compared == 8


def test_j13_a_slowdown_is_shown_as_one():
    cell = cell_of(Machine(acceptance=1.0, c=0.5, v=lambda n: float(n)).bench(draft_of(4)))
    assert cell.counts.acceptance_rate == 1.0
    assert cell.speedup.value == pytest.approx(5 / 7, rel=0.03)
    assert cell.speedup.high < 1
    assert cell.verdict == "costs"


# -- truth


@pytest.mark.parametrize(
    ("acceptance", "k", "c", "slope"),
    [(0.7, 4, 0.1, 0.2), (0.5, 2, 0.3, 0.1), (0.9, 8, 0.05, 0.05), (0.3, 1, 0.5, 0.6)],
)
def test_the_true_speedup_is_recovered(acceptance, k, c, slope):
    machine = Machine(1, acceptance, c, lambda n: 1 + slope * (n - 1), n_tokens=160, n_prompts=120)
    cell = cell_of(machine.bench(draft_of(k)))
    assert cell.speedup.value == pytest.approx(machine.speedup(k), rel=0.02)
    low, high = cell.speedup.interval
    assert low < machine.speedup(k) < high
    assert high - low < 0.1 * machine.speedup(k)


def test_the_interval_covers_the_truth():
    """Nominally in 95% of runs; eight prompts once each, 48 tokens, 5% of noise on every pass."""
    covered, values, k = 0, [], 4
    for seed in range(N_SEEDS):
        machine = Machine(seed, n_tokens=48)
        found = speedup([report.pair_of(trial) for trial in machine.bench(draft_of(k)).trials], seed, 1000)
        values.append(found.value)
        covered += found.low <= machine.speedup(k) <= found.high
    assert covered >= 0.9 * N_SEEDS
    assert np.mean(values) == pytest.approx(machine.speedup(k), rel=0.02)


def test_plain_against_plain_contains_one():
    covered = 0
    for seed in range(N_SEEDS):
        pairs = [report.pair_of(trial) for trial in Machine(seed, n_tokens=24).bench(PLAIN).trials]
        found = speedup(pairs, seed, 1000)
        covered += found.low <= 1 <= found.high
    assert covered >= 0.9 * N_SEEDS
