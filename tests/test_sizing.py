"""What llama.cpp says it would allocate against what it then allocates, buffer by buffer."""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from dataclasses import replace

import pytest
from memory_sizes import N_ROWS, Sizes, allocated, planned
from support import generate, load_model, settings
from tiny_gguf import write_lora

from specli.config import KvOverride, Lora, ModelOptions, PlacementOptions
from specli.engine import sizing
from specli.engine.base import Slice
from specli.engine.log import LOG
from specli.engine.sizing import LlamaSizer, fit, host_room
from specli.errors import EngineError, ModelLoadError
from specli.memory_plan import HOST, HOST_RESERVE, MIB, Room, Setup, make_plan, rough_bound
from specli.memory_search import choose, suggest
from specli.session import Hooks, Session

TINY = [
    ("llama", {}, {}),
    ("llama", {}, {"n_ctx": 512, "n_ubatch": 32}),
    ("llama", {"n_layer": 3, "n_embd": 128}, {"n_ctx": 1000, "flash_attn": "off"}),
    ("llama", {}, {"n_ctx": 4096, "flash_attn": "on", "cache_type_k": "q8_0", "cache_type_v": "q4_0"}),
    ("llama", {"n_vocab": 5000, "split_max_tensors": 5}, {"n_ctx": 300}),
    ("gemma2", {}, {"n_ctx": 4096}),  # sliding window, and embeddings that are the output matrix too
    ("gemma2", {"sliding_window": 700}, {"n_ctx": 4096, "n_batch": 64}),
    ("gemma2", {}, {"n_ctx": 4096, "swa_full": True}),
    ("mamba", {}, {"n_ctx": 4096}),
    ("jamba", {"n_layer": 4}, {"n_ctx": 4096}),
    *(("llama", {}, {"n_ctx": 512, "load_mode": mode}) for mode in ("none", "mmap", "mlock", "mmap+mlock", "dio")),
    ("llama", {}, {"placement": PlacementOptions((), kv_offload=False, tensor_overrides=(("ffn", "CPU"),))}),
    ("llama", {}, {"kv_overrides": (KvOverride("llama.context_length", 64),)}),
]


def rooms(free_mib: float) -> tuple[Room, ...]:
    """RAM only, so much of it free."""
    return (Room(HOST, "RAM", round(free_mib * MIB), round(free_mib * MIB), HOST_RESERVE),)


def assert_equal(plan: Sizes, real: Sizes, tolerance: int) -> None:
    """Within the log's rounding: 0.01 MiB per line."""
    plan, real = (Counter({key: n for key, n in sizes.items() if n > tolerance}) for sizes in (plan, real))
    assert plan.keys() == real.keys()
    assert all(abs(plan[key] - real[key]) <= tolerance for key in real), (plan, real)


@pytest.mark.parametrize(("architecture", "shape", "options"), TINY)
def test_a_tiny_model_gets_what_was_planned(architecture, shape, options, tiny_model) -> None:
    asked = ModelOptions(tiny_model(architecture, **shape), **options)
    plan = planned(asked)
    is_mapped = asked.load_mode in ("auto", "mmap", "mmap+mlock")
    assert plan["weights", "CPU_Mapped" if is_mapped else HOST] > 0
    assert plan["state" if architecture == "mamba" else "kv", HOST] > 0
    assert_equal(plan, allocated(asked), tolerance=2)


@pytest.mark.model
@pytest.mark.parametrize(
    "options",
    [{}, {"n_ctx": 2000, "n_ubatch": 64, "flash_attn": "off"}, {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}],
)
@pytest.mark.parametrize("which", ["target_path", "q4_0_path", "draft_path"])
def test_the_default_pair_gets_what_was_planned(which, options, request) -> None:
    asked = ModelOptions(request.getfixturevalue(which), **options)
    assert_equal(planned(asked), allocated(asked), tolerance=1)


@pytest.mark.model
def test_weights_that_are_rewritten_for_the_cpu_must_stay_and_their_file_need_not(q4_0_path) -> None:
    with LlamaSizer() as sizer:
        mapped, *others = (part for part in sizer.measure(ModelOptions(q4_0_path), 1).buffers if part.kind == "weights")
    if not others:
        pytest.skip("this CPU reads Q4_0 as it is")
    assert mapped.is_mapped
    assert not others[0].is_mapped
    assert mapped.hot_bytes < mapped.n_bytes
    weights = mapped.hot_bytes + others[0].n_bytes
    assert abs(weights - q4_0_path.stat().st_size) < 0.1 * weights


