"""Profiles on disk: kept, found again for the same circumstances only, and never a reason to fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specli.controller import Controller
from specli.profile import FORMAT, load_profile, profile_path, save_profile
from specli.record import Outcome


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("specli.profile.platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    return tmp_path / "cache" / "specli"


def learned() -> Controller:
    """A controller that calibrated and drafted once."""
    controller = Controller(4)
    for n in (1, 1, 2, 4):
        controller.costs.observe_pass(n, 0.01 * (1 + 0.2 * (n - 1)))
    controller.costs.observe_draft(1, 1, 0.001)
    controller.begin(1)
    controller.plan(1, None, 4)
    controller.observe([Outcome("draft", [0.9, 0.8], 2, 1, 2)], 0.014, 0.002, 2, 1)
    return controller


def test_what_is_kept_comes_back(cache):
    path, before, after = profile_path("model", 4), learned(), Controller(4)
    assert load_profile(path) is None
    assert save_profile(path, before.profile())
    kept = load_profile(path)
    assert kept is not None
    assert after.restore(kept)
    assert after.costs.as_dict() == before.costs.as_dict()
    assert after.acceptance.as_dict() == before.acceptance.as_dict()
    assert after.profile()["profit"] == before.profile()["profit"]
    assert path.parent == cache / "profiles"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]  # no part file is left


def test_a_second_run_replaces_the_first(cache):
    path = profile_path("model")
    for c in (0.1, 0.3):
        assert save_profile(path, {"costs": {"c": c}})
    assert load_profile(path) == {"format": FORMAT, "costs": {"c": 0.3}}


def test_other_circumstances_have_another_profile(cache, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    parts = [file, "q8_0", 4, None, 0.5, True, ["a", "b"]]
    path = profile_path(*parts)
    assert path == profile_path(*parts)
    assert path == profile_path(Path(os.path.relpath(file)), *parts[1:])  # the same file by another name
    others = {profile_path(*parts[:i], "other", *parts[i + 1 :]) for i in range(len(parts))}
    assert len(others) == len(parts)
    assert path not in others
    file.write_bytes(b"other weights")
    assert profile_path(*parts) != path
    file.unlink()
    assert profile_path(*parts) != path  # a file that is gone has a name only


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{}",
        b'{"format": 0}',
        b'{"format": "1", "costs": {}}',
        b"\xff\xfe\x00 not text",
        b"[" * 100_000,
        b'{"format": 1' + b"9" * 5000 + b"}",
    ],
)
def test_a_damaged_file_is_as_good_as_none(cache, content):
    path = profile_path("model")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert load_profile(path) is None


@pytest.mark.parametrize("at", [0.2, 0.5, 0.9, 0.99])
def test_a_file_cut_short(cache, at):
    path = profile_path("model")
    save_profile(path, learned().profile())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(at * len(whole))])
    assert load_profile(path) is None


def test_a_file_with_another_value_anywhere(cache):
    """Each value of a real profile replaced by nonsense in turn: what is read does no harm."""
    path = profile_path("model")
    save_profile(path, learned().profile())
    whole = json.loads(path.read_text())

    def places(value, at=()):
        yield at
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(len(value)):
                yield from places(value[key], (*at, key))

    n_read = 0
    for at in places(whole):
        for nonsense in (None, -1, 1e308, "x", [], {}, float("nan")):
            if not at:
                continue
            damaged = json.loads(json.dumps(whole))
            inner = damaged
            for key in at[:-1]:
                inner = inner[key]
            inner[at[-1]] = nonsense
            path.write_text(json.dumps(damaged))
            kept, controller = load_profile(path), Controller(4)
            if kept is None:
                assert at == ("format",)
                continue
            controller.restore(kept)
            controller.begin(1)
            controller.plan(3, [0.5], 4)
            controller.observe([Outcome("none", (), 0, 0, 1)], 0.01, 0.0, 0, 0)
            json.dumps([controller.profile(), controller.report()], allow_nan=False)
            n_read += 1
    assert n_read > 200


def test_a_folder_in_place_of_the_file(cache):
    path = profile_path("model")
    path.mkdir(parents=True)
    assert load_profile(path) is None
    assert not save_profile(path, {})
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_cache_that_cannot_be_written(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert not save_profile(profile_path("model"), learned().profile())
    assert load_profile(profile_path("model")) is None
