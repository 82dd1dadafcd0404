"""The pure rooms of the load test: lengths, arrivals, events, windows, figures, search, counters."""

from __future__ import annotations

import io
import itertools
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specli.bench.workloads import Prompt
from specli.config import LENGTHS, LengthOptions, LoadOptions
from specli.errors import ConfigError
from specli.loadtest import figures as f
from specli.loadtest.arrivals import poisson
from specli.loadtest.client import shown_url, split_url
from specli.loadtest.document import LoadReport
from specli.loadtest.lengths import INPUT, OUTPUT, draw, parse
from specli.loadtest.prompts import Writer, text
from specli.loadtest.records import Burst, Record, StepRun
from specli.loadtest.scrape import Counters, between, counters
from specli.loadtest.search import Found, probes
from specli.loadtest.sse import MOST_BYTES, EventParser, EventTooLong
from specli.loadtest.window import Extent, SteadyWindow
from specli.render.load import markdown, print_report

URL = "http://127.0.0.1:1"

# -- lengths


@pytest.mark.parametrize("written", [*LENGTHS, "uniform:64,256", "normal:200,50", "lognormal:120,0.7"])
def test_lengths_stay_in_bounds_and_are_never_all_equal(written):
    for role, flag in ((INPUT, "--input-length"), (OUTPUT, "--output-length")):
        lengths = parse(flag, written, role)
        LoadOptions(URL, input_length=lengths, output_length=lengths)
        drawn = [draw(lengths, np.random.default_rng(1)) for _ in range(2)]
        assert drawn[0] == drawn[1]
        rng = np.random.default_rng(0)
        drawn = [draw(lengths, rng) for _ in range(2000)]
        assert lengths.low <= min(drawn) < max(drawn) <= lengths.high


def test_lengths_have_the_law_asked_for():
    rng = np.random.default_rng(0)
    uniform = [draw(LengthOptions("uniform", 10, 12), rng) for _ in range(3000)]
    assert set(uniform) == {10, 11, 12}
    normal = [draw(LengthOptions("normal", 200, 50), rng) for _ in range(4000)]
    assert abs(np.mean(normal) - 200) < 4
    assert abs(np.std(normal) - 50) < 3
    lognormal = [draw(LengthOptions("lognormal", 120, 0.7), rng) for _ in range(4000)]
    assert abs(np.median(lognormal) - 120) < 6
    assert abs(np.std(np.log(lognormal)) - 0.7) < 0.04