def test_adapters_are_paid_for(tiny_model, tmp_path, monkeypatch) -> None:
    lora = write_lora(tmp_path / "lora.gguf", tiny_model(), rank=32)
    asked = ModelOptions(tiny_model(), loras=(Lora(lora),))
    with LlamaSizer() as sizer:
        sizes = [sizer.measure(options, 1).total("weights") for options in (asked, ModelOptions(tiny_model()))]
    monkeypatch.setattr(LOG, "lines", deque())
    monkeypatch.setattr(LOG, "clear", lambda: None)
    load_model(tiny_model(), loras=asked.loras).close()
    [said] = [match for _level, line in LOG.lines if (match := re.search(r"LoRA buffer size = +([\d.]+) MiB", line))]
    assert abs((sizes[0] - sizes[1]) / MIB - float(said[1])) < 0.01
    assert sizes[0] - sizes[1] == 4 * 32 * (64 + 64 + 128 + 64)


def test_a_plan_follows_the_flags_and_repeats_them(specli, tiny_model) -> None:
    path = tiny_model("gemma2", context_length=4096)
    flags = ("-c", "4096", "--override-kv", "gemma2.attention.sliding_window=int:64")
    whole, small = (
        json.loads(specli("plan", "-m", path, "-o", "json", *flags, *more).out) for more in (("--swa-full",), ())
    )
    kv = [
        sum(part["bytes"] for part in plan["models"][0]["buffers"] if part["kind"] == "kv") for plan in (whole, small)
    ]
    assert kv[0] > 1.5 * kv[1]
    assert "--swa-full" in whole["command"]
    assert "--override-kv" in small["command"]
    assert specli("plan", "-m", path, "-dev", "NOPE").code == 2


def test_logits_rows_are_paid_for(tiny_model) -> None:
    path = tiny_model("llama")
    with LlamaSizer() as sizer:
        sizes = [sizer.measure(ModelOptions(path), n).total("output") for n in (1, 8)]
    assert sizes == [4 * 272, 8 * 4 * 272]


def test_a_context_too_long_to_be_asked_about_is_extrapolated(tiny_model) -> None:
    asked = ModelOptions(tiny_model("llama"), n_ctx=300_000)
    with LlamaSizer(rooms(1 << 20)) as sizer:
        exact = sizer.measure(asked, 1)
    with LlamaSizer(rooms(100)) as sizer:
        guess = sizer.measure(asked, 1)
        assert sizer.measure(replace(asked, n_ctx=2**31 - 1), 1).total("kv") > 1e12
    assert guess.n_ctx == exact.n_ctx == 300_000
    assert abs(guess.total() - exact.total()) < 0.01 * exact.total()


def test_one_model_is_asked_again_and_again(tiny_model, monkeypatch) -> None:
    path, loads = tiny_model("llama"), []
    load = sizing.llama_cpp.llama_model_load_from_file
    monkeypatch.setattr(sizing.llama_cpp, "llama_model_load_from_file", lambda *a: loads.append(a) or load(*a))
    with LlamaSizer() as sizer:
        for n_ctx in (256, 512, 1024):
            sizer.measure(ModelOptions(path, n_ctx=n_ctx), 1)
    assert len(loads) == 1


def test_the_log_is_as_it_was(tiny_model, capfd) -> None:
    before = LOG.lines
    LOG.verbose = True
    try:
        with LlamaSizer() as sizer:
            sizer.measure(ModelOptions(tiny_model("llama")), 1)
        assert LOG.verbose
    finally:
        LOG.verbose = False
    assert LOG.lines is before
    assert capfd.readouterr().err == ""


def test_settings_that_llama_cpp_refuses(tiny_model) -> None:
    path = tiny_model("llama", n_embd=80)  # heads of 40: no multiple of a block
    with LlamaSizer() as sizer, pytest.raises(EngineError, match=r"refuses a context of 256 tokens .* block size 32"):
        sizer.measure(ModelOptions(path, cache_type_k="q8_0"), 1)


def test_a_file_that_cannot_be_loaded(tmp_path, tiny_model) -> None:
    path = tiny_model("llama", **{"llama.attention.head_count": 7})
    with (
        LlamaSizer() as sizer,
        pytest.raises(ModelLoadError, match=f"llama.cpp could not load {re.escape(str(path))}: "),
    ):
        sizer.measure(ModelOptions(path), 1)


