"""``specli bench --url`` against a stand-in server: counts, tokens by usage, errors by kind, files, Ctrl-C."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import json
import signal
import socket
import subprocess
import time

import numpy as np
import pytest
from chat_server import Script, running
from support import CommandLine

pytest.importorskip("httpx")

from specli.bench.files import save
from specli.bench.workloads import Prompt
from specli.config import LengthOptions, LoadOptions
from specli.errors import Cancelled, ConfigError, ServerError
from specli.loadtest.arrivals import poisson
from specli.loadtest.compare import compare
from specli.loadtest.document import load
from specli.loadtest.measure import measure
from specli.loadtest.prompts import Ask
from specli.loadtest.records import Burst, Record
from specli.loadtest.run import HOPELESS, Step, Watch, run_step
from specli.loadtest.window import Extent

SHORT = LengthOptions("uniform", 10, 40)


def options(server, **more) -> LoadOptions:
    given = {"concurrency": (2,), "n_requests": 6, "input_length": SHORT, "output_length": SHORT, "timeout_s": 20.0}
    return LoadOptions(**{"url": server.url, **given, **more})


# -- figures over a real connection


def test_counts_and_tokens_are_of_the_usage():
    with running(chars_per_token=4.0) as server:
        report = measure(options(server, concurrency=(1, 3), n_requests=8, sla_ttft_ms=60_000))
    assert [(step.load, step.n_measured, step.n_ok, step.errors) for step in report.steps] == [
        (1, 8, 8, {}),
        (3, 8, 8, {}),
    ]
    for step in report.steps:
        assert step.output_tokens.counted == 6  # in three pieces
        assert step.tpot_ms.p50 == pytest.approx(step.itl_burst_ms.p50 * 2 / 5, rel=0.5)
        assert step.tpot_ms.p50 > 0.5  # 10 ms over 5 tokens, less by how late a busy machine reads the first piece,
        assert step.e2e_ms.p50 >= 10.0  # which cannot shorten the whole
        assert step.ttft_ms.p50 < step.e2e_ms.p50
        assert step.output_tok_s > 0
        assert step.goodput == 1.0
        assert step.acceptance_rate == pytest.approx(0.7)
        assert step.in_flight <= step.load + 1e-6
    assert len(server.asked) >= 8 + 1 + 8 + 3
    assert sum(step.proposed for step in report.steps) == 10 * len(server.asked)  # by the metrics, warm-up and all
    body = server.asked[0]
    assert (body["model"], body["stream"], body["stream_options"]) == ("stand-in", True, {"include_usage": True})
    assert 10 <= body["max_tokens"] <= 40
    assert len({asked["max_tokens"] for asked in server.asked}) > 3
    assert len({asked["messages"][0]["content"][:8] for asked in server.asked}) == len(server.asked)
    assert report.words[0].startswith("highest measured load inside the bounds: concurrency 3 (100% of requests within")
    assert report.circumstances["server"] == "stand-in/1, nobody"
    assert report.circumstances["chars_per_token"] == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("fields", [{"content"}, {"model", "prompt"}], ids=["llama-server", "vLLM"])
def test_prompts_have_the_lengths_asked_for_by_the_servers_own_tokens(fields):
    with running(chars_per_token=2.0, tokenize_fields=fields) as server:
        measure(options(server, n_requests=20, input_length=LengthOptions("uniform", 200, 400)))
    lengths = [len(asked["messages"][0]["content"]) for asked in server.asked]
    assert 390 <= min(lengths) < max(lengths) <= 810


def test_completions_prompts_of_a_file_and_end_tokens_ignored():
    prompts = [Prompt("w", "w 1", "first"), Prompt("w", "w 2", "second", "be brief")]
    with running() as server:
        report = measure(options(server, endpoint="completions", ignore_eos=True, concurrency=(1,)), prompts)
    assert {asked["prompt"] for asked in server.asked} == {"first", "be brief\n\nsecond"}
    assert all(asked["ignore_eos"] is True for asked in server.asked)
    assert any("prefix cache" in note for note in report.notes)
    assert report.steps[0].n_ok == 6


def test_without_usage_and_metrics_the_rest_is_measured():
    with running(behave=lambda _i, _body: Script(n_tokens=None), prefix=None) as server:
        report = measure(options(server, sla_tpot_ms=50.0))
    (step,) = report.steps
    assert (step.n_ok, step.tpot_ms, step.output_tok_s, step.goodput, step.acceptance_rate) == (
        6,
        None,
        None,
        None,
        None,
    )
    assert step.ttft_ms is not None
    assert step.requests_s > 0
    assert report.notes[0].startswith("the server gives no usage")
    assert report.notes[1] == "the server shows no draft counters at /metrics"
    assert report.words == ["nobody can tell what is inside TPOT 50 ms: the server gives no usage"]
    json.dumps(report.as_dict(), allow_nan=False)


def test_an_open_loop_counts_from_the_arrival():
    with running() as server:
        report = measure(options(server, rates=(20.0, 60.0), warmup_requests=2, n_requests=12))
    for step, rate in zip(report.steps, (20.0, 60.0), strict=True):
        assert (step.is_open, step.load, step.n_ok) == (True, rate, 12)
        assert step.window_s > 0


class SlowAsker:
    """Answers after 30 ms each, one at a time, as a server that is overrun."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.in_flight = self.most = 0

    async def ask(self, ask: Ask, due_s: float | None, is_measured: bool) -> Record:
        sent_s = time.monotonic()
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        async with self.lock:
            await asyncio.sleep(0.03)
        self.in_flight -= 1
        now_s = time.monotonic()
        due_s = sent_s if due_s is None else due_s
        return Record(ask.index, is_measured, due_s, sent_s, now_s, (Burst(now_s, 1, 1),), output_tokens=1)


