"""The shipped pairs, the user's own, and what a mistake in either is answered with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specli import hub, registry
from specli.errors import ConfigError, ModelLoadError
from specli.hub import HubFile
from specli.registry import LocalFile, Model, PackageFile

SHIPPED = Path(registry.__file__).parent.parent / "models.toml"
MODEL = 'licence = "MIT"\ntokenizer = "t"\n'
MINE = f"""\
[models.small]
path = "~/small.gguf"
{MODEL}
[pairs.mine]
target = "llama-3.1-8b"
draft = "small"
k = [2, 5]
n_max = 4
use = "tests"
"""


@pytest.fixture
def user_file(monkeypatch, tmp_path: Path) -> Path:
    """Where the user's entries are looked for; empty."""
    path = tmp_path / "models.toml"
    path.write_text("", "utf-8")
    monkeypatch.setattr(registry, "user_models_toml", lambda: path)
    return path


# -- what is shipped


def test_the_pairs_that_were_promised() -> None:
    pairs = registry.load_pairs()
    sizes = {
        (re.sub(r"-?[\d.]+b.*", "", pair.target.name), pair.target.parameters, pair.draft.parameters)
        for pair in pairs.values()
    }
    assert {("llama-3.1", "70B", "8B")} <= sizes
    assert {("llama-3.1", target, draft) for target in ("70B", "8B") for draft in ("1B", "3B")} <= sizes
    qwen = ("qwen2.5", "qwen2.5-coder")
    targets = [(line, size) for line in qwen for size in ("32B", "14B", "7B")] + [("qwen2.5", "72B")]
    assert {(line, size, draft) for line, size in targets for draft in ("1.5B", "0.5B")} <= sizes
    assert {"qwen3", "gemma-3"} <= {line for line, *_ in sizes}
    assert ("deepseek-coder", "33B", "1.3B") in sizes
    assert next(iter(pairs)) == registry.DEFAULT_PAIR


def test_every_pair_is_whole(user_file: Path) -> None:
    for name, pair in registry.load_pairs().items():
        assert pair.name == name
        assert pair.target.tokenizer == pair.draft.tokenizer
        assert pair.target.name != pair.draft.name
        assert 1 <= pair.k[0] < pair.k[1] <= 16
        assert pair.n_max is None or pair.k[0] <= pair.n_max <= pair.k[1]
        assert pair.origin == SHIPPED
        assert pair.description.startswith(pair.target.title) or name == registry.DEFAULT_PAIR
        for model in (pair.target, pair.draft):
            assert model.licence
            assert model.size_gb is None or 0.01 < model.size_gb < 50
            if isinstance(model.source, HubFile):
                source = model.source
                assert source.file is None or hub.choose([source.file], source) == [source.file]
                assert source.file is None or source.quant is None


def test_every_hub_model_says_where_it_was_read() -> None:
    tables = re.split(r"^\[", SHIPPED.read_text("utf-8"), flags=re.MULTILINE)
    with_repo = [table for table in tables if re.search(r"^repo = ", table, re.MULTILINE)]
    assert len(with_repo) >= 25
    for table in with_repo:
        repo = re.search(r'^repo = "(.*)"', table, re.MULTILINE)
        source = re.search(r"^# source: (.*)", table, re.MULTILINE)
        assert source, table
        assert repo
        assert repo[1] in source[1] or "llama.cpp common/arg.cpp" in source[1] or "the hub's list of" in source[1]


def test_no_address_is_shipped() -> None:
    assert "://" not in SHIPPED.read_text("utf-8")


def test_the_default_pair(user_file: Path) -> None:
    pair = registry.find_pair(registry.DEFAULT_PAIR)
    assert isinstance(pair.target.source, PackageFile)
    assert (pair.target.quantize, pair.n_max, pair.licence) == ("Q4_0", 3, "Apache-2.0")
    assert registry.find_file(pair.draft).is_file()


def test_licences_of_both() -> None:
    assert registry.find_pair("llama-3.1-8b-1b").licence == "llama3.1 / llama3.2"


