"""Names to files, and downloads by the real client from a stand-in of the hub."""

from __future__ import annotations

import ast
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import TOKEN, FakeHub, Repo, serve, sha256

import specli
from specli import hub
from specli.errors import Cancelled, ConfigError, ModelLoadError
from specli.hub import HubFile

PACKAGE = Path(specli.__file__).parent
MB = 1 << 20
Q4 = HubFile("org/model-GGUF", "Q4_K_M")
FILE = "model-Q4_K_M.gguf"


# -- names


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("org/model", HubFile("org/model")),
        ("org/model-GGUF:Q4_K_M", HubFile("org/model-GGUF", "Q4_K_M")),
        ("a.b_c/d.e-f:ud-q2_k_xl", HubFile("a.b_c/d.e-f", "ud-q2_k_xl")),
    ],
)
def test_reference(text: str, wanted: HubFile) -> None:
    assert hub.parse_reference(text) == wanted


@pytest.mark.parametrize(
    "text",
    ["", "model", "/model", "org/", "org/model:", "a/b/c", "a/b:c:d", "https://host/a/b", "a /b", "ä/b", "a/b\n"],
)
def test_what_is_no_reference(text: str) -> None:
    with pytest.raises(ConfigError, match=r"-hfd got .*, expected USER/MODEL or USER/MODEL:QUANT"):
        hub.parse_reference(text, "-hfd")


FILES = [
    "README.md",
    "imatrix.gguf",
    "mmproj-model-f16.gguf",
    "model-BF16.gguf",
    "model-IQ4_XS.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model-q8_0.gguf",
    "model.Q5_0.gguf",
    "mtp-model-Q4_K_M.gguf",
]


@pytest.mark.parametrize(
    ("quant", "file", "chosen"),
    [
        (None, None, "model-Q4_K_M.gguf"),
        ("q4_k_m", None, "model-Q4_K_M.gguf"),
        ("Q8_0", None, "model-q8_0.gguf"),
        ("Q5_0", None, "model.Q5_0.gguf"),
        ("bf16", None, "model-BF16.gguf"),
        ("Q4_K", None, None),  # a dot or hyphen must follow, or Q4_K would mean Q4_K_M
        ("Q5.0", None, None),  # not a pattern
        ("Q2_K", None, None),
        ("Q2_K", "model-IQ4_XS.gguf", "model-IQ4_XS.gguf"),  # the file decides
        (None, "mmproj-model-f16.gguf", "mmproj-model-f16.gguf"),
        (None, "MODEL-Q4_K_M.gguf", None),
    ],
)
def test_choice(quant: str | None, file: str | None, chosen: str | None) -> None:
    wanted = HubFile("org/model", quant, file)
    assert hub.choose(FILES, wanted) == ([chosen] if chosen else [])
    assert hub.choose(reversed(FILES), wanted) == hub.choose(FILES, wanted)


def test_choice_without_a_usual_quant() -> None:
    assert hub.choose(["b-Q8_0.gguf", "a-Q6_K.gguf"], HubFile("o/m")) == ["b-Q8_0.gguf"]
    assert hub.choose(["b-Q5_K.gguf", "a-Q6_K.gguf"], HubFile("o/m")) == ["a-Q6_K.gguf"]
    assert hub.choose(["mmproj-Q4_K_M.gguf", "x.bin"], HubFile("o/m")) == []
    assert hub.choose([], HubFile("o/m")) == []


def test_choice_of_a_split_file_is_all_of_it() -> None:
    shards = [f"Q4_K_M/big-Q4_K_M-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    names = ["Q8_0/big-Q8_0-00001-of-00002.gguf", *reversed(shards), "Q4_K_M/big-Q4_K_M-00001-of-00002.gguf"]
    assert hub.choose([*shards, names[0]], HubFile("o/m")) == shards
    assert hub.choose(names, HubFile("o/m", file=shards[1])) == shards
    assert hub.choose(shards[1:], HubFile("o/m")) == shards[1:]


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (4.92e9, "4.92 GB"), (94e6, "94 MB"), (1.2345e12, "1234 GB")],
)
def test_format_bytes(n: float, text: str) -> None:
    assert hub.format_bytes(n) == text


def test_the_client_has_one_home() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert path.name == "hub.py" or not any(name.split(".")[0] == "huggingface_hub" for name in names)


def test_help_does_not_import_the_client() -> None:
    code = "import sys; from specli.cli.main import run; run(['--help']); sys.exit('huggingface_hub' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=PACKAGE.parent)