@pytest.mark.parametrize(
    "written", ["poems", "uniform", "uniform:5", "uniform:5,x", "normal:1,2,3", "uniform:nan,5", ""]
)
def test_lengths_that_are_not_one(written):
    with pytest.raises(
        ConfigError, match=r"--input-length got .*expected one of chat, summarize, code, long, or uniform"
    ):
        parse("--input-length", written, INPUT)


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        (("uniform", 5, 5), "under which all lengths are equal"),
        (("uniform", 9, 5), "expected the shorter length first"),
        (("normal", 100, 0), "under which all lengths are equal"),
        (("normal", 100, 0.1), "under which all lengths are equal"),
        (("lognormal", 100, 0), "under which all lengths are equal"),
        (("lognormal", 100, 9), "expected at least 1 token"),
        (("uniform", 0, 5), "expected at least 1 token"),
        (("uniform", 1, math.inf), "expected at least 1 token"),
        (("normal", math.nan, 5), "expected at least 1 token"),
        (("normal", 100, -5), "expected at least 1 token"),
    ],
)
def test_lengths_that_no_traffic_has(lengths, words):
    with pytest.raises(ConfigError, match=f"--output-length got .*{words}"):
        LoadOptions(URL, output_length=LengthOptions(*lengths))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "localhost:8080"}, "--url got 'localhost:8080', expected http://HOST:PORT"),
        ({"url": "ftp://a"}, "--url got"),
        ({"url": "http://"}, "--url got"),
        ({"url": "http://a:99999"}, "--url got"),
        ({"url": "http://a b"}, "--url got"),
        ({"url": "http://u:secret@a/?x=1"}, "--url got 'http://a/?x=1', expected"),
        ({"concurrency": ()}, "--concurrency got nothing"),
        ({"concurrency": (0,)}, "--concurrency got 0, expected 1 to 1000"),
        ({"rates": (math.nan,)}, "--rate got nan"),
        ({"rates": (math.inf,)}, "--rate got inf"),
        ({"rates": (-1.0,)}, "--rate got -1.0"),
        ({"n_requests": 0}, "--requests got 0"),
        ({"duration_s": 0}, "--duration got 0"),
        ({"duration_s": math.nan}, "--duration got nan"),
        ({"warmup_s": math.inf}, "--warmup-for got inf"),
        ({"timeout_s": -1}, "--timeout got -1"),
        ({"sla_ttft_ms": math.nan}, "--sla-ttft got nan"),
        ({"sla_tpot_ms": 0}, "--sla-tpot got 0"),
        ({"find_sla": True}, "--find-sla was given without a bound"),
        ({"endpoint": "images"}, "--endpoint got 'images'"),
        ({"temperature": math.nan}, "--temp got nan"),
        ({"shared_prefix": -1}, "--shared-prefix got -1"),
        ({"api_key": "a\nb"}, "--api-key got a key, expected one line"),
        ({"seed": -1}, "-s/--seed got -1"),
    ],
)
def test_options_that_cannot_be_used(options, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        LoadOptions(**{"url": URL, **options})


def test_a_key_is_not_shown():
    assert "secret" not in repr(LoadOptions(URL, api_key="secret"))
    assert split_url("https://me:a%20b@host:1/api/v1/") == ("https://host:1/api", ("me", "a b"))
    assert shown_url("http://me:pass@host:1/v1") == "http://host:1"


# -- prompts and arrivals


def test_prompts_differ_from_their_beginning_and_have_their_length():
    options = LoadOptions(URL, input_length=LengthOptions("uniform", 50, 300))
    asks = list(itertools.islice(Writer(options, "tag", chars_per_token=4.0).asks(0), 200))
    assert len({ask.text[:10] for ask in asks}) == 200
    for ask in asks:
        assert abs(len(ask.text) - 4 * ask.input_tokens) <= 10
    again = list(itertools.islice(Writer(options, "gat", chars_per_token=4.0).asks(0), 200))
    assert [ask.text.split(":")[1] for ask in again] == [ask.text.split(":")[1] for ask in asks]
    assert asks[0].text[:10] != again[0].text[:10]
    assert [ask.max_tokens for ask in again] == [ask.max_tokens for ask in asks]
    assert len({ask.max_tokens for ask in asks}) > 10


def test_a_shared_prefix_is_shared_and_nothing_more():
    options = LoadOptions(URL, shared_prefix=100, input_length=LengthOptions("uniform", 200, 300))
    first, second = itertools.islice(Writer(options, "tag", chars_per_token=4.0).asks(0), 2)
    n = next(i for i, (a, b) in enumerate(zip(first.text, second.text, strict=False)) if a != b)
    assert 390 <= n <= 410
    assert abs(len(first.text) - 4 * first.input_tokens) <= 10


def test_prompts_of_a_file_are_asked_once_before_any_is_asked_again():
    prompts = [Prompt("w", f"w {i}", f"text {i}") for i in range(5)]
    writer = Writer(LoadOptions(URL), "tag", prompts=prompts)
    first = [ask.text for step, n in enumerate((2, 3)) for ask in itertools.islice(writer.asks(step), n)]
    assert sorted(first) == [prompt.text for prompt in prompts]
    assert not writer.repeats
    assert next(writer.asks(2)).text in first
    assert writer.repeats


def test_what_a_step_asks_does_not_depend_on_how_long_the_steps_before_it_were():
    options = LoadOptions(URL, input_length=LengthOptions("uniform", 50, 300))

    def steps(*n_asked, chars_per_token=4.0):
        writer = Writer(options, "tag", chars_per_token=chars_per_token)
        return [list(itertools.islice(writer.asks(step), n)) for step, n in enumerate(n_asked)]

    def drawn(asks):
        return [(ask.input_tokens, ask.max_tokens) for ask in asks]

    first, second = steps(9, 30)
    longer, after = steps(120, 30)
    assert [ask.text for ask in after] == [ask.text for ask in second]
    assert drawn(after) == drawn(second)
    assert drawn(first) == drawn(longer)[:9] != drawn(second)[:9]
    assert drawn(steps(9, 30, chars_per_token=6.0)[1]) == drawn(second)  # of another server
    assert len({ask.text[:10] for ask in longer + after}) == 150


@given(st.integers(0, 3000))
def test_text_is_as_long_as_asked(n):
    assert abs(len(text("x: ", n, np.random.default_rng(0))) - max(n, 3)) <= 10


def test_arrivals_are_poisson():
    times = list(itertools.islice(poisson(4.0, np.random.default_rng(0)), 4000))
    gaps = np.diff([0.0, *times])
    assert abs(gaps.mean() - 0.25) < 0.02
    assert abs(gaps.std() - 0.25) < 0.02  # an exponential's deviation is its mean
    assert min(gaps) > 0


# -- events

STREAM = (
    '\ufeff: hello\r\ndata: {"a":\r\ndata:  1}\r\n\r\nevent: x\rdata: é€😀\r\rid: 7\ndata:no blank\n\n: ping\n\n'
    "data\n\ndata: [DONE]\n\n"
).encode()
EVENTS = ['{"a":\n 1}', "é€😀", "no blank", "", "[DONE]"]


def parsed(*pieces: bytes) -> list[str]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts):
    ends = [0, *sorted(cuts), len(STREAM)]
    assert parsed(*(STREAM[a:b] for a, b in itertools.pairwise(ends))) == EVENTS


