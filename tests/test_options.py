"""llama.cpp's options: names, variables, defaults, and what command lines in its style come to.

``LLAMA_CPP`` is extracted from ``common/arg.cpp`` (calls of ``add_opt``) of the llama.cpp inside llama-cpp-python
0.3.36, the defaults from ``common/common.h``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from contextlib import closing
from functools import reduce
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import typer
from support import HANG_S, forced_rows, load_model, make_engine
from tiny_gguf import CHAT_TEMPLATE, write_lora, write_tiny

import specli as package
from specli.chat import Message
from specli.cli import arguments, values
from specli.cli.arguments import FORMER_FLAGS, LACKING, REMOVED
from specli.cli.load_flags import LoadFlags
from specli.cli.main import application
from specli.cli.serve_flags import ServeFlags
from specli.config import KvOverride, Lora, ModelOptions, PlacementOptions, TemplateOptions
from specli.engine.chat_templates import builtin_templates
from specli.engine.devices import buffer_types, describe_devices, list_devices
from specli.errors import ConfigError
from specli.session import Session

README = Path(package.__file__).parent.parent / "README.md"

# names | negative names | variable | default where ours is the same
LLAMA_CPP = """
-co --color | | | auto
-t --threads | | LLAMA_ARG_THREADS |
-tb --threads-batch | | |
-C --cpu-mask | | |
-Cr --cpu-range | | |
--prio | | | 0
-c --ctx-size | | LLAMA_ARG_CTX_SIZE |
-n --predict --n-predict | | LLAMA_ARG_N_PREDICT | -1
-b --batch-size | | LLAMA_ARG_BATCH | 2048
-ub --ubatch-size | | LLAMA_ARG_UBATCH | 512
--swa-full | | LLAMA_ARG_SWA_FULL | False
-fa --flash-attn | | LLAMA_ARG_FLASH_ATTN | auto
-p --prompt | | |
-sys --system-prompt | | |
-f --file | | |
-sysf --system-prompt-file | | |
-e --escape | --no-escape | | True
-r --reverse-prompt | | |
-sp --special | | | False
-cnv --conversation | -no-cnv --no-conversation | |
-st --single-turn | | | False
-i --interactive | | | False
--warmup | --no-warmup | | True
-s --seed | | | -1
--ignore-eos | | | False
--temp --temperature | | LLAMA_ARG_TEMPERATURE | 0.8
--top-k | | LLAMA_ARG_TOP_K | 40
--top-p | | LLAMA_ARG_TOP_P | 0.95
--samplers | | |
--sampler-seq --sampling-seq | | |
--top-nsigma --top-n-sigma | | | -1.0
--xtc-probability | | | 0.0
--xtc-threshold | | | 0.1
--typical --typical-p | | | 1.0
--repeat-last-n | | | 64
--repeat-penalty | | LLAMA_ARG_REPEAT_PENALTY | 1.0
--presence-penalty | | LLAMA_ARG_PRESENCE_PENALTY | 0.0
--frequency-penalty | | LLAMA_ARG_FREQUENCY_PENALTY | 0.0
--dry-multiplier | | | 0.0
--dry-base | | | 1.75
--dry-allowed-length | | | 2
--dry-penalty-last-n | | | 64
--dry-sequence-breaker | | |
--dynatemp-range | | | 0.0
--dynatemp-exp | | | 1.0
--mirostat | | | 0
--mirostat-lr | | | 0.1
--mirostat-ent | | | 5.0
-l --logit-bias | | |
--grammar | | |
--grammar-file | | |
-j --json-schema | | |
-jf --json-schema-file | | |
--min-p | | LLAMA_ARG_MIN_P | 0.05
--rope-scaling | | LLAMA_ARG_ROPE_SCALING_TYPE |
--rope-scale | | LLAMA_ARG_ROPE_SCALE |
--rope-freq-base | | LLAMA_ARG_ROPE_FREQ_BASE | 0.0
--rope-freq-scale | | LLAMA_ARG_ROPE_FREQ_SCALE |
--yarn-orig-ctx | | LLAMA_ARG_YARN_ORIG_CTX | 0
--yarn-ext-factor | | LLAMA_ARG_YARN_EXT_FACTOR | -1.0
--yarn-attn-factor | | LLAMA_ARG_YARN_ATTN_FACTOR | -1.0
--yarn-beta-slow | | LLAMA_ARG_YARN_BETA_SLOW | -1.0
--yarn-beta-fast | | LLAMA_ARG_YARN_BETA_FAST | -1.0
-kvo --kv-offload | -nkvo --no-kv-offload | LLAMA_ARG_KV_OFFLOAD |
-ctk --cache-type-k | | LLAMA_ARG_CACHE_TYPE_K | f16
-ctv --cache-type-v | | LLAMA_ARG_CACHE_TYPE_V | f16
-lm --load-mode | | LLAMA_ARG_LOAD_MODE |
--numa | | LLAMA_ARG_NUMA |
-dev --device | | LLAMA_ARG_DEVICE |
--list-devices | | |
-ot --override-tensor | | LLAMA_ARG_OVERRIDE_TENSOR |
-cmoe --cpu-moe | | LLAMA_ARG_CPU_MOE | False
-ncmoe --n-cpu-moe | | LLAMA_ARG_N_CPU_MOE |
-ncffn --n-cpu-ffn | | LLAMA_ARG_N_CPU_FFN |
-ngl --gpu-layers --n-gpu-layers | | LLAMA_ARG_N_GPU_LAYERS | auto
-sm --split-mode | | LLAMA_ARG_SPLIT_MODE | layer
-ts --tensor-split | | LLAMA_ARG_TENSOR_SPLIT |
-mg --main-gpu | | LLAMA_ARG_MAIN_GPU | 0
-fit --fit | | LLAMA_ARG_FIT | on
--override-kv | | |
--lora | | |
--lora-scaled | | |
-m --model | | LLAMA_ARG_MODEL |
-hf -hfr --hf-repo | | LLAMA_ARG_HF_REPO |
-hff --hf-file | | LLAMA_ARG_HF_FILE |
-hft --hf-token | | HF_TOKEN |
--chat-template-kwargs | | LLAMA_ARG_CHAT_TEMPLATE_KWARGS |
--chat-template | | LLAMA_ARG_CHAT_TEMPLATE |
--chat-template-file | | LLAMA_ARG_CHAT_TEMPLATE_FILE |
-v --verbose --log-verbose | | | False
--spec-draft-hf -hfd -hfrd --hf-repo-draft | | LLAMA_ARG_SPEC_DRAFT_HF_REPO |
--spec-draft-threads -td --threads-draft | | |
--spec-draft-threads-batch -tbd --threads-batch-draft | | |
--spec-draft-type-k -ctkd --cache-type-k-draft | | LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K | f16
--spec-draft-type-v -ctvd --cache-type-v-draft | | LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V | f16
--spec-draft-override-tensor -otd --override-tensor-draft | | |
--spec-draft-cpu-moe -cmoed --cpu-moe-draft | | LLAMA_ARG_SPEC_DRAFT_CPU_MOE | False
--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft | | LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE |
--spec-draft-n-max | | LLAMA_ARG_SPEC_DRAFT_N_MAX |
--spec-draft-n-min | | LLAMA_ARG_SPEC_DRAFT_N_MIN | 0
--spec-draft-p-min --draft-p-min | | LLAMA_ARG_SPEC_DRAFT_P_MIN | 0.0
--spec-draft-device -devd --device-draft | | |
--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft | | LLAMA_ARG_N_GPU_LAYERS_DRAFT | auto
--spec-draft-model -md --model-draft | | LLAMA_ARG_SPEC_DRAFT_MODEL |
--spec-type | | LLAMA_ARG_SPEC_TYPE |
--draft --draft-n --draft-max | | LLAMA_ARG_DRAFT_MAX |
--draft-min --draft-n-min | | LLAMA_ARG_DRAFT_MIN | 0
"""
ROWS = [[part.strip() for part in line.split("|")] for line in LLAMA_CPP.strip().splitlines()]
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # common.h


@pytest.fixture(scope="module")
def command():
    """``specli run`` as Typer made it."""
    return typer.main.get_command(application()).commands["run"]


@pytest.fixture
def parse(tiny_model, monkeypatch):
    """``parse("-c", "64")``: the settings, and what is asked of them, that a command line comes to; nothing loads."""
    seen = []
    monkeypatch.setattr("specli.cli.run._generate", lambda *given: seen.append(given))
    for name in [name for name in os.environ if name.startswith(("LLAMA_", "HF_"))]:
        monkeypatch.delenv(name)

    def parse(*argv: str, prompt: bool = True):
        base = ["-m", str(tiny_model()), "-md", "draft.gguf"]
        given = [*base, *(("-p", "hi") if prompt else ()), *argv]
        main = typer.main.get_command(application())
        arguments.check(given, main.commands["run"].params)
        main.main(args=["run", *given], prog_name="specli", standalone_mode=False)
        settings, answer, *_ = seen.pop()
        return settings, answer

    return parse


def refusal(call, *given) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*given)
    message = str(caught.value)
    assert "\n" not in message
    return message


def at(value, path: str):
    """``target.rope.scaling`` of settings and answer, a pair."""
    settings, answer = value
    first, *rest = path.split(".")
    return reduce(getattr, rest, getattr(settings if hasattr(settings, first) else answer, first))


# -- names, variables, defaults


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_names_variables_and_defaults_are_llama_cpps(command, row):
    names, negative, variable, default = row
    found = {param.name: param for param in command.params if {*param.opts, *param.secondary_opts} & {*names.split()}}
    assert len(found) == 1, found.keys()
    [param] = found.values()
    assert {*names.split()} <= {*param.opts}
    assert {*negative.split()} <= {*param.secondary_opts}
    ours = [param.envvar] if isinstance(param.envvar, str) else list(param.envvar or [])
    assert variable in ours or (variable == "" and not [name for name in ours if name.startswith("LLAMA_ARG_")])
    if default:
        assert str(param.default) == default


def test_present_names_come_before_removed_ones(command):
    for param in command.params:
        former = [name in REMOVED for name in param.opts if name.startswith("--")]
        assert former == sorted(former), param.opts


def test_every_name_is_known_once(command):
    names = [name for param in command.params for name in (*param.opts, *param.secondary_opts)]
    assert len(names) == len(set(names))
    assert not {*names} & {*LACKING}
    assert {*REMOVED, *FORMER_FLAGS} <= {*names}
    assert len(LACKING) > 250


def table(command) -> str:
    """The README's table: what we have of llama.cpp, with our defaults."""
    lines = ["| option | variable | default |", "|---|---|---|"]
    pinned = [{*row[0].split(), *row[1].split()} for row in ROWS]
    for param in sorted(command.params, key=lambda param: param.opts[0].lstrip("-").lower()):
        if not any(names & {*param.opts} for names in pinned):
            continue
        names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
        variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar or []
        is_shown = param.default not in (None, False) and not param.is_flag
        default = f"`{param.default}`" if is_shown else "on" if param.is_flag and param.default else ""
        lines.append(f"| {names} | {', '.join(f'`{name}`' for name in variables)} | {default} |")
    return "\n".join(lines)


