"""``specli models`` and the flags that name models, as processes, against a stand-in of the hub."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, FakeHub, Repo, serve, sha256

from specli.cli.models import ModelChoice
from specli.errors import ConfigError

MB = 1 << 20
RUN = ("run", "--raw", "--temp", "0", "-n", "6", "-p", "hello")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeHub]:
    with serve() as fake:
        yield fake


@pytest.fixture
def online(server: FakeHub) -> FakeHub:
    fresh = FakeHub(url=server.url, cdn_url=server.cdn_url)
    server.__dict__.update(fresh.__dict__)
    return server


@pytest.fixture
def env(online: FakeHub, tmp_path: Path) -> dict[str, str]:
    """Where a process finds the hub, its cache and the user's entries."""
    folders = {"HF_HOME": tmp_path / "hf", "XDG_CONFIG_HOME": tmp_path / "config"}
    return {"HF_ENDPOINT": online.url, **{name: str(folder) for name, folder in folders.items()}}


def write_pairs(env: dict[str, str], text: str) -> Path:
    path = Path(env["XDG_CONFIG_HOME"]) / "specli" / "models.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text, "utf-8")
    return path


def pair(name: str, target: str, draft: str, more: str = "") -> str:
    """An entry whose sides are hub repositories."""
    facts = 'licence = "MIT", tokenizer = "t"'
    return (
        f'[pairs.{name}]\ntarget = {{ repo = "{target}", {facts} }}\ndraft = {{ repo = "{draft}", {facts} }}\n'
        f'k = [1, 4]\nuse = "tests"\n{more}'
    )


# -- list and show


def test_list(specli, env) -> None:
    own = write_pairs(env, pair("mine", "org/big-GGUF", "org/small-GGUF"))
    done = specli("models", "list", env=env)
    assert done.code == 0
    lines = done.out.decode().splitlines()
    assert lines[0].split() == ["pair", "target", "draft", "K", "on", "disk", "tokenizer", "licence", "use"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert rows["llama-3.1-70b-8b"].split()[1:9] == ["70B", "42.5", "GB", "8B", "4.92", "GB", "3-6", "-"]
    assert " ?  " in rows["mine"]
    assert rows["mine"].endswith("tests")
    assert not any(line != line.rstrip() for line in lines)
    assert done.err.strip() == f"your own entries: {own}"
    assert specli("models", env=env).out == done.out


def test_list_as_json(specli, env, online: FakeHub) -> None:
    done = specli("models", "list", "-o", "json", env=env)
    assert (done.code, done.err) == (0, "")
    pairs = {entry["name"]: entry for entry in json.loads(done.out)}
    entry = pairs["qwen3-32b-0.6b"]
    assert entry["k"] == [4, 10]
    assert (entry["n_max"], entry["tokenizer"], entry["licence"]) == (None, "qwen3", "Apache-2.0")
    assert entry["target"] == {
        "name": "qwen3-32b",
        "title": "Qwen3 32B",
        "parameters": "32B",
        "size_bytes": 19_800_000_000,
        "licence": "Apache-2.0",
        "tokenizer": "qwen3",
        "source": {"repo": "ggml-org/Qwen3-32B-GGUF", "quant": "Q4_K_M", "file": None, "revision": None},
        "on_disk": None,
    }
    assert Path(pairs["smollm2-135m"]["draft"]["on_disk"]).is_file()
    assert online.requests == []


def test_show(specli, env) -> None:
    done = specli("models", "show", "smollm2-135m", env=env)
    text = done.out.decode()
    assert done.code == 0
    assert "draft length K  1 to 4 tokens, 3 measured best" in text
    assert "data/smollm2-135m-draft-q8_0.gguf in the package specli" in text
    assert "specli run --pair smollm2-135m -p ..." in text
    shown = json.loads(specli("models", "show", "smollm2-135m", "-o", "json", env=env).out)
    assert shown["defined_in"].endswith("models.toml")
    hub_text = specli("models", "show", "gemma-3-27b-1b", env=env).out.decode()
    assert "hub: ggml-org/gemma-3-27b-it-GGUF/gemma-3-27b-it-Q4_K_M.gguf" in hub_text
    assert "not on this disk" in hub_text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("models", "show", "nope"), 2, "there is no pair 'nope'; `specli models list` shows all"),
        (("models", "pull", "nope"), 2, "there is no pair 'nope'"),
        (("models", "list", "-o", "xml"), 2, "-o/--output got 'xml', expected one of table, json"),
        (("models", "pull", "a/b/c"), 2, "pull got 'a/b/c', expected USER/MODEL"),
        (("models", "pull", "x", "-hftABC"), 2, "-hftABC is not an option; write the value apart: -hft ABC"),
        (("run", "-hforg/model", "-p", "x"), 2, "write the value apart: -hf org/model"),
        (("models", "push"), 2, "push"),
        (("run", "--pair", "nope", "-p", "x"), 2, "there is no pair 'nope'"),
        (("run", "-hf", "nope", "-p", "x"), 2, "-hf got 'nope', expected USER/MODEL"),
    ],
)
def test_refusals(specli, env, arguments, code: int, words: str) -> None:
    done = specli(*arguments, env=env)
    assert done.code == code
    assert words in done.error


