"""Two kept load tests compared: intervals where requests are enough for one, and what is noted."""

from __future__ import annotations

import numpy as np
import pytest

from specli.bench.statistics import percentile_interval
from specli.loadtest.compare import compare


def kept(times, n_unfinished=0, concurrency=2):
    """A file with one load, whose requests took ``times``: TTFT, TPOT and E2E alike, ms."""
    step = {"concurrency": concurrency, "rate": None, "requests": [[0.0, ms, ms, ms, 10, 5, None] for ms in times]}
    figures = {"output_tok_s": None, "requests_s": None, "goodput": None, "unfinished_requests": n_unfinished}
    return {"settings": {}, "steps": [{**step, **figures}]}


def ratios(old, new):
    (change,) = compare(kept(old), kept(new)).changes
    return change.ratios


@pytest.mark.parametrize(("name", "least"), [("tpot_p50", 6), ("ttft_p95", 72), ("e2e_p95", 72)])
def test_an_interval_needs_requests_on_both_sides_of_the_quantile(name, least):
    values = list(np.random.default_rng(0).exponential(100, size=200))
    for old, new in ((least - 1, 200), (200, least - 1)):
        found = ratios(values[:old], values[:new])[name]
        assert found.interval is None
        assert found.value > 0
    low, high = ratios(values[:least], values)[name].interval
    assert low < high


def test_the_interval_is_the_benchs_own():
    """As if each resample had been drawn, and t-corrected for the smaller file."""
    rng = np.random.default_rng(1)
    old, new = rng.exponential(100, size=90), rng.exponential(50, size=140)
    drawn = [
        np.quantile(values[rng.integers(len(values), size=(20_000, len(values)))], 0.95, axis=1)
        for values in (old, new)
    ]
    wanted = percentile_interval(drawn[0] / drawn[1], 90)
    assert ratios(old, new)["ttft_p95"].interval == pytest.approx(wanted, rel=0.06)


@pytest.mark.parametrize(("name", "n"), [("tpot_p50", 8), ("tpot_p50", 40), ("ttft_p95", 80)])
def test_intervals_cover(name, n):
    rng, n_inside = np.random.default_rng(0), 0
    for _ in range(300):
        low, high = ratios(rng.exponential(150, size=n), rng.exponential(100, size=n))[name].interval
        n_inside += low <= 1.5 <= high
    assert n_inside / 300 >= 0.93


def test_a_load_that_was_cut_short_is_noted():
    times = [float(ms) for ms in range(50, 90)]
    assert not compare(kept(times), kept(times)).notes
    assert compare(kept(times), kept(times, n_unfinished=3)).notes == (
        "concurrency 2: the new one left 3 requests unfinished; its latencies are of the faster ones, its tokens/s are "
        "unknown",
    )


def test_tokens_per_second_of_a_load_that_was_cut_short_are_not_compared():
    """Also where an earlier version has counted them without those of the answers under way."""
    old, new, cut = kept([5.0]), kept([5.0]), kept([5.0], n_unfinished=1)
    for document, rate in ((old, 80.0), (new, 40.0), (cut, 40.0)):
        document["steps"][0].update(output_tok_s=rate, requests_s=rate / 10)
    assert compare(old, new).changes[0].ratios["output_tok_s"].value == 0.5
    for pair in ((old, cut), (cut, old)):
        found = compare(*pair).changes[0].ratios
        assert found["output_tok_s"] is None
        assert found["requests_s"] is not None


def test_loads_that_only_one_file_has_are_noted():
    old, new = kept([5.0]), kept([4.0])
    old["steps"] += kept([5.0], concurrency=4)["steps"]
    new["steps"] += kept([5.0], concurrency=8)["steps"]
    assert compare(old, new).notes == ("concurrency 4 is only in the old one", "concurrency 8 is only in the new one")