OWN = {"serve": ServeFlags, "load": LoadFlags}  # groups of options that the README lists whole


def own_table(group: str) -> str:
    """The README's table of a group: what only ``serve``, or only ``bench --url``, has."""
    command = typer.main.get_command(application()).commands[{"serve": "serve", "load": "bench"}[group]]
    own = {field.name for field in dataclasses.fields(OWN[group])}
    lines = ["| option | variable | default | meaning |", "|---|---|---|---|"]
    for param in command.params:
        if param.name not in own:
            continue
        names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
        variable = f"`{param.envvar}`" if param.envvar else ""
        is_shown = param.default not in (None, False) and not param.is_flag
        default = f"`{param.default}`" if is_shown else "on" if param.is_flag and param.default else ""
        lines.append(f"| {names} | {variable} | {default} | {param.help.rstrip('.')} |")
    return "\n".join(lines) + "\n"


def with_own_tables(text: str) -> str:
    """``text`` with the tables of groups as they should be."""
    for group in OWN:
        text, n = re.subn(
            rf"(<!-- options: {group} -->\n).*?(<!-- end -->)",
            lambda found, group=group: found[1] + own_table(group) + found[2],
            text,
            flags=re.DOTALL,
        )
        assert n == 1, group
    return text


def test_the_readme_has_the_table_of_options(command):
    """To renew it: ``PYTHONPATH=.:tests python tests/test_options.py``."""
    assert table(command) in README.read_text("utf-8")


