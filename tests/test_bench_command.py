"""``specli bench`` as a command: what it measures, bad input in one line, and real weights."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support import CommandLine, settings

from specli.bench.harness import Setting
from specli.bench.measure import Watch, measure, settings_of
from specli.bench.runner import Runner
from specli.bench.workloads import Prompt, built_in
from specli.cli.bench import seconds
from specli.config import BenchOptions
from specli.errors import ConfigError, ContextOverflow
from specli.exact import Proof
from specli.session import Session


def names(found):
    return [(setting.drafter, setting.k) for setting in found]


def test_without_types_everything_there_is_and_the_controller():
    options = BenchOptions(lengths=(1, 4, None))
    assert names(settings_of(options, has_draft=True)) == [
        *(("draft", 1), ("draft", 4), ("ngram", 1), ("ngram", 4), ("auto", None))
    ]
    assert names(settings_of(options, has_draft=False)) == [("ngram", 1), ("ngram", 4), ("ngram", None)]


def test_with_types_exactly_these_each_once():
    options = BenchOptions(lengths=(0, 4, None), spec_types=("none", "draft", "auto"))
    assert names(settings_of(options, has_draft=True)) == [
        *(("none", 0), ("draft", 4), ("draft", None), ("auto", None))
    ]
    with pytest.raises(ConfigError, match="needs a draft model, none was given"):
        settings_of(options, has_draft=False)


def test_temperature_zero_has_one_verifier():
    options = BenchOptions(lengths=(2,), spec_types=("ngram",), temperatures=(0.0, 0.8), verifiers=("block", "coupled"))
    assert settings_of(options, has_draft=False) == [
        Setting("ngram", 2, 0.0, "greedy"),
        Setting("ngram", 2, 0.8, "block"),
        Setting("ngram", 2, 0.8, "coupled"),
    ]


def test_lengths_that_the_session_does_not_draft_are_measured_once(tiny_model, monkeypatch):
    """--exact, where passes of up to three tokens are exact."""
    proof = Proof({}, 3, 1.0, (16,))
    monkeypatch.setattr("specli.exact.settle", lambda *_arguments: proof)
    options = BenchOptions(lengths=(1, 2, 4, 8, None), spec_types=("ngram",), n_predict=8)
    chosen = settings(tiny_model(), n_max=options.k_max, fixed=True, model={"n_ctx": 128})
    notices = []
    with Session(dataclasses.replace(chosen, exact=True)) as loaded:
        assert loaded.speculation.k == 2
        prompts = [Prompt("w", "w 1", "abcabcabcabc")]
        report = measure(loaded, prompts, options, Watch(notice=notices.append), [])
    assert sorted(cell.setting.k or 0 for cell in report.cells) == [0, 1, 2]
    assert notices == ["--spec-draft-n-max 4, 8: a pass has room for drafts of 2 tokens here; that is measured"]


@pytest.mark.parametrize(
    ("text", "wanted"), [("90s", 90), ("15m", 900), ("1h30m", 5400), ("600", 600), ("0", None), ("1.5h", 5400)]
)
def test_times(text, wanted):
    assert seconds(text) == wanted


BAD = {
    ("-r", "0"): "-r/--repetitions got 0, expected at least 1",
    ("-n", "1"): "-n/--predict got 1, expected at least 2 tokens",
    ("-w", "chat,poems"): "--workloads got 'poems', expected some of chat, code",
    ("-w", "chat", "--prompts", "x.txt"): "--workloads and --prompts were both given",
    ("--prompts", "missing.txt"): "--prompts missing.txt cannot be read",
    ("--spec-draft-n-max", "1,two"): "--spec-draft-n-max got 'two', expected auto or a number of tokens",
    ("--spec-draft-n-max", "999"): "--draft-max got 999, expected auto, or 0 (no drafting) to 256 tokens",
    ("--temp", "0,warm"): "--temp got 'warm', expected numbers between commas",
    ("--temp", "nan"): "--temp got nan, expected a finite number",
    ("--spec-type", "medusa"): "--spec-type got 'medusa', expected one of auto, none, draft, ngram",
    ("--verify", "all"): "--verify got 'all', expected one of block, rejection, coupled",
    ("--time-budget", "soon"): "--time-budget got 'soon', expected a time",
    ("-o", "xml"): "-o/--output got 'xml', expected one of table, md, json, jsonl, csv",
    ("--save", "no/where.json"): "--save no/where.json cannot be written",
    ("--plot", "a.gif"): "--plot got a.gif, expected a file that ends in .png or .svg",
    ("--compare", "a.json", "b.json"): "--compare a.json cannot be read",
    ("-m", "missing.gguf", "-w", "chat"): "missing.gguf: found no such file",
}


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_bad_input_is_one_line(specli: CommandLine, arguments):
    assert specli("bench", *arguments).error.startswith(BAD[arguments])


def test_j5_nothing_to_time_is_one_line(specli: CommandLine, tiny_model, tmp_path):
    """A context with room for one token more than the prompt has no time per token; no inf, no NaN."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c d e f g h\n", "utf-8")
    ended = specli("bench", "-m", tiny_model(), "--raw", "--prompts", prompts, "-c", "4")
    assert ended.code == 5
    assert "no prompt fits; the prompt has" in ended.error


