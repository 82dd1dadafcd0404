"""``make bench``: the project's own figures, written to docs/performance.md. Nothing else should be running.

Workloads are measured by ``specli bench`` itself; the rest are ratios that a user has no use for: host time, lookups,
start-up, memory, and llama.cpp's own speculative example beside ours. Every comparison takes turns in one process and
quotes medians. Nothing here is asserted: figures belong beside their hardware, not into tests.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from specli import registry
from specli.bench import machine
from specli.bench.document import Report, save
from specli.bench.harness import Progress, Setting
from specli.bench.measure import Watch, measure
from specli.bench.plot import draw
from specli.bench.runner import Runner
from specli.bench.workloads import built_in
from specli.cli.models import prepare_source
from specli.config import BenchOptions, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.drafters.base import EMPTY, SequenceState
from specli.drafters.ngram import NgramDrafter
from specli.render.bench import digest, markdown
from specli.sampling import Sampler
from specli.session import Session
from specli.verify import make_verifier
from tests.inflate import inflate

LARGE_VOCABULARY = 151_936
DOCS = Path(__file__).parent.parent / "docs"
K = 3  # of the ratios
LARGE_WORKLOADS = ("chat", "rewrite", "extract")  # a 1.5B-class target has no time for all of them


def microseconds(work: Callable[[], object], n: int = 300) -> float:
    """Median time of one call, µs."""
    times = []
    for _ in range(n):
        started_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - started_s)
    return 1e6 * statistics.median(times)


def row_costs() -> Iterator[str]:
    """Host time per logits row at a large vocabulary."""
    row = (np.random.default_rng(0).standard_normal(LARGE_VOCABULARY) * 3).astype(np.float32)
    state = SequenceState(0, [1, 2, 3])
    for name, verifier in {
        "greedy": make_verifier("block", Sampler(temperature=0)),
        "block": make_verifier("block", Sampler()),
        "coupled": make_verifier("coupled", Sampler()),
    }.items():
        cost = microseconds(lambda verifier=verifier: verifier.verify(EMPTY, row[None], state))
        yield f"| one row of {LARGE_VOCABULARY:,} logits, {name} | {cost:.0f} µs |"


def ngram_costs() -> Iterator[str]:
    """One proposal of up to 16 tokens at two lengths of history."""
    for length in (1_000, 131_072):
        tokens = np.tile(np.random.default_rng(0).integers(0, 300, 500), length // 500 + 1)[:length].tolist()
        state = SequenceState(0, tokens)
        drafter = NgramDrafter(min_hit_rate=0.0)
        drafter.commit(state, tokens)
        cost = microseconds(lambda d=drafter, s=state: d.propose([s], [16]))
        yield f"| n-gram proposal at {length:,} tokens | {cost:.0f} µs |"


def help_cost() -> str:
    """``specli --help`` against a bare Typer program."""
    bare = (
        "import typer\napp = typer.Typer()\n@app.callback()\ndef root(): pass\n@app.command()\ndef run(): pass\napp()"
    )
    commands = {"bare": ["-c", bare, "--help"], "specli": ["-m", "specli", "--help"]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(9):
        for name, arguments in commands.items():
            started_s = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - started_s)
    extra_s = statistics.median(times["specli"]) - statistics.median(times["bare"])
    return f"| `specli --help` beyond a bare Typer program | {1000 * extra_s:.0f} ms |"


def load(target: Path, draft: Path, n_max: int) -> Session:
    """Target and draft, to make any drafter from."""
    return Session(
        Settings(
            ModelOptions(path=target, n_ctx=2048),
            ModelOptions(path=draft),
            SamplingOptions(),
            SpeculationOptions(n_max=n_max, fixed=True),
        )
    )


def host_shares(target: Path, draft: Path) -> Iterator[str]:
    """Host time ÷ time of rounds, with a 1.5B-class target."""
    prompt = built_in(("chat",))[0]
    with load(target, draft, K) as session, Runner(session, 64) as runner:
        for label, temperature, verify in (
            ("greedy", 0.0, "greedy"),
            ("block", 0.8, "block"),
            ("coupled", 0.8, "coupled"),
        ):
            setting = Setting("draft", K, temperature, verify)
            runner.warm_up(prompt, [setting])
            shares = [runner.decode(prompt, setting, seed).stats.host_share for seed in range(5)]
            middle = statistics.median(share for share in shares if share is not None)
            yield f"| host share of a round, 1.5B-class target, draft K = {K}, {label} | {middle:.2%} |"


def peak_memory(target: Path) -> str:
    """Peak memory of ``specli run`` against a bare loop over the same library."""
    bare = _BARE_LOOP.format(path=str(target))
    command = [
        "-m",
        "specli",
        "run",
        "-m",
        str(target),
        "-c",
        "2048",
        "--spec-type",
        "none",
        "--raw",
        "-p",
        "Once upon a time",
    ]
    peaks = []
    for arguments in ([*command, "-n", "64", "--temp", "0"], ["-c", bare]):
        code = "import resource, subprocess, sys; quiet = {'check': True, 'stdout': subprocess.DEVNULL}; "
        code += f"subprocess.run([sys.executable, *{arguments!r}], **quiet); "
        code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
        peaks.append(int(output.split()[-1]))
    return f"| peak memory ÷ that of a bare loop | {peaks[0] / peaks[1]:.3f} |"


_BARE_LOOP = """
import ctypes, llama_cpp as L, numpy as np
quiet = L.llama_log_callback(lambda *a: None)
L.llama_log_set(quiet, ctypes.c_void_p(0))
m = L.llama_model_load_from_file({path!r}.encode(), L.llama_model_default_params())
p = L.llama_context_default_params(); p.n_ctx, p.n_batch, p.n_ubatch, p.n_outputs_max = 2048, 512, 512, 1
c = L.llama_init_from_model(m, p)
n = L.llama_vocab_n_tokens(L.llama_model_get_vocab(m))
t = 1
for _ in range(68):
    L.llama_decode(c, L.llama_batch_get_one((ctypes.c_int32 * 1)(t), 1))
    t = int(np.ctypeslib.as_array(L.llama_get_logits(c), (n,)).argmax())
