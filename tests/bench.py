"""``make bench``: the project's own figures, written into the README. Nothing else should be running.

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
from specli.bench.document import Report
from specli.bench.harness import Progress, Setting
from specli.bench.measure import Watch, measure
from specli.bench.report import Cell
from specli.bench.runner import Runner
from specli.bench.workloads import built_in
from specli.chat import Message
from specli.cli.models import prepare_source
from specli.config import (
    BenchOptions,
    GenerationOptions,
    ModelOptions,
    SamplingOptions,
    Settings,
    SpeculationOptions,
)
from specli.drafters.base import EMPTY, SequenceState
from specli.drafters.ngram import NgramDrafter
from specli.events import RoundDone, Text
from specli.render.bench import TITLES, label
from specli.sampling import Sampler
from specli.session import Session
from specli.stats import Stats
from specli.verify import make_verifier
from tests import bench_hindsight, bench_serve
from tests.inflate import inflate
from tests.memory_sizes import allocated, planned

LARGE_VOCABULARY = 151_936
README = Path(__file__).parent.parent / "README.md"
PARTS = ("memory", "ratios", "speed", "hindsight", "regimes", "serve")
K = 3  # of the ratios
WORKLOADS = ("chat", "rewrite", "extract", "story")
TEMPERATURES = (0.0, 0.8)
LARGE_SHARE = 0.7  # of the time for the tables; the 1.5B-class target takes about six times as long per token


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


def workload_report(target: Path, draft: Path, names: Sequence[str], options: BenchOptions, budget_s: float) -> Report:
    """What ``specli bench`` would report."""
    with load(target, draft, options.k_max) as session:
        watch = Watch(progress=show, deadline_s=time.monotonic() + budget_s)
        return measure(session, built_in(names), options, watch, ["-m", target.name, "-md", draft.name])


def show(step: Progress) -> None:
    if sys.stderr.isatty():
        left = "" if step.left_s is None else f", {step.left_s:.0f} s left"
        print(f"\r{step.fraction:4.0%} {step.prompt.name}{left}      ", end="", file=sys.stderr, flush=True)


def circumstances() -> str:
    """Hardware, library, commit and date."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=README.parent, capture_output=True, text=True, check=False
    ).stdout.strip()
    found, load_now = machine.hardware(), machine.load_average()
    return (
        f"{found['cpu']}, {found['logical_cores']} logical cores, "
        f"{int(str(found['ram'] or 0)) / 2**30:.0f} GiB, {found['system']}; Python {platform.python_version()}; commit "
        f"{commit or 'unknown'}; {time.strftime('%Y-%m-%d')}; load before "
        f"{load_now if load_now is None else round(load_now, 2)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9, help="pairs of runs against llama.cpp")
    parser.add_argument("-n", type=int, default=96, help="tokens per run")
    parser.add_argument("--turns", type=int, default=5, help="turns for the table of answers at a time")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds for each table of speed")
    parser.add_argument("--speculative-simple", type=Path, help="llama.cpp's example program, to compare with")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    options = parser.parse_args()
    pair = registry.load_pairs()[registry.DEFAULT_PAIR]
    target = prepare_source(pair.target, print, lambda: False)[0]
    draft = registry.find_file(pair.draft)
    parts: dict[str, str] = {}
    where = circumstances()
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "inflated-1.5b.gguf"
        inflate(target, large)
        if options.only in (None, "memory"):
            rows = "\n".join(memory(target, large, draft))
            parts["memory"] = f"`make bench` on {where}\n\n{_MEMORY_HEAD}\n{rows}\n"
        if options.only in (None, "ratios"):
            rows = "\n".join(ratios(options, target, large, draft))
            parts["ratios"] = f"`make bench` on {where}\n\n| figure | value |\n|---|---|\n{rows}\n"
        if options.only in (None, "speed"):
            rows = "\n".join(speed(options, target, large, draft, registry.find_file(pair.target)))
            parts["speed"] = f"`make bench`, {_tokens(options)}, on {where}\n\n{_SPEED_HEAD}\n{rows}\n"
        if options.only in (None, "hindsight"):
            rows = "\n".join(hindsight(options, target, large, draft))
            parts["hindsight"] = f"`make bench`, {_tokens(options)}, on {where}\n\n{bench_hindsight.HEAD}\n{rows}\n"
        if options.only in (None, "regimes"):
            rows = "\n".join(regimes(large, draft, 120))
            parts["regimes"] = f"`make bench` on {where}\n\n{_REGIMES_HEAD}\n{rows}\n"
        if options.only in (None, "serve"):
            rows = "\n".join(bench_serve.throughput(target, draft, min(options.n, 48), options.turns))
            gaps = "\n".join(f"- {line}" for line in bench_serve.stalls(target, draft))
            parts["serve"] = f"`make bench` on {where}\n\n{bench_serve.HEAD}\n{rows}\n\n{gaps}\n"
    for name, text in parts.items():
        print(text)
        README.write_text(with_part(README.read_text("utf-8"), name, text), "utf-8")


def _tokens(options: argparse.Namespace) -> str:
    return f"{options.n} tokens a run (1.5B-class: {options.n // 2})"


def with_part(page: str, name: str, text: str) -> str:
    """``page`` with ``text`` between the marks of part ``name``."""
    before, rest = page.split(f"<!-- bench: {name} -->\n", 1)
    _old, after = rest.split("<!-- end -->", 1)
    return f"{before}<!-- bench: {name} -->\n{text}<!-- end -->{after}"


_MEMORY_HEAD = "| model | buffer | planned MiB | allocated MiB |\n|---|---|---|---|"


def memory(target: Path, large: Path, draft: Path) -> Iterator[str]:
    """What ``specli plan`` foretells beside what llama.cpp then allocates, per model and buffer."""
    for title, path in (("default target (Q4_0)", target), ("draft", draft), ("1.5B-class target", large)):
        options = ModelOptions(path, n_ctx=8192)
        plan, real = planned(options), allocated(options)
        for kind, name in sorted(plan.keys() | real.keys()):
            if max(plan[kind, name], real[kind, name]) > 0:
                yield f"| {title} | {kind}, {name} | {plan[kind, name] / 100:.2f} | {real[kind, name] / 100:.2f} |"


REGIMES = (
    ("prose", "Write a short story about a lighthouse keeper who finds a letter."),
    ("code", "Write a Python class for a bank account with deposit, withdraw and a list of transactions."),
    ("a copied list", "Repeat this list exactly, nothing else:\n{items}"),
)
_ITEMS = "\n".join(
    f"- item {i}: {name}, {17 * i % 100} pieces" for i, name in enumerate(("rope", "lamp", "oil", "sail") * 4)
)
_BARS = "·▁▂▃▄▅▆▇█"  # 0 to 8 tokens and more


def regimes(target: Path, draft: Path, n_predict: int) -> Iterator[str]:
    """How the controller follows a text that changes its kind: three turns of one conversation, one mark per round."""
    options, greedy = ModelOptions(path=target, n_ctx=4096), SamplingOptions(temperature=0)
    with Session(Settings(options, ModelOptions(path=draft), greedy)) as session:
        history: list[Message] = []
        for name, text in REGIMES:
            history.append(Message("user", text.format(items=_ITEMS)))
            stats, parts, marks = Stats(), list[str](), list[int]()
            for event in session.generate(session.chat_ids(history), GenerationOptions(n_predict), reuse=True):
                stats.observe(event)
                if isinstance(event, RoundDone):
                    marks.append(event.sequences[0].proposed)
                elif isinstance(event, Text):
                    parts.append(event.text)
            history.append(Message("assistant", "".join(parts)))
            assert session.controller is not None
            by_kind = session.controller.record.by_kind
            drafted = [k for k in marks if k]
            yield (
                f"| {name} | {len(marks)} | "
                f"{by_kind['draft'] / len(marks):.0%} | {by_kind['ngram'] / len(marks):.0%} | "
                f"{statistics.mean(drafted) if drafted else 0:.1f} | {stats.block_efficiency or 1:.2f} | "
                f"`{''.join(_BARS[min(k, 8)] for k in marks)}` |"
            )


_REGIMES_HEAD = (
    "| text | rounds | by the draft model | by n-gram | mean K | τ | K of each round (· none, █ 8 and more) |\n"
    "|---|---|---|---|---|---|---|"
)
_SPEED_HEAD = (
    "| target | workload | temp | drafter | plain tok/s | tok/s | acceptance | τ | speedup |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def speed(options: argparse.Namespace, target: Path, large: Path, draft: Path, heavy: Path) -> Iterator[str]:
    """The rows of the README's table of the controller beside plain decoding; shorter texts of the large target.

    ``heavy``: a draft as dear as the default target, which nobody should use.
    """
    for title, path, share in (("default", target, 1 - LARGE_SHARE), ("1.5B-class", large, LARGE_SHARE)):
        n_predict = options.n if path == target else options.n // 2
        asked = BenchOptions(temperatures=TEMPERATURES, lengths=(None,), n_predict=n_predict, repetitions=1)
        cells: list[tuple[str, Cell]] = []
        for drafter, kinds, part in ((draft, ("ngram", "auto"), 0.6), (heavy, ("auto",), 0.4)):
            budget_s = options.budget * share * part
            report = workload_report(path, drafter, WORKLOADS, replace(asked, spec_types=kinds), budget_s)
            cells += ((" (hopeless draft)" if drafter == heavy else "", cell) for cell in report.cells)
        for workload in WORKLOADS:
            for temperature in TEMPERATURES:
                for note, cell in cells:
                    if (cell.workload, cell.setting.temperature) == (workload, temperature):
                        yield _row(title, note, cell)


def hindsight(options: argparse.Namespace, target: Path, large: Path, draft: Path) -> Iterator[str]:
    """The rows of the README's table of the controller beside fixed lengths; shorter texts of the large target."""
    for title, path, share, n_predict in (
        ("default", target, 1 - LARGE_SHARE, options.n),
        ("1.5B-class", large, LARGE_SHARE, options.n // 2),
    ):
        lengths = bench_hindsight.LENGTHS if path == target else bench_hindsight.FEW_LENGTHS
        budget_s = options.budget * share
        yield from bench_hindsight.hindsight(title, path, draft, lengths, n_predict, budget_s)


def _row(target: str, note: str, cell: Cell) -> str:
    acceptance = cell.counts.acceptance_rate
    efficiency = cell.counts.block_efficiency
    columns = (
        target,
        TITLES.get(cell.workload, cell.workload),
        f"{cell.setting.temperature:g}",
        label(cell.setting) + note,
        f"{cell.plain_tok_s.median:.0f}",
        f"{cell.tok_s.median:.0f}",
        "–" if acceptance is None else f"{acceptance:.0%}",
        "–" if efficiency is None else f"{efficiency:.2f}",
        bench_hindsight.with_interval(cell.speedup),
    )
    return f"| {' | '.join(columns)} |"


def ratios(options: argparse.Namespace, target: Path, large: Path, draft: Path) -> Iterator[str]:
    """What specli adds to a pass, to start-up and to memory."""
    yield from row_costs()
    yield from ngram_costs()
    yield help_cost()
    yield peak_memory(target)
    yield from host_shares(large, draft)
    if options.speculative_simple:
        for path in (target, large):
            yield against_llama_cpp(options.speculative_simple, path, draft, options.pairs)


if __name__ == "__main__":
    main()
