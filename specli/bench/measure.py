"""A whole bench over a loaded session: warm-up, runs, margins of texts that differ, figures, conclusion."""

from __future__ import annotations

import datetime
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from specli import __version__
from specli.bench import machine, report
from specli.bench.advice import conclude
from specli.bench.document import Report
from specli.bench.harness import Harness, Interrupted, Outcome, Plan, Progress, Setting
from specli.bench.runner import Runner
from specli.bench.workloads import Prompt
from specli.config import BenchOptions, ModelOptions
from specli.errors import Cancelled, ConfigError, ContextOverflow
from specli.events import SpeculationState

if TYPE_CHECKING:
    from specli.session import Session

MARGIN_PASSES = 4000  # one-token passes that looking for margins may take, all cells together


@dataclass(frozen=True, slots=True)
class Watch:
    """What a bench tells and asks: progress, notices, whether to stop, and when it must end (on ``time.monotonic``)."""

    progress: Callable[[Progress], None] = lambda _progress: None
    notice: Callable[[str], None] = lambda _line: None
    stopped: Callable[[], bool] = lambda: False
    deadline_s: float | None = None

    def is_over(self) -> bool:
        """Whether the user or the clock wants an end."""
        return self.stopped() or (self.deadline_s is not None and time.monotonic() > self.deadline_s)


def settings_of(options: BenchOptions, has_draft: bool) -> list[Setting]:
    """Every combination asked for, each once. Raises ``ConfigError`` for a draft that is not there.

    Without types: a draft model if there is one, n-gram, and for the length auto what ``specli run`` would do.
    """
    types = options.spec_types or (("draft", "ngram", "auto") if has_draft else ("ngram", "auto"))
    found: dict[Setting, None] = {}
    for temperature, verify, kind, k in itertools.product(
        options.temperatures, options.verifiers, types, options.lengths
    ):
        if not options.spec_types and (kind == "auto") != (k is None):
            continue
        found[_setting(kind, k, temperature, verify, has_draft)] = None
    return list(found)


def _setting(kind: str, k: int | None, temperature: float, verify: str, has_draft: bool) -> Setting:
    verify = "greedy" if temperature == 0 else verify
    if kind == "none" or k == 0:
        return Setting("none", 0, temperature, verify)
    if kind == "draft" and not has_draft:
        raise ConfigError(
            "--spec-type draft needs a draft model, none was given; add -md FILE or use --spec-type ngram"
        )
    if kind == "auto" and (k is not None or not has_draft):
        kind = "draft" if has_draft else "ngram"
    return Setting(kind, k, temperature, verify)


def measure(
    session: Session, prompts: Sequence[Prompt], options: BenchOptions, watch: Watch, flags: Sequence[str]
) -> Report:
    """Run everything and say what it means. ``flags``: those that name the models, for the command that is suggested.

    Raises ``ConfigError`` when nothing could be measured, ``Cancelled`` when the user stopped before anything was.
    """
    circumstances = _circumstances(session, options)
    options = _within(options, session.speculation, watch)
    settings = settings_of(options, session.drafting is not None and session.drafting.draft is not None)
    if not session.speculation.active:
        settings = [setting for setting in settings if setting.drafter == "none"]
        if not settings:
            raise ConfigError(f"there is nothing to speculate with: {session.speculation.reason}")
    usable: list[Prompt] = []
    skipped: dict[str, str] = {}
    with Runner(
        session, options.n_predict, raw=options.raw, share=options.share_drafts, stopped=watch.is_over
    ) as runner:
        for prompt in prompts:
            try:
                runner.prompt_ids(prompt)
                usable.append(prompt)
            except ContextOverflow as error:
                skipped[prompt.name] = str(error)
        if not usable:
            raise ContextOverflow(f"no prompt fits; {next(iter(skipped.values()))}")
        for name, reason in skipped.items():
            watch.notice(f"{name} is left out: {reason}")
        outcome = _run(runner, Plan(usable, settings, options.repetitions, options.seed), watch)
        differences = dict(_differences(runner, outcome, watch))
    _require_some(outcome, options)
    known = report.costs(outcome.trials)
    order = [prompt.workload for prompt in prompts]
    found = report.cells(outcome.trials, known, differences, order)
    return Report(
        circumstances,
        usable,
        found,
        known,
        conclude(found, flags),
        skipped | outcome.skipped,
        outcome.ending,
        outcome.n_done,
        outcome.n_planned,
        outcome.elapsed_s,
    )


