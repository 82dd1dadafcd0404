"""A whole load test: who answers, how long its tokens are, each load in turn or the search, figures."""

from __future__ import annotations

import asyncio
import datetime
import secrets
import time
from collections.abc import Awaitable, Generator, Sequence
from typing import TypeVar

import numpy as np

from specli import __version__
from specli.bench import machine
from specli.bench.workloads import Prompt
from specli.config import OPEN_WARMUP_S, LoadOptions
from specli.errors import Cancelled, ConfigError, ServerError
from specli.loadtest.client import Client, Facts, shown_url
from specli.loadtest.document import LoadReport, load_words
from specli.loadtest.figures import Bounds, Figures, figures
from specli.loadtest.prompts import CHARS_PER_TOKEN, Writer, text
from specli.loadtest.run import TICK_S, Step, Watch, run_step
from specli.loadtest.scrape import between, counters
from specli.loadtest.search import Found, probes
from specli.loadtest.window import Extent

SAMPLE_CHARS = 4000  # of text, whose tokens are counted once
LATE_MS = 20.0  # of this machine, from where on it measures itself
_T = TypeVar("_T")


def measure(options: LoadOptions, prompts: Sequence[Prompt] = (), watch: Watch | None = None) -> LoadReport:
    """Measure a server. ``prompts``: a file's, in place of written ones.

    Raises ``ServerError`` when nothing works, ``ConfigError`` when the time was up before anything was measured, and
    ``Cancelled`` when the user stopped before.
    """
    return asyncio.run(_Campaign(options, prompts, watch or Watch()).run())


def extent_of(options: LoadOptions, load: float) -> Extent:
    """How long ``load`` is held."""
    if options.warmup_requests is not None or options.warmup_s is not None:
        warm_requests, warm_s = options.warmup_requests or 0, options.warmup_s or 0.0
    else:
        warm_requests, warm_s = (0, OPEN_WARMUP_S) if options.is_open else (int(load), 0.0)
    return Extent(warm_requests, warm_s, options.n_requests, options.duration_s)