def asks():
    return (Ask(i, "", None, 1) for i in range(10**6))


def test_a_closed_loop_never_has_more_in_flight_and_an_open_one_does():
    closed, opened = SlowAsker(), SlowAsker()
    run = asyncio.run(run_step(closed, Step(3, False, Extent(3, n_requests=9)), asks(), Watch()))
    assert closed.most == 3
    assert sum(record.is_measured for record in run.records) == 9
    assert run.started_s < run.ended_s <= max(record.ended_s for record in run.records)
    run = asyncio.run(run_step(opened, Step(200.0, True, Extent(n_requests=20), seed=1), asks(), Watch()))
    assert opened.most > 3
    waits = [record.first_s - record.due_s for record in run.records]
    assert waits[-1] > waits[0]  # the queue is in the latency


class BlockingAsker(SlowAsker):
    """Its first answer keeps all of this process busy."""

    n_asked = 0

    async def ask(self, ask: Ask, due_s: float | None, is_measured: bool) -> Record:
        self.n_asked += 1
        if ask.index == 0:
            time.sleep(0.5)
        return await super().ask(ask, due_s, is_measured)


def arrivals_until(end_s: float) -> list[float]:
    return list(itertools.takewhile(lambda at_s: at_s < end_s, poisson(100.0, np.random.default_rng([1, 2]))))


def test_arrivals_for_which_this_machine_was_late_are_sent_and_measured():
    step = Step(100.0, True, Extent(duration_s=0.3), seed=1)
    run = asyncio.run(run_step(BlockingAsker(), step, asks(), Watch()))
    due_s = [record.due_s - run.started_s for record in run.records if record.is_measured]
    assert due_s == pytest.approx(arrivals_until(0.3))
    assert run.ended_s - run.started_s == pytest.approx(0.3)
    assert run.n_unfinished == 0


def test_arrivals_that_were_due_before_a_step_is_cut_short_are_unfinished():
    asker = BlockingAsker()
    watch = Watch(stopped=lambda: asker.n_asked > 0)
    run = asyncio.run(run_step(asker, Step(100.0, True, Extent(), seed=1), asks(), watch))
    assert run.stopped
    assert len(run.records) + run.n_unfinished == len(arrivals_until(run.ended_s - run.started_s)) > 30