def _within(options: BenchOptions, speculation: SpeculationState, watch: Watch) -> BenchOptions:
    """``options`` without drafts longer than the session makes, which would be measured as shorter ones (--exact)."""
    k_most = speculation.k
    longer = [k for k in options.lengths if k is not None and k > k_most]
    if not speculation.active or not longer:
        return options
    lengths = dict.fromkeys(None if k is None else min(k, k_most) for k in options.lengths)
    words = ", ".join(map(str, longer))
    watch.notice(f"--spec-draft-n-max {words}: a pass has room for drafts of {k_most} tokens here; that is measured")
    return replace(options, lengths=tuple(lengths))


def _run(runner: Runner, plan: Plan, watch: Watch) -> Outcome:
    try:
        runner.warm_up(plan.prompts[0], plan.settings)
    except Interrupted:
        return Outcome((), {}, "interrupted" if watch.stopped() else "time", 0, 0, 0.0)
    return Harness(
        plan, runner.decode, deadline_s=watch.deadline_s, stopped=watch.stopped, on_step=watch.progress
    ).run()


def _require_some(outcome: Outcome, options: BenchOptions) -> None:
    if outcome.trials:
        return
    if outcome.ending == "interrupted":
        raise Cancelled("stopped before the first comparison was done; there is nothing to show")
    if outcome.ending == "time":
        raise ConfigError(
            f"--time-budget of {options.time_budget_s:g} s was over before the first comparison was done; give it "
            "more, or fewer tokens (-n)"
        )
    name, reason = next(iter(outcome.skipped.items()), ("", "there was nothing to run"))
    raise ConfigError(f"nothing could be measured: {name}: {reason}")


def _differences(runner: Runner, outcome: Outcome, watch: Watch) -> Iterator[tuple[int, report.Difference]]:
    """The first difference of each cell with plain's margin there, as far as the passes for it reach."""
    earliest: dict[tuple[str, Setting], tuple[int, report.Difference]] = {}
    for i, trial in enumerate(outcome.trials):
        difference = report.first_difference(trial) if report.promises_identity(trial.setting) else None
        key = trial.prompt.workload, trial.setting
        if difference is not None and (key not in earliest or difference.position < earliest[key][1].position):
            earliest[key] = i, difference
    n_left, known = MARGIN_PASSES, dict[tuple[str, int, int | None, int | None], float]()
    for i, difference in earliest.values():
        if difference.plain_token is None or difference.token is None:
            continue  # one text had ended: there is no pair of logits
        key_of = (difference.prompt, difference.position, difference.plain_token, difference.token)
        if key_of not in known:
            if n_left < difference.position or watch.is_over():
                continue
            n_left -= difference.position
            trial = outcome.trials[i]
            tokens = trial.plain.stats.tokens or ()
            known[key_of] = runner.margin(trial.prompt, tokens, difference.position, difference.token)
        yield i, replace(difference, margin=known[key_of])


def _circumstances(session: Session, options: BenchOptions) -> Mapping[str, object]:
    """JSON types only. Taken before anything is measured: hashing files would disturb it."""
    from specli.engine.llama import library_build

    asked = session.settings
    drafting = session.drafting
    draft = asked.draft if drafting is not None and drafting.draft is not None else None
    target = session.target_options
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "specli": __version__,
        "library": library_build(),
        "hardware": {**machine.hardware(), "load_average_before": machine.load_average()},
        "models": {"target": _model(target), "draft": None if draft is None else _model(draft)},
        "settings": {
            "n_predict": options.n_predict,
            "repetitions": options.repetitions,
            "seed": options.seed,
            "share_drafts": options.share_drafts,
            "n_ctx": session.engine.n_ctx,
            "n_batch": session.engine.n_batch,
            "threads": target.n_threads,
            "threads_batch": target.n_threads_batch,
            "gpu_layers": target.n_gpu_layers,
            "flash_attn": target.flash_attn,
            "cache_type_k": target.cache_type_k,
            "cache_type_v": target.cache_type_v,
            "top_k": asked.sampling.top_k,
            "top_p": asked.sampling.top_p,
            "min_p": asked.sampling.min_p,
        },
    }


def _model(options: ModelOptions) -> dict[str, object]:
    size = options.path.stat().st_size
    return {"name": options.label, "bytes": size, "sha256": machine.file_hash(options.path)}
