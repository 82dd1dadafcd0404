"""``make bench``: the project's own figures, as ratios with their spread. Nothing else should be running.

Every comparison takes turns in one process (A B A B) and quotes medians; single timings mean nothing. Nothing here is
asserted: figures belong in the README with the hardware beside them, not in tests.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specli import registry
from specli.chat import Message
from specli.cli.models import prepare_source
from specli.config import GenerationOptions, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.drafters.base import EMPTY, SequenceState
from specli.drafters.ngram import NgramDrafter
from specli.sampling import Sampler
from specli.session import Session
from specli.stats import Stats
from specli.verify import make_verifier
from tests.inflate import inflate

LARGE_VOCABULARY = 151_936
ORDER = """Order NW-20417-B, placed by Ada Lindqvist (ada.lindqvist@northwind.example): 24 thermocouple probes, type K,
300 mm, at 18.40 EUR each, shipped to 14 Harbour Street, 4021 Stavanger, Norway, before 12 March."""
CODE = """def total_price(items, tax_rate):
    subtotal = 0
    for item in items:
        subtotal = subtotal + item.price * item.quantity
    tax = subtotal * tax_rate
    return subtotal + tax
"""
MINUTES = """Present: Maria Keller (chair), Tom Okafor, Ines Duarte. The budget of 48,000 EUR was approved. Tom Okafor will
send the revised plan to the printer by 3 June. Ines Duarte books the hall in Lyon for 120 people. Next meeting: 10 June,
9:30, room 204."""
WORKLOADS = {
    "chat": (
        "What are the main differences between cats and dogs as pets?",
        "Give me some advice on how to sleep better.",
        "Explain photosynthesis to a ten-year-old.",
    ),
    "code rewriting": (
        f"Rename the variable subtotal to amount in this code and print the whole code again.\n\n{CODE}",
        f"Add a docstring to this function and print the whole function.\n\n{CODE}",
        f"Rewrite this function with type hints and print it.\n\n{CODE}",
    ),
    "extraction": (
        f"Extract the fields of this order as a JSON object.\n\n{ORDER}",
        f"Copy this text, then list the names in it.\n\n{MINUTES}",
        f"Extract people, dates and places from these minutes as JSON.\n\n{MINUTES}",
    ),
}


@dataclass(frozen=True)
class Sample:
    """Figures of one run."""

    tok_s: float
    accepted: int
    proposed: int
    emitted: int
    rounds: int


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
        tokens = np.random.default_rng(0).integers(0, 300, length).tolist()
        state = SequenceState(0, tokens)
        drafter = NgramDrafter(min_hit_rate=0.0)
        drafter.commit(state, tokens)
        yield f"| n-gram proposal at {length:,} tokens | {microseconds(lambda d=drafter, s=state: d.propose([s], [16])):.0f} µs |"


def help_cost() -> str:
    """``specli --help`` against a bare Typer program."""
    bare = "import typer\napp = typer.Typer()\n@app.callback()\ndef root(): pass\n@app.command()\ndef run(): pass\napp()"
    commands = {"bare": ["-c", bare, "--help"], "specli": ["-m", "specli", "--help"]}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(9):
        for name, arguments in commands.items():
            started_s = time.perf_counter()
            subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - started_s)
    extra_s = statistics.median(times["specli"]) - statistics.median(times["bare"])
    return f"| `specli --help` beyond a bare Typer program | {1000 * extra_s:.0f} ms |"


def settings(target: Path, draft: Path, temperature: float, kind: str, n_max: int, verify: str | None = None) -> Settings:
    return Settings(
        ModelOptions(path=target, n_ctx=2048),
        ModelOptions(path=draft),
        SamplingOptions(temperature=temperature),
        SpeculationOptions(type=kind, n_max=n_max, verify=verify),
    )


def run(session: Session, prompt: list[int], n_predict: int, speculate: bool) -> tuple[Sample, Stats]:
    stats = Stats()
    for event in session.generate(prompt, GenerationOptions(n_predict), speculate=speculate):
        stats.observe(event)
    sample = Sample(stats.decode_tok_s or 0.0, stats.accepted, stats.proposed, stats.n_tokens - 1, stats.rounds)
    return sample, stats


def workload_rows(name: str, target: Path, draft: Path, n_predict: int, n_pairs: int) -> Iterator[str]:
    """Plain against n-gram and draft, K = 3, interleaved pair by pair."""
    for temperature in (0.0, 0.8):
        for kind in ("ngram", "draft"):
            with Session(settings(target, draft, temperature, kind, 3)) as session:
                for workload, prompts in WORKLOADS.items():
                    ratios, plain, samples = [], [], []
                    for text in prompts:
                        prompt = session.chat_ids([Message("user", text)])
                        run(session, prompt, 16, True)
                        for _ in range(n_pairs):
                            before = run(session, prompt, n_predict, False)[0]
                            after = run(session, prompt, n_predict, True)[0]
                            if before.tok_s and after.tok_s:
                                plain.append(before.tok_s)
                                samples.append(after)
                                ratios.append(after.tok_s / before.tok_s)
                    yield workload_row(name, workload, temperature, kind, plain, samples, ratios)


def workload_row(
    target: str,
    workload: str,
    temperature: float,
    kind: str,
    plain: list[float],
    samples: list[Sample],
    ratios: list[float],
) -> str:
    proposed = sum(sample.proposed for sample in samples)
    acceptance = f"{sum(s.accepted for s in samples) / proposed:.0%}" if proposed else "n/a"
    tau = sum(s.emitted for s in samples) / sum(s.rounds for s in samples)
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return (
        f"| {target} | {workload} | {temperature:g} | {kind} | {statistics.median(plain):.0f} | "
        f"{statistics.median(s.tok_s for s in samples):.0f} | {acceptance} | {tau:.2f} | "
        f"{middle:.2f} ({low:.2f}–{high:.2f}) |"
    )


def host_shares(target: Path, draft: Path) -> Iterator[str]:
    """Host time ÷ time of rounds, with a 1.5B-class target."""
    for label, temperature, verify in (("greedy", 0.0, None), ("block", 0.8, "block"), ("coupled", 0.8, "coupled")):
        with Session(settings(target, draft, temperature, "draft", 3, verify)) as session:
            prompt = session.chat_ids([Message("user", WORKLOADS["chat"][0])])
            shares = [run(session, prompt, 64, True)[1].host_share for _ in range(5)]
            middle = statistics.median(share for share in shares if share is not None)
            yield f"| host share of a round, 1.5B-class target, draft K = 3, {label} | {middle:.2%} |"


def peak_memory(target: Path) -> str:
    """Peak memory of ``specli run`` against a bare loop over the same library."""
    bare = _BARE_LOOP.format(path=str(target))
    command = ["-m", "specli", "run", "-m", str(target), "-c", "2048", "--spec-type", "none", "--raw", "-p", "Once upon a time"]
    peaks = []
    for arguments in ([*command, "-n", "64", "--temp", "0"], ["-c", bare]):
        code = f"import resource, subprocess, sys; subprocess.run([sys.executable, *{arguments!r}], check=True); "
        code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
        peaks.append(int(output.split()[-1]))
    return f"| peak memory ÷ that of a bare loop | {peaks[0] / peaks[1]:.3f} |"


_BARE_LOOP = """
import ctypes, llama_cpp as L, numpy as np
L.llama_log_set(L.llama_log_callback(lambda *a: None), ctypes.c_void_p(0))
m = L.llama_model_load_from_file({path!r}.encode(), L.llama_model_default_params())
p = L.llama_context_default_params(); p.n_ctx, p.n_batch, p.n_ubatch, p.n_outputs_max = 2048, 512, 512, 1
c = L.llama_init_from_model(m, p)
n = L.llama_vocab_n_tokens(L.llama_model_get_vocab(m))
t = 1
for _ in range(68):
    L.llama_decode(c, L.llama_batch_get_one((ctypes.c_int32 * 1)(t), 1))
    t = int(np.ctypeslib.as_array(L.llama_get_logits(c), (n,)).argmax())