def test_requests_of_the_warm_up_that_are_cut_off_are_told():
    looks = itertools.count()
    watch = Watch(stopped=lambda: next(looks) >= 6)
    run = asyncio.run(run_step(SlowAsker(), Step(40, False, Extent(2)), asks(), watch))
    assert run.started_s is not None
    assert run.n_cut == 40
    assert run.n_unfinished < 40
    run = asyncio.run(run_step(SlowAsker(), Step(2, False, Extent(2, n_requests=4)), asks(), Watch()))
    assert (run.n_cut, run.is_cut) == (0, False)


def test_requests_that_wait_to_be_sent_are_unfinished_too(monkeypatch):
    class Silent:
        n_asked = 0

        async def ask(self, ask: Ask, due_s: float | None, is_measured: bool) -> Record:
            self.n_asked += 1
            await asyncio.sleep(3600)
            raise AssertionError

    monkeypatch.setattr("specli.loadtest.run.MOST_IN_FLIGHT", 2)
    silent, looks = Silent(), itertools.count()
    watch = Watch(stopped=lambda: next(looks) >= 6)
    run = asyncio.run(run_step(silent, Step(200.0, True, Extent(), seed=1), asks(), watch))
    assert (silent.n_asked, run.records, run.stopped) == (2, (), True)
    assert run.n_unfinished > 2


# -- a server that refuses the excess


class FullServer:
    """Answers so many at once after a while, and refuses the others at once; ``fails``: those that it took fail too."""

    def __init__(self, n_places: int, *, fails: bool = False) -> None:
        self.n_places, self.fails = n_places, fails
        self.n_running = self.n_refused = 0

    async def ask(self, ask: Ask, due_s: float | None, is_measured: bool) -> Record:
        sent_s = time.monotonic()
        error, bursts = "http 429", ()
        if self.n_running < self.n_places:
            self.n_running += 1
            await asyncio.sleep(1.0)  # meanwhile the others are refused several times each
            self.n_running -= 1
            error = "timeout" if self.fails else None
            bursts = () if self.fails else (Burst(time.monotonic(), 1, 1),)
        else:
            self.n_refused += 1
            await asyncio.sleep(0.001)
        due_s = sent_s if due_s is None else due_s
        return Record(ask.index, is_measured, due_s, sent_s, time.monotonic(), bursts, output_tokens=1, error=error)


@pytest.mark.parametrize(
    "step",
    [Step(32, False, Extent(32, duration_s=1.5)), Step(60.0, True, Extent(0, 0.5, duration_s=1.5), seed=1)],
    ids=["closed", "open"],
)
def test_a_server_that_refuses_only_the_excess_is_measured(step):
    server = FullServer(17)
    run = asyncio.run(run_step(server, step, asks(), Watch()))
    good = [record for record in run.records if record.error is None]
    assert server.n_refused > 2 * 15 >= HOPELESS
    assert not run.hopeless
    assert sum(record.is_measured for record in good) >= 17
    assert run.ended_s - run.started_s == pytest.approx(1.5)
    if not step.is_open:  # refusals warm nothing up
        assert sum(record.ended_s <= run.started_s for record in good) >= 32


def test_when_those_under_way_have_failed_too_it_is_given_up():
    server = FullServer(4, fails=True)
    run = asyncio.run(run_step(server, Step(8, False, Extent(8)), asks(), Watch()))
    assert (run.hopeless, run.started_s) == (True, None)
    assert sum(record.error == "timeout" for record in run.records) >= 4
    looks = itertools.count()
    watch = Watch(stopped=lambda: next(looks) >= 3)  # Ctrl-C while they are waited for
    run = asyncio.run(run_step(FullServer(4, fails=True), Step(8, False, Extent(8)), asks(), watch))
    assert (run.stopped, run.hopeless) == (True, False)


def test_a_server_that_stops_working_while_it_warms_up_is_measured_as_it_is():
    with running(behave=lambda i, _body: Script(status=503) if i >= 3 else Script()) as server:
        wanted = options(server, concurrency=(4,), n_requests=5)
        with pytest.raises(ServerError) as caught:
            measure(wanted)
    told = str(caught.value).partition(": ")[2]
    assert told == ("no measured request succeeded (of the warm-up 3 did); of 5 at concurrency 4, 5 gave http 503 (no)")