# -- downloads


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[FakeHub]:
    """The stand-in, and a client that was imported with its address: it reads its variables once."""
    with serve() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", fake.url)
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.delenv(name, raising=False)
        for name in [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]:
            patch.delitem(sys.modules, name)
        yield fake
        from huggingface_hub import close_session

        close_session()


@pytest.fixture
def online(server: FakeHub, monkeypatch, tmp_path: Path) -> FakeHub:
    """The stand-in with one repository, and an empty cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    fresh = FakeHub(url=server.url, cdn_url=server.cdn_url)
    fresh.repos["org/model-GGUF"] = Repo(
        {FILE: content(3 * MB, 4), "model-Q8_0.gguf": content(100, 8), "README.md": b""}
    )
    server.__dict__.update(fresh.__dict__)
    return server


def content(n: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(n)


def blob(fake: FakeHub, suffix: str = "", file: str = FILE) -> Path:
    """Where the client keeps the content of ``file``."""
    from huggingface_hub import constants

    data = fake.repos["org/model-GGUF"].files[file]
    return Path(constants.HF_HUB_CACHE) / "models--org--model-GGUF" / "blobs" / (sha256(data) + suffix)


def body(fake: FakeHub, file: str = FILE) -> bytes:
    return fake.repos["org/model-GGUF"].files[file]


@pytest.fixture
def no_waiting(monkeypatch) -> None:
    """The client waits a second before it tries again."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _s: None)


def test_fetch(online: FakeHub) -> None:
    seen: list[tuple[str, int, int]] = []
    assert hub.cached(Q4) == []
    paths = hub.fetch(Q4, progress=lambda *report: seen.append(report))
    assert [path.read_bytes() for path in paths] == [body(online)]
    assert paths[0].name == FILE
    assert hub.cached(Q4) == paths
    assert {(name, size) for name, _, size in seen} == {(FILE, 3 * MB)}
    done = [n for _, n, _ in seen]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, 3 * MB)
    assert not blob(online, ".incomplete").exists()


def test_what_is_on_disk_is_not_asked_for(online: FakeHub) -> None:
    paths = hub.fetch(Q4)
    online.requests.clear()
    assert (
        hub.fetch(Q4) == hub.fetch(HubFile("org/model-GGUF")) == hub.fetch(HubFile("org/model-GGUF", "q4_k_m")) == paths
    )
    assert hub.fetch(HubFile("org/model-GGUF", file=FILE)) == paths
    assert online.requests == []
    assert hub.fetch(Q4, refresh=True) == paths
    assert online.requests
    assert online.transfers() == []


def test_refresh_takes_what_is_new(online: FakeHub) -> None:
    old = hub.fetch(Q4)
    online.repos["org/model-GGUF"].files[FILE] = content(1000, 5)
    assert hub.fetch(Q4) == old
    assert hub.fetch(Q4, refresh=True)[0].read_bytes() == content(1000, 5)
    assert hub.cached(Q4)[0].read_bytes() == content(1000, 5)


def test_without_a_quant_the_hub_decides(online: FakeHub) -> None:
    hub.fetch(HubFile("org/model-GGUF", "Q8_0"))
    assert hub.fetch(HubFile("org/model-GGUF"))[0].name == FILE


def test_a_named_revision(online: FakeHub) -> None:
    commit = online.repos["org/model-GGUF"].commit
    pinned = HubFile("org/model-GGUF", "Q4_K_M", revision=commit)
    paths = hub.fetch(pinned)
    online.requests.clear()
    assert hub.fetch(pinned) == paths
    assert online.requests == []
    assert commit in str(paths[0])
    with pytest.raises(ModelLoadError, match="has no revision v2; name a branch, tag or commit"):
        hub.fetch(HubFile("org/model-GGUF", revision="v2"))


def test_all_shards(online: FakeHub) -> None:
    shards = {f"big/big-Q4_K_M-{i:05}-of-00003.gguf": content(100 + i, i) for i in (1, 2, 3)}
    online.repos["org/big"] = Repo({**shards, "big-Q8_0.gguf": b"x"})
    paths = hub.fetch(HubFile("org/big"))
    assert [path.read_bytes() for path in paths] == list(shards.values())
    assert [path.name for path in paths] == [name.rpartition("/")[2] for name in shards]
    paths[1].unlink()
    assert hub.cached(HubFile("org/big")) == []
    assert [path.is_file() for path in hub.fetch(HubFile("org/big"))] == [True] * 3


def test_a_shard_that_the_repository_lacks(online: FakeHub) -> None:
    online.repos["org/big"] = Repo({"big-Q4_K_M-00001-of-00002.gguf": b"x"})
    with pytest.raises(ModelLoadError, match=r"org/big is split into 2 files, but org/big holds 1 of them"):
        hub.fetch(HubFile("org/big"))
    assert online.transfers() == []