"""


def against_llama_cpp(binary: Path, target: Path, draft: Path, n_pairs: int) -> str:
    """Decode rate at the same pair, prompt and fixed K, greedy, against llama.cpp's ``llama-speculative-simple``."""
    prompt = built_in(("rewrite",))[2]
    text = f"<|im_start|>user\n{prompt.text}<|im_end|>\n<|im_start|>assistant\n"
    common = ["-m", str(target), "-md", str(draft), "-c", "2048", "-n", "128", "--temp", "0", "-p", text]
    theirs = [str(binary), *common, "--spec-type", "draft-simple", "--spec-draft-n-max", str(K), "-fa", "on"]
    raw, setting = replace(prompt, text=text), Setting("draft", K, 0.0, "greedy")
    with load(target, draft, K) as session, Runner(session, 128, raw=True) as runner:
        ratios = []
        for _ in range(n_pairs):
            output = subprocess.run(theirs, capture_output=True, text=True, check=True)
            rate = re.search(r"decoded.*speed:\s*([\d.]+)", output.stdout + output.stderr)
            mine = runner.decode(raw, setting, 0).stats.decode_tok_s
            if rate and mine:
                ratios.append(mine / float(rate[1]))
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"| tok/s ÷ llama-speculative-simple's, K = {K}, {target.name} | {middle:.2f} ({low:.2f}–{high:.2f}) |"


