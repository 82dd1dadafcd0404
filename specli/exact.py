"""``--exact``: settings under which the logits of a token do not depend on how many others share its pass.

Candidates are tried in order of what they are likely to cost: the settings as given, with flash attention, with q8_0
caches, with one thread for one-token passes. Each is measured (``bits``) at every width up to 17 tokens, at a few
lengths. What was found is kept per file, settings and library, so that only the first load pays for it.

With several sequences, a pass that holds all of them must also give each the logits that it gets alone; their caches
are kept apart then, since in a shared one a text's tokens lie in whatever order cells became free.

The choice does not look at the draft: with none, or with another, the same settings are chosen, and so the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from specli import bits
from specli.config import ModelOptions
from specli.engine.base import Engine
from specli.errors import ConfigError
from specli.profile import load_profile, save_profile

_FLAGS = {
    "flash_attn": "-fa",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "n_threads": "-t",
    "n_threads_batch": "-tb",
}
Changes = dict[str, str | int]  # fields of ModelOptions


class Opener(Protocol):
    """Makes an engine over the loaded weights."""

    def __call__(self, options: ModelOptions, n_rows_max: int) -> Engine:
        """A context with ``options`` that gives ``n_rows_max`` rows at once. The caller closes it."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found. ``changed``: fields of ``ModelOptions`` to set; ``widest``: tokens in a pass that stay exact.

    ``cost``: seconds of a one-token pass / those with the settings as given. ``lengths``: where it was looked.
    """

    changed: Mapping[str, str | int]
    widest: int
    cost: float
    lengths: tuple[int, ...]

    def apply(self, options: ModelOptions) -> ModelOptions:
        """``options`` with what must change."""
        return _changed(options, dict(self.changed))

    def words(self) -> str:
        """One line for the user."""
        flags = " ".join(f"{_FLAGS[name]} {value}" for name, value in self.changed.items())
        *firsts, last = map(str, self.lengths)
        where = f"{', '.join(firsts)} and {last}" if firsts else last
        cost = f"; a one-token pass takes {self.cost:.2f} × as long as with the settings given" if flags else ""
        return (
            f"exact: passes of 1 to {self.widest} tokens give the same logits to the bit with "
            f"{flags or 'the settings given'} (checked behind {where} tokens){cost}"
        )


def settle(
    options: ModelOptions,
    tokenize: Callable[[str], list[int]],
    open_engine: Opener,
    kept_at: Path | None = None,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> Proof:
    """Find and prove settings. ``options.n_ctx`` must be a number.

    The first ones that are exact at all widths; if there are none, those exact up to the largest width. Raises
    ``ConfigError`` if not even two tokens are.
    """
    if kept_at is not None and (kept := _restored(load_profile(kept_at))) is not None:
        return kept
    n_ctx = options.n_ctx or bits.LENGTHS[-1] + bits.MAX_WIDTH
    width = min(bits.MAX_WIDTH, n_ctx)
    lengths = bits.lengths_within(n_ctx, width)
    tokens = bits.sample_tokens(tokenize, lengths[-1] + width)
    with ExitStack() as stack:
        tried: list[_Tried] = []
        for words, changed in (every := list(candidates(options))):
            short = _changed(options, {**changed, "n_ctx": lengths[-1] + width})
            engine = open_engine(replace(short, n_sequences=1), width)
            stack.callback(engine.close)
            report = partial(_part, progress, len(tried), len(every))
            widest, moved = _check(engine, tokens, lengths, report)
            if options.n_sequences > 1 and widest > 1:
                with closing(open_engine(short, max(widest, options.n_sequences))) as shared:
                    moved = bits.together(engine, shared, tokens, lengths[-1], widest)
                widest = widest if moved.is_identical else 1
            tried.append(_Tried(words, changed, engine, widest, moved))
            if tried[-1].widest == bits.MAX_WIDTH:
                break
        best = max(tried, key=lambda one: one.widest)
        if best.widest < options.n_sequences:
            raise ConfigError(
                f"--exact with -np {options.n_sequences}: passes of up to {best.widest} tokens are exact here, and "
                "each answer under way needs one; give a smaller -np"
            )
        if best.widest < 2:
            raise ConfigError(_refusal(options.label, tried))
        is_given = best is tried[0]
        cost = 1.0 if is_given else bits.pass_ratio(best.engine, tried[0].engine, tokens, lengths[-1])
    proof = Proof(best.changed, best.widest, cost, lengths)
    if kept_at is not None:
        save_profile(kept_at, asdict(proof))
    return proof


@dataclass(frozen=True, slots=True)
class _Tried:
    """A candidate that was measured: the widest exact width, and the largest shift that was seen."""

    words: str
    changed: Changes
    engine: Engine
    widest: int
    moved: bits.Shift


def _part(progress: Callable[[float], None], number: int, n_parts: int, fraction: float) -> None:
    progress((number + fraction) / n_parts)


def _changed(options: ModelOptions, changed: Changes) -> ModelOptions:
    return replace(options, **changed)  # type: ignore[arg-type]


def _refusal(label: str, tried: Sequence[_Tried]) -> str:
    found = "; ".join(f"with {one.words} logits move by {one.moved.largest:.2g}" for one in tried)
    return (
        f"--exact found no settings under which passes over 2 tokens of {label} give the logits of one-token passes to "
        f"the bit ({found}); leave --exact out, or use another quantization of the weights"
    )


def candidates(options: ModelOptions) -> Iterator[tuple[str, Changes]]:
    """Names and changes, the settings as given first."""
    flash: Changes = {} if options.flash_attn == "on" else {"flash_attn": "on"}
    quantized: Changes = {"cache_type_k": "q8_0", "cache_type_v": "q8_0"}
    one_thread: Changes = {"n_threads": 1, "n_threads_batch": options.n_threads_batch or options.n_threads or 0}
    yield "the settings given", {}
    if options.flash_attn == "off":
        yield "-fa on", flash
    if (options.cache_type_k, options.cache_type_v) != ("q8_0", "q8_0"):
        yield "-fa on -ctk q8_0 -ctv q8_0", flash | quantized
    yield "-fa on -t 1", flash | one_thread


def _check(
    engine: Engine, tokens: Sequence[int], lengths: Sequence[int], progress: Callable[[float], None]
) -> tuple[int, bits.Shift]:
    """The widest exact width over all ``lengths``, and the largest shift that was seen."""
    widest = min(engine.n_rows_max, engine.n_batch, engine.n_ctx)
    widths, moved = range(2, widest + 1), bits.NONE
    n_passes, n_done = max(1, len(lengths) * 2 * widest), 0

    def on_pass() -> None:
        nonlocal n_done
        n_done += 1
        progress(min(1.0, n_done / n_passes))

    for length in reversed(lengths):  # the longest is the first to fail
        shifts = bits.measure(engine, tokens, length, widths, on_pass) if widths else {}
        widest = min(widest, bits.widest_identical(shifts))
        worst = bits.largest(shifts)
        moved = worst if worst.largest > moved.largest else moved
        if widest < 2:
            break
    return widest, moved


def _restored(kept: Mapping[str, object] | None) -> Proof | None:
    """What an earlier run found, or None."""
    if kept is None:
        return None
    changed, widest, cost, lengths = (kept.get(name) for name in ("changed", "widest", "cost", "lengths"))
    if not isinstance(changed, dict) or not isinstance(widest, int) or not isinstance(cost, float):
        return None
    if not set(changed) <= set(_FLAGS) or not isinstance(lengths, list) or not lengths:
        return None
    return Proof(changed, widest, cost, tuple(int(length) for length in lengths))