# -- real weights


@pytest.fixture(scope="module")
def saved(specli: CommandLine, q4_0_path, tmp_path_factory):
    """One short bench, as JSON, with everything kept."""
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "prompts.jsonl"
    texts = ["Count from one to twenty.", "Repeat this: the fox, the fox, the fox.", "word " * 3000, "Why is it dark?"]
    prompts.write_text("".join(json.dumps({"prompt": text, "workload": "w"}) + "\n" for text in texts), "utf-8")
    ended = specli(
        *("bench", "--prompts", prompts, "--spec-type", "draft,ngram,none", "--spec-draft-n-max", "2,4"),
        *("--temp", "0,0.8", "--verify", "coupled", "-n", "12", "-r", "1", "-c", "512", "-t", "2"),
        *("-o", "json", "--save", folder / "a.json", "--plot", folder / "a.png"),
    )
    assert ended.code == 0, ended.err
    return json.loads(ended.out), ended.err, folder


@pytest.mark.model
def test_every_cell_of_a_real_bench(saved):
    found, _, folder = saved
    cells = {(cell["drafter"], cell["k"], cell["temperature"]): cell for cell in found["cells"]}
    wanted = {(kind, k, t) for kind in ("draft", "ngram") for k in (2, 4) for t in (0.0, 0.8)}
    assert set(cells) == wanted | {("none", 0, 0.0), ("none", 0, 0.8)}
    for cell in cells.values():
        assert cell["prompts"] == 3
        assert cell["identity"]["n_same"] == cell["identity"]["n_compared"] == 3  # greedy, and coupled by its seed
        assert cell["decode_tok_s"]["low"] <= cell["decode_tok_s"]["median"] <= cell["decode_tok_s"]["high"]
        assert cell["speedup"]["low"] < cell["speedup"]["value"] < cell["speedup"]["high"]
        assert cell["ttft_s"] > 0
        assert cell["peak_bytes"] > 50e6
        assert cell["accepted"] <= cell["proposed"]
        assert abs(sum(cell["time_shares"].values()) - 1) < 1e-9
    assert cells["draft", 4, 0.0]["c"] > 0
    assert cells["none", 0, 0.0]["acceptance_rate"] is None
    low, high = (cells["none", 0, 0.0]["speedup"][end] for end in ("low", "high"))
    assert low < 1 < high or (0.5 < low < 2)  # plain against plain; a busy machine may do anything
    assert found["ended"] == "done"
    assert len(found["models"]["target"]["sha256"]) == len(found["models"]["draft"]["sha256"]) == 64
    assert found["settings"]["n_ctx"] == 512
    assert (folder / "a.png").stat().st_size > 10_000


@pytest.mark.model
def test_a_prompt_that_does_not_fit_is_reported_and_the_others_are_measured(saved):
    found, stderr, _ = saved
    assert list(found["skipped_prompts"]) == ["w 3"]
    assert "the context holds 512" in found["skipped_prompts"]["w 3"]
    assert "w 3 is left out: the prompt has" in stderr


@pytest.mark.model
def test_saved_files_compare(saved, specli: CommandLine):
    _, _, folder = saved
    ended = specli("bench", "--compare", folder / "a.json", folder / "a.json", "-o", "jsonl")
    assert ended.code == 0
    changes = [json.loads(line) for line in ended.out.decode().splitlines()]
    assert len(changes) == 10
    assert {change["verdict"] for change in changes} == {"no sure change"}
    other = json.loads((folder / "a.json").read_text("utf-8"))
    other["models"]["target"]["sha256"] = "0" * 64
    (folder / "b.json").write_text(json.dumps(other), "utf-8")
    error = specli("bench", "--compare", folder / "a.json", folder / "b.json").error
    assert error.startswith("--compare got files of different target models")


