"""Which settings make it fit: what ``-ngl auto`` and an unset ``-c`` become, what to suggest, what the draft costs.

Every answer is a plan that was measured, found by bisection; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from specli.config import ModelOptions
from specli.errors import ConfigError, EngineError, ModelLoadError
from specli.memory_plan import HOST, Plan, Setup, Sizer, make_plan, size

CONTEXT_STEP = 256  # llama.cpp rounds a context up to this
CONTEXT_FLOOR = 4096  # an unset -c is not shrunk below this for speed alone (llama.cpp's --fit-ctx)
CONTEXT_MIN = 512  # nor below this at all
MAX_SUGGESTIONS = 4


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Settings that fit, asked and not guessed; ``what`` says in words what they change."""

    what: str
    plan: Plan


@dataclass(frozen=True, slots=True)
class Choice:
    """The plan that ``-ngl auto`` and an unset ``-c`` led to, and what the user should hear of it."""

    plan: Plan
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """What the draft takes from the target's context.

    ``n_bytes``: all it touches; ``bytes_per_token``: of target context, caches and compute buffers; ``tokens``: how
    many its memory would buy, None where context costs nothing; ``longest_with`` and ``longest_without`` it: the
    longest context that fits, up to the trained one; None: none does.
    """

    n_bytes: int
    bytes_per_token: float
    tokens: int | None
    longest_with: int | None
    longest_without: int | None


# -- choosing what the user left open ----------------------------------------------------------------------------------


def choose(setup: Setup, sizer: Sizer) -> Choice:
    """Turn ``-ngl auto`` into a number and an unset ``-c`` into one that fits; what was given is not touched.

    Without a device auto is 0. With one it is all layers if they fit; otherwise an unset context shrinks first, down to
    ``CONTEXT_FLOOR`` tokens, then layers stay on the CPU, the target's before the draft's, because a draft takes K
    steps for one of the target (llama.cpp's ``--fit`` goes the same way). The plan may still not fit.
    """
    devices = [room for room in sizer.rooms() if room.name != HOST]
    has_device = any(room.total for room in devices)
    start = _with_auto_layers(setup, "all" if has_device else "0") if devices else setup
    first = make_plan(start, sizer)
    if first.is_comfortable:
        return Choice(first)
    is_open = setup.target.n_ctx is None and first.target.n_ctx > CONTEXT_MIN
    n_ctx = first.target.n_ctx
    better = _shrink(start, n_ctx, CONTEXT_FLOOR, sizer, lambda plan: plan.is_comfortable) if is_open else None
    if better is None and has_device and start != _with_auto_layers(setup, "0"):
        floor = start.with_context(min(n_ctx, CONTEXT_FLOOR)) if is_open else start
        better = _spread_layers(floor, setup, sizer)
        if better is not None and better.setup.target.n_gpu_layers == "0":  # then a shorter context bought nothing
            better = _spread_layers(start, setup, sizer) or better
    if better is None and is_open and not first.leaves_reserve:
        on_cpu = _with_auto_layers(setup, "0") if devices else setup
        better = _shrink(on_cpu, n_ctx, CONTEXT_MIN, sizer, lambda plan: plan.leaves_reserve)
    plan = better or first
    return Choice(plan, [*_choice_notices(setup, first, plan), *(plan.warnings if plan.fits else ())])


def _with_auto_layers(setup: Setup, layers: str) -> Setup:
    def resolved(options: ModelOptions) -> ModelOptions:
        return replace(options, n_gpu_layers=layers) if options.n_gpu_layers == "auto" else options

    return replace(setup, target=resolved(setup.target), draft=setup.draft and resolved(setup.draft))


def _choice_notices(setup: Setup, first: Plan, plan: Plan) -> Iterator[str]:
    if plan.target.n_ctx < first.target.n_ctx:
        short = next(room for room in first.rooms if first.verdict(room) != "fits")
        why = (
            f"{size(first.hot(short))} and a reserve of {size(short.reserve)} would not fit the {size(short.free)} "
            f"that {short.description} has free"
        )
        yield f"-c was not given: a context of {plan.target.n_ctx} tokens, not {first.target.n_ctx}: {why}"
    if setup.target.n_gpu_layers == "auto" and plan.setup.target.n_gpu_layers not in ("auto", "all"):
        yield f"-ngl auto: {plan.setup.target.n_gpu_layers} of {plan.target.n_layers} layers fit the device"


