"""Settings as frozen dataclasses: every default is here and nowhere else, and every value is checked here.

Names and defaults are llama.cpp's where it has the setting (``common/common.h``); the flag stands beside each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from specli.errors import ConfigError

MAX_ROWS = 64
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
FLASH_ATTN = ("on", "off", "auto")
FIT = ("on", "off")
SPLIT_MODES = ("none", "layer", "row", "tensor")
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")
ROPE_SCALINGS = ("none", "linear", "yarn")
NUMA = ("distribute", "isolate", "numactl")
KV_OVERRIDE_TYPES = ("int", "float", "bool", "str")
SAMPLERS = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
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
MOST_LOGIT = 1e30  # what may be added to a logit or multiply it, so that a float32 holds the sum
AUTO_K = 16  # tokens: the longest draft that the controller may choose
FIXED_K = 3  # tokens: llama.cpp's --spec-draft-n-max, for --draft-fixed without a number
CONTEXT_CAP = 8192  # tokens: the default context when a model was trained on more
LENGTH_KINDS = ("uniform", "normal", "lognormal")
ENDPOINTS = ("chat", "completions")
MOST_IN_FLIGHT = 1000  # requests of a load test, so that file descriptors suffice
FIND_SLA_MOST = 256  # requests in flight that --find-sla looks at when nobody says
OPEN_WARMUP_S = 10.0  # of arrivals at a rate before anything is measured
RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's LLAMA_DEFAULT_SEED: what -s -1 becomes there


@dataclass(frozen=True)
class PlacementOptions:
    """Which devices hold what. ``devices`` None: all that there are; empty (``-dev none``): the CPU alone.

    ``tensor_overrides``: pairs of a regular expression on tensor names and a buffer type, the first that matches wins.
    """

    devices: tuple[str, ...] | None = None  # -dev, -devd
    split_mode: str = "layer"  # -sm
    tensor_split: tuple[float, ...] = ()  # -ts, parts for each device
    main_gpu: int = 0  # -mg
    kv_offload: bool = True  # -kvo, -nkvo
    tensor_overrides: tuple[tuple[str, str], ...] = ()  # -ot, -cmoe, -ncmoe and the draft's

    def __post_init__(self) -> None:
        if self.devices is not None:
            is_named = all(self.devices) and len(set(self.devices)) == len(self.devices)
            _require("-dev/--device", ",".join(self.devices), is_named, "names, each once (see --list-devices)")
        _require_choice("-sm/--split-mode", self.split_mode, SPLIT_MODES)
        parts = self.tensor_split
        is_share = all(math.isfinite(part) and part >= 0 for part in parts) and (not parts or any(parts))
        _require("-ts/--tensor-split", parts, is_share, "proportions of 0 or more, one of them above 0 (3,1)")
        _require("-mg/--main-gpu", self.main_gpu, 0 <= self.main_gpu < 2**31, "the number of a device, from 0")
        for pattern, buffer_type in self.tensor_overrides:
            _require_pattern(pattern, buffer_type)
        if self.split_mode == "none" and len(parts) > 1:
            raise ConfigError("-ts was given with -sm none: one device holds everything there; leave one of them out")


@dataclass(frozen=True)
class RopeOptions:
    """Rotary positions, for contexts longer than trained. 0 (and -1 for YaRN's factors): as the model says."""

    scaling: str | None = None  # --rope-scaling
    freq_base: float = 0.0  # --rope-freq-base
    freq_scale: float = 0.0  # --rope-freq-scale; --rope-scale N is 1/N
    yarn_orig_ctx: int = 0  # --yarn-orig-ctx, tokens
    yarn_ext_factor: float = -1.0  # --yarn-ext-factor
    yarn_attn_factor: float = -1.0  # --yarn-attn-factor
    yarn_beta_slow: float = -1.0  # --yarn-beta-slow
    yarn_beta_fast: float = -1.0  # --yarn-beta-fast

    def __post_init__(self) -> None:
        if self.scaling is not None:
            _require_choice("--rope-scaling", self.scaling, ROPE_SCALINGS)
        for flag, value in (("--rope-freq-base", self.freq_base), ("--rope-freq-scale", self.freq_scale)):
            _require(flag, value, 0 <= value < math.inf, "a number above 0, or 0 for the model's own")
        _require(
            "--yarn-orig-ctx", self.yarn_orig_ctx, 0 <= self.yarn_orig_ctx < 2**31, "0 (as trained) or more tokens"
        )
        for name in ("ext_factor", "attn_factor", "beta_slow", "beta_fast"):
            value = getattr(self, f"yarn_{name}")
            is_number = value == -1 or 0 <= value < math.inf
            _require(f"--yarn-{name.replace('_', '-')}", value, is_number, "0 or more, or -1 for the model's own")


@dataclass(frozen=True)
class KvOverride:
    """A key of the model's metadata taken as another value: ``--override-kv KEY=TYPE:VALUE``."""

    key: str
    value: bool | int | float | str

    def __post_init__(self) -> None:
        key, text = self.key.encode("utf-8"), str(self.value).encode("utf-8")
        _require("--override-kv", repr(self.key), 0 < len(key) < 128, "a key of 1 to 127 bytes")
        if isinstance(self.value, str):
            _require("--override-kv", repr(self.value), len(text) < 128, "a text of at most 127 bytes")
        elif isinstance(self.value, int):
            _require("--override-kv", self.value, -(2**63) <= self.value < 2**63, "an integer of 64 bits")
        else:
            _require("--override-kv", self.value, math.isfinite(self.value), "a finite number")


@dataclass(frozen=True)
class Lora:
    """A LoRA adapter laid over the target's weights."""

    path: Path  # --lora
    scale: float = 1.0  # --lora-scaled FNAME:SCALE

    def __post_init__(self) -> None:
        _require("--lora-scaled", self.scale, math.isfinite(self.scale), "a finite number behind the colon")


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
    placement: PlacementOptions = field(default_factory=PlacementOptions)
    rope: RopeOptions = field(default_factory=RopeOptions)
    kv_overrides: tuple[KvOverride, ...] = ()  # --override-kv
    loras: tuple[Lora, ...] = ()  # --lora, --lora-scaled
    swa_full: bool = False  # --swa-full: a sliding window's cache as long as the context
    load_mode: str = "auto"  # -lm
    warmup: bool = True  # --warmup, --no-warmup
    n_sequences: int = 1  # -np: texts at a time, each with a context of n_ctx tokens
    kv_unified: bool = True  # their caches are one; apart, ragged batches take several passes (a quarter slower)
    name: str = ""  # what messages call the model; the file's name when empty

    def __post_init__(self) -> None:
        if self.n_ctx is not None:
            _require("-c/--ctx-size", self.n_ctx, 0 <= self.n_ctx < 2**31, "0 (as trained) or more tokens")
        _require("-np/--parallel", self.n_sequences, 1 <= self.n_sequences <= 256, "1 to 256 texts at a time")
        _require("-b/--batch-size", self.n_batch, 0 < self.n_batch < 2**31, "at least 1 token")
        _require("-ub/--ubatch-size", self.n_ubatch, 0 < self.n_ubatch < 2**31, "at least 1 token")
        if self.n_sequences > (n_most := min(self.n_batch, self.n_ubatch, self.n_ctx or self.n_batch)):
            raise ConfigError(
                f"-np got {self.n_sequences}, expected at most {n_most}: a pass holds no more tokens (-b, -ub, -c), "
                "and each text needs one"
            )
        for flag, threads in (("-t/--threads", self.n_threads), ("-tb/--threads-batch", self.n_threads_batch)):
            if threads is not None:
                _require(flag, threads, -1 <= threads <= 512, "1 to 512 threads (0 or -1 = all logical cores)")
        _require_choice("-fa/--flash-attn", self.flash_attn, FLASH_ATTN)
        _require_choice("-ctk/--cache-type-k", self.cache_type_k, CACHE_TYPES)
        _require_choice("-ctv/--cache-type-v", self.cache_type_v, CACHE_TYPES)
        _require_choice("-lm/--load-mode", self.load_mode, LOAD_MODES)
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

    def n_rows(self, k_max: int) -> int:
        """Logits rows that one pass may have to give: a draft of ``k_max`` tokens and one more for each sequence.

        With many sequences less: a pass over more rows than ``MAX_ROWS`` is bound by arithmetic, where no draft pays.
        """
        return max(self.n_sequences, min(self.n_sequences * (k_max + 1), max(k_max + 1, MAX_ROWS)))


@dataclass(frozen=True)
class SamplingOptions:
    """The sampler chain, with llama.cpp's names and defaults. ``seed`` None means no promise of repetition.

    ``dry_penalty_last_n`` and ``repeat_last_n`` count tokens of prompt and answer; -1 means all of them. ``grammar`` is
    GBNF, ``json_schema`` a schema as text; empty: none. ``logit_bias``: pairs of a token id and what is added to its
    logit, -inf bans it.
    """

    temperature: float = 0.8  # --temp; 0 = greedy
    top_k: int = 40  # --top-k; 0 = off
    top_p: float = 0.95  # --top-p; 1 = off
    min_p: float = 0.05  # --min-p; 0 = off
    seed: int | None = None  # -s; -1 = none
    ignore_eos: bool = False  # --ignore-eos
    typical_p: float = 1.0  # --typical; 1 = off
    top_n_sigma: float = -1.0  # --top-nsigma; -1 = off
    xtc_probability: float = 0.0  # --xtc-probability; 0 = off
    xtc_threshold: float = 0.1  # --xtc-threshold; above 0.5 = off
    dynatemp_range: float = 0.0  # --dynatemp-range; 0 = off
    dynatemp_exponent: float = 1.0  # --dynatemp-exp
    repeat_last_n: int = 64  # --repeat-last-n, tokens; 0 = off
    repeat_penalty: float = 1.0  # --repeat-penalty; 1 = off
    presence_penalty: float = 0.0  # --presence-penalty; 0 = off
    frequency_penalty: float = 0.0  # --frequency-penalty; 0 = off
    dry_multiplier: float = 0.0  # --dry-multiplier; 0 = off
    dry_base: float = 1.75  # --dry-base
    dry_allowed_length: int = 2  # --dry-allowed-length, tokens
    dry_penalty_last_n: int = 64  # --dry-penalty-last-n, tokens; 0 = off
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")  # --dry-sequence-breaker
    mirostat: int = 0  # --mirostat; 0 = off
    mirostat_tau: float = 5.0  # --mirostat-ent, bits
    mirostat_eta: float = 0.1  # --mirostat-lr
    samplers: tuple[str, ...] = SAMPLERS  # --samplers
    logit_bias: tuple[tuple[int, float], ...] = ()  # -l
    grammar: str = ""  # --grammar
    json_schema: str = ""  # -j

    def __post_init__(self) -> None:
        self._check_penalties()
        _require("--typical", self.typical_p, 0 < self.typical_p <= 1, "more than 0 and at most 1 (off)")
        _require("--top-nsigma", self.top_n_sigma, math.isfinite(self.top_n_sigma), "a number above 0, or -1 (off)")
        _require("--xtc-probability", self.xtc_probability, 0 <= self.xtc_probability <= 1, "0 (off) to 1")
        _require("--xtc-threshold", self.xtc_threshold, 0 <= self.xtc_threshold <= 1, "0 to 1 (above 0.5: off)")
        in_range = 0 <= self.dynatemp_range < math.inf
        _require("--dynatemp-range", self.dynatemp_range, in_range, "a finite number, 0 (off) or more")
        in_range = 0 < self.dynatemp_exponent < math.inf
        _require("--dynatemp-exp", self.dynatemp_exponent, in_range, "a finite number above 0")
        _require("--mirostat", self.mirostat, self.mirostat in (0, 1, 2), "0 (off), 1 or 2")
        _require("--mirostat-ent", self.mirostat_tau, 0 <= self.mirostat_tau < math.inf, "0 or more bits")
        _require("--mirostat-lr", self.mirostat_eta, 0 <= self.mirostat_eta < math.inf, "a finite number, 0 or more")
        for name in self.samplers:
            _require_choice("--samplers", name, SAMPLERS)
        is_once = len(set(self.samplers)) == len(self.samplers)
        _require("--samplers", ";".join(self.samplers), is_once, "each name at most once")
        for token, bias in self.logit_bias:
            _require("-l/--logit-bias", token, 0 <= token < 2**31, "a token id, 0 or more")
            in_range = abs(bias) <= MOST_LOGIT or bias == -math.inf
            _require("-l/--logit-bias", bias, in_range, "a number up to 1e30 either way, or -inf")
        if any(not text for text in self.dry_breakers):
            raise ConfigError(
                "--dry-sequence-breaker got an empty text, which stands everywhere; leave it out, or none"
            )
        if self.ignore_eos and self.is_constrained:
            raise ConfigError(
                "--ignore-eos was given with a grammar or schema, which says where the text ends; leave one out"
            )
        if self.grammar and self.json_schema:
            raise ConfigError(
                "a grammar and a JSON schema were both given, each says what may come next; leave one out"
            )
        is_number = math.isfinite(self.temperature) and self.temperature >= 0
        _require("--temp", self.temperature, is_number, "a finite number, 0 (greedy) or more")
        _require("--top-k", self.top_k, -1 <= self.top_k < 2**31, "0 (off) or more tokens")
        _require("--top-p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1 (off)")
        _require("--min-p", self.min_p, 0 <= self.min_p <= 1, "0 (off) to 1")
        if self.seed is not None:
            _require("-s/--seed", self.seed, 0 <= self.seed < 2**32, "0 to 4294967295, or -1 for none")

    def _check_penalties(self) -> None:
        for flag, n in (("--repeat-last-n", self.repeat_last_n), ("--dry-penalty-last-n", self.dry_penalty_last_n)):
            _require(flag, n, -1 <= n < 2**31, "a number of tokens, 0 (off) or -1 (all)")
        is_divisor = 1 / MOST_LOGIT <= self.repeat_penalty <= MOST_LOGIT
        _require("--repeat-penalty", self.repeat_penalty, is_divisor, "a number above 0, up to 1e30 (1: off)")
        for flag, value in (
            ("--presence-penalty", self.presence_penalty),
            ("--frequency-penalty", self.frequency_penalty),
            ("--dry-multiplier", self.dry_multiplier),
        ):
            _require(flag, value, abs(value) <= MOST_LOGIT, "a number up to 1e30 either way (0: off)")
        _require("--dry-base", self.dry_base, 1 <= self.dry_base <= MOST_LOGIT, "a number from 1 to 1e30")
        in_range = 0 <= self.dry_allowed_length < 2**31
        _require("--dry-allowed-length", self.dry_allowed_length, in_range, "0 or more tokens")

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit of what is left decides (``sampling.Sampler.is_greedy``)."""
        has_temperature = self.mirostat > 0 or "temperature" in self.samplers
        return has_temperature and self.temperature == 0 and self.dynatemp_range == 0

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar or schema says what may come next."""
        return bool(self.grammar or self.json_schema)


@dataclass(frozen=True)
class SpeculationOptions:
    """Who drafts, how much, and who judges. ``verify`` None: coupled with a seed, block without."""

    type: str = "auto"  # --spec-type: auto (draft if there is one, else ngram), none, draft, ngram
    n_max: int | None = None  # --spec-draft-n-max, tokens: the longest draft; None (auto): up to 16
    n_min: int = 0  # --spec-draft-n-min, tokens
    p_min: float = 0.0  # --spec-draft-p-min
    verify: str | None = None  # --verify
    fixed: bool = False  # --draft-fixed: always the longest draft, whether it pays or not
    measure_anew: bool = False  # specli tune: what was kept of costs does not count

    def __post_init__(self) -> None:
        _require_choice("--spec-type", self.type, SPEC_TYPES)
        _require("--spec-draft-n-max", self.n_max, 0 <= self.k_max <= 256, "auto, or 0 (no drafting) to 256 tokens")
        in_range = 0 <= self.n_min <= self.k_max
        _require("--spec-draft-n-min", self.n_min, in_range, f"0 to --spec-draft-n-max ({self.k_max})")
        _require("--spec-draft-p-min", self.p_min, 0 <= self.p_min <= 1, "a probability, 0 (off) to 1")
        if self.verify is not None:
            _require_choice("--verify", self.verify, VERIFIERS)

    @property
    def k_max(self) -> int:
        """The longest draft, tokens."""
        if self.n_max is not None:
            return self.n_max
        return FIXED_K if self.fixed else AUTO_K

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model has any use."""
        return self.type == "draft" or (self.type == "auto" and self.k_max > 0)


@dataclass(frozen=True)
class GenerationOptions:
    """When to stop. ``n_predict`` as llama.cpp: -1 until EOS or the end of the context, -2 the same."""

    n_predict: int = -1  # -n, tokens
    stops: tuple[str, ...] = ()  # -r, may be repeated
    special: bool = False  # -sp: control tokens are shown as text
    n_logprobs: int | None = None  # --logprobs: of each token, and of so many alternatives

    def __post_init__(self) -> None:
        _require("-n/--predict", self.n_predict, -2 <= self.n_predict < 2**31, "0 or more, or -1 or -2 for no limit")
        n_logprobs = self.n_logprobs
        _require("--logprobs", n_logprobs, n_logprobs is None or 0 <= n_logprobs <= 100, "0 to 100 alternatives")
        if any(not stop for stop in self.stops):
            raise ConfigError("-r/--reverse-prompt got an empty stop string, which stands everywhere; leave it out")


@dataclass(frozen=True)
class TemplateOptions:
    """The chat template. ``source``: jinja text, or the name of one that llama.cpp has built in; None: the file's."""

    source: str | None = None  # --chat-template, --chat-template-file
    kwargs: Mapping[str, object] = field(default_factory=dict)  # --chat-template-kwargs

    def __post_init__(self) -> None:
        _require("--chat-template", repr(self.source), self.source != "", "jinja text or a built-in name")
        taken = sorted({"messages", "add_generation_prompt"} & set(self.kwargs))
        _require("--chat-template-kwargs", ", ".join(taken), not taken, "names that the conversation does not use")


@dataclass(frozen=True)
class ProcessOptions:
    """What holds for the whole process, so for target and draft alike. ``cpus`` None: all that it may use."""

    cpus: frozenset[int] | None = None  # -C, -Cr
    priority: int = 0  # --prio: -1 (low) to 3 (realtime)
    numa: str | None = None  # --numa

    def __post_init__(self) -> None:
        if self.cpus is not None:
            is_mask = bool(self.cpus) and min(self.cpus) >= 0
            _require("-C/--cpu-mask", sorted(self.cpus), is_mask, "at least one CPU")
        _require("--prio", self.priority, -1 <= self.priority <= 3, "-1 (low) to 3 (realtime)")
        if self.numa is not None:
            _require_choice("--numa", self.numa, NUMA)


@dataclass(frozen=True)
class Settings:
    """Everything that a session needs to know."""

    target: ModelOptions
    draft: ModelOptions | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    fit: str = "on"  # -fit: plan the memory before loading
    names: tuple[str, ...] | None = None  # the flags that named the models, to repeat in advice; None: their files
    template: TemplateOptions = field(default_factory=TemplateOptions)
    process: ProcessOptions = field(default_factory=ProcessOptions)
    exact: bool = False  # --exact: only settings under which passes of every width give the same logits to the bit

    def __post_init__(self) -> None:
        _require_choice("-fit/--fit", self.fit, FIT)

    @property
    def verify(self) -> str:
        """The verifier's name: a seed promises repetition, which only coupled sampling keeps for every K."""
        if self.sampling.is_greedy:
            return "greedy"
        return self.speculation.verify or ("block" if self.sampling.seed is None else "coupled")


@dataclass(frozen=True)
class BenchOptions:
    """What ``specli bench`` measures.

    ``lengths``: tokens, None is the controller's; ``spec_types`` empty: what there is.
    """

    lengths: tuple[int | None, ...] = (1, 2, 4, 8, None)  # --draft-max
    spec_types: tuple[str, ...] = ()  # --spec-type
    temperatures: tuple[float, ...] = (0.0,)  # --temp
    verifiers: tuple[str, ...] = ("block",)  # --verify
    n_predict: int = 128  # -n, tokens
    repetitions: int = 3  # -r
    time_budget_s: float | None = 900.0  # --time-budget; None: no limit
    seed: int = 0  # -s: orders the runs and seeds the sampled ones
    raw: bool = False  # --raw
    share_drafts: bool = False  # --share-drafts

    def __post_init__(self) -> None:
        for k in self.lengths:
            _require("--draft-max", k, k is None or 0 <= k <= 256, "auto, or 0 (no drafting) to 256 tokens")
        for name in self.spec_types:
            _require_choice("--spec-type", name, SPEC_TYPES)
        for name in self.verifiers:
            _require_choice("--verify", name, VERIFIERS)
        for temperature in self.temperatures:
            SamplingOptions(temperature)
        _require("-n/--predict", self.n_predict, 2 <= self.n_predict < 2**31, "at least 2 tokens, or nothing is timed")
        _require("-r/--repetitions", self.repetitions, 1 <= self.repetitions < 2**31, "at least 1")
        _require("-s/--seed", self.seed, 0 <= self.seed < 2**32, "0 to 4294967295")
        budget_s = self.time_budget_s
        _require("--time-budget", budget_s, budget_s is None or 0 < budget_s < math.inf, "a time, such as 90s or 15m")

    @property
    def k_max(self) -> int:
        """The longest draft that is asked for, tokens."""
        return max((AUTO_K if k is None else k for k in self.lengths), default=0)


@dataclass(frozen=True)
class ServeOptions:
    """What ``specli serve`` listens to and bounds. Names and defaults are llama-server's where it has the setting.

    ``sla_ttft_ms``, ``sla_tpot_ms``: what 95% of the answers should stay within, None: no promise.
    """

    host: str = "127.0.0.1"  # --host
    port: int = 8080  # --port; 0: any that is free
    alias: str | None = None  # -a: the model's name in the interface
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # --api-key, --api-key-file
    cors_origins: tuple[str, ...] = ()  # --cors-origins
    n_queue: int = 64  # --queue: requests that may wait
    timeout_s: float = 600.0  # -to: from arrival to the last token
    n_predict: int = -1  # -n: most tokens of one answer, -1: no limit but the context
    max_body_bytes: int = 4 << 20  # --max-body
    max_messages: int = 1024  # --max-messages
    max_stops: int = 16  # --max-stops
    max_choices: int = 16  # --max-choices: n of one request
    chunked_prefill: bool = True  # --chunked-prefill: a long prompt takes turns with the answers under way
    sla_ttft_ms: float | None = None  # --sla-ttft
    sla_tpot_ms: float | None = None  # --sla-tpot
    log_prompts: bool = False  # --log-prompts

    def __post_init__(self) -> None:
        _require("--host", repr(self.host), bool(self.host.strip()), "an address or name to listen at")
        _require("--port", self.port, 0 <= self.port < 2**16, "0 (any) to 65535")
        _require("-a/--alias", repr(self.alias), self.alias is None or bool(self.alias.strip()), "a name")
        if any(not key or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError(
                "--api-key got an empty key or one with spaces or control characters; expected plain text"
            )
        for flag, n, most in (
            ("--queue", self.n_queue, 1 << 16),
            ("--max-body", self.max_body_bytes, 1 << 31),
            ("--max-messages", self.max_messages, 1 << 20),
            ("--max-stops", self.max_stops, 1 << 10),
            ("--max-choices", self.max_choices, 256),
        ):
            _require(flag, n, 1 <= n <= most, f"1 to {most}")
        _require("-to/--timeout", self.timeout_s, 0 < self.timeout_s < 1e9, "seconds above 0")
        _require("-n/--predict", self.n_predict, self.n_predict == -1 or 0 < self.n_predict < 2**31, "1 or more, or -1")
        for flag, bound_ms in (("--sla-ttft", self.sla_ttft_ms), ("--sla-tpot", self.sla_tpot_ms)):
            _require(flag, bound_ms, bound_ms is None or 0 < bound_ms < 1e9, "milliseconds above 0")

    @property
    def has_bounds(self) -> bool:
        """Whether there is anything to keep."""
        return self.sla_ttft_ms is not None or self.sla_tpot_ms is not None

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host == "localhost" or self.host == "::1" or self.host.startswith("127.")


@dataclass(frozen=True)
class LengthOptions:
    """How lengths in tokens are drawn; ``LoadOptions`` checks it, with the flag's name in its words.

    ``uniform``: from ``first`` to ``second``. ``normal``: mean and standard deviation. ``lognormal``: median, and
    standard deviation of the logarithm. The latter two are cut off at three deviations.
    """

    kind: str
    first: float
    second: float

    @property
    def low(self) -> int:
        """The shortest, tokens; at least 1."""
        ends = {"uniform": self.first, "normal": self.first - 3 * self.second}
        return max(1, round(ends.get(self.kind, self.first * math.exp(-3 * min(self.second, 10.0)))))

    @property
    def high(self) -> int:
        """The longest, tokens."""
        ends = {"uniform": self.second, "normal": self.first + 3 * self.second}
        return round(ends.get(self.kind, self.first * math.exp(3 * min(self.second, 10.0))))

    @property
    def words(self) -> str:
        """As it is written on the command line."""
        return f"{self.kind}:{self.first:g},{self.second:g}"


# Kinds of use by the lengths of their prompts and answers: guesses at the shape, not measurements of anybody's traffic.
LENGTHS: Mapping[str, tuple[LengthOptions, LengthOptions]] = {
    "chat": (LengthOptions("lognormal", 120, 0.7), LengthOptions("lognormal", 150, 0.5)),
    "summarize": (LengthOptions("normal", 900, 200), LengthOptions("normal", 100, 25)),
    "code": (LengthOptions("lognormal", 350, 0.6), LengthOptions("lognormal", 200, 0.5)),
    "long": (LengthOptions("uniform", 2000, 6000), LengthOptions("uniform", 200, 600)),
}


@dataclass(frozen=True)
class LoadOptions:
    """What ``specli bench --url`` asks of a server, and for how long.

    ``rates`` in place of ``concurrency``: an open loop. ``n_requests`` in place of ``duration_s``: where the measured
    part of a step ends. Without either warm-up: one request per connection, or ``OPEN_WARMUP_S`` of arrivals.
    """

    url: str  # --url, with or without /v1
    api_key: str | None = field(default=None, repr=False)  # --api-key, --api-key-file
    model_name: str | None = None  # --model-name; None: the first that the server names
    endpoint: str = "chat"  # --endpoint
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16)  # --concurrency, requests in flight
    rates: tuple[float, ...] = ()  # --rate, requests/s
    input_length: LengthOptions = LENGTHS["chat"][0]  # --input-length
    output_length: LengthOptions = LENGTHS["chat"][1]  # --output-length
    shared_prefix: int = 0  # --shared-prefix, tokens
    n_requests: int | None = None  # --requests, of each step
    duration_s: float = 60.0  # --duration, of each step
    warmup_requests: int | None = None  # --warmup-for N
    warmup_s: float | None = None  # --warmup-for TIME
    sla_ttft_ms: float | None = None  # --sla-ttft
    sla_tpot_ms: float | None = None  # --sla-tpot
    find_sla: bool = False  # --find-sla: the highest load inside the bounds, between the ends of the loads
    temperature: float = 0.0  # --temp
    ignore_eos: bool = False  # --ignore-eos
    seed: int = 0  # -s: lengths, words and arrivals
    timeout_s: float = 300.0  # --timeout: the longest wait for the next piece of an answer
    time_budget_s: float | None = 900.0  # --time-budget; None: no limit

    def __post_init__(self) -> None:
        _require_url(self.url)
        key = self.api_key
        is_key = key is None or (bool(key) and key.isascii() and key.isprintable() and " " not in key)
        _require("--api-key", "a key", is_key, "one line of ASCII without blanks")
        _require_choice("--endpoint", self.endpoint, ENDPOINTS)
        _require("--model-name", repr(self.model_name), self.model_name != "", "a name")
        _require("--concurrency", "nothing", bool(self.concurrency or self.rates), "numbers of requests in flight")
        for n in self.concurrency:
            _require("--concurrency", n, 1 <= n <= MOST_IN_FLIGHT, f"1 to {MOST_IN_FLIGHT} requests in flight")
        for rate in self.rates:
            _require("--rate", rate, 0 < rate <= 1e5, "requests per second, above 0")
        _require_lengths("--input-length", self.input_length)
        _require_lengths("--output-length", self.output_length)
        _require("--shared-prefix", self.shared_prefix, 0 <= self.shared_prefix < 2**20, "0 or more tokens")
        self._check_times()
        SamplingOptions(self.temperature)
        _require("-s/--seed", self.seed, 0 <= self.seed < 2**32, "0 to 4294967295")

    def _check_times(self) -> None:
        n_requests, n_warm = self.n_requests, self.warmup_requests
        _require("--requests", n_requests, n_requests is None or 1 <= n_requests < 2**31, "at least 1")
        _require("--warmup-for", n_warm, n_warm is None or 0 <= n_warm < 2**31, "a number of requests, or a time")
        times = {"--duration": self.duration_s, "--timeout": self.timeout_s, "--time-budget": self.time_budget_s}
        for flag, value in {**times, "--warmup-for": self.warmup_s}.items():
            _require(flag, value, value is None or 0 < value < math.inf, "a time above 0, such as 30s or 5m")
        for flag, bound in {"--sla-ttft": self.sla_ttft_ms, "--sla-tpot": self.sla_tpot_ms}.items():
            _require(flag, bound, bound is None or 0 < bound < math.inf, "milliseconds, above 0")
        if self.find_sla and not self.has_sla:
            raise ConfigError("--find-sla was given without a bound; give --sla-ttft MS, --sla-tpot MS, or both")

    @property
    def has_sla(self) -> bool:
        """Whether a request can be inside or outside the bounds."""
        return self.sla_ttft_ms is not None or self.sla_tpot_ms is not None

    @property
    def is_open(self) -> bool:
        """Whether requests come at a rate, whatever the server does."""
        return bool(self.rates)

    @property
    def loads(self) -> tuple[float, ...]:
        """Requests in flight, or requests/s."""
        return self.rates or self.concurrency


def _require_pattern(pattern: str, buffer_type: str) -> None:
    """``-ot``: a regular expression and a buffer type, both there."""
    found = f"{pattern}={buffer_type}"
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"-ot/--override-tensor got {found}, expected a regular expression: {error}") from error
    _require("-ot/--override-tensor", found, bool(pattern and buffer_type), "PATTERN=BUFFER_TYPE")