@pytest.mark.parametrize(("architecture", "shape", "options"), TINY)
def test_the_rough_bound_is_above_what_is_asked(architecture, shape, options, tiny_model) -> None:
    asked = ModelOptions(tiny_model(architecture, **shape), **options)
    with LlamaSizer() as sizer:
        assert rough_bound(sizing._shards(asked.path), asked, N_ROWS) > sizer.measure(asked, N_ROWS).total()


@pytest.mark.model
@pytest.mark.parametrize("which", ["target_path", "q4_0_path", "draft_path"])
def test_the_rough_bound_is_far_above_the_default_pair(which, request) -> None:
    asked = ModelOptions(request.getfixturevalue(which))
    with LlamaSizer() as sizer:
        assert rough_bound(sizing._shards(asked.path), asked, N_ROWS) > 2 * sizer.measure(asked, N_ROWS).total()


# -- verdicts on real models, with little memory


def test_suggestions_fit_when_they_are_loaded(tiny_model) -> None:
    asked = Setup(ModelOptions(tiny_model("llama", n_layer=4, n_embd=128), n_ctx=100_000))
    with LlamaSizer(rooms(200)) as sizer:
        plan = choose(asked, sizer).plan
        found = suggest(plan, sizer)
    assert not plan.fits
    assert {one.what for one in found} >= {"a shorter context", "q8_0 caches and a shorter context"}
    for one in found:
        real = allocated(one.plan.setup.target)
        pinned = sum(n for (_, name), n in real.items() if name != "CPU_Mapped") / 100
        assert pinned + HOST_RESERVE / MIB <= 200


def test_a_context_one_step_longer_than_suggested_does_not_fit(tiny_model) -> None:
    asked = Setup(ModelOptions(tiny_model("llama", n_layer=4, n_embd=128), n_ctx=100_000))
    with LlamaSizer(rooms(200)) as sizer:
        found = {one.what: one.plan for one in suggest(make_plan(asked, sizer), sizer)}
        n_ctx = found["a shorter context"].target.n_ctx
        assert not make_plan(asked.with_context(n_ctx + 256), sizer).leaves_reserve