def test_a_mistake_in_the_users_entries(specli, env) -> None:
    own = write_pairs(env, pair("mine", "org/big", "org/small", "colour = 1\n"))
    for arguments in (("models", "list"), ("run", "-p", "x"), ("models", "pull", "qwen3-32b-0.6b")):
        done = specli(*arguments, env=env)
        assert done.code == 2
        assert done.error.startswith(f"{own}, line 6: pairs.mine: unknown key 'colour'")


# -- pull


def test_pull_a_pair(specli, env, online: FakeHub) -> None:
    shards = {f"big-Q4_K_M-{i:05}-of-00002.gguf": os.urandom(1000) for i in (1, 2)}
    online.repos = {"org/big": Repo(shards), "org/small": Repo({"small-Q8_0.gguf": os.urandom(10)})}
    write_pairs(env, pair("mine", "org/big", "org/small"))
    done = specli("models", "pull", "mine", env=env)
    assert done.code == 0
    paths = [Path(line) for line in done.out.decode().splitlines()]
    assert [path.name for path in paths] == [*shards, "small-Q8_0.gguf"]
    assert [path.read_bytes() for path in paths[:2]] == list(shards.values())
    assert done.err.splitlines() == [
        "downloading big-Q4_K_M-00001-of-00002.gguf (1 kB)",
        "downloading big-Q4_K_M-00002-of-00002.gguf (1 kB)",
        "downloading small-Q8_0.gguf (10 bytes)",
    ]
    again = specli("models", "pull", "mine", env=env)
    assert (again.code, again.out, again.err) == (0, done.out, "")
    listed = json.loads(specli("models", "show", "mine", "-o", "json", env=env).out)
    assert listed["target"]["on_disk"] == str(paths[0])
    offline = specli("models", "pull", "mine", env={**env, "HF_HUB_OFFLINE": "1"})
    assert (offline.code, offline.out) == (0, done.out)


def test_pull_one_file(specli, env, online: FakeHub) -> None:
    online.repos["org/model"] = Repo({"m-Q4_0.gguf": b"4", "m-Q8_0.gguf": b"8"})
    done = specli("models", "pull", "org/model:q8_0", env=env)
    assert Path(done.out.decode().strip()).read_bytes() == b"8"


def test_pull_with_a_token(specli, env, online: FakeHub) -> None:
    online.repos["org/gated"] = Repo({"m.gguf": b"x"}, gated=True)
    refused = specli("models", "pull", "org/gated", env=env)
    assert refused.code == 3
    assert refused.error.startswith("org/gated is gated: accept its licence on its page")
    assert specli("models", "pull", "org/gated", env={**env, "HF_TOKEN": TOKEN}).code == 0
    wrong = specli("models", "pull", "org/gated", "-hft", "hf_wrong", env={**env, "HF_TOKEN": TOKEN})
    assert wrong.code == 3  # the flag beats the variable
    assert "gated" in wrong.error
    assert "hf_wrong" not in wrong.err


def test_pull_offline(specli, env, online: FakeHub) -> None:
    done = specli("models", "pull", "org/model", env={**env, "HF_HUB_OFFLINE": "1"})
    assert done.code == 3
    assert "HF_HUB_OFFLINE is set" in done.error
    assert online.requests == []


def test_pull_what_is_in_a_package(specli, env, online: FakeHub) -> None:
    done = specli("models", "show", "smollm2-135m", "-o", "json", env=env)
    draft = json.loads(done.out)["draft"]["on_disk"]
    pulled = specli("models", "pull", "smollm2-135m", env=env)
    assert online.requests == []
    if pulled.code == 0:
        assert pulled.out.decode().splitlines()[1] == draft
    else:
        assert "pip install" in pulled.error


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_stops_a_download_at_once_and_the_next_goes_on(specli, env, online: FakeHub) -> None:
    data = os.urandom(4 * MB)
    online.repos["org/model"] = Repo({"m-Q4_K_M.gguf": data})
    online.stall_at = 2 * MB + 1
    partial = Path(env["HF_HOME"]) / "hub" / "models--org--model" / "blobs" / f"{sha256(data)}.incomplete"
    with specli.start("models", "pull", "org/model", env=env) as process:
        wait_for(lambda: partial.is_file() and partial.stat().st_size >= 2 * MB)
        process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        out, err = process.communicate(timeout=60)
    assert time.monotonic() - started_s < 30  # the server never goes on, and the client would wait 10 s five times
    assert (process.returncode, out) == (130, b"")
    assert b"specli: error: stopped while fetching org/model; what came stays" in err
    online.stall_at = None
    online.requests.clear()
    done = specli("models", "pull", "org/model", env=env)
    assert "going on at 2.1 MB" in done.err
    assert Path(done.out.decode().strip()).read_bytes() == data
    assert online.ranges() == [f"bytes={2 * MB}-"]