# -- transfers that end early


@pytest.mark.usefixtures("no_waiting")
def test_a_broken_transfer_goes_on_by_itself(online: FakeHub) -> None:
    online.cuts = [MB + 500_000, MB]
    assert hub.fetch(Q4)[0].read_bytes() == body(online)
    assert online.ranges() == [None, f"bytes={MB}-", f"bytes={2 * MB}-"]


def test_a_connection_that_is_reset(online: FakeHub) -> None:
    online.cuts, online.arrived = [MB + 500_000], threading.Event()
    paths = hub.fetch(Q4, progress=lambda _name, done, _size: online.arrived.set() if done >= MB else None)
    assert paths[0].read_bytes() == body(online)
    assert online.ranges() == [None, f"bytes={MB}-"]


@pytest.mark.usefixtures("no_waiting")
def test_a_transfer_that_keeps_breaking_can_be_taken_up_later(online: FakeHub) -> None:
    online.cuts = [2 * MB + 7, *[0] * 20]
    with pytest.raises(ModelLoadError, match=r"cannot be reached for org/model-GGUF:Q4_K_M .*; run it again to go on"):
        hub.fetch(Q4)
    partial = blob(online, ".incomplete")
    assert partial.read_bytes() == body(online)[: 2 * MB]
    assert hub.cached(Q4) == []
    online.cuts, online.requests = [], []
    seen: list[int] = []
    assert hub.fetch(Q4, progress=lambda _name, done, _size: seen.append(done))[0].read_bytes() == body(online)
    assert online.ranges() == [f"bytes={2 * MB}-"]
    assert seen[0] == 2 * MB
    assert not partial.exists()


def test_ctrl_c_keeps_what_came(online: FakeHub) -> None:
    def interrupt(_name: str, done: int, _size: int) -> None:
        if done >= 2 * MB:
            raise KeyboardInterrupt

    with pytest.raises(Cancelled, match="stopped while fetching org/model-GGUF:Q4_K_M; what came stays"):
        hub.fetch(Q4, progress=interrupt)
    assert blob(online, ".incomplete").stat().st_size == MB  # the client reports a piece before it writes it
    online.requests.clear()
    assert hub.fetch(Q4)[0].read_bytes() == body(online)
    assert online.ranges() == [f"bytes={MB}-"]


def test_a_server_without_ranges_sends_it_all_again(online: FakeHub) -> None:
    leave_partial(online, body(online)[:MB])
    online.has_ranges = False
    assert hub.fetch(Q4)[0].read_bytes() == body(online)


def test_a_partial_file_that_is_complete(online: FakeHub) -> None:
    leave_partial(online, body(online))
    assert hub.fetch(Q4)[0].read_bytes() == body(online)
    assert online.transfers() == []


def test_a_partial_file_that_is_too_long(online: FakeHub) -> None:
    leave_partial(online, bytes(4 * MB))
    assert hub.fetch(Q4)[0].read_bytes() == body(online)


def test_a_damaged_partial_file(online: FakeHub) -> None:
    leave_partial(online, bytes(MB))
    with pytest.raises(ModelLoadError, match=f"{FILE} arrived damaged .* and was removed; run it again"):
        hub.fetch(Q4)
    assert not blob(online, ".incomplete").exists()
    assert hub.fetch(Q4)[0].read_bytes() == body(online)


