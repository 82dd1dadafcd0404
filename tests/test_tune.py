"""``specli tune``: what it prints was measured, and says so where there was nothing to measure."""

from __future__ import annotations

import json
import re

import pytest

from specli.cli.tune import break_even


def test_break_even_is_where_the_tokens_are_worth_the_cost():
    assert break_even(1, 1.3) == pytest.approx(0.3, abs=1e-6)
    assert break_even(2, 1.0) == pytest.approx(0.0, abs=1e-6)
    assert break_even(3, 4.0) is None
    assert break_even(3, 3.9) == pytest.approx(0.9834, abs=1e-3)  # 1 + a + a^2 + a^3 = 3.9


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(("-o", "xml"), "-o/--output got 'xml', expected one of table, json"), (("-n", "0"), "-n/--predict got 0")],
)
def test_bad_options(specli, arguments, line):
    run = specli("tune", *arguments)
    assert run.code == 2
    assert line in run.error


@pytest.mark.model
def test_a_pair_is_measured_and_its_profile_is_kept(specli, q4_0_path, draft_path):
    arguments = ("tune", "-m", q4_0_path, "-md", draft_path, "-n", "24", "-p", "Count from one to ten.")
    report = json.loads(specli(*arguments, "-o", "json").out)
    assert report["c"] > 0
    assert [row["k"] for row in report["lengths"]] == [1, 2, 3, 4, 6, 8, 12, 16]
    for row in report["lengths"]:
        assert row["cost"] == pytest.approx(row["v"] + row["k"] * report["c"])
        assert row["break_even"] == break_even(row["k"], row["cost"])
    kept = [json.loads(file.read_text()) for file in (specli.cache_home / "specli" / "profiles").glob("*.json")]
    assert report["c"] in [profile["costs"]["0"]["c"] for profile in kept if "costs" in profile]
    [told] = report["prompts"]
    assert (told["prompt"], sum(told["decisions"][kind] for kind in ("none", "draft", "ngram"))) == (
        arguments[-1],
        told["rounds"],
    )
    assert report["acceptance_rate"] == pytest.approx(report["accepted"] / report["proposed"])
    for count in ("proposed", "accepted"):  # by who proposed them, and in all
        assert sum(of[count] for of in told["drafted"].values()) == report[count]
    table = specli(*arguments).out.decode().splitlines()
    assert re.match(r"draft step c = 0\.\d\d; of its tokens \d+ of \d+ accepted", table[0])
    assert re.match(r"copies of the text \(n-gram\) cost nothing to propose; of these \d+ of \d+ accepted", table[1])
    assert table[-1].startswith("'Count from one to ten.': speculated in ")


@pytest.mark.model
def test_what_was_kept_of_costs_does_not_count_where_they_are_measured_anew(specli, q4_0_path, draft_path):
    """A curve that was taken on a busy machine says that nothing can pay."""
    arguments = ("tune", "-m", q4_0_path, "-md", draft_path, "-n", "8", "-p", "Hi.", "-o", "json")
    assert json.loads(specli(*arguments).out)["v"]["4"] < 3.9
    folder = specli.cache_home / "specli" / "profiles"
    paths = [file for file in folder.glob("*.json") if "costs" in json.loads(file.read_text())]
    assert paths
    for path in paths:  # of other tests, too
        kept = json.loads(path.read_text())
        v = {"v": {"1": 1.0, "2": 2.5, "4": 4.8, "8": 9.0}, "v_samples": {"2": 9, "4": 9, "8": 9}}
        kept["costs"]["0"] |= {**v, "c": 9.0, "c_samples": 9}
        path.write_text(json.dumps(kept))
    again = json.loads(specli(*arguments).out)
    assert again["v"]["4"] < 3.9
    assert again["c"] < 1


@pytest.mark.model
def test_without_a_draft_model_no_cost_of_one_is_told(specli, q4_0_path):
    arguments = ("tune", "-m", q4_0_path, "-n", "24", "-p", "Count from one to ten.")
    report = json.loads(specli(*arguments, "-o", "json").out)
    assert (report["c"], report["break_even"]) == (None, None)
    assert all(row["cost"] == row["v"] for row in report["lengths"])
    table = specli(*arguments).out.decode()
    assert table.startswith("no draft model; copies of the text (n-gram) cost nothing to propose; of these ")
