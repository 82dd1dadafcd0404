"""Bounds and defaults of every setting; a refusal names the flag, what was given and what was expected."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from specli.config import (
    CACHE_TYPES,
    LOAD_MODES,
    SPLIT_MODES,
    GenerationOptions,
    KvOverride,
    Lora,
    ModelOptions,
    PlacementOptions,
    ProcessOptions,
    RopeOptions,
    SamplingOptions,
    ServeOptions,
    Settings,
    SpeculationOptions,
    TemplateOptions,
)
from specli.errors import ConfigError

NAN, INF = math.nan, math.inf
OPTIONS: dict[type, dict[str, Any]] = {
    ModelOptions: {"path": Path("model.gguf")},
    PlacementOptions: {},
    RopeOptions: {},
    KvOverride: {"key": "llama.context_length", "value": 64},
    Lora: {"path": Path("lora.gguf")},
    TemplateOptions: {},
    ProcessOptions: {},
    SamplingOptions: {},
    SpeculationOptions: {},
    GenerationOptions: {},
    ServeOptions: {},
}

# (class, field, flag, refused, taken)
BOUNDS: list[tuple[type, str, str, list[Any], list[Any]]] = [
    (ServeOptions, "host", "--host", ["", " "], ["127.0.0.1", "::"]),
    (ServeOptions, "port", "--port", [-1, 65536], [0, 65535]),
    (ServeOptions, "alias", "-a", ["", " "], [None, "smollm2"]),
    (ServeOptions, "api_keys", "--api-key", [("",), ("a b",), ("a\n",), ("schlüssel",)], [(), ("sk-1", "sk-2")]),
    (ServeOptions, "n_queue", "--queue", [0, -1, 2**17], [1, 2**16]),
    (ServeOptions, "timeout_s", "-to", [0.0, -1.0, NAN, INF], [0.1, 1e6]),
    (ServeOptions, "n_predict", "-n", [0, -2, 2**31], [-1, 1]),
    (ServeOptions, "max_body_bytes", "--max-body", [0, 2**32], [1, 2**31]),
    (ServeOptions, "max_messages", "--max-messages", [0, 2**21], [1]),
    (ServeOptions, "max_stops", "--max-stops", [0, 2**11], [1]),
    (ServeOptions, "max_choices", "--max-choices", [0, 257], [1, 256]),
    (ServeOptions, "sla_ttft_ms", "--sla-ttft", [0.0, -1.0, NAN, INF], [None, 1.0]),
    (ServeOptions, "sla_tpot_ms", "--sla-tpot", [0.0, -1.0, NAN, INF], [None, 1.0]),
    (ModelOptions, "n_ctx", "-c", [-1, -5, 2**31], [None, 0, 1, 2**31 - 1]),
    (ModelOptions, "n_sequences", "-np", [0, -1, 257], [1, 256]),
    (ModelOptions, "n_batch", "-b", [0, -1, 2**31], [1, 32, 2**31 - 1]),
    (ModelOptions, "n_ubatch", "-ub", [0, -1, 2**31], [1, 2**31 - 1]),
    (ModelOptions, "n_threads", "-t", [-2, 513, 2**40], [None, -1, 0, 1, 512]),
    (ModelOptions, "n_threads_batch", "-tb", [-2, 513], [None, -1, 0, 1, 512]),
    (
        ModelOptions,
        "n_gpu_layers",
        "-ngl",
        ["", "-", "--5", "5-", "x", "1.5", "²", "-3", "9" * 5000],
        ["auto", "all", "0", "99"],
    ),
    (ModelOptions, "flash_attn", "-fa", ["", "ON", "yes"], ["on", "off", "auto"]),
    (ModelOptions, "cache_type_k", "-ctk", ["", "f8", "Q8_0"], list(CACHE_TYPES)),
    (ModelOptions, "cache_type_v", "-ctv", ["", "f8"], list(CACHE_TYPES)),
    (ModelOptions, "load_mode", "-lm", ["", "MMAP", "mlock+mmap"], list(LOAD_MODES)),
    (PlacementOptions, "devices", "-dev", [("",), ("CUDA0", ""), ("CUDA0", "CUDA0")], [None, (), ("CUDA1", "CUDA0")]),
    (PlacementOptions, "split_mode", "-sm", ["", "rows"], list(SPLIT_MODES)),
    (PlacementOptions, "tensor_split", "-ts", [(-1.0,), (NAN, 1.0), (INF,), (0.0, 0.0)], [(), (3.0, 1.0), (0.0, 1.0)]),
    (PlacementOptions, "main_gpu", "-mg", [-1, 2**31], [0, 7]),
    (
        PlacementOptions,
        "tensor_overrides",
        "-ot",
        [(("(", "CPU"),), (("", "CPU"),), (("x", ""),)],
        [(("exps", "CPU"),)],
    ),
    (RopeOptions, "scaling", "--rope-scaling", ["", "ntk", "longrope"], [None, "none", "linear", "yarn"]),
    (RopeOptions, "freq_base", "--rope-freq-base", [-1.0, NAN, INF], [0.0, 10000.0]),
    (RopeOptions, "freq_scale", "--rope-freq-scale", [-1.0, NAN, INF], [0.0, 0.25]),
    (RopeOptions, "yarn_orig_ctx", "--yarn-orig-ctx", [-1, 2**31], [0, 4096]),
    (RopeOptions, "yarn_ext_factor", "--yarn-ext-factor", [-0.5, NAN, INF], [-1, 0.0, 1.0]),
    (RopeOptions, "yarn_attn_factor", "--yarn-attn-factor", [-2, NAN], [-1, 1.0]),
    (RopeOptions, "yarn_beta_slow", "--yarn-beta-slow", [-0.1, INF], [-1, 1.0]),
    (RopeOptions, "yarn_beta_fast", "--yarn-beta-fast", [-0.1, INF], [-1, 32.0]),
    (KvOverride, "key", "--override-kv", ["", "k" * 128, "é" * 64], ["k" * 127]),
    (KvOverride, "value", "--override-kv", [2**63, -(2**63) - 1, NAN, INF, "x" * 128], [0, True, 1.5, "", "x" * 127]),
    (Lora, "scale", "--lora-scaled", [NAN, INF], [0.0, -1.0, 2.5]),
    (SamplingOptions, "typical_p", "--typical", [0.0, -0.1, 1.1, NAN], [0.1, 1.0]),
    (SamplingOptions, "top_n_sigma", "--top-nsigma", [NAN, INF], [-1.0, 0.0, 2.5]),
    (SamplingOptions, "xtc_probability", "--xtc-probability", [-0.1, 1.1, NAN], [0.0, 1.0]),
    (SamplingOptions, "xtc_threshold", "--xtc-threshold", [-0.1, 1.1, NAN], [0.0, 0.6, 1.0]),
    (SamplingOptions, "dynatemp_range", "--dynatemp-range", [-0.1, NAN, INF], [0.0, 0.5]),
    (SamplingOptions, "dynatemp_exponent", "--dynatemp-exp", [0.0, -1.0, NAN, INF], [0.5, 1.0]),
    (SamplingOptions, "repeat_last_n", "--repeat-last-n", [-2, 2**31], [-1, 0, 64]),
    (SamplingOptions, "repeat_penalty", "--repeat-penalty", [0.0, -1.0, NAN, INF, 1e-300], [0.5, 1.0, 1.5]),
    (SamplingOptions, "presence_penalty", "--presence-penalty", [NAN, INF], [-2.0, 0.0, 2.0]),
    (SamplingOptions, "frequency_penalty", "--frequency-penalty", [NAN, -INF], [-2.0, 0.0, 2.0]),
    (SamplingOptions, "dry_multiplier", "--dry-multiplier", [NAN, INF], [0.0, 0.8]),
    (SamplingOptions, "dry_base", "--dry-base", [0.5, 0.0, NAN, INF], [1.0, 1.75]),
    (SamplingOptions, "dry_allowed_length", "--dry-allowed-length", [-1, 2**31], [0, 2]),
    (SamplingOptions, "dry_penalty_last_n", "--dry-penalty-last-n", [-2, 2**31], [-1, 0, 64]),
    (SamplingOptions, "mirostat", "--mirostat", [-1, 3], [0, 1, 2]),
    (SamplingOptions, "mirostat_tau", "--mirostat-ent", [-1.0, NAN, INF], [0.0, 5.0]),
    (SamplingOptions, "mirostat_eta", "--mirostat-lr", [-1.0, NAN, INF], [0.0, 0.1]),
    (SamplingOptions, "samplers", "--samplers", [("top_q",), ("top_k", "top_k")], [(), ("top_k", "temperature")]),
    (SamplingOptions, "logit_bias", "--logit-bias", [((-1, 1.0),), ((3, NAN),), ((3, INF),)], [((3, -INF),), ()]),
    (GenerationOptions, "n_logprobs", "--logprobs", [-1, 101], [None, 0, 100]),
    (TemplateOptions, "source", "--chat-template", [""], [None, "chatml", "{{ messages }}"]),
    (TemplateOptions, "kwargs", "--chat-template-kwargs", [{"messages": []}], [{}, {"enable_thinking": False}]),
    (ProcessOptions, "cpus", "-C", [frozenset(), frozenset({-1})], [None, frozenset({0, 5})]),
    (ProcessOptions, "priority", "--prio", [-2, 4], [-1, 0, 3]),
    (ProcessOptions, "numa", "--numa", ["", "mirror"], [None, "distribute", "isolate", "numactl"]),
    (SamplingOptions, "temperature", "--temp", [NAN, INF, -INF, -0.1, -1], [0, 0.0, 1e-9, 1e9, 2]),
    (SamplingOptions, "top_k", "--top-k", [-2, 2**31], [-1, 0, 1, 2**31 - 1]),
    (SamplingOptions, "top_p", "--top-p", [NAN, INF, -INF, 0, 0.0, -1, 1.1], [1e-9, 0.5, 1, 1.0]),
    (SamplingOptions, "min_p", "--min-p", [NAN, INF, -0.1, 1.1], [0, 0.05, 1]),
    (SamplingOptions, "seed", "-s", [-1, 2**32], [None, 0, 2**32 - 1]),
    (SpeculationOptions, "type", "--spec-type", ["", "draft-simple", "Draft"], ["auto", "none", "draft", "ngram"]),
    (SpeculationOptions, "n_max", "--spec-draft-n-max", [-1, 257], [None, 0, 1, 256]),
    (SpeculationOptions, "n_min", "--spec-draft-n-min", [-1, 17], [0, 1, 16]),
    (SpeculationOptions, "p_min", "--spec-draft-p-min", [NAN, INF, -0.1, 1.1], [0, 0.5, 1]),
    (SpeculationOptions, "verify", "--verify", ["", "greedy", "Block"], [None, "block", "rejection", "coupled"]),
    (GenerationOptions, "n_predict", "-n", [-3, 2**31], [-2, -1, 0, 1, 2**31 - 1]),
    (GenerationOptions, "stops", "-r", [("",), ("a", "")], [(), ("a",), ("\n", "b")]),
]


def make(kind: type, **values: Any) -> Any:
    return kind(**{**OPTIONS[kind], **values})


@pytest.mark.parametrize(("kind", "name", "flag", "refused", "taken"), BOUNDS, ids=lambda value: str(value)[:30])
def test_bounds(kind: type, name: str, flag: str, refused: list[Any], taken: list[Any]) -> None:
    for value in refused:
        with pytest.raises(ConfigError) as refusal:
            make(kind, **{name: value})
        assert flag in str(refusal.value)
        assert str(value) in str(refusal.value) or isinstance(value, tuple | dict | frozenset)
        assert "\n" not in str(refusal.value)
    for value in taken:
        assert getattr(make(kind, **{name: value}), name) == value


def test_every_setting_with_a_bound_has_a_case() -> None:
    free = {
        "path",
        "name",
        "ignore_eos",
        "special",
        "fixed",
        "measure_anew",
        "warmup",
        "swa_full",
        "kv_offload",
        "kv_unified",
    }
    free |= {"cors_origins", "chunked_prefill", "log_prompts"}
    free |= {"placement", "rope", "kv_overrides", "loras"}  # kinds of their own
    free |= {"dry_breakers", "grammar", "json_schema"}  # texts, judged where they are used
    settings = {(kind, field.name) for kind in OPTIONS for field in dataclasses.fields(kind)}
    assert {(kind, name) for kind, name, *_ in BOUNDS} == {(kind, name) for kind, name in settings if name not in free}


def test_a_pass_must_hold_a_token_of_every_sequence() -> None:
    with pytest.raises(ConfigError, match="-np got 8, expected at most 4"):
        make(ModelOptions, n_sequences=8, n_ubatch=4)
    with pytest.raises(ConfigError, match="-np got 8, expected at most 5"):
        make(ModelOptions, n_sequences=8, n_ctx=5)
    assert make(ModelOptions, n_sequences=8, n_ubatch=8).n_sequences == 8


def test_settings_are_frozen() -> None:
    for kind in OPTIONS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            make(kind).n_max = 1


def test_n_min_may_not_pass_n_max() -> None:
    assert SpeculationOptions(n_max=8, n_min=8).n_min == 8
    with pytest.raises(ConfigError, match=r"n-min got 3, expected 0 to --spec-draft-n-max \(2\)"):
        SpeculationOptions(n_max=2, n_min=3)
    assert SpeculationOptions(n_max=0).n_min == 0


@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0", "iq4_nl"])
def test_a_quantized_v_cache_needs_flash_attention(cache_type: str) -> None:
    with pytest.raises(ConfigError, match="-fa off"):
        make(ModelOptions, flash_attn="off", cache_type_v=cache_type)
    make(ModelOptions, flash_attn="auto", cache_type_v=cache_type)
    make(ModelOptions, flash_attn="off", cache_type_k=cache_type, cache_type_v="f32")


def test_defaults_are_llama_cpps() -> None:
    """``common/common.h`` of the pinned llama.cpp; what the library itself can be asked, it is asked."""
    sampling, speculation = SamplingOptions(), SpeculationOptions()
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert (speculation.n_min, speculation.p_min) == (0, 0.0)
    assert SpeculationOptions(fixed=True).k_max == 3
    assert speculation.k_max == 16  # ours: up to this, as the controller decides
    assert GenerationOptions().n_predict == -1
    model, library = make(ModelOptions), llama_cpp.llama_context_default_params()
    assert (model.n_batch, model.n_ubatch) == (library.n_batch, library.n_ubatch) == (2048, 512)
    assert (model.cache_type_k, model.cache_type_v) == ("f16", "f16")
    assert library.type_k == library.type_v == llama_cpp.GGML_TYPE_F16
    assert model.flash_attn == "auto"
    assert library.flash_attn_type == -1
    assert model.n_gpu_layers == "auto"
    weights = llama_cpp.llama_model_default_params()
    assert (weights.n_gpu_layers, weights.load_mode, weights.split_mode, weights.main_gpu) == (-1, -1, 1, 0)
    assert (model.load_mode, model.placement.split_mode, model.placement.main_gpu) == ("auto", "layer", 0)
    assert (model.placement.kv_offload, library.offload_kqv) == (True, True)
    rope = [getattr(library, field) for field in ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx")]
    assert rope == [model.rope.freq_base, model.rope.freq_scale, model.rope.yarn_orig_ctx] == [0, 0, 0]
    yarn = [f"yarn_{name}" for name in ("ext_factor", "attn_factor", "beta_slow", "beta_fast")]
    assert [getattr(library, name) for name in yarn] == [getattr(model.rope, name) for name in yarn] == [-1] * 4
    assert library.rope_scaling_type == -1
    assert model.rope.scaling is None
    assert model.swa_full is False  # common.h; the library alone would say True


def test_label() -> None:
    assert make(ModelOptions, path=Path("folder/a.gguf")).label == "a.gguf"
    assert make(ModelOptions, name="tiny").label == "tiny"


@pytest.mark.parametrize(
    ("temperature", "seed", "asked", "verifier"),
    [
        (0.8, None, None, "block"),
        (0.8, 42, None, "coupled"),  # a seed promises repetition
        (0.8, 0, None, "coupled"),
        (0.8, 42, "block", "block"),
        (0.8, None, "rejection", "rejection"),
        (0, 42, "block", "greedy"),  # temperature 0 decides
        (0.0, None, None, "greedy"),
    ],
)
def test_verifier(temperature: float, seed: int | None, asked: str | None, verifier: str) -> None:
    settings = Settings(
        make(ModelOptions),
        sampling=SamplingOptions(temperature=temperature, seed=seed),
        speculation=SpeculationOptions(verify=asked),
    )
    assert settings.verify == verifier


def test_one_device_cannot_be_split() -> None:
    with pytest.raises(ConfigError, match="-ts was given with -sm none"):
        PlacementOptions(split_mode="none", tensor_split=(3.0, 1.0))
    assert PlacementOptions(split_mode="none", tensor_split=(1.0,)).split_mode == "none"
