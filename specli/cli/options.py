"""Every shared option, declared once: names, environment variable and help. llama.cpp's names come first.

Defaults are not here: a command takes them from ``config``. Values are checked in ``config``, so that the command
line, the environment and Python callers get the same words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specli.cli.values import switch

MODEL, PROMPT, SAMPLING = "Models", "Prompt and output", "Sampling"
SPECULATION, HARDWARE = "Speculation", "Context and hardware"

# -- models
Model = Annotated[
    Path | None,
    typer.Option(
        "-m", "--model", envvar="LLAMA_ARG_MODEL", rich_help_panel=MODEL, help="Target GGUF file (unset: default pair)."
    ),
]
DraftModel = Annotated[
    Path | None,
    typer.Option(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        envvar="LLAMA_ARG_SPEC_DRAFT_MODEL",
        rich_help_panel=MODEL,
        help="Draft GGUF file; the target's own file loads its weights once.",
    ),
]
Pair = Annotated[
    str | None,
    typer.Option("--pair", rich_help_panel=MODEL, help="Pair of target and draft (specli models list)."),
]
HfRepo = Annotated[
    str | None,
    typer.Option(
        "-hf",
        "-hfr",
        "--hf-repo",
        metavar="USER/MODEL[:QUANT]",
        envvar="LLAMA_ARG_HF_REPO",
        rich_help_panel=MODEL,
        help="Target from the hub; without a quant Q4_K_M, Q8_0 or the first file.",
    ),
]
HfFile = Annotated[
    str | None,
    typer.Option(
        "-hff",
        "--hf-file",
        metavar="FILE",
        envvar="LLAMA_ARG_HF_FILE",
        rich_help_panel=MODEL,
        help="File in the -hf repository, in place of a quant.",
    ),
]
HfRepoDraft = Annotated[
    str | None,
    typer.Option(
        "-hfd",
        "-hfrd",
        "--hf-repo-draft",
        "--spec-draft-hf",
        metavar="USER/MODEL[:QUANT]",
        envvar="LLAMA_ARG_SPEC_DRAFT_HF_REPO",
        rich_help_panel=MODEL,
        help="Draft from the hub.",
    ),
]
HfToken = Annotated[
    str | None,
    typer.Option(
        "-hft",
        "--hf-token",
        metavar="TOKEN",
        envvar="HF_TOKEN",
        rich_help_panel=MODEL,
        help="Access token of the hub, for gated and private repositories.",
    ),
]

# -- prompt and output
Output = Annotated[
    str, typer.Option("-o", "--output", metavar="FORMAT", rich_help_panel=PROMPT, help="table or json, on stdout.")
]
Prompt = Annotated[
    str | None, typer.Option("-p", "--prompt", rich_help_panel=PROMPT, help="The prompt (unset: -f or stdin).")
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "-f", "--file", rich_help_panel=PROMPT, help="File with the prompt, - for stdin; a last newline is cut."
    ),
]
System = Annotated[str | None, typer.Option("-sys", "--system-prompt", rich_help_panel=PROMPT, help="System message.")]
Raw = Annotated[
    bool, typer.Option("--raw", rich_help_panel=PROMPT, help="Complete the text as is, without the chat template.")
]
Conversation = Annotated[
    bool | None,
    typer.Option(
        "-cnv/-no-cnv",
        "--conversation/--no-conversation",
        rich_help_panel=PROMPT,
        help="Chat (unset: when no prompt is given on a terminal); a pipe's lines are the messages.",
    ),
]
Interactive = Annotated[
    bool,
    typer.Option("-i", "--interactive", "-if", "--interactive-first", rich_help_panel=PROMPT, help="The same as -cnv."),
]
SingleTurn = Annotated[
    bool, typer.Option("-st", "--single-turn", rich_help_panel=PROMPT, help="Chat for one answer, then exit.")
]
NPredict = Annotated[
    int,
    typer.Option(
        "-n",
        "--predict",
        "--n-predict",
        envvar="LLAMA_ARG_N_PREDICT",
        rich_help_panel=PROMPT,
        help="Tokens to generate; -1 until the end token or the end of the context.",
    ),
]
Stops = Annotated[
    list[str] | None,
    typer.Option("-r", "--reverse-prompt", rich_help_panel=PROMPT, help="Stop before this text; may be repeated."),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", rich_help_panel=PROMPT, help="Never generate an end-of-generation token.")
]
ShowStats = Annotated[bool, typer.Option("--stats", rich_help_panel=PROMPT, help="Summary on stderr on a pipe too.")]
StatsJson = Annotated[
    str | None,
    typer.Option(
        "--stats-json",
        metavar="FILE",
        rich_help_panel=PROMPT,
        help="Write text and figures as JSON, a line per answer; - puts them on stdout in place of the text.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("-v", "--verbose", "--log-verbose", rich_help_panel=PROMPT, help="Show llama.cpp's log on stderr."),
]
Debug = Annotated[bool, typer.Option("--debug", rich_help_panel=PROMPT, help="Show tracebacks of errors.")]

ShowConfig = Annotated[
    bool, typer.Option("--show-config", rich_help_panel=PROMPT, help="Print every setting with its origin, and exit.")
]

# -- sampling
Temperature = Annotated[
    float,
    typer.Option(
        "--temp", "--temperature", envvar="LLAMA_ARG_TEMPERATURE", rich_help_panel=SAMPLING, help="0 is greedy."
    ),
]
TopK = Annotated[
    int,
    typer.Option("--top-k", envvar="LLAMA_ARG_TOP_K", rich_help_panel=SAMPLING, help="Most likely tokens; 0 = off."),
]
TopP = Annotated[
    float,
    typer.Option("--top-p", envvar="LLAMA_ARG_TOP_P", rich_help_panel=SAMPLING, help="Probability mass; 1 = off."),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", envvar="LLAMA_ARG_MIN_P", rich_help_panel=SAMPLING, help="Least share of the top; 0 = off."
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "-s",
        "--seed",
        rich_help_panel=SAMPLING,
        help="Same seed, same text, with any drafter and K (past 256 tokens with --exact); -1 = none.",
    ),
]

# -- speculation
SpecType = Annotated[
    str,
    typer.Option(
        "--spec-type",
        envvar="LLAMA_ARG_SPEC_TYPE",
        rich_help_panel=SPECULATION,
        help="auto (draft if there is one, else ngram), none, draft, ngram; llama.cpp's names are mapped.",
    ),
]
DraftMax = Annotated[
    str,
    typer.Option(
        "--spec-draft-n-max",
        "--draft-max",
        "--draft",
        "--draft-n",
        envvar=["LLAMA_ARG_SPEC_DRAFT_N_MAX", "LLAMA_ARG_DRAFT_MAX"],
        rich_help_panel=SPECULATION,
        metavar="N|auto",
        help="Longest draft (K), tokens; auto leaves it to the controller.",
    ),
]
DraftFixed = Annotated[
    bool,
    typer.Option(
        "--draft-fixed", rich_help_panel=SPECULATION, help="Always draft K tokens (auto: 3), whether it pays or not."
    ),
]
DraftMin = Annotated[
    int,
    typer.Option(
        "--spec-draft-n-min",
        "--draft-min",
        "--draft-n-min",
        envvar=["LLAMA_ARG_SPEC_DRAFT_N_MIN", "LLAMA_ARG_DRAFT_MIN"],
        rich_help_panel=SPECULATION,
        help="Shortest draft worth verifying, tokens (sampled drafts: --spec-draft-p-min may not stop earlier).",
    ),
]
DraftPMin = Annotated[
    float,
    typer.Option(
        "--spec-draft-p-min",
        "--draft-p-min",
        envvar="LLAMA_ARG_SPEC_DRAFT_P_MIN",
        rich_help_panel=SPECULATION,
        help="Stop drafting where the draft's confidence is below this.",
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        rich_help_panel=SPECULATION,
        help="Only settings under which logits do not depend on the draft to the last bit (proved once, then kept).",
    ),
]
Verify = Annotated[
    str | None,
    typer.Option(
        "--verify",
        rich_help_panel=SPECULATION,
        help="block, rejection or coupled (unset: coupled with a seed, block without).",
    ),
]

# -- context and hardware
CtxSize = Annotated[
    int | None,
    typer.Option(
        "-c",
        "--ctx-size",
        envvar="LLAMA_ARG_CTX_SIZE",
        rich_help_panel=HARDWARE,
        help="Context, tokens; 0 as trained (unset: as trained, at most 8192, less if memory is short).",
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "-b", "--batch-size", envvar="LLAMA_ARG_BATCH", rich_help_panel=HARDWARE, help="Logical batch, tokens."
    ),
]
UbatchSize = Annotated[
    int,
    typer.Option(
        "-ub", "--ubatch-size", envvar="LLAMA_ARG_UBATCH", rich_help_panel=HARDWARE, help="Physical batch, tokens."
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        envvar="LLAMA_ARG_THREADS",
        rich_help_panel=HARDWARE,
        help="Threads while generating (unset: one per physical core).",
    ),
]
ThreadsBatch = Annotated[
    int | None,
    typer.Option("-tb", "--threads-batch", rich_help_panel=HARDWARE, help="Threads for the prompt (unset: as -t)."),
]
ThreadsDraft = Annotated[
    int | None,
    typer.Option(
        "-td",
        "--threads-draft",
        "--spec-draft-threads",
        rich_help_panel=HARDWARE,
        help="The draft's -t (unset: as -t).",
    ),
]
ThreadsBatchDraft = Annotated[
    int | None,
    typer.Option(
        "-tbd",
        "--threads-batch-draft",
        "--spec-draft-threads-batch",
        rich_help_panel=HARDWARE,
        help="The draft's -tb (unset: as -td).",
    ),
]
GpuLayers = Annotated[
    str,
    typer.Option(
        "-ngl",
        "--gpu-layers",
        "--n-gpu-layers",
        envvar="LLAMA_ARG_N_GPU_LAYERS",
        rich_help_panel=HARDWARE,
        help="Layers on the GPU: a number, auto (what fits), all.",
    ),
]
GpuLayersDraft = Annotated[
    str,
    typer.Option(
        "-ngld",
        "--gpu-layers-draft",
        "--n-gpu-layers-draft",
        "--spec-draft-ngl",
        envvar="LLAMA_ARG_N_GPU_LAYERS_DRAFT",
        rich_help_panel=HARDWARE,
        help="The draft's -ngl.",
    ),
]
Fit = Annotated[
    str,
    typer.Option(
        "-fit",
        "--fit",
        envvar="LLAMA_ARG_FIT",
        callback=switch,
        rich_help_panel=HARDWARE,
        help="on: check memory before loading, settle -ngl auto and an unset -c by it; off: load as asked.",
    ),
]
FlashAttn = Annotated[
    str,
    typer.Option(
        "-fa",
        "--flash-attn",
        envvar="LLAMA_ARG_FLASH_ATTN",
        callback=switch,
        rich_help_panel=HARDWARE,
        help="on, off or auto.",
    ),
]
CacheTypeK = Annotated[
    str,
    typer.Option(
        "-ctk", "--cache-type-k", envvar="LLAMA_ARG_CACHE_TYPE_K", rich_help_panel=HARDWARE, help="Type of the K cache."
    ),
]
CacheTypeV = Annotated[
    str,
    typer.Option(
        "-ctv", "--cache-type-v", envvar="LLAMA_ARG_CACHE_TYPE_V", rich_help_panel=HARDWARE, help="Type of the V cache."
    ),
]
CacheTypeKDraft = Annotated[
    str,
    typer.Option(
        "-ctkd",
        "--cache-type-k-draft",
        "--spec-draft-type-k",
        envvar="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
        rich_help_panel=HARDWARE,
        help="The draft's -ctk.",
    ),
]
CacheTypeVDraft = Annotated[
    str,
    typer.Option(
        "-ctvd",
        "--cache-type-v-draft",
        "--spec-draft-type-v",
        envvar="LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
        rich_help_panel=HARDWARE,
        help="The draft's -ctv.",
    ),
]