def test_the_readme_has_the_tables_of_groups():
    """To renew them: as above."""
    text = README.read_text("utf-8")
    assert with_own_tables(text) == text


# -- command lines


LINES: list[tuple[str, dict[str, object]]] = [
    ("-c 4096 -n 128 -b 1024 -ub 256", {"target.n_ctx": 4096, "target.n_batch": 1024, "generation.n_predict": 128}),
    ("--ctx-size 0 --predict -2 -t 4 -tb 8", {"target.n_ctx": 0, "target.n_threads": 4, "target.n_threads_batch": 8}),
    ("-fa 1", {"target.flash_attn": "on", "draft.flash_attn": "on"}),
    ("-fa disabled", {"target.flash_attn": "off"}),
    ("--flash-attn auto -fit 0", {"target.flash_attn": "auto", "fit": "off"}),
    ("-ctk q8_0 -ctv q4_0 -ctkd q5_1 -fa on", {"target.cache_type_k": "q8_0", "draft.cache_type_k": "q5_1"}),
    ("-ngl 99 -ngld all", {"target.n_gpu_layers": "99", "draft.n_gpu_layers": "all"}),
    (
        "-dev CUDA0,CUDA1",
        {"target.placement.devices": ("CUDA0", "CUDA1"), "draft.placement.devices": ("CUDA0", "CUDA1")},
    ),
    ("-dev none -devd CUDA1", {"target.placement.devices": (), "draft.placement.devices": ("CUDA1",)}),
    ("--device-draft none", {"target.placement.devices": None, "draft.placement.devices": ()}),
    ("-sm row -mg 1", {"target.placement.split_mode": "row", "draft.placement.main_gpu": 1}),
    ("-sm tensor -devd CUDA0", {"target.placement.split_mode": "tensor", "draft.placement.split_mode": "layer"}),
    ("-ts 3,1", {"target.placement.tensor_split": (3.0, 1.0), "draft.placement.tensor_split": (3.0, 1.0)}),
    ("-ts 1/1/2", {"target.placement.tensor_split": (1.0, 1.0, 2.0)}),
    ("-nkvo", {"target.placement.kv_offload": False, "draft.placement.kv_offload": False}),
    ("-nkvo -kvo", {"target.placement.kv_offload": True}),
    (
        r"-ot blk\.[0-3]\.=CPU,exps=CUDA0 -ot output=CPU",
        {"target.placement.tensor_overrides": ((r"blk\.[0-3]\.", "CPU"), ("exps", "CUDA0"), ("output", "CPU"))},
    ),
    ("-cmoe", {"target.placement.tensor_overrides": ((EXPERTS, "CPU"),), "draft.placement.tensor_overrides": ()}),
    (
        "-ncmoe 2 -otd ffn=CPU",
        {
            "target.placement.tensor_overrides": ((rf"blk\.0{EXPERTS}", "CPU"), (rf"blk\.1{EXPERTS}", "CPU")),
            "draft.placement.tensor_overrides": (("ffn", "CPU"),),
        },
    ),
    ("-ncffn 1", {"target.placement.tensor_overrides": ((r"blk\.0\.ffn_(up|down|gate)\.", "CPU"),)}),
    ("--spec-draft-ncmoe 1", {"draft.placement.tensor_overrides": ((rf"blk\.0{EXPERTS}", "CPU"),)}),
    ("-cmoed", {"target.placement.tensor_overrides": (), "draft.placement.tensor_overrides": ((EXPERTS, "CPU"),)}),
    ("--lora a.gguf,b.gguf --lora c.gguf", {"target.loras": tuple(Lora(Path(f"{x}.gguf")) for x in "abc")}),
    ("--lora-scaled a.gguf:0.5", {"target.loras": (Lora(Path("a.gguf"), 0.5),), "draft.loras": ()}),
    (
        "--rope-scaling yarn --rope-scale 4 --yarn-orig-ctx 4096",
        {"target.rope.scaling": "yarn", "target.rope.freq_scale": 0.25, "draft.rope.yarn_orig_ctx": 4096},
    ),
    ("--rope-freq-base 1e6 --rope-freq-scale 0.5", {"target.rope.freq_base": 1e6, "target.rope.freq_scale": 0.5}),
    (
        "--yarn-ext-factor 0 --yarn-attn-factor 1.5",
        {"target.rope.yarn_ext_factor": 0, "target.rope.yarn_attn_factor": 1.5},
    ),
    ("--yarn-beta-slow 2 --yarn-beta-fast 16", {"target.rope.yarn_beta_slow": 2, "target.rope.yarn_beta_fast": 16}),
    (
        "--override-kv tokenizer.ggml.add_bos_token=bool:false,tokenizer.ggml.add_eos_token=bool:false",
        {
            "target.kv_overrides": (
                KvOverride("tokenizer.ggml.add_bos_token", False),
                KvOverride("tokenizer.ggml.add_eos_token", False),
            )
        },
    ),
    (
        "--override-kv a=int:-3 --override-kv b=float:1e-6",
        {"draft.kv_overrides": (KvOverride("a", -3), KvOverride("b", 1e-6))},
    ),
    ("--swa-full --no-warmup", {"target.swa_full": True, "draft.swa_full": True, "target.warmup": False}),
    ("-lm mmap+mlock", {"target.load_mode": "mmap+mlock", "draft.load_mode": "mmap+mlock"}),
    ("--load-mode dio", {"target.load_mode": "dio"}),
    ("--mlock", {"target.load_mode": "mmap+mlock"}),
    ("--mlock --no-mmap", {"target.load_mode": "mlock"}),
    ("--no-mmap", {"target.load_mode": "none"}),
    ("--mmap", {"target.load_mode": "mmap"}),
    ("-dio", {"target.load_mode": "dio"}),
    ("-ndio", {"target.load_mode": "auto"}),
    ("-C f0 -Cr 0-1", {"process.cpus": frozenset({0, 1, 4, 5, 6, 7})}),
    (
        "--cpu-mask 0x5 --prio 2 --numa isolate",
        {"process.cpus": frozenset({0, 2}), "process.priority": 2, "process.numa": "isolate"},
    ),
    ("--chat-template chatml", {"template.source": "chatml"}),
    (
        '--chat-template-kwargs {"key1":"value1","key2":[1,null]}',
        {"template.kwargs": {"key1": "value1", "key2": [1, None]}},
    ),
    ("-sp -r User: -r END", {"generation.special": True, "generation.stops": ("User:", "END")}),
    ("-r \\n\\x41\\t -e", {"generation.stops": ("\nA\t",)}),
    ("-r \\n --no-escape", {"generation.stops": ("\\n",)}),
    ("--spec-type draft-simple --spec-draft-n-max 8", {"speculation.type": "draft", "speculation.n_max": 8}),
    (
        "--spec-draft-n-max 16 --spec-draft-n-min 2 --draft-p-min 0.6",
        {"speculation.n_min": 2, "speculation.p_min": 0.6},
    ),
    (
        "--temp 0 --top-k 10 --top-p 0.9 --min-p 0 -s 42",
        {"sampling.temperature": 0, "sampling.top_k": 10, "sampling.seed": 42},
    ),
    ("-s 4294967295", {"sampling.seed": None}),
    ("-td 2 -tbd 3", {"draft.n_threads": 2, "draft.n_threads_batch": 3}),
]