@pytest.mark.model
def test_ctrl_c_prints_what_is_done(specli: CommandLine, q4_0_path):
    arguments = ("bench", "-w", "story", "--spec-type", "ngram", "--spec-draft-n-max", "2", "-n", "4", "-r", "99999")
    with specli.start(*arguments, "-c", "512", "-o", "jsonl", stderr=subprocess.PIPE) as process:
        time.sleep(8)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    if out:
        (cell,) = map(json.loads, out.decode().splitlines())
        assert cell["workload"] == "story"
    else:  # a busy machine
        assert b"stopped before the first comparison" in err


@pytest.mark.model
def test_a_budget_that_is_too_short_is_one_line(specli: CommandLine, q4_0_path):
    error = specli("bench", "-w", "chat", "-c", "512", "--time-budget", "0.5s").error
    assert error.startswith("--time-budget of 0.5 s was over before the first comparison")


@pytest.fixture(scope="module")
def session(q4_0_path, draft_path):
    options = settings(q4_0_path, draft_path, n_max=16, fixed=True, model={"n_ctx": 512, "n_threads": 2})
    with Session(options) as loaded:
        yield loaded


@pytest.mark.model
def test_runs_share_nothing_unless_asked(session):
    """An answer that was given before is no help to n-gram drafting, and is under --share-drafts."""
    prompt = Prompt("w", "w 1", "Write one sentence about a fox.")
    setting = Setting("ngram", 4, 0.0, "greedy")
    with Runner(session, 24) as runner:
        first, second = (runner.decode(prompt, setting, 0) for _ in range(2))
    assert first.stats.tokens == second.stats.tokens
    assert (first.stats.proposed, first.stats.accepted) == (second.stats.proposed, second.stats.accepted)
    with Runner(session, 24, share=True) as runner:
        first, second = (runner.decode(prompt, setting, 0) for _ in range(2))
    assert first.stats.tokens == second.stats.tokens
    assert second.stats.accepted > first.stats.accepted


@pytest.mark.model
def test_every_drafter_runs_and_the_controller_learns_once(session):
    prompt = built_in(("rewrite",))[0]
    found = {}
    with Runner(session, 16) as runner:
        kinds = [
            Setting(kind, k, 0.0, "greedy") for kind, k in (("none", 0), ("draft", 3), ("ngram", 3), ("auto", None))
        ]
        runner.warm_up(prompt, kinds)
        for setting in kinds:
            found[setting.drafter] = runner.decode(prompt, setting, 0).stats
    assert len({stats.tokens for stats in found.values()}) == 1
    assert found["draft"].draft_s > 0
    assert found["ngram"].draft_s == found["none"].proposed == 0


@pytest.mark.model
def test_a_margin_is_what_plain_decoding_saw(session):
    prompt = built_in(("chat",))[0]
    with Runner(session, 8) as runner:
        tokens = runner.decode(prompt, Setting("none", 0, 0.0, "greedy"), 0).stats.tokens
        for at in (0, 3):
            assert runner.margin(prompt, tokens, at, tokens[at]) == 0
            assert runner.margin(prompt, tokens, at, tokens[at] + 1) > 0
    assert session.engine.n_past(0) == 0


def resident_bytes() -> int:
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
    return 1024 * int(found[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of memory")
def test_j14_memory_does_not_grow_with_requests(tiny_model):
    options = settings(tiny_model(), type="ngram", n_max=4, fixed=True, model={"n_ctx": 256})
    grown = []
    with Session(options) as session, Runner(session, 64, raw=True) as runner:
        for i in range(200):
            prompt = Prompt("w", f"w {i}", " ".join(chr(97 + (i * 7 + j) % 26) for j in range(8)))
            runner.decode(prompt, Setting("ngram", 4, 0.0, "greedy"), i)
            if i in (49, 199):
                grown.append(resident_bytes())
    assert grown[1] - grown[0] < 4 << 20


@pytest.mark.model
def test_prompts_must_leave_room_for_two_tokens(session):
    with Runner(session, 8) as runner, pytest.raises(ContextOverflow, match="the context holds 512"):
        runner.prompt_ids(Prompt("w", "w 1", "word " * 600))
