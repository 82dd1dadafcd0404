"""How a server shares its time: pure, with times that are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from specli.serve.pace import Pace, Sla, Window


def test_a_prompt_gets_what_the_usual_round_leaves():
    pace = Pace()
    assert pace.chunk(0, 512) == 512, "nobody waits for a round"
    assert pace.chunk(2, 512) == 16, "nothing is known yet"
    pace.observe_chunk(100, 0.1)  # 1 ms per token
    pace.observe_round(2, 2, 0.02, 0.0)
    assert pace.chunk(2, 512) == 40  # twice the round
    for _ in range(3):
        pace.observe_chunk(1, 0.02)
    assert pace.chunk(2, 512) == 40, "a single token tells what a pass costs, not what a token does"
    assert pace.chunk(2, 8) == 8
    assert Pace(is_chunked=False).chunk(2, 512) == 512


def test_a_bound_on_tpot_decides_what_a_prompt_gets_and_who_comes_in():
    pace = Pace(Sla(tpot_ms=50))
    assert pace.may_admit(0, 0.0)
    assert not pace.may_admit(1, 0.0), "the first one is judged before the second comes in"
    pace.observe_chunk(1000, 1.0)
    for _ in range(3):
        pace.observe_round(2, 4, 0.06, 0.0)  # 2 tokens each: 30 ms per token
    assert pace.chunk(2, 512) == 40  # 100 ms for two tokens, 60 taken
    pace.observe_round(3, 3, 9.0, 0.0)
    assert pace.may_admit(2, 0.0), "one slow round is no news"
    for _ in range(3):
        pace.observe_round(3, 3, 0.06, 1.0)
    assert pace.may_admit(1, 1.0)
    assert not pace.may_admit(2, 1.0)
    assert not pace.may_admit(3, 1.0), "what is too slow for three is too slow for four"
    for _ in range(3):
        pace.observe_round(2, 4, 0.06, 20.0)
    assert pace.may_admit(2, 20.0), "what was too slow is tried again"
    assert not pace.may_admit(3, 20.0), "by one answer, and judged before the next"
    assert pace.may_admit(0, 1.0), "somebody is always answered"
    assert Pace().may_admit(100, 0.0)


@dataclass
class Load:
    """A queue that is never empty, before 8 slots. ``round_ms(n, at_s)``: what a round over ``n`` answers takes."""

    pace: Pace
    round_ms: Callable[[int, float], float]
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    now_s: float = 0.0
    n_tokens: int = 0
    under_way: list[list[float]] = field(default_factory=list)  # tokens, those that are left, and the beginning
    tpot_ms: list[float] = field(default_factory=list)
    most: int = 0  # answers at a time

    def turn(self) -> None:
        """As the scheduler: let in, then a round."""
        while len(self.under_way) < 8 and self.pace.may_admit(len(self.under_way), self.now_s):
            n = float(self.rng.integers(20, 200))
            self.under_way.append([n, n, self.now_s])
        n_active = len(self.under_way)
        seconds = self.round_ms(n_active, self.now_s) * self.rng.uniform(0.97, 1.03) / 1000
        self.now_s += seconds
        self.n_tokens += n_active
        self.most = max(self.most, n_active)
        self.pace.observe_round(n_active, n_active, seconds, self.now_s)
        for one in self.under_way:
            one[1] -= 1
        self.tpot_ms += [1000 * (self.now_s - start_s) / n for n, left, start_s in self.under_way if left == 0]
        self.under_way = [one for one in self.under_way if one[1] > 0]

    def run(self, until_s: float) -> Load:
        while self.now_s < until_s:
            self.turn()
        return self

    @property
    def share_kept(self) -> float:
        return float(np.mean(np.array(self.tpot_ms) <= self.pace.sla.tpot_ms))


@pytest.mark.parametrize(("bound_ms", "n_right"), [(25, 1), (35, 2), (55, 4), (85, 7), (1000, 8)])
def test_under_sustained_load_the_bound_is_kept_at_the_right_number_of_answers(bound_ms: float, n_right: int):
    load = Load(Pace(Sla(tpot_ms=bound_ms)), lambda n, _at_s: 10 + 10 * n).run(600)
    assert load.most == min(8, n_right + 1), "a try is one answer more, not all that wait"
    assert load.share_kept >= 0.95  # six tries in these ten minutes, of an answer or two each
    assert load.n_tokens / load.now_s >= 0.97 * 1000 * n_right / (10 + 10 * n_right)


def test_what_slowed_the_answers_may_be_over():
    """Half a minute four times as slow: one answer at a time, then as many as before."""
    load = Load(Pace(Sla(tpot_ms=55)), lambda n, at_s: (10 + 10 * n) * (4 if 60 <= at_s < 90 else 1)).run(120)
    assert len(load.under_way) == 4
    n_before, from_s = load.n_tokens, load.now_s
    load.run(240)
    assert (load.n_tokens - n_before) / (load.now_s - from_s) >= 0.95 * 80


def test_what_is_too_slow_each_time_is_tried_less_and_less_often():
    load = Load(Pace(Sla(tpot_ms=35)), lambda n, _at_s: 10 + 10 * n)
    tries, n_before = list[float](), 0
    while load.now_s < 3600:
        load.turn()
        if len(load.under_way) > 2 >= n_before:
            tries.append(load.now_s)
        n_before = len(load.under_way)
    gaps = np.diff(tries)
    assert 8 <= len(tries) <= 14
    assert 10 <= gaps[0] < 25
    assert 600 <= gaps[-1] < 640


def test_a_bound_on_ttft_hurries_a_prompt_that_can_still_keep_it():
    pace = Pace(Sla(ttft_ms=1000))
    pace.observe_chunk(1000, 1.0)  # 1 ms per token
    pace.observe_round(1, 1, 0.02, 0.0)
    assert pace.chunk(1, 512, n_left=100, waited_s=0.0) == 40, "there is time enough"
    assert pace.chunk(1, 512, n_left=500, waited_s=0.4) in (100, 101)  # 5 chunks and rounds in the 600 ms that are left
    assert pace.chunk(1, 512, n_left=500, waited_s=0.6) == 40, "too late: nobody else need suffer"


def test_the_last_minute_decides_whether_a_bound_is_broken():
    pace = Pace(Sla(ttft_ms=100))
    assert pace.p95(0.0) == (None, None)
    assert pace.broken(0.0) == {"ttft": False}
    for i in range(19):
        pace.observe_answer(float(i), 0.05, 10.0)
    pace.observe_answer(19.0, 5.0, None)
    assert pace.p95(20.0) == (pytest.approx(50.0), pytest.approx(10.0))
    pace.observe_answer(20.0, 5.0, 10.0)
    assert pace.broken(21.0) == {"ttft": True}
    assert pace.broken(100.0) == {"ttft": False}, "a minute later nothing of it counts"


def test_those_who_got_nothing_in_time_break_a_bound_too():
    pace = Pace(Sla(ttft_ms=1000))
    pace.observe_departure(1.0, 0.5)
    assert pace.p95(1.0) == (None, None), "who left before the bound tells nothing of it"
    pace.observe_departure(2.0, 5.0)
    assert pace.broken(2.0) == {"ttft": True}


def test_a_window_may_be_read_while_it_is_written():
    window = Window()
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            window.total(1e9)
            window.quantile(0.0)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(20_000):
        window.add(float(i % 7), 1.0)
    is_over.set()
    for reader in readers:
        reader.join()
    assert window.total(0.0) == window.total(0.0)


def test_a_full_queue_is_worth_half_the_answers_before_it():
    assert Pace().wait_s(8, 4, 10.0) == 10
    assert Pace().wait_s(0, 4, None) == 1
    assert Pace().wait_s(10_000, 1, 100.0) == 600