def test_nobody_is_asked_where_there_is_plenty(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(sizing, "host_room", lambda: rooms(4000)[0])
    monkeypatch.setattr(sizing, "LlamaSizer", None)
    asked = Setup(ModelOptions(tiny_model("llama")), ModelOptions(tiny_model("llama", seed=1)), 3)
    assert fit(asked, pytest.fail) == asked


def test_a_session_that_cannot_fit_loads_nothing(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(sizing, "host_room", lambda: rooms(200)[0])
    monkeypatch.setattr(Session, "_load_model", pytest.fail)
    path = tiny_model("llama", n_layer=4, n_embd=128)
    asked = settings(path, type="none", model={"n_ctx": 100_000})
    with pytest.raises(
        ModelLoadError, match=r"must stay in memory .* RAM has 200 MiB free; this fits \(.*\): specli run -m"
    ):
        Session(asked)


def test_an_unset_context_shrinks_with_a_notice(tiny_model, monkeypatch) -> None:
    free = HOST_RESERVE / MIB + 12
    monkeypatch.setattr(sizing, "host_room", lambda: rooms(free)[0])
    path = tiny_model("llama", n_layer=4, n_embd=128, context_length=8192)
    notices: list[str] = []
    with Session(settings(path, type="none"), Hooks(notice=notices.append)) as session:
        assert 512 <= session.engine.n_ctx < 8192
        assert f"a context of {session.engine.n_ctx} tokens, not 8192" in notices[0]
        assert generate(session, [3, 4, 5], 4).stats.n_tokens == 4


def test_fit_off_asks_nobody(tiny_model, monkeypatch) -> None:
    monkeypatch.setattr(sizing, "host_room", lambda: rooms(1)[0])
    asked = replace(settings(tiny_model("llama"), type="none"), fit="off")
    with Session(asked) as session:
        assert session.engine.n_ctx == 256


def test_a_session_loads_what_was_planned(tiny_model) -> None:
    """The plan of run's own check is that of the contexts which the session then makes."""
    target, draft = tiny_model("llama"), tiny_model("llama", seed=1)
    with LlamaSizer() as sizer:
        plan = make_plan(Setup(ModelOptions(target), ModelOptions(draft), 3), sizer)
    with Session(settings(target, draft, n_max=3)) as session:
        assert plan.target.n_ctx == session.engine.n_ctx
        assert session.engine.n_rows_max == 4
        row = session.engine.evaluate([Slice(0, [3], 0, 1)]).rows[0]
        assert plan.target.total("output") == 4 * row.nbytes


def test_this_machine_has_ram() -> None:
    assert host_room().free > 0


# -- the command


def test_plan_prints_tables_and_ends_with_0(specli, tiny_model) -> None:
    path = tiny_model("llama")
    ended = specli("plan", "-m", path, "-md", path)
    assert ended.code == 0, ended.err
    out = ended.out.decode()
    assert "CPU_Mapped" in out
    assert "KV cache" in out
    assert f"fits: specli run -m {path} -md {path}" in out
    assert not any(line.endswith(" ") for line in out.splitlines())


def test_plan_as_json(specli, tiny_model) -> None:
    ended = specli("plan", "-m", tiny_model("llama"), "-md", tiny_model("llama", seed=1), "-o", "json", "-c", "512")
    found = json.loads(ended.out)
    assert found["fits"]
    assert [model["n_ctx"] for model in found["models"]] == [512, 256]
    assert found["models"][0]["weights"]["F32"]["tensors"] > 10
    assert {part["kind"] for part in found["models"][0]["buffers"]} == {"weights", "kv", "compute", "output"}
    assert found["memories"][0]["must_stay"] < found["memories"][0]["free"]
    assert found["draft_cost"]["tokens"] > 0


def test_plan_that_does_not_fit_ends_with_1_and_commands(specli, tiny_model) -> None:
    ended = specli("plan", "-m", tiny_model("llama"), "-c", "2000000000", "-o", "json")
    assert ended.code == 1
    found = json.loads(ended.out)
    assert not found["fits"]
    assert found["suggestions"][0]["command"].startswith("specli run -m ")
    free = found["memories"][0]["free"]
    assert all(one["must_stay"][HOST] < free for one in found["suggestions"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-o", "xml"], 2, "expected one of table, json"),
        (["-fa", "off", "-ctv", "q8_0"], 2, "a quantized V cache needs flash attention"),
        (["-m", "missing.gguf"], 3, "no such file"),
    ],
)
def test_plan_on_bad_input(arguments, code, words, specli) -> None:
    ended = specli("plan", *arguments)
    assert ended.code == code
    assert words in ended.error


def test_run_refuses_before_loading(specli, tiny_model) -> None:
    ended = specli("run", "-m", tiny_model("llama"), "-c", "2000000000", "-p", "hi")
    assert ended.code == 3
    assert "must stay in memory" in ended.error
    assert "specli run -m" in ended.error


# -- --show-config


def shown(ended) -> dict[str, tuple[str, str]]:
    """Options by their names, each with value and origin."""
    rows = (re.split(r"  +", line) for line in ended.out.decode().splitlines())
    return {names: (value, origin) for names, value, origin in rows}


def test_show_config_tells_origins(specli, tiny_model) -> None:
    path = tiny_model("llama")
    environment = {"LLAMA_ARG_BATCH": "64", "LLAMA_ARG_DRAFT_MAX": "5", "HF_TOKEN": "hf_secret"}
    ended = specli("run", "--show-config", "-m", path, "-c", "100", "-r", "stop", env=environment)
    assert ended.code == 0, ended.err
    rows = shown(ended)
    assert rows["-m/--model"] == (json.dumps(str(path)), "flag")
    assert rows["-c/--ctx-size"] == ("100", "flag")
    assert rows["-r/--reverse-prompt"] == ('["stop"]', "flag")
    assert rows["-b/--batch-size"] == ("64", "environment (LLAMA_ARG_BATCH)")
    assert rows["--spec-draft-n-max"] == ('"5"', "environment (LLAMA_ARG_DRAFT_MAX)")
    assert rows["-ub/--ubatch-size"] == ("512", "default")
    assert rows["-md/--model-draft"] == ("-", "default")
    assert rows["-hft/--hf-token"] == ("(hidden)", "environment (HF_TOKEN)")
    assert b"hf_secret" not in ended.out


def test_show_config_tells_what_a_pair_stands_for(specli) -> None:
    rows = shown(specli("run", "--show-config", "-md", "mine.gguf"))
    value, origin = rows["-m/--model"]
    assert "SmolLM2" in value
    assert "(a Q4_0 copy of it)" in value
    assert origin.endswith("models.toml (pair smollm2-135m)")
    assert rows["-md/--model-draft"] == ('"mine.gguf"', "flag")
    assert rows["--spec-draft-n-max"] == ("auto (up to 16)", "default")
    assert rows["-dev/--device"] == ("all", "default")
    assert rows["-lm/--load-mode"] == ("auto", "default")


def test_show_config_checks_values(specli) -> None:
    assert specli("run", "--show-config", "-c", "-5").code == 2