@pytest.mark.parametrize(("line", "expected"), LINES, ids=[line for line, _ in LINES])
def test_a_llama_cpp_command_line(parse, line, expected):
    found = parse(*line.split(" "))
    assert {path: at(found, path) for path in expected} == expected


def test_without_options_everything_is_as_in_llama_cpp(parse):
    settings, answer = parse()
    plain = ModelOptions(settings.target.path)
    assert settings.target == plain
    assert settings.draft == dataclasses.replace(plain, path=Path("draft.gguf"))
    assert (settings.template, answer.generation.special) == (TemplateOptions(), False)
    assert settings.process.cpus is settings.process.numa is None


@pytest.mark.parametrize(
    ("variable", "value", "path", "expected"),
    [
        ("LLAMA_ARG_DEVICE", "none", "target.placement.devices", ()),
        ("LLAMA_ARG_SPLIT_MODE", "none", "target.placement.split_mode", "none"),
        ("LLAMA_ARG_TENSOR_SPLIT", "1,2", "target.placement.tensor_split", (1.0, 2.0)),
        ("LLAMA_ARG_MAIN_GPU", "2", "target.placement.main_gpu", 2),
        ("LLAMA_ARG_KV_OFFLOAD", "0", "target.placement.kv_offload", False),
        ("LLAMA_ARG_NO_KV_OFFLOAD", "", "target.placement.kv_offload", False),
        ("LLAMA_ARG_OVERRIDE_TENSOR", "a=CPU,b=CPU", "target.placement.tensor_overrides", (("a", "CPU"), ("b", "CPU"))),
        ("LLAMA_ARG_CPU_MOE", "1", "target.placement.tensor_overrides", ((EXPERTS, "CPU"),)),
        ("LLAMA_ARG_SWA_FULL", "1", "target.swa_full", True),
        ("LLAMA_ARG_LOAD_MODE", "mlock", "target.load_mode", "mlock"),
        ("LLAMA_ARG_ROPE_SCALING_TYPE", "linear", "target.rope.scaling", "linear"),
        ("LLAMA_ARG_YARN_ORIG_CTX", "77", "target.rope.yarn_orig_ctx", 77),
        ("LLAMA_ARG_NUMA", "numactl", "process.numa", "numactl"),
        ("LLAMA_ARG_CHAT_TEMPLATE", "llama3", "template.source", "llama3"),
        ("LLAMA_ARG_CHAT_TEMPLATE_KWARGS", '{"a": 1}', "template.kwargs", {"a": 1}),
        ("LLAMA_ARG_FLASH_ATTN", "1", "target.flash_attn", "on"),
    ],
)
def test_variables(parse, monkeypatch, variable, value, path, expected):
    monkeypatch.setenv(variable, value)
    assert at(parse(), path) == expected