# -- the search


def test_the_search_finds_what_the_server_takes():
    """More than three at a time, and this server refuses everything until the next step."""

    def behave(_i, _body):
        return Script(status=429) if server.most_in_flight > 3 else Script()

    with running(behave=behave) as server:
        report = measure(options(server, find_sla=True, concurrency=(1, 16), sla_ttft_ms=60_000))
    assert (report.found.best, report.found.outside) == (3, 4)
    assert report.words[0].startswith(
        "highest load inside the bounds: concurrency 3 (100% of requests within TTFT 60000"
    )
    assert [step.load for step in report.steps] == [1, 2, 3, 4]


def test_the_search_goes_on_below_a_load_that_is_given_up_while_it_warms_up():
    def behave(_i, body):
        is_third_step = body["messages"][0]["content"].startswith("2-")  # of 1, 2, 4, 3 in flight
        return Script(status=429) if is_third_step else Script()

    with running(behave=behave) as server:
        wanted = options(server, find_sla=True, concurrency=(1, 4), sla_ttft_ms=60_000, warmup_requests=15)
        report = measure(wanted)
    assert (report.found.best, report.found.outside) == (3, 4)
    assert [(step.load, step.n_measured, step.goodput) for step in report.steps] == [
        *((1, 6, 1.0), (2, 6, 1.0), (3, 6, 1.0), (4, 0, 0.0))
    ]


def test_when_even_one_is_too_many():
    with running() as server:
        report = measure(options(server, find_sla=True, concurrency=(1, 16), sla_ttft_ms=1e-3))
    assert report.found.best is None
    assert report.words == ["no load is inside the bounds: concurrency 1 has 0% of requests within TTFT 0.001 ms"]


# -- errors by kind

KINDS = {
    "http 429": Script(status=429, said='{"error": {"message": "slow down"}}'),
    "http 500": Script(status=500, said="oh"),
    "http 502": Script(status=502, said="<!DOCTYPE html>\n<html><head><title>\n502 Bad Gateway</title>" + "x" * 3000),
    "http 307": Script(status=307),
    "cut": Script(cut_after=2),
    "error event": Script(event='{"error": {"message": "out of memory"}}'),
    "bad json": Script(event='{"choices": ['),
    "not streamed": Script(content_type="application/json"),
    "empty": Script(pieces=()),
}


SAID = {
    "http 429": "slow down",
    "error event": "out of memory",
    "http 500": "oh",
    "http 502": "a page of HTML, 502 Bad Gateway",
}


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_counted_by_kind(kind):
    with running(behave=lambda i, _body: KINDS[kind] if i % 3 == 2 else Script()) as server:
        report = measure(options(server, concurrency=(1,), warmup_requests=0))
    (step,) = report.steps
    assert step.errors == {kind: 2}
    assert (step.n_measured, step.n_ok, step.ttft_ms.n) == (6, 4, 4)
    said = SAID.get(kind)
    assert report.remarks[0].startswith(f"concurrency 1: 2 failed: {kind} (2)")
    assert said is None or said in report.remarks[0]


def test_a_stream_without_its_last_line_but_with_a_reason_is_whole():
    with running(behave=lambda _i, _body: Script(has_done=False)) as server:
        assert measure(options(server)).steps[0].errors == {}