"""


def against_llama_cpp(binary: Path, target: Path, draft: Path, k: int, n_pairs: int) -> str:
    """Decode rate at the same pair, prompt and fixed K, greedy, against llama.cpp's ``llama-speculative-simple``."""
    text = f"<|im_start|>user\n{WORKLOADS['code rewriting'][1]}<|im_end|>\n<|im_start|>assistant\n"
    common = ["-m", str(target), "-md", str(draft), "-c", "2048", "-n", "128", "--temp", "0", "-p", text]
    theirs = [str(binary), *common, "--spec-type", "draft-simple", "--spec-draft-n-max", str(k), "-fa", "on"]
    with Session(settings(target, draft, 0.0, "draft", k)) as session:
        prompt = session.text_ids(text)
        ratios = []
        for _ in range(n_pairs):
            output = subprocess.run(theirs, capture_output=True, text=True, check=True)
            rate = re.search(r"decoded.*speed:\s*([\d.]+)", output.stdout + output.stderr)
            mine = run(session, prompt, 128, True)[0].tok_s
            if rate:
                ratios.append(mine / float(rate[1]))
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return f"| tok/s ÷ llama-speculative-simple's, K = {k}, {target.name} | {middle:.2f} ({low:.2f}–{high:.2f}) |"


def hardware() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    name = re.search(r"model name\s*: (.+)", info)
    return f"{name[1] if name else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs per prompt")
    parser.add_argument("-n", type=int, default=128, help="tokens per run")
    parser.add_argument("--speculative-simple", type=Path, help="llama.cpp's example program, to compare with")
    parser.add_argument("--only", choices=("costs", "workloads", "llama"), help="one part")
    options = parser.parse_args()
    pair = registry.load_pairs()[registry.DEFAULT_PAIR]
    target = prepare_source(pair.target, print, lambda: False)[0]
    draft = registry.find_file(pair.draft)
    print(f"{hardware()}; Python {platform.python_version()}; peak of this process at the end\n")
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "inflated-1.5b.gguf"
        inflate(target, large)
        if options.only in (None, "costs"):
            print("| figure | value |\n|---|---|")
            lines = [*row_costs(), *ngram_costs(), help_cost(), peak_memory(target), *host_shares(large, draft)]
            print("\n".join(lines), flush=True)
        if options.only in (None, "llama") and options.speculative_simple:
            for path in (target, large):
                print(against_llama_cpp(options.speculative_simple, path, draft, 3, 3 * options.pairs), flush=True)
        if options.only in (None, "workloads"):
            print("\n| target | workload | temp | drafter | plain tok/s | tok/s | acceptance | τ | speedup |")
            print("|---|---|---|---|---|---|---|---|---|")
            for name, path in (("default", target), ("1.5B-class", large)):
                for line in workload_rows(name, path, draft, options.n, options.pairs):
                    print(line, flush=True)
    print(f"\npeak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
