"""Statistics, cells, advice, files, tables and pictures of a bench: pure, on simulated runs."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math

import numpy as np
import pytest
from simulated import PLAIN, Machine, draft_of

from specli.bench import advice, compare, document, files, report, workloads
from specli.bench.harness import Setting
from specli.bench.statistics import Estimate, Pair, median, quantiles, speedup, t_quantile
from specli.cli.bench import BenchFlags
from specli.cli.deliver import FORMATS, deliver, deliver_comparison
from specli.errors import ConfigError
from specli.render import bench as render
from specli.render.tables import PIPE_WIDTH

# -- statistics


@pytest.mark.parametrize(
    ("degrees", "wanted"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_students_t(degrees, wanted):
    assert t_quantile(0.975, degrees) == pytest.approx(wanted, rel=0.011)


def test_a_speedup_is_the_ratio_of_the_time_that_the_same_tokens_take():
    pairs = [Pair("a", 100, 10.0, 5.0), Pair("b", 50, 20.0, 20.0)]
    assert speedup(pairs).value == pytest.approx((100 * 10 + 50 * 20) / (100 * 5 + 50 * 20))


def test_repetitions_count_by_their_median_and_are_no_news_of_other_prompts():
    once = [Pair(str(i), 50, 10.0, 10.0 / (1 + 0.1 * i)) for i in range(6)]
    thrice = [dataclasses.replace(pair, after=pair.after * factor) for pair in once for factor in (1.0, 1.0, 9.0)]
    assert speedup(thrice).value == pytest.approx(speedup(once).value)
    assert speedup(thrice).interval == pytest.approx(speedup(once).interval)


def test_one_pair_has_no_interval_and_none_has_no_value():
    assert speedup([]) is None
    assert speedup([Pair("a", 50, 10.0, 8.0)]) == Estimate(1.25)
    assert Estimate(1.25).interval is None


def test_a_single_prompt_is_judged_by_its_repetitions():
    found = speedup([Pair("a", 50, 10.0, 10.0 / ratio) for ratio in (1.1, 1.2, 1.3, 1.2, 1.25, 1.15, 1.2)])
    assert found.low < 1.2 < found.high
    assert found.low > 1


def test_two_pairs_are_not_enough_to_be_sure():
    found = speedup([Pair("a", 50, 10.0, 8.0), Pair("b", 50, 10.0, 7.0)])
    assert found.low < 1 < found.high


def test_intervals_are_seeded_and_shrink_with_prompts():
    rng = np.random.default_rng(0)
    pairs = [Pair(str(i), 50, 10.0, 10.0 / ratio) for i, ratio in enumerate(rng.normal(1.2, 0.1, 64))]
    assert speedup(pairs, 1) == speedup(pairs, 1)
    few, many = (speedup(pairs[:n]) for n in (8, 64))
    assert many.high - many.low < 0.6 * (few.high - few.low)


def test_medians_and_quantiles_of_nothing_are_none():
    assert median([]) is None
    assert quantiles([], (0.5,)) is None
    assert quantiles([1.0, 2.0, 3.0], (0.5, 1.0)) == [2.0, 3.0]


# -- workloads


def test_eight_workloads_of_at_least_eight_prompts():
    prompts = workloads.built_in()
    counts = {name: sum(prompt.workload == name for prompt in prompts) for name in workloads.WORKLOADS}
    assert len(counts) == 8
    assert min(counts.values()) >= 8
    assert set(workloads.TITLES) == set(counts)
    assert len({prompt.text for prompt in prompts}) == len({prompt.name for prompt in prompts}) == len(prompts)


def test_some_workloads_and_an_unknown_one():
    assert {prompt.workload for prompt in workloads.built_in(("code", "chat", "code"))} == {"code", "chat"}
    with pytest.raises(ConfigError, match=r"'poetry', expected some of chat, code"):
        workloads.built_in(("chat", "poetry"))


FILES = {
    "own.txt": ("Hello there.\n\n  How are you?\r\n", [("own", "Hello there."), ("own", "How are you?")]),
    "own.jsonl": ('"Hello"\n{"prompt": "Bye", "workload": "w"}\n', [("own", "Hello"), ("w", "Bye")]),
    "braces": ('{"prompt": "a\\nb", "system": "s"}', [("own", "a\nb")]),
    "bom.txt": ("\ufeffHi", [("own", "Hi")]),
}


@pytest.mark.parametrize("name", FILES)
def test_prompts_of_a_file(tmp_path, name):
    text, wanted = FILES[name]
    (tmp_path / name).write_bytes(text.encode())
    found = workloads.read_prompts(tmp_path / name)
    assert [(prompt.workload, prompt.text) for prompt in found] == wanted
    assert len({prompt.name for prompt in found}) == len(found)


BAD_FILES = {
    "empty.txt": (b"\n \n", "holds no prompt"),
    "broken.jsonl": (b'{"prompt": "a"}\n\n{"prompt": \n', "line 3 is not JSON"),
    "no-prompt.jsonl": (b'{"prompt": "a"}\n{"text": "b"}\n', "line 2 has no 'prompt'"),
    "list.jsonl": (b'["a"]\n', "line 1 holds a list"),
    "blank.jsonl": (b'{"prompt": " "}\n', "line 1 has the prompt ' '"),
    "workload.jsonl": (b'{"prompt": "a", "workload": 3}\n', "line 1 has a 'workload' or 'system' that is not a text"),
    "bytes.txt": (b"fine\nbad \xff\n", "line 2 is not UTF-8: byte 0xff"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_line_is_named(tmp_path, name):
    data, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError) as error:
        workloads.read_prompts(tmp_path / name)
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--prompts .*none\.txt cannot be read"):
        workloads.read_prompts(tmp_path / "none.txt")


# -- reports of simulated benches


def make_report(*settings, flags=("-m", "t.gguf"), seed=1, sha="a" * 64, **machine) -> document.Report:
    simulated = Machine(seed, **machine)
    outcome = simulated.bench(*(settings or (draft_of(1), draft_of(2), draft_of(4))))
    known = report.costs(outcome.trials)
    cells = report.cells(outcome.trials, known)
    circumstances = {
        "date": "2026-01-31T00:00:00+00:00",
        "specli": "0",
        "library": "l",
        "hardware": {"cpu": "two cores"},
        "models": {"target": {"name": "t.gguf", "bytes": 1, "sha256": sha}, "draft": None},
        "settings": {"n_predict": simulated.n_tokens},
    }
    conclusion = advice.conclude(cells, flags)
    prompts = simulated.prompts()
    return document.Report(
        circumstances, prompts, cells, known, conclusion, {}, outcome.ending, outcome.n_done, outcome.n_planned, 1.0
    )


@pytest.fixture(scope="module")
def fast():
    """A machine where speculation pays."""
    return make_report(acceptance=0.85, c=0.05, v=lambda n: 1 + 0.1 * (n - 1))


@pytest.fixture(scope="module")
def slow():
    """One where it does not."""
    return make_report(acceptance=0.3, c=0.3, v=lambda n: 1 + 0.4 * (n - 1))


def test_cells_are_sorted_and_agree_with_their_predictions(fast):
    assert [cell.setting.k for cell in fast.cells] == [1, 2, 4]
    for cell in fast.cells:
        assert cell.predicted == pytest.approx(cell.speedup.value, rel=0.05)
        assert cell.tok_s.low <= cell.tok_s.median <= cell.tok_s.high
        assert cell.itl_token_ms[0] <= cell.itl_token_ms[1] <= cell.itl_token_ms[2]
        assert cell.verdict == "pays"
        assert cell.n_prompts == 8


def test_it_is_said_that_it_pays_and_what_to_type(fast):
    words = fast.conclusion.words
    assert words[0] == "speculation pays here for the workload with the right setting"
    assert "draft K 4" in words[1]
    assert words[1].endswith("pays")
    assert words[-1] == "use: specli run -m t.gguf --spec-type draft --spec-draft-n-max 4 --draft-fixed --temp 0"


def test_it_is_said_that_it_does_not_pay_and_why(slow):
    words = slow.conclusion.words
    assert words[0].startswith("speculation does not pay here")
    assert "acceptance is too low" in words[1]
    assert words[-1] == "use: specli run -m t.gguf --spec-type none --temp 0"


@pytest.mark.parametrize(
    ("machine", "cause"),
    [
        ({"acceptance": 0.9, "c": 0.9, "v": lambda n: 1 + 0.02 * (n - 1)}, "the draft is too heavy (0.9"),
        ({"acceptance": 0.9, "c": 0.02, "v": lambda n: 0.8 * n + 0.2}, "verification is not flat"),
        ({"acceptance": 0.1, "c": 0.1, "v": lambda n: 1 + 0.1 * (n - 1)}, "acceptance is too low (2%"),
    ],
)
def test_the_weightiest_cause_comes_first(machine, cause):
    found = make_report(draft_of(4), **machine)
    assert report.reasons(found.cells[0])[0].startswith(cause.split("(")[0].strip())
    assert any(cause in words for words in report.reasons(found.cells[0]))


def test_break_even_is_the_acceptance_at_which_a_round_brings_what_it_costs():
    found = make_report(draft_of(4), acceptance=0.1, c=0.1, v=lambda n: 1 + 0.1 * (n - 1), noise=0.0)
    assert "acceptance is too low (2%, 20% would break even)" in report.reasons(found.cells[0])[0]


def test_the_best_is_the_surest_where_there_is_enough_to_tell(fast):
    first, second = (dataclasses.replace(cell) for cell in fast.cells[:2])
    sure = dataclasses.replace(first, speedup=Estimate(1.2, 1.15, 1.25))
    lucky = dataclasses.replace(second, speedup=Estimate(1.5, 0.8, 2.8))
    assert report.best([sure, lucky]) is sure
    few = dataclasses.replace(lucky, pairs=lucky.pairs[:3])  # its interval says little of anything
    assert report.best([sure, few]) is few
    assert report.best([]) is None


def test_flags_of_settings():
    assert advice.setting_flags(Setting("auto", None, 0.8, "block")) == []
    assert advice.setting_flags(Setting("ngram", 8, 0.0, "greedy")) == [
        *("--spec-type", "ngram", "--spec-draft-n-max", "8", "--draft-fixed", "--temp", "0")
    ]
    assert advice.setting_flags(Setting("draft", None, 1.0, "coupled")) == [
        *("--spec-type", "draft", "--temp", "1", "--verify", "coupled")
    ]
    assert advice.label(Setting("none", 0, 0.0, "greedy")) == "plain"


def test_plain_cells_are_never_the_advice():
    found = make_report(PLAIN)
    assert found.cells[0].verdict == "even"
    assert found.conclusion.advice == ()
    assert found.conclusion.headline.startswith("nothing was measured")


def test_texts_that_differ_are_told_with_position_and_margin():
    machine = Machine()
    outcome = machine.bench(draft_of(2))
    trial = outcome.trials[3]
    tokens = trial.run.stats.tokens
    trial.run.stats.tokens = (*tokens[:5], (tokens[5] + 1) % 8, *tokens[6:])
    difference = report.first_difference(trial)
    assert (difference.position, difference.plain_token) == (5, tokens[5])
    known = report.costs(outcome.trials)
    noted = dataclasses.replace(difference, margin=0.25)
    (cell,) = report.cells(outcome.trials, known, {3: noted})
    assert (cell.identity.n_same, cell.identity.n_compared, cell.identity.first) == (7, 8, noted)


# -- output


def all_numbers(value):
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [number for item in value for number in all_numbers(item)]
    return [value] if isinstance(value, float) else []


def test_the_document_is_strict_json_with_every_figure(fast):
    found = json.loads(json.dumps(fast.as_dict(), allow_nan=False))
    assert all(math.isfinite(number) for number in all_numbers(found))
    (cell, *_) = found["cells"]
    assert {"speedup", "decode_tok_s", "acceptance_rate", "per_position_acceptance", "mean_accepted_length"} <= set(
        cell
    )
    assert {"block_efficiency", "ttft_s", "tpot_ms", "itl_token_ms", "itl_burst_ms", "time_shares", "v", "c"} <= set(
        cell
    )
    assert {"speedup_predicted", "peak_bytes", "identity", "verdict"} <= set(cell)
    assert set(cell["itl_token_ms"]) == {"p50", "p95", "p99"}
    assert len(cell["pairs"]) == 8
    assert found["costs"]["v"]["2"]["passes"] > 0


def test_lines_repeat_the_circumstances(fast):
    lines = list(fast.lines())
    assert len(lines) == 3
    for line in lines:
        assert line["models"]["target"]["sha256"] == "a" * 64
        assert {"hardware", "library", "settings", "workload", "k"} <= set(line)
        assert "pairs" not in line


def test_csv_columns_are_flat(fast):
    rows = [document.flat(line) for line in fast.lines()]
    assert rows[0]["models.target.sha256"] == "a" * 64
    assert rows[0]["speedup.value"] > 1
    assert json.loads(rows[0]["per_position_acceptance"])
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    assert len(list(csv.DictReader(io.StringIO(buffer.getvalue())))) == 3


@pytest.mark.parametrize("details", [False, True])
def test_the_table_fits_a_pipe_and_says_everything(fast, details):
    stream = io.StringIO()
    render.print_report(stream, {}, fast, details=details)
    text = stream.getvalue()
    assert "\x1b" not in text
    lines = text.splitlines()
    assert max(map(len, lines[: lines.index(fast.conclusion.headline)])) <= PIPE_WIDTH
    for wanted in ("draft K 4", "speedup", "plain", "costs: a target pass over 2 tokens", "use: specli run"):
        assert wanted in text
    assert ("burst gap" in text) is details


def test_markdown_is_one_table_and_the_verdict(fast):
    text = render.markdown(fast)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 3
    assert len({line.count("|") for line in table}) == 1
    assert f"- {fast.conclusion.headline}" in text


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_drawn(fast, tmp_path, suffix):
    plot = pytest.importorskip("specli.bench.plot")
    pytest.importorskip("matplotlib")
    path = tmp_path / f"bench.{suffix}"
    plot.require_plotting(path)
    plot.draw(fast, path)
    assert path.stat().st_size > 10_000
    assert path.read_bytes()[:4] in (b"\x89PNG", b"<?xm")


def test_a_picture_of_another_format_is_refused(tmp_path):
    from specli.bench import plot

    with pytest.raises(ConfigError, match=r"--plot got a\.pdf, expected a file that ends in \.png or \.svg"):
        plot.require_plotting(tmp_path / "a.pdf")


# -- delivering


@pytest.mark.parametrize("form", FORMATS)
def test_a_report_goes_to_stdout_in_every_form_and_into_files(fast, form, tmp_path, capsys):
    def draw(_report, path):
        path.write_text("drawn", "utf-8")

    flags = BenchFlags(output=form, save=tmp_path / "a.json", plot=tmp_path / "a.svg")
    deliver(fast, flags, render.print_report, render.markdown, draw)
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out) == document.load(tmp_path / "a.json")
    elif form == "jsonl":
        assert [json.loads(line)["k"] for line in out.splitlines()] == [line["k"] for line in fast.lines()]
    elif form == "csv":
        assert [float(row["speedup.value"]) > 1 for row in csv.DictReader(io.StringIO(out))] == [True] * 3
    else:
        assert fast.conclusion.headline in out
    assert (tmp_path / "a.svg").read_text("utf-8") == "drawn"


@pytest.mark.parametrize("form", FORMATS)
def test_a_comparison_goes_to_stdout_in_every_form(fast, saved, form, capsys):
    found = compare.compare(saved(fast, "a.json"), saved(fast, "b.json"))
    rows = [compare.change_dict(change) for change in found.changes]
    deliver_comparison(found, rows, form, render.print_comparison, render.comparison_markdown)
    out = capsys.readouterr().out
    if form == "json":
        assert json.loads(out) == {"changes": rows, "notes": []}
    elif form == "jsonl":
        assert [json.loads(line) for line in out.splitlines()] == rows
    elif form == "csv":
        assert [row["verdict"] for row in csv.DictReader(io.StringIO(out))] == ["no sure change"] * 3
    else:
        assert out.count("no sure change") == 3


# -- comparing


@pytest.fixture
def saved(fast, tmp_path):
    def save(found: document.Report, name: str):
        path = tmp_path / name
        files.require_writable("--save", path)
        files.save(path, found)
        return document.load(path)

    return save


def test_a_file_compared_with_itself_changed_nothing(fast, saved):
    found = compare.compare(saved(fast, "a.json"), saved(fast, "b.json"))
    assert len(found.changes) == 3
    assert not found.notes
    for change in found.changes:
        assert change.plain.value == change.speculative.value == change.relative.value == 1.0
        assert change.words == "no sure change"


def test_a_faster_draft_is_better_and_a_slower_machine_cancels_out(fast, saved):
    better = make_report(acceptance=0.85, c=0.01, v=lambda n: 1 + 0.02 * (n - 1))
    found = compare.compare(saved(fast, "a.json"), saved(better, "b.json"))
    assert {change.words for change in found.changes} == {"better"}
    assert all(change.speculative.value > 1 for change in found.changes)
    document_of = saved(fast, "c.json")
    for cell in document_of["cells"]:
        cell["pairs"] = [[name, tokens, 2 * before, 2 * after] for name, tokens, before, after in cell["pairs"]]
    found = compare.compare(saved(fast, "a.json"), document_of)
    for change in found.changes:
        assert change.plain.value == pytest.approx(0.5)
        assert change.relative.value == pytest.approx(1.0)
    stream = io.StringIO()
    render.print_comparison(stream, {}, found)
    assert "no sure change" in stream.getvalue()
    assert render.comparison_markdown(found).count("| draft K") == 3
    assert json.dumps([compare.change_dict(change) for change in found.changes], allow_nan=False)


def test_other_settings_are_noted(fast, saved):
    other = saved(fast, "b.json")
    other["settings"]["n_predict"] = 7
    other["hardware"]["cpu"] = "four cores"
    notes = compare.compare(saved(fast, "a.json"), other).notes
    assert notes == ("n_predict was 64 and is 7", "cpu was two cores and is four cores")


def test_files_of_other_models_are_refused(fast, saved):
    other = make_report(draft_of(1), sha="b" * 64)
    with pytest.raises(ConfigError, match=r"different target models: t\.gguf \(aaaaaaaaaaaa\) and t\.gguf \(bbb"):
        compare.compare(saved(fast, "a.json"), saved(other, "b.json"))


def test_files_without_a_common_cell_are_refused(fast, saved):
    other = make_report(draft_of(8))
    with pytest.raises(ConfigError, match="without a common cell"):
        compare.compare(saved(fast, "a.json"), saved(other, "b.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "is not a bench"), ('{"cells": [], "models": {}, "prompts": {}}', "has format None")],
)
def test_files_that_are_no_bench_are_refused(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message):
        document.load(path)


def test_a_damaged_bench_is_refused_in_one_line(fast, saved):
    broken = saved(fast, "a.json")
    del broken["cells"][0]["pairs"]
    with pytest.raises(ConfigError, match="is damaged"):
        compare.compare(broken, broken)


def test_what_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"--save .* cannot be written"):
        files.require_writable("--save", tmp_path / "no" / "a.json")
    with pytest.raises(ConfigError, match=r"--save .* cannot be written"):
        files.require_writable("--save", tmp_path)
    files.require_writable("--save", tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()