def test_silence_is_a_timeout():
    slow = Script(pieces=((0.0, "a"), (30.0, "b")))
    with running(behave=lambda i, _body: slow if i == 1 else Script()) as server:
        report = measure(options(server, concurrency=(1,), warmup_requests=0, timeout_s=0.5))
    assert report.steps[0].errors == {"timeout": 1}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_nothing_works():
    with pytest.raises(ServerError, match=r"/v1/models gave refused.*start the server"):
        measure(LoadOptions(f"http://127.0.0.1:{free_port()}"))
    with running(key="right") as server:
        with pytest.raises(ServerError, match=r"gave http 401 \(no such key\); give --api-key"):
            measure(options(server))
        assert measure(options(server, api_key="right")).steps[0].n_ok == 6
        with pytest.raises(ServerError, match="gave http 401"):
            measure(options(server, api_key="wrong", model_name="a"))
    page = "<html><title>\x1b[31mWelcome &amp; hello</title>"
    with running(models=page) as server:
        with pytest.raises(ServerError, match=r"models: a page of HTML, \x1b\[31mWelcome & hello\).*--model-name NAME"):
            measure(options(server))
        assert measure(options(server, model_name="mine")).circumstances["model"] == "mine"
        assert server.asked[0]["model"] == "mine"
    with running(models_status=404) as server, pytest.raises(ServerError, match=r"gave http 404.*without /v1"):
        measure(options(server))
    with running(behave=lambda _i, _body: Script(status=503, said="busy")) as server:
        with pytest.raises(
            ServerError, match=r"no request succeeded; of (8|9) at concurrency 2, \1 gave http 503 \(busy\)"
        ):
            measure(options(server))
        assert len(server.asked) < 20  # it was not asked on and on
    with running() as server, pytest.raises(ServerError, match="/v1/models gave tls"):
        measure(options(server, url=server.url.replace("http:", "https:")))


def test_the_user_and_the_clock_stop_it():
    with running(behave=lambda i, _body: Script(pieces=((30.0, "a"),)) if i > 4 else Script()) as server:
        over_s = time.monotonic() + 2.0
        watch = Watch(stopped=lambda: time.monotonic() > over_s)
        report = measure(options(server, concurrency=(1,), warmup_requests=0, sla_ttft_ms=60_000), watch=watch)
        assert (report.ending, report.steps[0].n_ok, report.steps[0].n_unfinished) == ("interrupted", 5, 1)
        assert report.words == ["nobody can tell what is inside TTFT 60000 ms: requests were unfinished"]
        assert (report.steps[0].output_tok_s, report.steps[0].goodput_s) == (None, None)
        assert report.steps[0].requests_s > 0
        with pytest.raises(Cancelled, match="stopped before anything was measured"):
            measure(options(server), watch=Watch(stopped=lambda: True))
        with pytest.raises(ConfigError, match="--time-budget of 1 s was over before anything was measured"):
            measure(options(server, time_budget_s=1.0), watch=Watch(deadline_s=time.monotonic()))


# -- files


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    with running() as server:
        for name, more in (("a", {}), ("b", {"concurrency": (2, 4), "temperature": 0.5}), ("c", {"concurrency": (8,)})):
            save(folder / f"{name}.json", measure(options(server, n_requests=10, **more)))
    return folder


def test_kept_load_tests_compare(kept):
    old, new = load(kept / "a.json"), load(kept / "b.json")
    comparison = compare(old, new)
    (change,) = comparison.changes
    assert change.load == 2
    ratio = change.ratios["ttft_p95"]
    before, after = (document["steps"][0]["ttft_ms"]["p95"] for document in (old, new))
    assert ratio.value == pytest.approx(before / after, rel=0.01)
    assert ratio.interval is None  # ten requests have no p95 to speak of
    middle = change.ratios["tpot_p50"]
    assert middle.low <= middle.value <= middle.high
    tokens = [document["steps"][0]["output_tok_s"] for document in (old, new)]
    assert change.ratios["output_tok_s"].value == pytest.approx(tokens[1] / tokens[0])
    assert comparison.notes == ("temperature was 0.0 and is 0.5", "concurrency 4 is only in the new one")
    with pytest.raises(ConfigError, match="without a common load"):
        compare(old, load(kept / "c.json"))
    damaged = {**new, "steps": [{"concurrency": 2, "rate": None}]}
    with pytest.raises(ConfigError, match="a file that is damaged"):
        compare(old, damaged)


# -- the command