# -- the user's own


def test_a_pair_of_the_users_own(user_file: Path) -> None:
    user_file.write_text(MINE, "utf-8")
    pair = registry.find_pair("mine")
    assert pair.draft.source == LocalFile(Path.home() / "small.gguf")
    assert pair.target == registry.find_pair("llama-3.1-8b-1b").target
    assert (pair.k, pair.n_max, pair.use, pair.origin) == ((2, 5), 4, "tests", user_file)
    assert pair.description == "Llama 3.1 8B Instruct, drafted by small"
    assert list(registry.load_pairs())[-1] == "mine"


def test_sides_described_in_place(user_file: Path) -> None:
    user_file.write_text(
        """
        [pairs.here]
        target = { repo = "org/big", quant = "Q8_0", revision = "v1", licence = "MIT", tokenizer = "t", size_gb = 2 }
        draft = { path = "d.gguf", licence = "MIT", tokenizer = "t" }
        k = [1, 256]
        use = "tests"
        """,
        "utf-8",
    )
    pair = registry.find_pair("here")
    assert pair.target.source == HubFile("org/big", "Q8_0", revision="v1")
    assert (pair.target.name, pair.draft.name, pair.licence) == ("here target", "here draft", "MIT")


def test_entries_override_by_name(user_file: Path) -> None:
    user_file.write_text(
        f'[models."llama-3.2-1b"]\npath = "mine.gguf"\n{MODEL}\n'
        '[pairs."qwen3-14b-0.6b"]\ntarget = "qwen3-32b"\ndraft = "qwen3-0.6b"\nk = [1, 2]\nuse = "u"\n',
        "utf-8",
    )
    pairs = registry.load_pairs()
    assert pairs["llama-3.1-8b-1b"].draft.source == LocalFile(Path("mine.gguf"))
    assert pairs["llama-3.1-8b-1b"].origin == SHIPPED
    assert (pairs["qwen3-14b-0.6b"].target.name, pairs["qwen3-14b-0.6b"].origin) == ("qwen3-32b", user_file)


def test_no_file_of_the_users_own(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "user_models_toml", lambda: tmp_path / "models.toml")
    assert registry.DEFAULT_PAIR in registry.load_pairs()


# -- mistakes

