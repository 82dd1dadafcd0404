"""Will it fit? What two models need of every memory, against what is free there.

Sizes come from a ``Sizer`` (``engine.sizing`` asks llama.cpp); this module adds them up and judges, ``memory_search``
looks for settings that fit. All sizes in bytes, all contexts in tokens.

What counts against free memory:

- **Pinned**: caches, compute and output buffers, weights on a device, and weights that llama.cpp rewrites for the CPU
  at loading (``CPU_REPACK``). If they do not fit, loading fails or the system swaps at every token: an error.
- **Mapped**: weights that are read in place from the file. The system may drop such pages and read them again, so a
  model larger than RAM does run, at the speed of the disk: a warning. Of these only the tensors that a pass touches
  count (``hot_bytes``); repacked ones lie in the mapped range too, and are read once.

Settings that specli chooses (``-ngl auto``, an unset ``-c``, suggestions) leave a reserve; what the user asked for is
refused only when it exceeds what is free.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, Protocol

import numpy as np

from specli.config import CONTEXT_CAP, ModelOptions
from specli.flags import draft_loading_flags, loading_flags
from specli.gguf_file import GgufHeader

Kind = Literal["weights", "kv", "state", "compute", "output"]
KINDS: tuple[Kind, ...] = ("weights", "kv", "state", "compute", "output")
Verdict = Literal["fits", "tight", "too large"]

MIB = 1 << 20
HOST = "CPU"  # the room of RAM, by llama.cpp's name of the device
HOST_RESERVE = 128 * MIB  # vocabularies, thread stacks, Python: 5 MiB beyond the plan measured on the default pair
DEVICE_RESERVE = 1024 * MIB  # what llama.cpp's own --fit leaves (common.h, fit_params_target)


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer as llama.cpp's log names it. ``hot_bytes``: what a pass touches; less only where ``is_mapped``."""

    room: str
    name: str
    kind: Kind
    n_bytes: int
    hot_bytes: int
    is_mapped: bool = False


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """What one model takes. ``n_layers`` counts the output layer, so it is the -ngl that offloads everything."""

    n_ctx: int
    n_ctx_train: int
    n_layers: int
    buffers: tuple[Buffer, ...]

    def without_weights(self) -> ModelMemory:
        """The same for a second context over weights that are loaded already."""
        return replace(self, buffers=tuple(part for part in self.buffers if part.kind != "weights"))

    def total(self, kind: Kind | None = None) -> int:
        """Bytes that a pass touches, of one kind or of all."""
        return sum(part.hot_bytes for part in self.buffers if kind in (None, part.kind))


@dataclass(frozen=True, slots=True)
class Room:
    """A memory: RAM (``HOST``) or a device's own. ``total`` 0: it does not say, and nothing is refused there."""

    name: str
    description: str
    free: int
    total: int
    reserve: int
    shares_ram: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be loaded. ``n_max``: the longest draft (K), tokens, 0 without speculation.

    ``names``: the flags by which the user named the models (none: the default pair), to be repeated in commands;
    None: their files.
    """

    target: ModelOptions
    draft: ModelOptions | None = None
    n_max: int = 0
    names: tuple[str, ...] | None = None

    @property
    def shares_weights(self) -> bool:
        """The target drafts for itself: one copy of the weights, two contexts."""
        return self.draft is not None and self.draft.path.resolve() == self.target.path.resolve()

    def with_context(self, n_ctx: int) -> Setup:
        """The same with ``-c``; the draft's context follows."""
        draft = self.draft and replace(self.draft, n_ctx=None)
        return replace(self, target=replace(self.target, n_ctx=n_ctx), draft=draft)

    def with_layers(self, n: int) -> Setup:
        """The same with ``-ngl``."""
        return replace(self, target=replace(self.target, n_gpu_layers=str(n)))

    def with_draft_layers(self, n: int) -> Setup:
        """The same with ``-ngld``, if there is a draft."""
        return replace(self, draft=self.draft and replace(self.draft, n_gpu_layers=str(n)))

    def without_draft(self) -> Setup:
        """The same with the target alone."""
        names = self.names
        if names is not None:  # a pair's draft is not named, so it must be refused
            kept = [pair for pair in zip(names[::2], names[1::2], strict=True) if pair[0] not in _DRAFT_NAMES]
            names = (*chain.from_iterable(kept), *(("--spec-type", "ngram") if len(kept) * 2 == len(names) else ()))
        return replace(self, draft=None, names=names)

    def with_cache_type(self, name: str) -> Setup:
        """The same with K and V caches of a type, of both models. Raises ``ConfigError`` under ``-fa off``."""
        draft = self.draft and replace(self.draft, cache_type_k=name, cache_type_v=name)
        return replace(self, target=replace(self.target, cache_type_k=name, cache_type_v=name), draft=draft)

    def flags(self) -> list[str]:
        """The command line that asks for it, without the command; defaults are left out."""
        plain = ModelOptions(self.target.path)
        flags = list(self.names) if self.names is not None else ["-m", str(self.target.path)]
        if self.draft is not None and self.names is None:
            flags += ["-md", str(self.draft.path)]
        flags += [*_changed(self.target, plain, _TARGET_FLAGS), *loading_flags(self.target)]
        if self.draft is not None:
            flags += [*_changed(self.draft, plain, _DRAFT_FLAGS), *draft_loading_flags(self.draft, self.target)]
        return flags

    def command(self) -> str:
        """The whole command, quoted for a shell."""
        return shlex.join(["specli", "run", *self.flags()])