BAD = {
    ("--url", "localhost"): "--url got 'localhost', expected http://HOST:PORT",
    ("--url", "http://a", "-m", "x.gguf", "--verify", "block"): "--verify, -m were given with --url, where",
    ("--url", "http://a", "-w", "chat"): "-w was given with --url, where the server decides; leave it out",
    ("--url", "http://a", "--share-drafts"): "--share-drafts was given with --url",
    ("--concurrency", "1", "--sla-ttft", "5"): "--concurrency, --sla-ttft were given without --url URL",
    ("--url", "http://a", "--compare", "a.json", "b.json"): "--url and --compare were both given",
    (
        "--url",
        "http://a",
        "--input-length",
        "normal:50,-1",
    ): "--input-length got normal:50,-1, expected at least 1 token",
    ("--find-sla",): "--find-sla was given without --url URL",
    ("--url", "http://a", "--find-sla"): "--find-sla was given without a bound",
    ("--url", "http://a", "--concurrency", "1", "--rate", "2"): "--concurrency and --rate were both given",
    ("--url", "http://a", "--concurrency", "1,,2"): "--concurrency got '1,,2', expected numbers",
    ("--url", "http://a", "--concurrency", "1.5"): "--concurrency got '1.5', expected whole numbers",
    ("--url", "http://a", "--rate", "nan"): "--rate got 'nan', expected numbers",
    ("--url", "http://a", "--rate", "0"): "--rate got 0.0, expected requests per second, above 0",
    ("--url", "http://a", "--input-length", "uniform:5,5"): "--input-length got uniform:5,5, under which all lengths",
    ("--url", "http://a", "--output-length", "poems"): "--output-length got 'poems', expected one of chat",
    ("--url", "http://a", "--requests", "5", "--duration", "5s"): "--requests and --duration were both given",
    ("--url", "http://a", "--warmup-for", "soon"): "--warmup-for got 'soon', expected a time",
    ("--url", "http://a", "--duration", "0"): "--duration got 0.0, expected a time above 0",
    ("--url", "http://a", "--temp", "0,1"): "--temp got '0,1', expected one temperature",
    ("--url", "http://a", "--api-key-file", "none"): "cannot read the API key file none",
    ("--url", "http://a", "--save", "no/where.json"): "--save no/where.json cannot be written",
    ("--url", "http://a", "--plot", "a.gif"): "--plot got a.gif, expected a file",
    ("--url", "http://a", "--prompts", "x", "--input-length", "chat"): "--prompts was given with --input-length",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_line(specli: CommandLine, arguments):
    ended = specli("bench", *arguments)
    assert ended.code == 2
    assert ended.error.startswith(BAD[arguments])


def test_a_variable_of_a_model_is_no_reason_to_refuse(specli: CommandLine):
    address = f"http://127.0.0.1:{free_port()}"
    ended = specli("bench", "--url", address, env={"LLAMA_ARG_MODEL": "x.gguf", "SPECLI_API_KEY": "secret"})
    assert ended.code == 7
    assert ended.error.startswith(f"--url {address}: /v1/models gave refused")
    assert "secret" not in ended.err


ARGUMENTS = ("--concurrency", "1,2", "--requests", "5", "--input-length", "uniform:10,40", "--sla-ttft", "60000")


@pytest.mark.parametrize("form", ["table", "md", "json", "jsonl", "csv"])
def test_the_answer_is_on_stdout_in_every_form(specli: CommandLine, form, tmp_path):
    with running() as server:
        address = server.url.replace("//", "//me:hidden@")
        files = ("--save", tmp_path / "a.json", "--plot", tmp_path / "a.svg") if form == "table" else ()
        ended = specli("bench", "--url", address, *ARGUMENTS, "-o", form, *files)
    assert (ended.code, ended.err) == (0, "")
    out = ended.out.decode()
    assert "hidden" not in out
    if form == "json":
        found = json.loads(out)
        assert [step["concurrency"] for step in found["steps"]] == [1, 2]
        assert (found["kind"], found["url"], found["model"]) == ("load test", server.url, "stand-in")
        assert len(found["steps"][0]["requests"]) == 5
        assert found["steps"][0]["acceptance_rate"] == pytest.approx(0.7)
    elif form == "jsonl":
        assert [json.loads(line)["measured_requests"] for line in out.splitlines()] == [5, 5]
    elif form == "csv":
        rows = list(csv.DictReader(io.StringIO(out)))
        assert [(row["concurrency"], row["settings.seed"], row["goodput"]) for row in rows] == [
            *(("1", "0", "1.0"), ("2", "0", "1.0"))
        ]
    else:
        assert "TTFT ms p50 95 99" in out
        assert "highest measured load inside the bounds: concurrency 2" in out
    if files:
        assert "hidden" not in (tmp_path / "a.json").read_text("utf-8")
        assert "svg" in (tmp_path / "a.svg").read_text("utf-8")


def test_loads_come_in_the_order_given(specli: CommandLine):
    for flag, loads in (("--concurrency", "2,1"), ("--rate", "80,40")):
        arguments = (flag, loads, "--requests", "3", "--warmup-for", "1", "-o", "jsonl")
        with running() as server:
            ended = specli("bench", "--url", server.url, *arguments)
        rows = [json.loads(line) for line in ended.out.splitlines()]
        assert [row["concurrency"] or row["rate"] for row in rows] == [float(load) for load in loads.split(",")]


def test_when_most_requests_fail_the_figures_come_with_an_error(specli: CommandLine, tmp_path):
    def behave(i, _body):
        return Script() if i % 4 == 0 else Script(status=429, said="slow down")

    arguments = ("--concurrency", "1", "--requests", "8", "--warmup-for", "0", "-o", "json", "--save", tmp_path / "a")
    with running(behave=behave) as server:
        ended = specli("bench", "--url", server.url, *arguments)
    assert ended.code == 7
    assert ended.err.strip() == (
        f"specli: error: --url {server.url}: at no load did half of the requests succeed; at best 2 of 8, at "
        "concurrency 1; 6 gave http 429 (slow down)"
    )
    found = json.loads(ended.out)
    assert found["steps"][0]["good_requests"] == 2
    assert "concurrency 1: only 2 of 8 requests succeeded" in found["notes"]
    assert load(tmp_path / "a")["steps"] == found["steps"]


def test_files_of_two_kinds_do_not_compare(specli: CommandLine, kept, tmp_path):
    ended = specli("bench", "--compare", kept / "a.json", kept / "b.json", "-o", "jsonl")
    assert ended.code == 0
    assert json.loads(ended.out)["concurrency"] == 2
    for form in ("table", "md", "csv", "json"):
        ended = specli("bench", "--compare", kept / "a.json", kept / "b.json", "-o", form)
        assert ended.code == 0
        assert ended.out
    other = tmp_path / "bench.json"
    other.write_text('{"format": 1, "cells": [], "models": {}, "prompts": {}}', "utf-8")
    error = specli("bench", "--compare", kept / "a.json", other).error
    assert error == f"--compare got a load test and a bench of models ({other}); expected two of a kind"
    assert specli("bench", "--compare", other, kept / "a.json").error == error
    other.write_text("{}", "utf-8")
    assert specli("bench", "--compare", other, kept / "a.json").error.endswith(
        "is not a bench; expected a file of specli bench --save"
    )


def test_ctrl_c_prints_what_was_measured(specli: CommandLine):
    arguments = ("--concurrency", "1", "--duration", "1h", "--time-budget", "0", "-o", "jsonl")
    with running() as server, specli.start("bench", "--url", server.url, *arguments) as process:
        while len(server.asked) < 10:
            time.sleep(0.05)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out)["good_requests"] >= 5


def test_without_httpx_one_line(specli: CommandLine, tmp_path):
    (tmp_path / "httpx.py").write_text("raise ImportError('no httpx')\n", "utf-8")
    environment = specli.environment()
    path = f"{tmp_path}:{environment['PYTHONPATH']}"
    done = subprocess.run(
        specli.argv("bench", "--url", "http://127.0.0.1:1"),
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 2
    assert b"--url needs httpx, which is not installed; pip install httpx" in done.stderr


def test_a_strangers_escape_codes_do_not_reach_the_terminal(specli: CommandLine):
    with running(models="<html><title>\x1b[31mred</title>") as server:
        ended = specli("bench", "--url", server.url)
    assert ended.code == 7
    assert "a page of HTML" in ended.error
    assert "[31mred" in ended.error
    assert "\x1b" not in ended.error
