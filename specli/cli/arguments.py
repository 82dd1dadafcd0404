"""What llama.cpp users type and Typer would misread: attached short values, removed names, flags that we lack."""

from __future__ import annotations

import os
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
# Flags that llama.cpp had before --load-mode.
FORMER_FLAGS: Mapping[str, str] = {
    "--mmap": "--load-mode mmap",
    "--no-mmap": "--load-mode none",
    "--mlock": "--load-mode mmap+mlock (mlock with --no-mmap)",
    "-dio": "--load-mode dio",
    "--direct-io": "--load-mode dio",
    "-ndio": "--load-mode auto",
    "--no-direct-io": "--load-mode auto",
}
# llama.cpp options that specli does not have, so that they are not read as something else: from common/arg.cpp, those
# of the programs that generate text.
_LACKING_NAMES = """
-cl --cache-list --completion-bash --server-base --verbose-prompt --display-prompt --no-display-prompt --cpu-strict
--poll -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch -lcs
--lookup-cache-static -lcd --lookup-cache-dynamic --kv-unified-per-slot --keep -ctxcp --ctx-checkpoints
--swa-checkpoints -cms --checkpoint-min-step -cram --cache-ram -kvu --kv-unified -no-kvu --no-kv-unified
--cache-idle-slots --no-cache-idle-slots --context-shift --no-context-shift --perf --no-perf --show-timings
--no-show-timings -bf --binary-file -ptc --print-token-count --prompt-cache --prompt-cache-all --prompt-cache-ro -mli
--multiline-input --in-prefix-bos --in-prefix --in-suffix --spm-infill --adaptive-target --adaptive-decay -bs
--backend-sampling
--pooling -gan --grp-attn-n -gaw --grp-attn-w --repack -nr --no-repack --no-host -dt --defrag-thold -np --parallel -cb
--cont-batching -nocb --no-cont-batching -mm --mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto
--mmproj-offload --no-mmproj-offload --image --audio --video --image-min-tokens --image-max-tokens
--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir --rpc -lzm --lazy-mode -fitt
--fit-target -fitc --fit-ctx --check-tensors --op-offload --no-op-offload --control-vector --control-vector-scaled
--control-vector-layer-range -a --alias --tags -mu --model-url -dr --docker-repo -o --output --output-file
--embd-normalize --host --port --reuse-port --path --cors-origins --cors-methods --cors-headers --cors-credentials
--no-cors-credentials --api-prefix --ui-config --webui-config --ui-config-file --webui-config-file --ui-mcp-proxy
--webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime --mcp-servers-config
--mcp-servers-json -ag --agent -no-ag --no-agent --ui --webui --no-ui --no-webui --embedding --embeddings --rerank
--reranking --api-key --api-key-file --ssl-key-file --ssl-cert-file -to --timeout --sse-ping-interval --threads-http
--cache-prompt --no-cache-prompt --cache-reuse --metrics --props --slots --no-slots --slot-save-path --media-path
--models-dir --models-preset --models-max --models-autoload --no-models-autoload --jinja --no-jinja --reasoning-format
-rea --reasoning --reasoning-effort --reasoning-budget --reasoning-budget-message --reasoning-preserve
--no-reasoning-preserve --skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant -sps
--slot-prompt-similarity --lora-init-without-apply --sleep-idle-seconds --simple-io --log-disable --log-file
--log-jsonl --no-log-jsonl --log-prompts-dir --log-colors --offline -lv --verbosity --log-verbosity
--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --spec-draft-cpu-mask -Cd --cpu-mask-draft
--spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio
--prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft
--spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --spec-synth-len
--spec-synth-rates --spec-draft-p-split --draft-p-split --spec-draft-backend-sampling --no-spec-draft-backend-sampling
--spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m
--spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --embd-gemma-default --fim-qwen-1.5b-default
--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default
--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default --spec-default
"""
_ONE_SET_OF_CPUS = "target and draft run on the same CPUs: use -C or -Cr"
_ONE_PRIORITY = "target and draft have the same priority: use --prio"
_POLLING = "threads spin briefly before they sleep: set OMP_WAIT_POLICY or GOMP_SPINCOUNT for something else"
_THINKING = "use --chat-template-kwargs with the variable of the model's template, as in '{\"enable_thinking\": false}'"
_REASONS = {
    **dict.fromkeys(("--jinja", "--no-jinja"), "templates are jinja, but for the built-in ones of --chat-template"),
    **dict.fromkeys(("-rea", "--reasoning", "--reasoning-effort"), _THINKING),
}
_FAMILIES = (("poll", _POLLING), ("cpu-", _ONE_SET_OF_CPUS), ("prio", _ONE_PRIORITY))


def _advice(name: str) -> str:
    """What to do instead; for most there is nothing."""
    if name in ("-Cb", "-Crb", "-Cd", "-Crd", "-Cbd", "-Crbd"):
        return _ONE_SET_OF_CPUS
    family = next((advice for part, advice in _FAMILIES if part in name), "leave it out")
    return _REASONS.get(name, family)


LACKING: Mapping[str, str] = {name: _advice(name) for name in _LACKING_NAMES.split()}  # flag -> what to do


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
        _require_environment(getattr(option, "envvar", None))
    notes = []
    waiting = iter(arguments)
    for argument in waiting:
        _require_text(argument)
        if argument == "--":
            break
        name = argument.split("=", 1)[0] if argument.startswith("--") else argument
        if name in takes_value:
            present = REMOVED.get(name) or FORMER_FLAGS.get(name)
            if present:
                notes.append(f"{name} is llama.cpp's former name of {present}; taken as that")
            if takes_value[name] and "=" not in argument:
                _require_text(next(waiting, ""))
        elif name in LACKING:
            raise ConfigError(f"{name} is a llama.cpp option that specli does not have; {LACKING[name]}")
        elif argument.startswith("-") and not argument.startswith("--"):
            short = max((known for known in takes_value if argument.startswith(known)), key=len, default="")
            if short:
                value = argument.removeprefix(short)
                raise ConfigError(f"{argument} is not an option; write the value apart: {short} {value}")
    return notes


def _require_environment(names: object) -> None:
    known = [names] if isinstance(names, str) else list(names) if isinstance(names, list | tuple) else []
    for name in known:
        try:
            os.environ.get(name, "").encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(f"the variable {name} is not UTF-8, at character {error.start}") from error


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


def show_log() -> None:
    """``--verbose``: llama.cpp's log on stderr."""
    from specli.engine.log import LOG

    LOG.verbose = True