_DRAFT_NAMES = ("-md", "-hfd")
_TARGET_FLAGS = {
    "n_ctx": "-c",
    "n_batch": "-b",
    "n_ubatch": "-ub",
    "n_gpu_layers": "-ngl",
    "flash_attn": "-fa",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
}
_DRAFT_FLAGS = {"n_gpu_layers": "-ngld", "cache_type_k": "-ctkd", "cache_type_v": "-ctvd"}


def _changed(options: ModelOptions, plain: ModelOptions, flags: dict[str, str]) -> Iterator[str]:
    for attribute, flag in flags.items():
        value = getattr(options, attribute)
        if value != getattr(plain, attribute):
            yield from (flag, str(value))


class Sizer(Protocol):
    """Who knows the sizes: llama.cpp (``engine.sizing.LlamaSizer``), or a table in a test."""

    def measure(self, options: ModelOptions, n_rows_max: int) -> ModelMemory:
        """The buffers of a model with a context for ``n_rows_max`` logits rows.

        Raises ``ModelLoadError`` (a file that cannot be loaded) or ``EngineError`` (settings that it refuses).
        """

    def trained_context(self, options: ModelOptions) -> int:
        """Tokens that the model was trained for."""

    def rooms(self) -> Sequence[Room]:
        """RAM first, then each device that layers can be put on."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Needs against rooms, for one ``setup`` whose contexts are numbers."""

    setup: Setup
    target: ModelMemory
    draft: ModelMemory | None
    rooms: tuple[Room, ...]

    def buffers(self, room: Room) -> Iterator[Buffer]:
        """Both models' buffers in ``room``; a device that uses RAM as its memory counts there too."""
        sharing = {other.name for other in self.rooms if other.shares_ram} if room.name == HOST else set()
        parts = chain(self.target.buffers, self.draft.buffers if self.draft else ())
        return (part for part in parts if part.room == room.name or part.room in sharing)

    def pinned(self, room: Room) -> int:
        """Bytes that must stay in ``room``."""
        return sum(part.n_bytes for part in self._pinned_buffers(room))

    def _pinned_buffers(self, room: Room) -> Iterator[Buffer]:
        """On a device mapped weights count: they are there when a pass runs, even where the memory is RAM (Metal)."""
        return (part for part in self.buffers(room) if room.name != HOST or not part.is_mapped)

    def hot(self, room: Room) -> int:
        """Bytes in ``room`` that every pass touches: pinned ones and mapped weights."""
        return sum(part.hot_bytes for part in self.buffers(room))

    def verdict(self, room: Room) -> Verdict:
        """``tight`` is within what is free, but into the reserve or with weights to be read again from disk."""
        if room.total == 0 or self.hot(room) + room.reserve <= room.free:
            return "fits"
        return "tight" if self.pinned(room) <= room.free else "too large"

    @property
    def fits(self) -> bool:
        """Everything can be loaded, if not comfortably."""
        return all(self.verdict(room) != "too large" for room in self.rooms)

    @property
    def is_comfortable(self) -> bool:
        """The same with the reserve left everywhere and all weights in RAM."""
        return all(self.verdict(room) == "fits" for room in self.rooms)

    @property
    def leaves_reserve(self) -> bool:
        """The reserve is left everywhere by what is pinned; mapped weights may have to be read again."""
        return all(self._leaves_reserve(room) for room in self.rooms)

    @property
    def leaves_device_reserve(self) -> bool:
        """The reserve is left on every device, whatever RAM says."""
        return all(self._leaves_reserve(room) for room in self.rooms if room.name != HOST)

    def _leaves_reserve(self, room: Room) -> bool:
        return room.total == 0 or self.pinned(room) + room.reserve <= room.free

    @property
    def warnings(self) -> list[str]:
        """One line for each room that is ``tight``."""
        return [self._warning(room) for room in self.rooms if self.verdict(room) == "tight"]

    def _warning(self, room: Room) -> str:
        if self.hot(room) > room.free:
            return (
                f"{size(self.hot(room))} of weights and caches, but {room.description} has {size(room.free)} free: "
                "weights will be read from disk again and again, which is slow"
            )
        return (
            f"{size(self.hot(room))} of weights and caches leave less than {size(room.reserve)} of the "
            f"{size(room.free)} that {room.description} has free"
        )

    def shortage(self) -> str:
        """Why it does not fit, in one clause; empty when it fits."""
        clauses = []
        for room in self.rooms:
            if self.verdict(room) == "too large":
                parts = ", ".join(f"{kind} {size(n)}" for kind in KINDS if (n := self._pinned_of(room, kind)))
                needs = f"{size(self.pinned(room))} must stay in memory ({parts})"
                clauses.append(f"{needs}, but {room.description} has {size(room.free)} free")
        return "; ".join(clauses)

    def _pinned_of(self, room: Room, kind: Kind) -> int:
        return sum(part.n_bytes for part in self._pinned_buffers(room) if part.kind == kind)