def workload_report(target: Path, draft: Path, options: BenchOptions, names: Sequence[str]) -> Report:
    """What ``specli bench`` would report."""
    deadline_s = None if options.time_budget_s is None else time.monotonic() + options.time_budget_s
    with load(target, draft, options.k_max) as session:
        watch = Watch(progress=show, deadline_s=deadline_s)
        return measure(session, built_in(names), options, watch, ["-m", target.name, "-md", draft.name])


def show(step: Progress) -> None:
    if sys.stderr.isatty():
        left = "" if step.left_s is None else f", {step.left_s:.0f} s left"
        print(f"\r{step.fraction:4.0%} {step.prompt.name}{left}      ", end="", file=sys.stderr, flush=True)


def heading() -> str:
    """Hardware, library, commit and date."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=DOCS.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    found = machine.hardware()
    load_now = machine.load_average()
    return (
        f"{found['cpu']}, {found['logical_cores']} logical cores, {int(str(found['ram'] or 0)) / 2**30:.0f} GiB, "
        f"{found['system']}; Python {platform.python_version()}; commit {commit or 'unknown'}; "
        f"{time.strftime('%Y-%m-%d')}; load before {load_now if load_now is None else round(load_now, 2)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs of runs against llama.cpp")
    parser.add_argument("-n", type=int, default=128, help="tokens per run")
    parser.add_argument("--budget", type=float, default=900.0, help="seconds for the workloads of each target")
    parser.add_argument("--speculative-simple", type=Path, help="llama.cpp's example program, to compare with")
    parser.add_argument("--only", choices=("ratios", "workloads"), help="one part, printed and not written")
    options = parser.parse_args()
    pair = registry.load_pairs()[registry.DEFAULT_PAIR]
    target = prepare_source(pair.target, print, lambda: False)[0]
    draft = registry.find_file(pair.draft)
    parts = ["# Performance\n", f"Written by `make bench`. {heading()}\n"]
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "inflated-1.5b.gguf"
        inflate(target, large)
        if options.only != "workloads":
            parts.append(
                "## Ratios\n\n| figure | value |\n|---|---|\n" + "\n".join(ratios(options, target, large, draft)) + "\n"
            )
        if options.only != "ratios":
            parts += workload_parts(options, target, large, draft)
    text = "\n".join(parts)
    print(text)
    if options.only is None:
        DOCS.mkdir(exist_ok=True)
        (DOCS / "performance.md").write_text(text, "utf-8")
        print(f"written to {DOCS / 'performance.md'}", file=sys.stderr)


def ratios(options: argparse.Namespace, target: Path, large: Path, draft: Path) -> Iterator[str]:
    """The rows of issue 2's section on speed."""
    yield from row_costs()
    yield from ngram_costs()
    yield help_cost()
    yield peak_memory(target)
    yield from host_shares(large, draft)
    if options.speculative_simple:
        for path in (target, large):
            yield against_llama_cpp(options.speculative_simple, path, draft, options.pairs)


def workload_parts(options: argparse.Namespace, target: Path, large: Path, draft: Path) -> Iterator[str]:
    """The README's table, all cells behind it, and its picture."""
    asked = BenchOptions(n_predict=options.n, time_budget_s=options.budget)
    for title, path, names, bench in (
        ("Default pair", target, (), asked),
        ("1.5B-class target (inflated), same draft", large, LARGE_WORKLOADS, replace(asked, lengths=(2, 4, None))),
    ):
        report = workload_report(path, draft, bench, names)
        yield f"## {title}\n\nGreedy; speedup over plain decoding with its 95% interval.\n\n{digest(report)}"
        yield f"<details><summary>every cell</summary>\n\n{markdown(report)}\n</details>\n"
        if options.only is None:
            name = "bench-default" if path == target else "bench-1.5b"
            DOCS.mkdir(exist_ok=True)
            save(DOCS / f"{name}.json", report)
            draw(report, DOCS / f"{name}.svg")
            yield f"![speedup, acceptance and costs]({name}.svg)\n"


if __name__ == "__main__":
    main()