# -- what cannot be


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--rope-scale 2 --rope-freq-scale 0.5", ["--rope-scale and --rope-freq-scale", "leave one out"]),
        ("--rope-scale 0", ["--rope-scale got 0.0, expected a number above 0"]),
        ("-cmoe -ncmoe 3", ["-cmoe (all experts) and -ncmoe 3", "leave one out"]),
        ("-cmoed -ncmoed 3", ["-cmoed (all experts) and -ncmoed 3"]),
        ("-ncmoe -1", ["-ncmoe got -1, expected 0 or more layers"]),
        ("-lm mmap --mlock", ["-lm mmap was given with --mlock"]),
        ("-dio --mlock", ["-dio was given with --mlock"]),
        ("-sm none -ts 3,1", ["-ts was given with -sm none"]),
        ("-sm rows", ["-sm/--split-mode got 'rows', expected one of none, layer, row, tensor"]),
        ("-ts 3;1", ["-ts/--tensor-split got '3;1', expected numbers between commas"]),
        ("-ot exps", ["-ot got 'exps', expected PATTERN=BUFFER_TYPE"]),
        ("-otd =CPU", ["-otd got '=CPU'"]),
        ("-ot (=CPU", ["-ot/--override-tensor got (=CPU, expected a regular expression"]),
        ("--override-kv a=int:x", ["--override-kv got 'a=int:x', expected an integer behind int:"]),
        ("--override-kv a=bool:yes", ["expected true or false behind bool:"]),
        ("--override-kv a=uint:3", ["expected KEY=TYPE:VALUE with a type of int, float, bool, str"]),
        ("--lora-scaled a.gguf", ["--lora-scaled got 'a.gguf', expected FNAME:SCALE"]),
        ("--lora-scaled a.gguf:x", ["--lora-scaled got 'a.gguf:x'"]),
        ("-C xyz", ["-C/--cpu-mask got 'xyz', expected up to 128 hexadecimal digits"]),
        ("-C 0", ["-C/--cpu-mask got [], expected at least one CPU"]),
        ("-Cr 3-1", ["-Cr/--cpu-range got '3-1', expected LO-HI with CPUs from 0 to 511"]),
        ("-Cr 5", ["-Cr/--cpu-range got '5'"]),
        ("--prio 4", ["--prio got 4, expected -1 (low) to 3 (realtime)"]),
        ("--numa mirror", ["--numa got 'mirror', expected one of distribute, isolate, numactl"]),
        ("-lm fast", ["-lm/--load-mode got 'fast', expected one of auto, none, mmap, mlock, mmap+mlock, dio"]),
        ("--rope-scaling ntk", ["--rope-scaling got 'ntk', expected one of none, linear, yarn"]),
        ("-co blue", ["-co/--color got 'blue', expected one of on, off, auto"]),
        ("--chat-template x --chat-template-file y", ["both --chat-template and --chat-template-file"]),
        ("--chat-template-file missing.jinja", ["cannot read the chat template file missing.jinja"]),
        ("--chat-template-kwargs [1]", ["--chat-template-kwargs got [1], expected a JSON object"]),
        ("--chat-template-kwargs {a}", ["--chat-template-kwargs is not JSON"]),
        ("--chat-template chatml --raw", ["--chat-template was given with --raw", "leave one out"]),
        ("-sys a -sysf b", ["both -sys and -sysf were given"]),
        ("-sysf missing.txt", ["cannot read the system prompt file missing.txt"]),
        ("-r \\xff", ["-r has escapes that give bytes which are not UTF-8: 0xff at offset 0", "--no-escape"]),
        ("-fa maybe", ["-fa/--flash-attn got 'maybe', expected one of on, off, auto"]),
    ],
)
def test_what_contradicts_itself_or_means_nothing_is_one_line(parse, line, parts):
    message = refusal(parse, *line.split(" "))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("attached", ["-C0f", "-dev0", "-ncmoe3", "-sm=row", "-lmmmap", "-nkvo1", "-ts3,1", "-mg1"])
def test_values_attached_to_short_names_are_refused(command, attached):
    message = refusal(arguments.check, [attached], command.params)
    assert message.startswith(f"{attached} is not an option; write the value apart: -")


def test_flags_that_we_lack_say_what_to_do_instead(command):
    for name, advice in (
        ("--adaptive-target", "leave it out"),
        ("--poll", "OMP_WAIT_POLICY"),
        ("--poll-draft", "OMP_WAIT_POLICY"),
        ("-Cd", "use -C or -Cr"),
        ("--cpu-strict", "use -C or -Cr"),
        ("--prio-batch", "use --prio"),
        ("--reasoning", "--chat-template-kwargs"),
    ):
        assert name in LACKING
        message = refusal(arguments.check, [name, "1"], command.params)
        assert message.startswith(f"{name} is a llama.cpp option that specli does not have; ")
        assert advice in message


def test_former_flags_are_taken_with_a_note(command):
    for name, present in FORMER_FLAGS.items():
        [note] = arguments.check([name], command.params)
        assert note == f"{name} is llama.cpp's former name of {present}; taken as that"
    assert arguments.check(["-lm", "--mlock"], command.params) == []  # a value, and a bad one