class _Campaign:
    def __init__(self, options: LoadOptions, prompts: Sequence[Prompt], watch: Watch) -> None:
        self._options, self._prompts, self._watch = options, prompts, watch
        self._bounds = Bounds(options.sla_ttft_ms, options.sla_tpot_ms)
        self._steps: list[Figures] = []
        self._tag = secrets.token_hex(3)
        self._was_stopped = False
        self._has_metrics = False
        self._n_good = 0  # requests that succeeded, those of the warm-up too

    async def run(self) -> LoadReport:
        started_s = time.monotonic()
        async with Client(self._options) as client:
            self._watch.progress("asking the server", None)
            facts = await self._or_cancelled(client.find_facts())
            chars = await self._or_cancelled(self._chars_per_token(client))
            writer = Writer(self._options, self._tag, chars_per_token=chars or CHARS_PER_TOKEN, prompts=self._prompts)
            circumstances = _circumstances(self._options, facts, self._tag, chars, len(self._prompts))
            found = await self._loads(client, writer)
        self._require_some()
        return LoadReport(
            circumstances,
            sorted(self._steps, key=lambda step: step.load) if self._options.find_sla else self._steps,
            self._ending,
            None if self._options.find_sla else len(self._options.loads),
            time.monotonic() - started_s,
            found,
            _bounds_words(self._options),
            list(self._notes(writer)),
        )

    async def _loads(self, client: Client, writer: Writer) -> Found | None:
        """Each load in turn, or those that the search asks for."""
        options = self._options
        if not options.find_sla:
            for load in options.loads:
                await self._step(client, writer, load)
                if self._was_stopped:
                    break
            return None
        search = probes(min(options.loads), max(options.loads), is_whole=not options.is_open)
        return await self._search(client, writer, search)

    async def _search(self, client: Client, writer: Writer, search: Generator[float, bool, Found]) -> Found | None:
        load = next(search)
        while True:
            step = await self._step(client, writer, load)
            if self._was_stopped or step is None or step.is_inside is None:
                return None
            try:
                load = search.send(step.is_inside)
            except StopIteration as ending:
                found: Found = ending.value
                return found

    async def _step(self, client: Client, writer: Writer, load: float) -> Figures | None:
        """Measure one load; None where it was stopped before anything ended."""
        options = self._options
        before = counters(await client.metrics() or "")
        label = f"{load:g} requests/s" if options.is_open else f"concurrency {load:g}"
        step = Step(load, options.is_open, extent_of(options, load), options.seed)
        run = await run_step(client, step, writer.asks(len(self._steps)), self._watch, label)
        self._was_stopped = run.stopped
        self._n_good += sum(record.error is None for record in run.records)
        after = None if run.stopped else counters(await client.metrics() or "")
        self._has_metrics = self._has_metrics or before is not None
        found = figures(run, load, options.is_open, self._bounds, between(before, after))
        if not run.stopped or found.n_measured:
            self._steps.append(found)
            return found
        return None

    async def _chars_per_token(self, client: Client) -> float | None:
        """Of text like ours, by the server's tokenizer; None where it has none, or nothing depends on it."""
        if self._prompts:
            return None
        sample = text(f"0 {self._tag}: ", SAMPLE_CHARS, np.random.default_rng(self._options.seed))
        n_tokens = await client.tokenize(sample)
        return len(sample) / n_tokens if n_tokens else None

    async def _or_cancelled(self, waited: Awaitable[_T]) -> _T:
        """What ``waited`` gives. Raises ``Cancelled`` or ``ConfigError`` when there is no more time for it."""
        task = asyncio.ensure_future(waited)
        while not task.done():
            await asyncio.wait([task], timeout=TICK_S)
            if self._watch.is_over() and not task.done():
                task.cancel()
                await asyncio.wait([task])
                self._was_stopped = True
                self._require_some()
        return task.result()

    @property
    def _ending(self) -> str:
        if not self._was_stopped:
            return "done"
        return "interrupted" if self._watch.stopped() else "time"

    def _require_some(self) -> None:
        if any(step.n_ok for step in self._steps):
            return
        failed = next((step for step in self._steps if step.errors), None)
        if self._ending == "interrupted":
            raise Cancelled("stopped before anything was measured; there is nothing to show")
        if failed is not None:
            kind, n = next(iter(failed.errors.items()))
            said = f" ({failed.said[kind]})" if failed.said.get(kind) else ""
            which = f"no measured request succeeded (of the warm-up {self._n_good} did)"
            raise ServerError(
                f"--url {shown_url(self._options.url)}: {which if self._n_good else 'no request succeeded'}; of "
                f"{sum(failed.errors.values())} at {load_words(failed)}, {n} gave {kind}{said}"
            )
        if self._ending == "time":
            raise ConfigError(
                f"--time-budget of {self._options.time_budget_s:g} s was over before anything was measured; give it "
                "more, or shorter answers (--output-length)"
            )
        raise ServerError(f"--url {shown_url(self._options.url)}: nothing was measured; give it more --requests")

    def _notes(self, writer: Writer) -> Generator[str, None, None]:
        good = [step for step in self._steps if step.n_ok]
        if any(not step.has_usage for step in good):
            yield "the server gives no usage: figures that need tokens are left out"
        if not self._has_metrics:
            yield "the server shows no draft counters at /metrics" + (
                "; acceptance is of its answers" if any(step.acceptance_of for step in good) else ""
            )
        late = [step.lag_ms for step in good if step.lag_ms is not None and step.lag_ms > LATE_MS]
        if late:
            yield f"this machine itself was up to {max(late):.0f} ms late (p99): measure from an idle one"
        if writer.repeats:
            yield "prompts of the file were asked more than once: a prefix cache may have answered"


def _bounds_words(options: LoadOptions) -> str:
    bounds = (("TTFT", options.sla_ttft_ms), ("TPOT", options.sla_tpot_ms))
    return " and ".join(f"{name} {bound:g} ms" for name, bound in bounds if bound is not None)


def _circumstances(
    options: LoadOptions, facts: Facts, tag: str, chars_per_token: float | None, n_prompts: int
) -> dict[str, object]:
    """JSON types only; no credentials."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "specli": __version__,
        "url": shown_url(options.url),
        "model": facts.model,
        "server": facts.server,
        "version": facts.version,
        "machine": {**machine.hardware(), "load_average_before": machine.load_average()},
        "prompts_tag": tag,
        "chars_per_token": chars_per_token,
        "settings": {
            "endpoint": options.endpoint,
            "input_length": f"{n_prompts} prompts of a file" if n_prompts else options.input_length.words,
            "output_length": options.output_length.words,
            "shared_prefix": options.shared_prefix,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "requests": options.n_requests,
            "duration_s": options.duration_s if options.n_requests is None else None,
            "warmup_requests": options.warmup_requests,
            "warmup_s": options.warmup_s,
            "sla_ttft_ms": options.sla_ttft_ms,
            "sla_tpot_ms": options.sla_tpot_ms,
            "seed": options.seed,
        },
    }