PAIR = 'target = "qwen3-32b"\ndraft = "qwen3-8b"\nk = [1, 2]\nuse = "u"\n'
MISTAKES = [
    ("[pairs.a\n", r" is not valid TOML: .*line 1"),
    ("\n\n[pairs.a]\nk = [1,\nuse = 3\n", r" is not valid TOML: .*line 5"),
    ("[pair.a]\n", r", line 1: unknown table 'pair', expected \[models.NAME\] and \[pairs.NAME\]"),
    ("# x\npairs = 3\n", r", line 2: pairs must be a table of named entries"),
    ("[pairs]\na = 1\n", r", line 2: pairs.a must be a table"),
    (f"[pairs.a]\n{PAIR}colour = 1\n", r", line 6: pairs.a: unknown key 'colour', expected some of target, draft,"),
    (f'\n[pairs."b.c"]\n{PAIR}'.replace("use", "uses"), r", line 2: pairs.b.c: use is missing"),
    (f"[pairs.a]\n{PAIR}".replace("qwen3-8b", "none"), r", line 3: pairs.a: draft names the model 'none', but there"),
    ('[pairs.a]\ntarget = "qwen3-32b"\n', r", line 1: pairs.a: draft must be the name of a model or a table"),
    ("[pairs.a]\n# it\ntarget = 3\n", r", line 3: pairs.a: target must be the name of a model or a table"),
    (f"[pairs.a]\n{PAIR}".replace("[1, 2]", "[2, 1]"), r", line 4: pairs.a: k is \[2, 1\], expected the shorter"),
    (f"[pairs.a]\n{PAIR}".replace("[1, 2]", "4"), r", line 4: pairs.a: k is 4, expected the shortest and the longest"),
    (f"[pairs.a]\n{PAIR}".replace("[1, 2]", "[0, 2]"), r", line 4: pairs.a: k has 0, expected 1 to 256 tokens"),
    (f"[pairs.a]\n{PAIR}".replace("[1, 2]", "[1, true]"), r", line 4: pairs.a: k has True, expected 1 to 256"),
    (f"[pairs.a]\n{PAIR}n_max = 300\n", r", line 6: pairs.a: n_max has 300, expected 1 to 256 tokens"),
    (f"[pairs.a]\n{PAIR}".replace('"u"', '" "'), r", line 5: pairs.a: use is ' ', expected a text"),
    (f"[pairs.a]\n{PAIR}[models.qwen3-8b]\n{MODEL}", r", line 6: models.qwen3-8b: expected one of package, repo and"),
    (f'[models.qwen3-8b]\nrepo = "a/b"\npath = "c"\n{MODEL}', r", line 1: models.qwen3-8b: expected one of package"),
    (f'[models.qwen3-8b]\nrepo = "qwen"\n{MODEL}', r", line 2: models.qwen3-8b: repo got 'qwen', expected USER/MODEL"),
    (f'[models.qwen3-8b]\npackage = "a"\n{MODEL}', r", line 2: models.qwen3-8b: a file in a package needs package,"),
    (f'[models.qwen3-8b]\npath = "a"\nsize_gb = "4"\n{MODEL}', r", line 3: models.qwen3-8b: size_gb is '4', expected"),
    (f'[models.qwen3-8b]\npath = "a"\nquants = "Q8"\n{MODEL}', r", line 3: models.qwen3-8b: unknown key 'quants'"),
    ('[models.qwen3-8b]\npath = "a"\ntokenizer = "t"\n', r", line 1: models.qwen3-8b: licence is missing"),
    ('[models]\nqwen3-8b = { path = "a", licence = "b" }\n', r", line 2: models.qwen3-8b: tokenizer is missing"),
    (f"[pairs]\na.x = 1\n[pairs.a.target]\n{MODEL}", r", line 3: pairs.a.target: expected one of package, repo"),
]


@pytest.mark.parametrize(("text", "problem"), MISTAKES)
def test_a_mistake_is_named_by_file_and_line(user_file: Path, text: str, problem: str) -> None:
    user_file.write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=re.escape(str(user_file)) + problem) as refusal:
        registry.load_pairs()
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_no_text(user_file: Path) -> None:
    user_file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        registry.load_pairs()


def test_a_name_that_is_not_there(user_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no pair 'llama-3.1-70b-1'; did you mean llama-3.1-70b-1b or .*list` shows"):
        registry.find_pair("llama-3.1-70b-1")
    with pytest.raises(ConfigError, match=r"no pair 'xyz'; `specli models list` shows all \d+"):
        registry.find_pair("xyz")


# -- files


def model(source: registry.Source) -> Model:
    return Model("m", "M", source, "MIT", "t")


def test_find_file_asks_nobody(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    wanted = HubFile("org/model", "Q8_0")
    with pytest.raises(ModelLoadError, match=r"org/model:Q8_0 is not on this disk; `specli models pull` downloads it"):
        registry.find_file(model(wanted))
    folder = tmp_path / "models--org--model"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc", "utf-8")
    file = folder / "snapshots" / "abc" / "model-q8_0.gguf"
    file.write_bytes(b"x")
    assert registry.find_file(model(wanted)) == file
    with pytest.raises(ModelLoadError, match="not on this disk"):
        registry.find_file(model(HubFile("org/model", "Q8_0", revision="v2")))


def test_a_local_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ModelLoadError, match=r"m.gguf, which models.toml names for m, is not there"):
        registry.find_file(model(LocalFile(path)))
    path.write_bytes(b"x")
    assert registry.find_file(model(LocalFile(path))) == path


def test_a_package_that_is_missing() -> None:
    source = PackageFile("no_such_package", "m.gguf", "pip install it")
    with pytest.raises(
        ModelLoadError, match=r"no_such_package, which holds m.gguf, is not installed; run `pip install"
    ):
        registry.find_file(model(source))