# -- values


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("a", ["a"]),
        ("", [""]),
        ("a,b,", ["a", "b", ""]),
        (  # the example of parse_csv_row
            'value1,"value, with, commas","value with ""escaped"" quotes",value4',
            ["value1", "value, with, commas", 'value with "escaped" quotes', "value4"],
        ),
        ('a"b,c', ['a"b', "c"]),
    ],
)
def test_rows_between_commas(text, fields):
    assert values.split_row(text) == fields


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"a\nb\rc\td", "a\nb\rc\td"),
        (r"\'\"\\", "'\"\\"),
        (r"\\n", r"\n"),
        (r"\x41\xe2\x82\xac", "A€"),
        (r"\xg1 \x4", r"\xg1 \x4"),
        (r"C:\dir\file", r"C:\dir\file"),
        ("ends in \\", "ends in \\"),
        ("é\\n🦙", "é\n🦙"),
        (r"\x00", "\0"),
    ],
)
def test_escapes_are_those_of_llama_cpp(text, expected):
    """``string_process_escapes`` of common.cpp."""
    assert values.unescape(text, "-p") == expected


def test_masks_and_ranges():
    assert values.cpus(None, None) is None
    assert values.cpus("FF00", None) == frozenset(range(8, 16))
    assert values.cpus(None, "-2") == {0, 1, 2}
    assert values.cpus(None, "510-") == {510, 511}


# -- prompts


def test_escapes_in_prompts_files_and_pipes(specli, tiny_model, tmp_path):
    """-p and -f as llama.cpp; what is piped in, and system messages, stay as they are (there, too)."""
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"a\\nb\n")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    base = ("run", "-m", tiny_model(), "-t", "1", "--temp", "0", "-n", "1", "--stats-json", "-")

    def n_tokens(*flags, stdin=None) -> int:
        ended = specli(*base, *flags, stdin=stdin)
        assert ended.code == 0, ended.err
        return json.loads(ended.out)["prompt_tokens"]

    assert n_tokens("--raw", "-p", r"a\nb") == n_tokens("--raw", "-f", file) == 3
    assert n_tokens("--raw", "-p", r"a\nb", "--no-escape") == n_tokens("--raw", "-f", file, "--no-escape") == 4
    assert n_tokens("--raw", stdin=b"a\\nb\n") == n_tokens("--raw", "-f", "-", stdin=b"a\\nb\n") == 4
    assert n_tokens("-p", "x", "-sysf", file, "--chat-template", template) == 1 + 4


@pytest.mark.parametrize(
    ("flags", "mode"), [((), "auto"), (("-co", "on"), "on"), (("--color", "0"), "off"), (("--color", "-1"), "auto")]
)
def test_color_reaches_the_renderer(parse, monkeypatch, flags, mode):
    from specli.render import choose as module

    original, seen = module.choose, []
    monkeypatch.setattr(module, "choose", lambda *given, **more: seen.append(more["color"]) or original(*given, **more))
    parse(*flags)
    assert seen == [mode]


# -- effects on the library


TEXT = [int(token) for token in np.random.default_rng(1).integers(3, 259, 60)]


@pytest.fixture
def rows(tiny_model):
    """``rows(swa_full=True)``: logits of ``TEXT`` by a tiny model that is loaded so."""

    def rows(path=None, architecture="llama", **options) -> np.ndarray:
        with (
            closing(load_model(path or tiny_model(architecture), **options)) as model,
            closing(make_engine(model, **options)) as engine,
        ):
            return forced_rows(engine, TEXT, 1)

    return rows


def test_ways_of_loading_change_nothing(rows):
    plain = rows()
    for mode in ("none", "mmap", "mlock", "mmap+mlock", "dio"):
        assert (rows(load_mode=mode) == plain).all(), mode
    placement = PlacementOptions((), kv_offload=False, tensor_overrides=(("ffn", "CPU"),))
    assert (rows(placement=placement, warmup=False) == plain).all()


def test_positions_can_be_scaled(rows):
    from specli.config import RopeOptions

    plain = rows()
    linear = rows(rope=RopeOptions("linear", freq_scale=0.5))
    yarn = RopeOptions("yarn", freq_scale=0.5, yarn_orig_ctx=128)
    other = [linear, rows(rope=RopeOptions(freq_base=1000.0))]
    assert all((one[0] == plain[0]).all() for one in other)  # position 0 is not turned
    without = dataclasses.replace(yarn, yarn_ext_factor=0.0)  # else llama.cpp computes the attention factor itself
    other += [rows(rope=yarn), rows(rope=dataclasses.replace(without, yarn_attn_factor=2.0))]
    other += [rows(rope=dataclasses.replace(yarn, yarn_beta_slow=4.0, yarn_beta_fast=64.0))]
    for i, one in enumerate(other):
        assert all(np.abs(one - two).max() > 0.01 for two in (plain, *other[:i])), i
    assert (rows(rope=without) == linear).all()  # by its definition


def test_metadata_can_be_overridden(tiny_model):
    overrides = (
        KvOverride("llama.context_length", 99),
        KvOverride("tokenizer.ggml.add_bos_token", True),
        KvOverride("tokenizer.ggml.eos_token_id", 7),
    )
    with closing(load_model(tiny_model(), kv_overrides=overrides)) as model:
        assert (model.n_ctx_train, model.adds_bos, model.eos) == (99, True, 7)
        assert 7 in model.end_ids