def test_events_byte_by_byte():
    assert parsed(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS


def test_an_event_is_given_as_soon_as_it_is_whole():
    parser = EventParser()
    assert parser.feed(b"data: 1\r\n\r") == ["1"]  # the line feed that may follow is not waited for
    assert parser.feed(b"\ndata: 2\n\n") == ["2"]
    assert parser.feed(b"data: left") == []
    assert parser.close() == ["left"]
    with pytest.raises(EventTooLong):
        parser.feed(b"x" * (MOST_BYTES + 1))


# -- windows


def test_a_window_begins_after_the_warm_up_and_takes_so_many():
    window = SteadyWindow(Extent(warmup_requests=2, n_requests=2), 10.0)
    assert [window.take(10.0), window.take(10.0)] == [False, False]
    window.note_success(11.0)
    assert window.take(11.0) is False
    window.note_success(12.0)
    assert window.started_s == 12.0
    assert [window.take(12.0), window.take(13.0)] == [True, True]
    assert window.fraction(13.0) == 1.0
    assert window.take(14.0) is None  # the load stops being full
    assert window.ended_s == 14.0


def test_a_window_of_time_ends_by_the_clock():
    window = SteadyWindow(Extent(warmup_s=5.0, duration_s=10.0), 100.0)
    assert window.take(104.0) is False
    assert window.fraction(104.0) is None
    assert window.take(106.0) is True
    assert (window.started_s, window.fraction(110.0)) == (105.0, 0.5)
    window.tick(120.0)
    assert window.ended_s == 115.0
    assert window.take(115.5) is None
    window.close(130.0)
    assert window.ended_s == 115.0


def test_without_warm_up_everything_is_measured():
    window = SteadyWindow(Extent(n_requests=1), 0.0)
    assert (window.take(0.0), window.take(0.0)) == (True, None)


def test_a_request_is_of_the_window_in_which_it_is_due_however_late_it_is_taken():
    window = SteadyWindow(Extent(warmup_s=5.0, duration_s=10.0), 100.0)
    window.tick(130.0)  # this machine was busy with something else
    assert [window.take(at_s) for at_s in (104.9, 105.0, 114.9)] == [False, True, True]
    assert window.take(115.0) is None
    assert (window.n_measured, window.started_s, window.ended_s) == (2, 105.0, 115.0)


# -- figures


def record(due=0.0, bursts=((1.0, 4), (1.2, 8), (1.8, 12)), n=7, **more) -> Record:
    pieces = tuple(Burst(at, chars, 1) for at, chars in bursts)
    ended = pieces[-1].at_s if pieces else due + 1
    return Record(**{"index": 0, "is_measured": True, "due_s": due, "sent_s": due, "ended_s": ended, "bursts": pieces,
                     "prompt_tokens": 10, "output_tokens": n, **more})  # fmt: skip


def test_figures_of_a_request_by_hand():
    one = record(due=0.5, n=6)
    assert f.ttft_ms(one) == pytest.approx(500)
    assert f.e2e_ms(one) == pytest.approx(1300)
    assert f.tpot_ms(one) == pytest.approx(800 / 5)  # 6 tokens of the usage over 3 pieces
    assert f.burst_gaps_ms(one) == pytest.approx([200, 600])
    assert f.burst_tokens(one) == [1, 2, 3]  # by characters: 4, 8 and 12 of 24
    assert list(f.token_gaps_ms(one)) == pytest.approx([100, 100, 200, 200, 200])


def test_pieces_are_tokens_where_they_are_as_many():
    one = record(bursts=((1.0, 1), (1.1, 20), (1.2, 1)), n=4)  # the end token has no text
    assert sum(f.burst_tokens(one)) == 4
    two = Record(0, True, 0, 0, 2, (Burst(1.0, 9, 1), Burst(1.5, 9, 4)), output_tokens=5)
    assert f.burst_tokens(two) == [1, 4]  # four events in one piece


def test_undefined_is_none():
    assert f.tpot_ms(record(n=1)) is None
    assert f.tpot_ms(record(n=None)) is None
    assert f.ttft_ms(record(bursts=())) is None
    assert f.burst_tokens(record(n=None)) == [0, 0, 0]
    assert list(f.token_gaps_ms(record(n=None))) == []
    found = f.figures(StepRun((), None, None), 4, False, f.Bounds(100.0))
    assert (found.ttft_ms, found.output_tok_s, found.requests_s, found.goodput, found.is_inside) == (None,) * 5
    assert found.acceptance_rate is None


def test_throughput_is_of_the_window_and_latency_of_what_began_in_it():
    records = (
        record(due=9.0, bursts=((9.5, 10), (10.5, 10)), n=2, is_measured=False),  # of the warm-up, half of it inside
        record(due=10.0, bursts=((11.0, 10), (12.0, 10)), n=10),
        record(due=19.0, bursts=((19.5, 10), (21.0, 30)), n=40),  # drained: a quarter came inside
        record(due=12.0, bursts=(), n=None, error="http 429", message="slow down"),
    )
    found = f.figures(StepRun(records, 10.0, 20.0), 2, False, f.Bounds(600.0, None))
    assert found.output_tok_s == pytest.approx((1 + 10 + 10) / 10)
    assert found.requests_s == pytest.approx(2 / 10)
    assert (found.ttft_ms.n, found.ttft_ms.p50) == (2, pytest.approx(750))
    assert found.errors == {"http 429": 1}
    assert found.said == {"http 429": "slow down"}
    assert found.goodput == pytest.approx(1 / 3)  # TTFT 1000 and a failure are outside
    assert found.goodput_s == pytest.approx(1 / 10)  # the warm-up's request, which ended inside
    assert found.in_flight == pytest.approx((0.5 + 2 + 1 + 1) / 10)
    assert found.is_inside is False


def test_bounds():
    bounds = f.Bounds(None, 100.0)
    assert bounds.keeps(record(n=9)) is True  # exactly 100 ms
    assert bounds.keeps(record(n=8)) is False
    assert bounds.keeps(record(n=1)) is True
    assert bounds.keeps(record(n=None)) is None
    assert bounds.keeps(record(error="cut")) is False
    assert f.Bounds(900.0, 100.0).keeps(record(n=None)) is False
    assert f.Bounds().keeps(record()) is None
    without_usage = f.figures(StepRun((record(n=None),), 0.0, 5.0), 1, False, bounds)
    assert (without_usage.goodput, without_usage.output_tok_s, without_usage.tpot_ms) == (None, None, None)
    assert without_usage.requests_s == pytest.approx(1 / 5)


def test_a_load_that_was_cut_short_is_neither_inside_nor_outside():
    bounds, fast = f.Bounds(2000.0), (record(), record())
    whole = f.figures(StepRun(fast, 0.0, 5.0), 8, False, bounds)
    cut = f.figures(StepRun(fast, 0.0, 5.0, n_unfinished=1, stopped=True), 16, False, bounds)
    assert (whole.goodput, whole.is_inside) == (1.0, True)
    assert (cut.goodput, cut.is_inside) == (None, None)
    report = LoadReport({}, [whole, cut], "time", 2, 5.0, None, "TTFT 2000 ms")
    assert report.words[0].startswith("highest measured load inside the bounds: concurrency 8 (100% of requests")
    unfinished = (
        "concurrency 16: 1 of 3 requests were unfinished; latencies are of the others, the faster ones; tokens/s are "
        "unknown"
    )
    assert f"{unfinished}, and so is whether it is inside the bounds" in report.remarks
    assert unfinished in LoadReport({}, [cut], "time", 2, 5.0).remarks
    alone = LoadReport({}, [cut], "interrupted", 2, 5.0, None, "TTFT 2000 ms")
    assert alone.words == ["nobody can tell what is inside TTFT 2000 ms: requests were unfinished"]
    slow = f.figures(StepRun(fast, 0.0, 5.0), 8, False, f.Bounds(1.0))
    unsure = LoadReport({}, [slow, cut], "time", 2, 5.0, None, "TTFT 1 ms")
    assert unsure.words[0].startswith("no load that can be judged is inside the bounds: concurrency 8 has 0%")


@pytest.mark.parametrize("left", [{"n_unfinished": 1, "n_cut": 1}, {"n_cut": 2}, {"n_unfinished": 1}])
def test_what_was_cut_off_had_tokens_that_nobody_counted(left):
    """An answer that had given 20 tokens leaves no usage: without them the throughput would be too low."""
    run = StepRun((record(), record(is_measured=False)), 0.0, 5.0, stopped=True, **left)
    found = f.figures(run, 4, False, f.Bounds(2000.0))
    assert (found.output_tok_s, found.goodput_s, found.in_flight) == (None, None, None)
    assert found.requests_s == pytest.approx(2 / 5)  # those that ended are all known
    report = LoadReport({}, [found], "time", 1, 5.0)
    assert any("tokens/s are unknown" in line for line in report.remarks)
    assert "2 requests of the warm-up were cut off; tokens/s are unknown" in report.remarks[1] or found.n_unfinished
    (line,) = report.lines()
    assert line["output_tok_s"] is None
    json.dumps(report.as_dict(), allow_nan=False)
    assert "| – |" in markdown(report)
    print_report(io.StringIO(), {}, report, details=True)
    whole = f.figures(StepRun(run.records, 0.0, 5.0), 4, False, f.Bounds(2000.0))
    assert whole.output_tok_s == pytest.approx(14 / 5)


def test_a_load_of_which_most_requests_failed_is_remarked():
    def load(n_good, n_bad):
        failed = record(bursts=(), error="http 429", message="slow down")
        return f.figures(StepRun((record(),) * n_good + (failed,) * n_bad, 0.0, 5.0), n_good, False, f.Bounds())

    half, fewer, least = load(3, 3), load(2, 3), load(1, 3)
    line = "concurrency 2: only 2 of 5 requests succeeded"
    report = LoadReport({"url": "http://a"}, [half, fewer], "done", 2, 5.0)
    assert line in report.remarks
    assert not any(" 3 of 6 " in remark for remark in report.remarks)
    assert report.failure is None
    assert LoadReport({"url": "http://a"}, [least, fewer], "done", 2, 5.0).failure == (
        "--url http://a: at no load did half of the requests succeed; at best 2 of 5, at concurrency 2; 3 gave "
        "http 429 (slow down)"
    )


def test_a_load_on_which_nothing_works_is_outside_though_its_warm_up_never_ended():
    failed = StepRun((record(bursts=(), is_measured=False, error="http 503"),) * 8, None, 3.0, hopeless=True)
    found = f.figures(failed, 4, True, f.Bounds(2000.0))
    assert (found.n_measured, found.goodput, found.is_inside) == (0, 0.0, False)
    assert f.figures(failed, 4, True, f.Bounds()).is_inside is None
    nothing = f.figures(StepRun((), 0.0, 5.0), 0.01, True, f.Bounds(2000.0))
    report = LoadReport({}, [nothing], "done", 1, 5.0, None, "TTFT 2000 ms")
    assert report.words == ["nobody can tell what is inside TTFT 2000 ms: nothing was measured"]


def test_acceptance_is_of_the_metrics_or_else_of_the_answers():
    records = (record(proposed=10, accepted=5), record(proposed=30, accepted=5), record())
    assert f.figures(StepRun(records, 0, 5), 1, False, f.Bounds(), (8, 6)).acceptance_rate == 0.75
    told = f.figures(StepRun(records, 0, 5), 1, False, f.Bounds())
    assert (told.acceptance_rate, told.acceptance_of) == (0.25, "answers")
    assert f.figures(StepRun(records, 0, 5), 1, False, f.Bounds(), (0, 0)).acceptance_rate is None


def test_intervals_of_quantiles_are_those_of_the_binomial():
    values = [float(i) for i in range(1, 101)]
    assert f.quantile_interval(values, 0.5) == (40.0, 61.0)  # as every table of order statistics has it for n = 100
    low, high = f.quantile_interval(values, 0.95)
    assert low < 95 < high
    assert f.quantile_interval(values[:20], 0.95) is None
    assert f.quantile_interval(values[:5], 0.5) is None
    assert f.quantile_interval(values[:6], 0.5) == (1.0, 6.0)


def test_intervals_cover():
    rng, n_inside = np.random.default_rng(0), 0
    for _ in range(400):
        low, high = f.quantile_interval(sorted(rng.exponential(size=60)), 0.5)
        n_inside += low <= math.log(2) <= high
    assert n_inside / 400 >= 0.93


# -- search


def search(low, high, is_inside, is_whole=True):
    looked, generator = [], probes(low, high, is_whole=is_whole)
    load = next(generator)
    while True:
        looked.append(load)
        try:
            load = generator.send(is_inside(load))
        except StopIteration as ending:
            return looked, ending.value


@given(st.integers(0, 70))
def test_the_search_finds_the_highest_load_inside(capacity):
    looked, found = search(1, 64, lambda load: load <= capacity)
    assert len(looked) == len(set(looked)) <= 14
    if capacity == 0:
        assert found == Found(None, 1)
    elif capacity >= 64:
        assert found == Found(64, None)
    else:
        assert found.best <= capacity < found.outside
        assert found.outside - found.best <= max(1, 0.05 * found.best)


@given(st.floats(0.6, 90))
def test_the_search_finds_a_rate(capacity):
    looked, found = search(0.5, 100.0, lambda load: load <= capacity, is_whole=False)
    assert found.best <= capacity <= found.outside <= 1.06 * found.best
    assert len(looked) < 20


# -- counters

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a"} 0.0
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="a"} 100.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="a \\"} } b"} 300.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="a"} 1.5e+02
# TYPE vllm:spec_decode_num_draft_tokens_created gauge
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="a"} 1.7e9
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="a"} 200.0
vllm:spec_decode_num_accepted_tokens_total{engine="1",model_name="a"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 90.0
"""
LLAMA = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 6886
# HELP llamacpp:spec_decode_num_draft_tokens_total Total draft tokens generated
# TYPE llamacpp:spec_decode_num_draft_tokens_total counter
llamacpp:spec_decode_num_draft_tokens_total 384
llamacpp:spec_decode_num_accepted_tokens_total 260
llamacpp:spec_decode_num_drafts_total 8
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 45
"""
SPECLI = """\
# TYPE specli_spec_decode_num_draft_tokens_total counter
specli_spec_decode_num_draft_tokens_total 12.0 1700000000000
specli_spec_decode_num_accepted_tokens_total 9.0
"""


def test_counters_of_three_servers():
    assert counters(VLLM) == Counters("vLLM", 450, 240)
    assert counters(LLAMA) == Counters("llama-server", 384, 260)
    assert counters(SPECLI) == Counters("specli", 12, 9)
    assert counters(SPECLI.replace("\n", "\r\n")) == Counters("specli", 12, 9)


def test_counters_that_are_not_there():
    for exposition in ("", "<html>", "llamacpp:prompt_tokens_total 1\n", SPECLI.replace("12.0", "NaN")):
        assert counters(exposition) is None
    one, two = Counters("vLLM", 10, 5), Counters("vLLM", 30, 10)
    assert between(one, two) == (20, 5)
    assert between(two, one) is None  # the server began anew
    assert between(None, two) is between(one, None) is between(one, Counters("specli", 30, 10)) is None
