"""What llama.cpp users type and Typer would misread: attached short values, removed names, flags that we lack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from specli.config import LLAMA_SPEC_TYPES
from specli.errors import ConfigError

# Names that llama.cpp removed; still taken, with a note that names the present one.
REMOVED: Mapping[str, str] = {
    "--draft-max": "--spec-draft-n-max",
    "--draft": "--spec-draft-n-max",
    "--draft-n": "--spec-draft-n-max",
    "--draft-min": "--spec-draft-n-min",
    "--draft-n-min": "--spec-draft-n-min",
}
# llama.cpp options that specli does not have, so that they are not read as something else. From common/arg.cpp.
_LACKING_NAMES = """
-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -lcs --lookup-cache-static -lcd
--lookup-cache-dynamic --keep --swa-full -ctxcp --ctx-checkpoints -cram --cache-ram -kvu --kv-unified
--context-shift --no-context-shift --chunks -co --color -sysf --system-prompt-file --in-file -bf --binary-file -e
--escape --no-escape -ptc --print-token-count --prompt-cache --prompt-cache-all --prompt-cache-ro -sp --special
-mli --multiline-input --in-prefix-bos --in-prefix --in-suffix --warmup --no-warmup --spm-infill --samplers
--sampler-seq --sampling-seq --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p
--repeat-last-n --repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base
--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay
--dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file
-j --json-schema -jf --json-schema-file -bs --backend-sampling --pooling --attention --rope-scaling --rope-scale
--rope-freq-base --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow
--yarn-beta-fast -gan --grp-attn-n -gaw --grp-attn-w -kvo --kv-offload -nkvo --no-kv-offload --repack -nr
--no-repack --no-host -dt --defrag-thold -np --parallel -cb --cont-batching -nocb --no-cont-batching -mm --mmproj
-mmu --mmproj-url --image --audio --video --rpc -lm --load-mode --mlock --mmap --no-mmap -dio --direct-io --numa
-dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe --n-cpu-moe -sm --split-mode -ts
--tensor-split -mg --main-gpu --check-tensors --override-kv --op-offload --no-op-offload --lora
--lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range -a --alias -mu --model-url
--mtp --eagle3 --chat-template --chat-template-file --chat-template-kwargs --jinja --no-jinja --reasoning-format -rea
--reasoning --reasoning-budget --log-disable --log-file --log-colors -lv --verbosity --log-verbosity --offline
--perf --no-perf --show-timings --no-show-timings --simple-io --verbose-prompt --no-display-prompt --display-prompt
--spec-draft-p-split --draft-p-split -devd --device-draft --spec-draft-device -otd --override-tensor-draft -cmoed
--cpu-moe-draft -ncmoed --n-cpu-moe-draft --spec-default -Cd --cpu-mask-draft -Crd --cpu-range-draft --prio-draft
--poll-draft --spec-synth-len --spec-synth-rates --spec-ngram-mod-n-min --spec-ngram-mod-n-max
--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --spec-ngram-size-n --spec-ngram-size-m
--spec-ngram-min-hits
"""
LACKING = frozenset(_LACKING_NAMES.split())


class Option(Protocol):
    """What this module needs to know of a declared option."""

    opts: list[str]
    secondary_opts: list[str]
    is_flag: bool


def check(arguments: Sequence[str], options: Iterable[Option]) -> list[str]:
    """Notes on removed names in ``arguments`` (behind the command's name).

    Raises ``ConfigError`` for text that is not UTF-8, for a llama.cpp flag that specli lacks, and for a value
    attached to a short option, which the parser would split (``-mu`` as ``-m u``).
    """
    takes_value: dict[str, bool] = {}
    for option in options:
        is_flag = getattr(option, "is_flag", False)
        takes_value.update(dict.fromkeys([*option.opts, *option.secondary_opts], not is_flag))
    notes = []
    waiting = iter(arguments)
    for argument in waiting:
        _require_text(argument)
        if argument == "--":
            break
        name = argument.split("=", 1)[0] if argument.startswith("--") else argument
        if name in takes_value:
            if name in REMOVED:
                notes.append(f"{name} is llama.cpp's former name of {REMOVED[name]}; taken as that")
            if takes_value[name] and "=" not in argument:
                _require_text(next(waiting, ""))
        elif name in LACKING:
            raise ConfigError(f"{name} is a llama.cpp option that specli does not have; leave it out")
        elif argument.startswith("-") and not argument.startswith("--"):
            short = max((known for known in takes_value if argument.startswith(known)), key=len, default="")
            if short:
                value = argument.removeprefix(short)
                raise ConfigError(f"{argument} is not an option; write the value apart: {short} {value}")
    return notes


def draft_length(value: str) -> int | None:
    """``--spec-draft-n-max``: a number of tokens, or None for auto."""
    if value == "auto":
        return None
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(f"--spec-draft-n-max got {value!r}, expected auto or a number of tokens") from error


def map_spec_type(value: str) -> tuple[str, str | None]:
    """``--spec-type`` with llama.cpp's names mapped to ours, and a note if one was."""
    if value not in LLAMA_SPEC_TYPES:
        return value, None
    ours = LLAMA_SPEC_TYPES[value]
    if ours is None:
        raise ConfigError(f"--spec-type {value} is a llama.cpp drafter that specli does not have; use draft or ngram")
    return ours, f"--spec-type {value} is llama.cpp's name; specli's own {ours} drafter is used"


def _require_text(argument: str) -> None:
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError as error:
        readable = argument.encode("utf-8", "backslashreplace").decode()
        raise ConfigError(f"an argument is not UTF-8: {readable!r}, at character {error.start}") from error