def test_overridden_metadata_is_compared_too(tiny_model):
    """Another BOS that both add is refused, whether the file or the flag says so."""
    from support import settings

    from specli.errors import VocabMismatch

    adds = KvOverride("tokenizer.ggml.add_bos_token", True)
    chosen = settings(tiny_model(), tiny_model(noise=0.1), model={"kv_overrides": (adds,)})
    draft = dataclasses.replace(chosen.draft, kv_overrides=(adds, KvOverride("tokenizer.ggml.bos_token_id", 0)))
    with pytest.raises(VocabMismatch, match="BOS"):
        Session(dataclasses.replace(chosen, draft=draft))


def test_an_adapter_is_what_it_adds_to_the_weights(rows, tiny_model, tmp_path):
    """Against a model whose weights hold the sum: w + scale · alpha / rank · B A."""
    lora, merged = write_lora(tmp_path / "lora.gguf", tiny_model()), tmp_path / "merged.gguf"
    for scale in (1.0, 0.5):
        write_tiny(merged, lora=lora, lora_scale=scale)
        with_adapter = rows(loras=(Lora(lora, scale),))
        assert np.abs(with_adapter - rows(merged)).max() < 0.02
        assert np.abs(with_adapter - rows()).max() > 0.5
    both = rows(loras=(Lora(lora, 0.5), Lora(lora, 0.5)))
    assert np.abs(both - rows(loras=(Lora(lora),))).max() < 0.02
    assert (rows(loras=(Lora(lora, 0.0),)) == rows()).all()


def test_an_adapter_is_for_the_target_alone(tiny_model, tmp_path):
    """Even where both are one file and share its weights."""
    from support import generate, settings

    lora = write_lora(tmp_path / "lora.gguf", tiny_model())
    chosen = settings(tiny_model(), tiny_model(), n_max=4, fixed=True, model={"loras": (Lora(lora),)})
    with Session(chosen) as session:
        prompt = session.text_ids("abc")
        answer = generate(session, prompt, 40)
        assert answer.stats.accepted < answer.stats.proposed
        assert answer.tokens == generate(session, prompt, 40, speculate=False).tokens


@pytest.mark.parametrize(
    ("architecture", "expected"), [("llama", True), ("gemma2", True), ("mamba", False), ("jamba", False)]
)
def test_without_a_warm_up_the_architecture_tells(tiny_model, monkeypatch, architecture, expected):
    decode, calls = llama_cpp.llama_decode, []
    monkeypatch.setattr(llama_cpp, "llama_decode", lambda *given: calls.append(given) or decode(*given))
    with closing(load_model(tiny_model(architecture))) as model:
        with closing(make_engine(model, warmup=False)) as cold:
            assert cold.can_roll_back is expected
        assert calls == []
        with closing(make_engine(model)) as warm:
            assert warm.can_roll_back is expected
        assert len(calls) == 1


def test_control_tokens_can_be_shown(specli, tiny_model):
    """A model that is made to say <|im_start|>, which ends nothing."""
    path = tiny_model(loud_token=1)
    base = ("run", "-m", path, "-t", "1", "--temp", "0", "-n", "4", "-p", "hi")
    assert specli(*base).out == b""
    assert specli(*base, "-sp").out == b"<|im_start|>" * 4


def test_built_in_templates_are_llama_cpps(tiny_model):
    from support import settings

    names = builtin_templates()
    assert {"chatml", "llama3", "gemma", "mistral-v7"} <= {*names}
    messages = [Message("system", "be kind"), Message("user", "hi <|im_end|>")]
    chosen = settings(tiny_model(chat_template=None), type="none")
    with Session(dataclasses.replace(chosen, template=TemplateOptions("chatml"))) as session:
        ids = session.chat_ids(messages)
        text = b"".join(map(session.model.special_piece, ids)).decode()
        assert text == (
            "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
        )
        assert ids.count(2) == 2  # the user's own stays text
    with Session(settings(tiny_model(), type="none")) as session:
        assert session.chat_ids(messages[1:]) == session.chat_ids(messages[1:])
        own = session.chat_ids(messages)
    chosen = settings(tiny_model(), type="none")
    with Session(dataclasses.replace(chosen, template=TemplateOptions(CHAT_TEMPLATE))) as session:
        assert session.chat_ids(messages) == own
    for name in names:
        with Session(dataclasses.replace(chosen, template=TemplateOptions(name))) as session:
            assert len(session.chat_ids(messages[1:])) > 3, name


def test_variables_reach_the_template(specli, tiny_model):
    template = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}xyz{% endif %}"
    base = ("run", "-m", tiny_model(), "-t", "1", "-n", "1", "--temp", "0", "-p", "hi", "--stats-json", "-")
    for more, expected in (((), 2), (("--chat-template-kwargs", '{"enable_thinking": false}'), 5)):
        ended = specli(*base, "--chat-template", template, *more)
        assert json.loads(ended.out)["prompt_tokens"] == expected
    assert "takes none" in specli(*base, "--chat-template", "chatml", "--chat-template-kwargs", '{"a": 1}').error
    assert "expected jinja text or one of" in specli(*base, "--chat-template", "nonsense").error
    assert "--chat-template is not jinja text: line 1" in specli(*base, "--chat-template", "{% if").error


def test_a_message_that_a_c_string_cannot_hold(tiny_model):
    from specli.engine.chat_templates import render_builtin

    assert "NUL" in refusal(render_builtin, "chatml", [("user", "a\0b")])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")
