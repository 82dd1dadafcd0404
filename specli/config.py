"""Settings as frozen dataclasses: every default is here and nowhere else, and every value is checked here.

Names and defaults are llama.cpp's where it has the setting (``common/common.h``); the flag stands beside each.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from specli.errors import ConfigError

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
FLASH_ATTN = ("on", "off", "auto")
FIT = ("on", "off")
SPEC_TYPES = ("auto", "none", "draft", "ngram")
VERIFIERS = ("block", "rejection", "coupled")
# llama.cpp's --spec-type names for what specli does under a simpler one; None: specli has no such drafter.
LLAMA_SPEC_TYPES: dict[str, str | None] = {
    "draft-simple": "draft",
    "ngram-simple": "ngram",
    "ngram-map-k": "ngram",
    "ngram-map-k4v": "ngram",
    "ngram-mod": "ngram",
    "ngram-cache": "ngram",
    "draft-eagle3": None,
    "draft-mtp": None,
    "draft-dflash": None,
    "draft-dspark": None,
}
CONTEXT_CAP = 8192  # tokens: the default context when a model was trained on more
RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's LLAMA_DEFAULT_SEED: what -s -1 becomes there


@dataclass(frozen=True)
class ModelOptions:
    """How one model is loaded. ``n_ctx`` None: min(trained, 8192); threads None: one per physical core."""

    path: Path  # -m, -md
    n_ctx: int | None = None  # -c, tokens; 0 = as trained
    n_batch: int = 2048  # -b, tokens
    n_ubatch: int = 512  # -ub, tokens
    n_threads: int | None = None  # -t, -td
    n_threads_batch: int | None = None  # -tb, -tbd; None: as n_threads
    n_gpu_layers: str = "auto"  # -ngl, -ngld: a number, auto, all
    flash_attn: str = "auto"  # -fa
    cache_type_k: str = "f16"  # -ctk, -ctkd
    cache_type_v: str = "f16"  # -ctv, -ctvd
    name: str = ""  # what messages call the model; the file's name when empty

    def __post_init__(self) -> None:
        if self.n_ctx is not None:
            _require("-c/--ctx-size", self.n_ctx, 0 <= self.n_ctx < 2**31, "0 (as trained) or more tokens")
        _require("-b/--batch-size", self.n_batch, 0 < self.n_batch < 2**31, "at least 1 token")
        _require("-ub/--ubatch-size", self.n_ubatch, 0 < self.n_ubatch < 2**31, "at least 1 token")
        for flag, threads in (("-t/--threads", self.n_threads), ("-tb/--threads-batch", self.n_threads_batch)):
            if threads is not None:
                _require(flag, threads, -1 <= threads <= 512, "1 to 512 threads (0 or -1 = all logical cores)")
        _require_choice("-fa/--flash-attn", self.flash_attn, FLASH_ATTN)
        _require_choice("-ctk/--cache-type-k", self.cache_type_k, CACHE_TYPES)
        _require_choice("-ctv/--cache-type-v", self.cache_type_v, CACHE_TYPES)
        if self.n_gpu_layers not in ("auto", "all"):
            is_number = re.fullmatch(r"-?[0-9]{1,10}", self.n_gpu_layers) is not None
            in_range = is_number and -2 <= int(self.n_gpu_layers) < 2**31
            _require("-ngl/--gpu-layers", self.n_gpu_layers, in_range, "a number of layers, auto or all")
        if self.flash_attn == "off" and self.cache_type_v not in ("f32", "f16", "bf16"):
            raise ConfigError(
                f"-fa off was given with -ctv {self.cache_type_v}: a quantized V cache needs flash attention; "
                "use -fa on or auto, or -ctv f16"
            )

    @property
    def label(self) -> str:
        """What messages call the model."""
        return self.name or self.path.name


@dataclass(frozen=True)
class SamplingOptions:
    """The sampler chain, in llama.cpp's order. ``seed`` None means no promise of repetition."""

    temperature: float = 0.8  # --temp; 0 = greedy
    top_k: int = 40  # --top-k; 0 = off
    top_p: float = 0.95  # --top-p; 1 = off
    min_p: float = 0.05  # --min-p; 0 = off
    seed: int | None = None  # -s; -1 = none
    ignore_eos: bool = False  # --ignore-eos

    def __post_init__(self) -> None:
        is_number = math.isfinite(self.temperature) and self.temperature >= 0
        _require("--temp", self.temperature, is_number, "a finite number, 0 (greedy) or more")
        _require("--top-k", self.top_k, -1 <= self.top_k < 2**31, "0 (off) or more tokens")
        _require("--top-p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1 (off)")
        _require("--min-p", self.min_p, 0 <= self.min_p <= 1, "0 (off) to 1")
        if self.seed is not None:
            _require("-s/--seed", self.seed, 0 <= self.seed < 2**32, "0 to 4294967295, or -1 for none")


@dataclass(frozen=True)
class SpeculationOptions:
    """Who drafts, how much, and who judges. ``verify`` None: coupled with a seed, block without."""

    type: str = "auto"  # --spec-type: auto (draft if there is one, else ngram), none, draft, ngram
    n_max: int = 3  # --spec-draft-n-max, tokens
    n_min: int = 0  # --spec-draft-n-min, tokens
    p_min: float = 0.0  # --spec-draft-p-min
    verify: str | None = None  # --verify

    def __post_init__(self) -> None:
        _require_choice("--spec-type", self.type, SPEC_TYPES)
        _require("--spec-draft-n-max", self.n_max, 0 <= self.n_max <= 256, "0 (no drafting) to 256 tokens")
        in_range = 0 <= self.n_min <= max(self.n_max, 0)
        _require("--spec-draft-n-min", self.n_min, in_range, f"0 to --spec-draft-n-max ({self.n_max})")
        _require("--spec-draft-p-min", self.p_min, 0 <= self.p_min <= 1, "a probability, 0 (off) to 1")
        if self.verify is not None:
            _require_choice("--verify", self.verify, VERIFIERS)


@dataclass(frozen=True)
class GenerationOptions:
    """When to stop. ``n_predict`` as llama.cpp: -1 until EOS or the end of the context, -2 the same."""

    n_predict: int = -1  # -n, tokens
    stops: tuple[str, ...] = ()  # -r, may be repeated

    def __post_init__(self) -> None:
        _require("-n/--predict", self.n_predict, -2 <= self.n_predict < 2**31, "0 or more tokens, or -1 for no limit")
        if any(not stop for stop in self.stops):
            raise ConfigError("-r/--reverse-prompt got an empty stop string, which stands everywhere; leave it out")


@dataclass(frozen=True)
class Settings:
    """Everything that a session needs to know."""

    target: ModelOptions
    draft: ModelOptions | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    fit: str = "on"  # -fit: plan the memory before loading
    names: tuple[str, ...] | None = None  # the flags that named the models, to repeat in advice; None: their files

    def __post_init__(self) -> None:
        _require_choice("-fit/--fit", self.fit, FIT)

    @property
    def verify(self) -> str:
        """The verifier's name: a seed promises repetition, which only coupled sampling keeps for every K."""
        if self.sampling.temperature == 0:
            return "greedy"
        return self.speculation.verify or ("block" if self.sampling.seed is None else "coupled")


def _require(flag: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ConfigError(f"{flag} got {value}, expected {expected}")


def _require_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    _require(flag, repr(value), value in choices, "one of " + ", ".join(choices))