def wait_for(happened, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


# -- flags of commands that load models


@pytest.fixture
def tiny_hub(online: FakeHub, tiny_model) -> FakeHub:
    """Two tiny models that share a vocabulary, as repositories."""
    target, draft = (tiny_model("llama", seed=seed).read_bytes() for seed in (1, 2))
    online.repos = {
        "org/target": Repo({"t-Q4_K_M.gguf": target, "t-Q8_0.gguf": draft}),
        "org/draft": Repo({"d-F32.gguf": draft}),
    }
    return online


def test_run_from_the_hub(specli, env, tiny_hub, tiny_model) -> None:
    local = specli(*RUN, "-m", tiny_model("llama", seed=1), env=env)
    assert local.code == 0
    fetched = specli(*RUN, "-hf", "org/target", "-hfd", "org/draft", "--stats-json", "-", env=env)
    assert fetched.code == 0, fetched.err
    figures = json.loads(fetched.out)
    assert figures["text"] == local.out.decode()
    assert figures["speculating"]
    assert "downloading t-Q4_K_M.gguf" in fetched.err
    assert "downloading d-F32.gguf" in fetched.err
    tiny_hub.requests.clear()
    again = specli(*RUN, "-hf", "org/target:Q4_K_M", "-hfd", "org/draft:f32", env=env)
    assert (again.out, tiny_hub.requests) == (local.out, [])
    named = specli(*RUN, "-hf", "org/target:Q2_K", "-hff", "t-Q8_0.gguf", env=env)
    assert named.out == specli(*RUN, "-m", tiny_model("llama", seed=2), env=env).out


def test_run_a_pair(specli, env, tiny_hub) -> None:
    write_pairs(env, pair("mine", "org/target", "org/draft", "n_max = 2\n"))
    by_pair = specli(*RUN, "--pair", "mine", "--stats-json", "-", env=env)
    assert by_pair.code == 0, by_pair.err
    assert json.loads(by_pair.out)["speculating"]
    plain = specli(*RUN, "--pair", "mine", "--spec-type", "none", env=env)
    assert plain.out.decode() == json.loads(by_pair.out)["text"]


def test_a_draft_that_is_not_used_is_not_fetched(specli, env, tiny_hub) -> None:
    write_pairs(env, pair("mine", "org/target", "org/draft"))
    for flags in (("--spec-type", "none"), ("--spec-type", "ngram"), ("--spec-draft-n-max", "0")):
        done = specli(*RUN, "--pair", "mine", *flags, env=env)
        assert done.code == 0, done.err
    assert not [path for _, path, _ in tiny_hub.requests if "draft" in path]


def test_a_flag_beats_the_environment(specli, env, tiny_hub, tiny_model) -> None:
    local = tiny_model("llama", seed=1)
    expected = specli(*RUN, "-m", local, env=env).out
    shell = {**env, "LLAMA_ARG_MODEL": "missing.gguf", "LLAMA_ARG_SPEC_DRAFT_MODEL": "missing.gguf"}
    assert specli(*RUN, "-hf", "org/target", "-hfd", "org/draft", env=shell).out == expected
    shell = {**env, "LLAMA_ARG_HF_REPO": "org/none", "LLAMA_ARG_HF_FILE": "none", "LLAMA_ARG_SPEC_DRAFT_HF_REPO": "o/n"}
    assert specli(*RUN, "-m", local, "-md", local, env=shell).out == expected
    assert specli(*RUN, env={**env, "LLAMA_ARG_HF_REPO": "org/target"}).out == expected


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_while_run_downloads(specli, env, online: FakeHub) -> None:
    online.repos["org/model"] = Repo({"m-Q4_K_M.gguf": os.urandom(2 * MB)})
    online.stall_at, online.stalled = 0, threading.Event()
    with specli.start(*RUN, "-hf", "org/model", env=env) as process:
        assert online.stalled.wait(60)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"stopped while fetching org/model" in err


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"model": Path("a"), "hf_repo": "a/b"}, "-m and -hf were given, but each names the target; keep one of them"),
        ({"model": Path("a"), "pair": "p"}, "-m and --pair were given, but each names the target"),
        ({"hf_repo": "a/b", "pair": "p"}, "-hf and --pair were given, but each names the target"),
        ({"draft_model": Path("a"), "hf_repo_draft": "a/b"}, "-md and -hfd were given, but each names the draft"),
        ({"hf_file": "a"}, "-hff names a file in a hub repository, but -hf was not given; add -hf USER/MODEL"),
        ({"hf_file": "a", "model": Path("a")}, "-hff names a file in a hub repository, but -hf was not given"),
        ({"hf_repo_draft": "a"}, "-hfd got 'a', expected USER/MODEL"),
    ],
)
def test_contradictions(named: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelChoice(**named)


def test_what_goes_together() -> None:
    assert ModelChoice().is_pair
    assert ModelChoice(pair="p", draft_model=Path("d")).is_pair
    assert ModelChoice(pair="p", hf_repo_draft="a/b").is_pair
    assert not ModelChoice(model=Path("m"), hf_repo_draft="a/b").is_pair
    assert not ModelChoice(hf_repo="a/b:q8_0", hf_file="f", hf_token="t").is_pair