def test_cpus_priority_and_numa_are_the_process_s_own():
    script = """
import os
from specli.config import ProcessOptions
from specli.engine.process import prepare
from specli.errors import ConfigError
from specli.engine.parameters import physical_cores
one = min(os.sched_getaffinity(0))
assert prepare(ProcessOptions()) == []
assert prepare(ProcessOptions(frozenset({one, 400}), -1, "distribute")) == []
print(os.sched_getaffinity(0) == {one}, os.getpriority(os.PRIO_PROCESS, 0), physical_cores())
try:
    prepare(ProcessOptions(frozenset({400})))
except ConfigError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    out = subprocess.check_output([sys.executable, "-c", script], env=environment, text=True, timeout=HANG_S)
    first, second = out.splitlines()
    assert first == "True 5 1"
    assert re.search(r"got CPUs 400, expected some of \d+, which this process may use", second)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "1000"),  # two processes on all CPUs: 35 ms a token each; with libgomp's own 300000, 700
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "passive"}, "0"),
    ],
)
def test_threads_spin_briefly_unless_the_user_says_otherwise(given, found):
    if not any(b"libgomp" in file.read_bytes() for file in Path(llama_cpp.__file__).parent.glob("lib/*ggml-cpu*")):
        pytest.skip("llama.cpp was built without GNU OpenMP")
    plain = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    environment = {**plain, "PYTHONPATH": str(README.parent), "OMP_DISPLAY_ENV": "verbose", **given}
    script = [sys.executable, "-c", "import specli.engine.llama"]
    done = subprocess.run(script, env=environment, stderr=subprocess.PIPE, text=True, timeout=HANG_S, check=True)
    assert f"GOMP_SPINCOUNT = '{found}'" in done.stderr


def test_a_priority_that_may_not_be_set_is_told(monkeypatch):
    from specli.config import ProcessOptions
    from specli.engine import process

    def refuse(*_given):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(process.os, "setpriority", refuse)
    assert process.prepare(ProcessOptions(priority=3)) == ["--prio 3 could not be set: Permission denied"]


# -- devices


def test_devices_are_listed_as_llama_cpp_does(specli):
    run = specli("run", "--list-devices")
    assert (run.code, run.err) == (0, "")
    head, *lines = run.out.decode().splitlines()
    assert head == "Available devices:"
    assert lines == [f"  {line}" for line in describe_devices()] or lines == ["  (none)"]


def test_a_device_that_is_not_there(specli, tiny_model):
    base = ("run", "-m", tiny_model(), "-t", "1", "-p", "hi")
    for flags in (("-dev", "NOPE0"), ("-dev", "NOPE0", "-fit", "off"), ("-devd", "NOPE0", "-md", tiny_model())):
        error = specli(*base, *flags).error
        assert "-dev/--device got 'NOPE0', expected " in error
        assert "--list-devices" in error
    assert "-ot/--override-tensor got x=NOPE, expected one of CPU" in specli(*base, "-ot", "x=NOPE").error
    assert next(iter(buffer_types())) == "CPU"


def test_flags_for_devices_say_where_there_are_none(specli, tiny_model):
    if list_devices():
        pytest.skip("there are devices here")
    base = ("run", "-m", tiny_model(), "-t", "1", "-p", "hi", "-n", "3", "--temp", "0", "--spec-type", "none")
    run = specli(*base, "-sm", "none", "-mg", "1", "-ngl", "99")
    assert (run.code, run.err) == (0, "-mg, -ngl, -sm without effect: this llama.cpp has no device but the CPU\n")
    assert run.out == specli(*base, "-dev", "none", "-nkvo").out


def test_suggested_commands_repeat_how_things_are_loaded(tiny_model):
    from specli.memory_plan import Setup

    line = (
        r"-dev none -nkvo -ot blk\.0=CPU,exps=CPU --rope-scaling yarn --rope-freq-scale 0.25 --override-kv a=bool:true"
    )
    flags = [*line.split(" "), "--lora-scaled", '"a,b.gguf:0.5"', "--swa-full", "-lm", "none"]
    target = ModelOptions(
        Path("t.gguf"),
        placement=PlacementOptions((), kv_offload=False, tensor_overrides=((r"blk\.0", "CPU"), ("exps", "CPU"))),
        rope=dataclasses.replace(ModelOptions(Path()).rope, scaling="yarn", freq_scale=0.25),
        kv_overrides=(KvOverride("a", True),),
        loras=(Lora(Path("a,b.gguf"), 0.5),),
        swa_full=True,
        load_mode="none",
    )
    draft = dataclasses.replace(
        target, path=Path("d.gguf"), loras=(), placement=PlacementOptions(("CUDA1",), tensor_overrides=(("x", "CPU"),))
    )
    found = Setup(target, draft).flags()
    assert found == ["-m", "t.gguf", "-md", "d.gguf", *flags, "-devd", "CUDA1", "-otd", "x=CPU"]


# -- shell completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints(specli, shell):
    run = specli("--show-completion", shell, env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert (run.code, run.err) == (0, "")
    assert "_SPECLI_COMPLETE" in run.out.decode()


def test_completion_knows_options_and_commands(specli):
    def complete(line: str) -> list[str]:
        words = {"_SPECLI_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        return specli(env=words).out.decode().split()

    assert {"--chat-template", "--chat-template-file", "--chat-template-kwargs"} <= {*complete("specli run --chat-t")}
    assert "run" in complete("specli r")


if __name__ == "__main__":
    text = README.read_text("utf-8")
    old = re.search(r"\| option \| variable \| default \|\n(\|.*\n)+", text)
    assert old is not None
    text = text.replace(old[0], table(typer.main.get_command(application()).commands["run"]) + "\n")
    README.write_text(with_own_tables(text), "utf-8")