def make_plan(setup: Setup, sizer: Sizer) -> Plan:
    """Measure ``setup``. Raises what ``Sizer.measure`` raises."""
    target = sizer.measure(setup.target, setup.n_max + 1)
    draft_options, draft = setup.draft, None
    if draft_options is not None:
        if draft_options.n_ctx is None:  # as session.py: it never needs more than the target's
            n_ctx = min(target.n_ctx, sizer.trained_context(draft_options))
            draft_options = replace(draft_options, n_ctx=n_ctx)
        draft = sizer.measure(draft_options, 1)
        if setup.shares_weights:
            draft = draft.without_weights()
    return Plan(setup, target, draft, tuple(sizer.rooms()))


# -- from the headers alone --------------------------------------------------------------------------------------------


def weights_by_type(headers: Iterable[GgufHeader]) -> dict[str, tuple[int, int]]:
    """Tensors and bytes of each ggml type in the shards of one model, the largest share first."""
    found: dict[str, tuple[int, int]] = {}
    for tensor in chain.from_iterable(header.tensors for header in headers):
        n, n_bytes = found.get(tensor.ggml_type, (0, 0))
        found[tensor.ggml_type] = (n + 1, n_bytes + tensor.n_bytes)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def rough_bound(headers: Sequence[GgufHeader], options: ModelOptions, n_rows: int) -> int:
    """Bytes that a model will stay below, guessed from its header: if twice the guess fits, nobody needs to be asked.

    Weights as they are, float32 caches, the attention scores of a whole batch without flash attention, and four
    activations of the widest layer; all of it doubled.
    """
    first = headers[0]

    def number(name: str, default: int) -> int:
        value = first.hparam(name)
        if isinstance(value, np.ndarray):
            return int(value.max(initial=0))
        return int(value) if isinstance(value, int | float) else default

    n_embd, n_layer, n_head = number("embedding_length", 0), number("block_count", 0), number("attention.head_count", 0)
    head = n_embd // max(1, n_head)
    n_kv = number("attention.head_count_kv", n_head)
    n_kv *= number("attention.key_length", head) + number("attention.value_length", head)
    n_ctx = min(first.context_length or CONTEXT_CAP, CONTEXT_CAP) if options.n_ctx is None else options.n_ctx
    n_ctx = (n_ctx or first.context_length or CONTEXT_CAP) * options.n_sequences
    n_ubatch = min(options.n_ubatch, options.n_batch)
    inner = number("ssm.inner_size", 0)
    width = (
        n_embd + n_kv + 4 * inner + max(1, number("expert_used_count", 1)) * number("feed_forward_length", 4 * n_embd)
    )
    weights = sum(tensor.n_bytes for header in headers for tensor in header.tensors)
    caches = 4 * n_layer * (n_kv * n_ctx + inner * (number("ssm.state_size", 0) + number("ssm.conv_kernel", 0)))
    compute = 4 * n_ubatch * (n_head * n_ctx + 4 * width) + 8 * n_rows * (first.n_vocab or 0)
    return 2 * (weights + caches + compute)


def size(n_bytes: int) -> str:
    """Bytes for people."""
    return f"{n_bytes / (1 << 30):.1f} GiB" if n_bytes >= 1 << 30 else f"{n_bytes / MIB:.0f} MiB"