def _require_url(url: str) -> None:
    """A server's address: http or https, a host, perhaps a port and a path."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_valid = is_valid and not (parts.query or parts.fragment or " " in url) and url.isprintable()
    except ValueError:  # a port that is no number, a bracket that is left open
        is_valid = False
    shown = re.sub(r"//[^/]*@", "//", url)  # a password is nobody's business
    _require("--url", repr(shown), is_valid, "http://HOST:PORT or https://HOST, with or without /v1")


def _require_lengths(flag: str, lengths: LengthOptions) -> None:
    """Finite, at least a token, and never all equal."""
    _require_choice(flag, lengths.kind, LENGTH_KINDS)
    first, second = lengths.first, lengths.second
    is_finite = 1 <= first < 2**20 and 0 <= second < 2**20
    if lengths.kind == "lognormal":
        is_finite = is_finite and second <= 3
    _require(
        flag,
        lengths.words,
        is_finite,
        "at least 1 token and fewer than 1,048,576, a spread of at least 0 (lognormal: at most 3)",
    )
    if lengths.low > lengths.high:
        raise ConfigError(f"{flag} got {lengths.words}, expected the shorter length first")
    if lengths.low == lengths.high:
        raise ConfigError(
            f"{flag} got {lengths.words}, under which all lengths are equal, as no traffic's are; expected a spread, "
            "as in uniform:64,256"
        )


def _require(flag: str, value: object, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ConfigError(f"{flag} got {value}, expected {expected}")


def _require_choice(flag: str, value: str, choices: tuple[str, ...]) -> None:
    _require(flag, repr(value), value in choices, "one of " + ", ".join(choices))