def _shrink(setup: Setup, n_ctx: int, floor: int, sizer: Sizer, is_good: Callable[[Plan], bool]) -> Plan | None:
    """The plan with the longest context from ``floor`` up to below ``n_ctx`` that is good, or None."""
    return _largest(
        -(-floor // CONTEXT_STEP),
        (n_ctx - 1) // CONTEXT_STEP,
        lambda n: setup.with_context(n * CONTEXT_STEP),
        sizer,
        is_good,
    )


def _spread_layers(setup: Setup, asked: Setup, sizer: Sizer) -> Plan | None:
    """The plan with the most layers on devices; only what ``asked`` has at ``auto`` is moved."""
    plan = make_plan(setup, sizer)
    is_target_open = asked.target.n_gpu_layers == "auto"
    if is_target_open and (found := _most_layers(plan.target.n_layers, setup.with_layers, sizer)):
        return found
    if plan.draft is None or asked.draft is None or asked.draft.n_gpu_layers != "auto":
        return None
    base = setup.with_layers(0) if is_target_open else setup
    return _most_layers(plan.draft.n_layers, base.with_draft_layers, sizer)


def _most_layers(n_layers: int, make: Callable[[int], Setup], sizer: Sizer) -> Plan | None:
    """The plan with as many layers as the devices take. Whatever they take, RAM need not, so RAM is judged last."""
    plan = _largest(0, n_layers, make, sizer, lambda p: p.leaves_device_reserve)
    return plan if plan is not None and plan.leaves_reserve else None


def _largest(
    low: int, high: int, make: Callable[[int], Setup], sizer: Sizer, is_good: Callable[[Plan], bool]
) -> Plan | None:
    """The plan of the largest number in [low, high] that is good, by bisection; None when ``low`` is not good."""
    if low > high:
        return None
    best = _try(make(low), sizer)
    if best is None or not is_good(best):
        return None
    top = _try(make(high), sizer)
    if top is not None and is_good(top):
        return top
    while high - low > 1:
        middle = (low + high) // 2
        plan = _try(make(middle), sizer)
        if plan is not None and is_good(plan):
            low, best = middle, plan
        else:
            high = middle
    return best


def _try(setup: Setup, sizer: Sizer) -> Plan | None:
    """The plan, or None where llama.cpp refuses the settings (a cache type that the head size does not allow)."""
    try:
        return make_plan(setup, sizer)
    except EngineError:
        return None


# -- suggestions -------------------------------------------------------------------------------------------------------


def require_fit(plan: Plan, sizer: Sizer) -> None:
    """Raise ``ModelLoadError`` with the first suggestion when ``plan`` does not fit."""
    if not plan.fits:
        raise ModelLoadError(refusal(plan, suggest(plan, sizer)))


def refusal(plan: Plan, suggestions: Sequence[Suggestion]) -> str:
    """One line: what does not fit, and the command that does."""
    if suggestions:
        advice = f"this fits ({suggestions[0].what}): {suggestions[0].plan.setup.command()}"
    else:
        advice = "no context of 512 tokens or more fits; take a smaller or more heavily quantized model"
    return f"{plan.setup.target.label}: {plan.shortage()}; {advice}"


def suggest(plan: Plan, sizer: Sizer) -> tuple[Suggestion, ...]:
    """Up to ``MAX_SUGGESTIONS`` ways to make it fit with the reserve left, the least loss first, each one measured."""
    found: list[Suggestion] = []
    for what, other in _alternatives(plan, sizer):
        if other is not None and other.leaves_reserve and other.setup not in [one.plan.setup for one in found]:
            found.append(Suggestion(what, other))
        if len(found) == MAX_SUGGESTIONS:
            break
    return tuple(found)


def _alternatives(plan: Plan, sizer: Sizer) -> Iterator[tuple[str, Plan | None]]:
    setup, n_ctx = plan.setup, plan.target.n_ctx
    uses_device = any(
        part.room != HOST for part in chain(plan.target.buffers, plan.draft.buffers if plan.draft else ())
    )
    if uses_device:
        yield "fewer layers on the device", _fewer_layers(plan, sizer)
    q8_0, q4_0 = (_smaller_cache(setup, name) for name in ("q8_0", "q4_0"))
    if q8_0 is not None:
        yield "q8_0 caches", _try(q8_0, sizer)
    yield "a shorter context", _shorter(setup, n_ctx, sizer)
    if q8_0 is not None and q4_0 is not None:
        yield _whole_or_shorter("q8_0 caches", q8_0, n_ctx, sizer)
        yield "q4_0 caches", _try(q4_0, sizer)
    if setup.draft is not None:
        yield _whole_or_shorter("no draft model", setup.without_draft(), n_ctx, sizer)
    if uses_device:
        on_cpu = setup.with_layers(0).with_draft_layers(0)
        yield _whole_or_shorter("no layers on the device", on_cpu, n_ctx, sizer)
    if setup.draft is not None and (smallest := _smaller_cache(setup.without_draft(), "q4_0")) is not None:
        smallest = smallest.with_layers(0) if uses_device else smallest
        yield _whole_or_shorter("no draft model, q4_0 caches", smallest, n_ctx, sizer)


def _whole_or_shorter(what: str, setup: Setup, n_ctx: int, sizer: Sizer) -> tuple[str, Plan | None]:
    plan = _try(setup, sizer)
    if plan is not None and plan.leaves_reserve:
        return what, plan
    return f"{what} and a shorter context", _shorter(setup, n_ctx, sizer)


def _fewer_layers(plan: Plan, sizer: Sizer) -> Plan | None:
    """The most target layers that fit; where none does, the target on the CPU and the most draft layers."""
    setup = plan.setup
    found = _most_layers(plan.target.n_layers - 1, setup.with_layers, sizer)
    if found is None and plan.draft is not None:
        found = _most_layers(plan.draft.n_layers, setup.with_layers(0).with_draft_layers, sizer)
    return found


def _shorter(setup: Setup, n_ctx: int, sizer: Sizer) -> Plan | None:
    return _shrink(setup, n_ctx, CONTEXT_MIN, sizer, lambda plan: plan.leaves_reserve)


def _smaller_cache(setup: Setup, name: str) -> Setup | None:
    try:
        return setup.with_cache_type(name)
    except ConfigError:  # a quantized V cache needs flash attention, which is off
        return None


# -- what the draft costs ----------------------------------------------------------------------------------------------


def draft_cost(plan: Plan, sizer: Sizer) -> DraftCost | None:
    """What the draft of ``plan`` costs in context, or None without a draft."""
    if plan.draft is None:
        return None
    alone = plan.setup.without_draft()
    n_bytes = plan.draft.total()
    per_token = bytes_per_token(plan, sizer)
    return DraftCost(
        n_bytes=n_bytes,
        bytes_per_token=per_token,
        tokens=int(n_bytes / per_token) if per_token > 0 else None,
        longest_with=longest_context(plan.setup, sizer),
        longest_without=longest_context(alone, sizer),
    )


def bytes_per_token(plan: Plan, sizer: Sizer) -> float:
    """What one more token of target context takes, from two measurements; 0 for fixed-size memories."""
    low = max(CONTEXT_STEP, plan.target.n_ctx // 2 // CONTEXT_STEP * CONTEXT_STEP)
    high = max(plan.target.n_ctx, low + 16 * CONTEXT_STEP)
    n_rows = plan.setup.n_max + 1
    sizes = [sizer.measure(replace(plan.setup.target, n_ctx=n), n_rows).total() for n in (low, high)]
    return max(0.0, (sizes[1] - sizes[0]) / (high - low))


def longest_context(setup: Setup, sizer: Sizer) -> int | None:
    """The longest context, up to the trained one, that fits comfortably; None when none of 512 tokens or more does."""
    trained = sizer.trained_context(setup.target)
    floor = min(CONTEXT_MIN, trained)
    plan = _shrink(setup, trained + CONTEXT_STEP, floor, sizer, lambda p: p.is_comfortable)
    return min(plan.target.n_ctx, trained) if plan else None