def leave_partial(fake: FakeHub, data: bytes) -> None:
    partial = blob(fake, ".incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(data)


# -- refusals


def test_a_gated_repository(online: FakeHub) -> None:
    online.repos["org/gated"] = Repo({"m-Q4_K_M.gguf": content(10, 1)}, gated=True)
    with pytest.raises(ModelLoadError) as refusal:
        hub.fetch(HubFile("org/gated"))
    assert str(refusal.value) == (
        f"org/gated is gated: accept its licence on its page at {online.url}, then set HF_TOKEN or give -hft TOKEN"
    )
    with pytest.raises(ModelLoadError, match="gated"):
        hub.fetch(HubFile("org/gated"), token="hf_wrong")
    assert hub.fetch(HubFile("org/gated"), token=TOKEN)[0].read_bytes() == content(10, 1)


def test_the_token_stays_with_the_hub(online: FakeHub) -> None:
    hub.fetch(Q4, token=TOKEN)
    assert [headers.get("authorization") for headers in online.transfers()] == [None]
    asked = [headers.get("authorization") for _, path, headers in online.requests if not path.startswith("/cdn/")]
    assert set(asked) == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("token", [None, TOKEN])
def test_a_repository_that_is_not_there(online: FakeHub, token: str | None) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        hub.fetch(HubFile("org/none"), token=token)
    assert str(refusal.value) == (
        f"{online.url} shows no repository org/none; check the name, or, if it is private or gated, set HF_TOKEN or "
        "give -hft TOKEN"
    )


@pytest.mark.parametrize(("quant", "file"), [("Q2_K", None), (None, "other.gguf")])
def test_a_file_that_is_not_there(online: FakeHub, quant: str | None, file: str | None) -> None:
    with pytest.raises(ModelLoadError) as refusal:
        hub.fetch(HubFile("org/model-GGUF", quant, file))
    tail = ":Q2_K" if quant else "/other.gguf"
    assert str(refusal.value) == (
        f"org/model-GGUF{tail} is not in that repository; GGUF files there: {FILE}, model-Q8_0.gguf"
    )


def test_many_files_are_not_all_named(online: FakeHub) -> None:
    online.repos["org/many"] = Repo({f"m-{i:02}.gguf": b"x" for i in range(20)})
    with pytest.raises(ModelLoadError, match=r"m-07.gguf and 12 more$"):
        hub.fetch(HubFile("org/many", "Q4_0"))
    online.repos["org/bare"] = Repo({"model.safetensors": b"x"})
    with pytest.raises(ModelLoadError, match="GGUF files there: none"):
        hub.fetch(HubFile("org/bare"))


def test_a_hub_in_trouble(online: FakeHub) -> None:
    online.status = 503
    with pytest.raises(ModelLoadError, match=f"{online.url} answered 503 for org/model-GGUF:Q4_K_M; try again later"):
        hub.fetch(Q4)


def test_nobody_answers(online: FakeHub, monkeypatch) -> None:
    q8 = hub.fetch(HubFile("org/model-GGUF", "Q8_0"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    notices: list[str] = []
    assert hub.fetch(HubFile("org/model-GGUF"), notice=notices.append) == q8  # the hub would say Q4_K_M
    assert len(notices) == 1
    assert "http://127.0.0.1:1 cannot be reached" in notices[0]
    assert notices[0].endswith("; using what is on disk")
    with pytest.raises(ModelLoadError, match=r"cannot be reached for org/model-GGUF:Q4_K_M \(.*refused.*\)"):
        hub.fetch(Q4)


def test_offline(online: FakeHub, monkeypatch) -> None:
    q8 = hub.fetch(HubFile("org/model-GGUF", "Q8_0"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    online.requests.clear()
    assert hub.fetch(HubFile("org/model-GGUF"), refresh=True) == q8
    with pytest.raises(ModelLoadError, match="org/model-GGUF:Q4_K_M is not on this disk and HF_HUB_OFFLINE is set"):
        hub.fetch(Q4)
    assert online.requests == []


def test_the_disk_is_looked_at_first(online: FakeHub, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=3 * MB - 1))
    with pytest.raises(
        ModelLoadError, match=r"3.15 MB are to be downloaded to .*hub, where 3.15 MB are free; make room for 1 b"
    ):
        hub.fetch(Q4)
    assert online.transfers() == []
    leave_partial(online, body(online)[:1])  # what is there already needs no room
    assert hub.fetch(Q4)[0].read_bytes() == body(online)


def test_a_folder_that_cannot_be_written(online: FakeHub, monkeypatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(ModelLoadError, match=r"cannot be written: Not a directory"):
        hub.fetch(Q4)


# -- files over 50 GB, which the hub does not serve in plain HTTP


def test_a_huge_file_is_left_to_the_client(online: FakeHub, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.MAX_HTTP_DOWNLOAD_SIZE", MB)
    with pytest.raises(ModelLoadError, match=r"could not be fetched \(The file is too large .*hf_xet"):
        hub.fetch(Q4)


def test_the_bar_suits_the_hubs_own_protocol() -> None:
    reporting = pytest.importorskip("huggingface_hub.utils._xet_progress_reporting")
    if not hasattr(reporting, "XetDownloadProgressReporter"):
        pytest.skip("huggingface_hub 2")
    seen: list[int] = []
    reporter = reporting.XetDownloadProgressReporter(
        reconstruction_desc="", total=10, log_level=0, tqdm_class=hub._progress_bar(seen.append)
    )
    rates = {"total_bytes_completion_rate": None, "total_transfer_bytes_completion_rate": 1.0, "total_bytes": 10}
    for n in (4, 10):
        report = SimpleNamespace(total_bytes_completed=n, total_transfer_bytes_completed=n, **rates)
        reporter.update_progress(report)
    reporter.close()
    assert seen == [0, 4, 10]
