"""A memory plan for people: all buffers, what each memory needs and has, what the draft costs, and what would fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from specli.memory_plan import MIB, ModelMemory, Plan, Verdict, size
from specli.memory_search import DraftCost, Suggestion
from specli.render.base import is_terminal, visible
from specli.render.live import TerminalConsole, terminal_console

WeightTypes = Mapping[str, tuple[int, int]]  # ggml type -> (tensors, bytes)
_KINDS = {"weights": "weights", "kv": "KV cache", "state": "recurrent state", "compute": "compute", "output": "logits"}
_STYLES: dict[Verdict, str] = {"fits": "green", "tight": "yellow", "too large": "red"}
_PIPE_WIDTH = 200  # columns where no terminal sets them


@dataclass(frozen=True)
class Report:
    """All that ``specli plan`` has to show. ``weights``: of the target, then of the draft if there is one."""

    plan: Plan
    notices: Sequence[str]
    weights: Sequence[WeightTypes]
    cost: DraftCost | None
    suggestions: Sequence[Suggestion]

    @property
    def models(self) -> Iterator[tuple[str, str, ModelMemory]]:
        """Role, name and memory of each model."""
        setup = self.plan.setup
        yield "target", setup.target.label, self.plan.target
        if self.plan.draft is not None and setup.draft is not None:
            yield "draft", setup.draft.label, self.plan.draft


def print_plan(stdout: TextIO, env: Mapping[str, str], report: Report) -> None:
    """Print the tables, then sentences."""
    is_for_eyes = is_terminal(stdout)
    if is_for_eyes:
        console: Console = terminal_console(stdout, env, tint=not env.get("NO_COLOR"))
    else:
        console = TerminalConsole(file=stdout, force_terminal=False, color_system=None, width=_PIPE_WIDTH)
    with contextlib.nullcontext() if is_for_eyes else console.capture() as captured:
        for number, part in enumerate([_buffers(report), _rooms(report.plan), *_sentences(report)]):
            if number <= 2:
                console.print()
            console.print(part, highlight=False, soft_wrap=isinstance(part, Text))
    if captured is not None:  # rich fills cells up with blanks, which nobody wants in a file
        stdout.write("".join(line.rstrip() + "\n" for line in captured.get().lstrip("\n").splitlines()))


def _buffers(report: Report) -> Table:
    """One row per buffer, by llama.cpp's names."""
    table = _table("model", "what", "buffer", "MiB>", "")
    for (role, name, memory), types in zip(report.models, report.weights, strict=True):
        table.add_row(role, "", visible(name), "", f"{memory.n_ctx} tokens of context")
        for part in memory.buffers:
            remark = _mapped_remark(part.n_bytes, part.hot_bytes) if part.is_mapped else ""
            table.add_row("", _KINDS[part.kind], part.name, _mib(part.n_bytes), remark)
        listed = ", ".join(f"{kind} {_mib(n_bytes)} in {n}" for kind, (n, n_bytes) in types.items())
        table.add_row("", "tensor types", "", "", listed, end_section=True)
    return table


def _mapped_remark(n_bytes: int, hot_bytes: int) -> str:
    in_use = "" if n_bytes == hot_bytes else f", of which {_mib(hot_bytes)} in use"
    return f"read in place from the file{in_use}"


def _rooms(plan: Plan) -> Table:
    """One row per memory."""
    table = _table("memory", "must stay MiB>", "with mapped weights>", "free>", "")
    for room in plan.rooms:
        verdict = plan.verdict(room)
        word = Text(verdict, _STYLES[verdict]) if room.total else Text("does not say what is free", "yellow")
        free = _mib(room.free) if room.total else "?"
        table.add_row(room.description, _mib(plan.pinned(room)), _mib(plan.hot(room)), free, word)
    return table


def _sentences(report: Report) -> Iterator[RenderableType]:
    yield from (Text(visible(f"note: {line}"), "yellow") for line in report.notices)
    if report.cost is not None:
        yield Text(_cost(report.cost, report.plan))
    if report.plan.fits:
        yield Text(visible(f"fits: {report.plan.setup.command()}"))
        return
    yield Text(f"does not fit: {report.plan.shortage()}", "red")
    if not report.suggestions:
        yield Text("no setting makes it fit; take a smaller or more heavily quantized model")
    for suggestion in report.suggestions:
        yield Text(visible(f"fits with {suggestion.what}: {suggestion.plan.setup.command()}"))


def _cost(cost: DraftCost, plan: Plan) -> str:
    if cost.tokens is None:
        bought = "context costs this target nothing more"
    else:
        bought = f"as much as {cost.tokens} more tokens of the target's context"
    longest = " and ".join(
        f"{n if n is not None else 'none'} {word} it"
        for word, n in (("with", cost.longest_with), ("without", cost.longest_without))
    )
    trained = plan.target.n_ctx_train
    return f"the draft takes {size(cost.n_bytes)}, {bought}; longest context that fits (trained: {trained}): {longest}"


def _table(*headings: str) -> Table:
    """A table; a heading that ends in ``>`` is of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for heading in headings:
        is_number = heading.endswith(">")
        table.add_column(heading.removesuffix(">"), justify="right" if is_number else "left", overflow="fold")
    return table


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.2f}"


def as_dict(report: Report) -> dict[str, object]:
    """The same for programs: sizes in bytes, contexts in tokens."""
    plan = report.plan
    return {
        "fits": plan.fits,
        "comfortable": plan.is_comfortable,
        "command": plan.setup.command(),
        "models": [_model_dict(*model, types) for model, types in zip(report.models, report.weights, strict=True)],
        "memories": [_room_dict(plan, number) for number in range(len(plan.rooms))],
        "notices": list(report.notices),
        "draft_cost": None if report.cost is None else _cost_dict(report.cost),
        "suggestions": [_suggestion_dict(suggestion) for suggestion in report.suggestions],
    }


def _model_dict(role: str, name: str, memory: ModelMemory, types: WeightTypes) -> dict[str, object]:
    return {
        "role": role,
        "name": name,
        "n_ctx": memory.n_ctx,
        "n_ctx_train": memory.n_ctx_train,
        "n_layers": memory.n_layers,
        "weights": {kind: {"tensors": n, "bytes": n_bytes} for kind, (n, n_bytes) in types.items()},
        "buffers": [
            {
                "memory": part.room,
                "name": part.name,
                "kind": part.kind,
                "bytes": part.n_bytes,
                "bytes_in_use": part.hot_bytes,
                "mapped": part.is_mapped,
            }
            for part in memory.buffers
        ],
    }


def _room_dict(plan: Plan, number: int) -> dict[str, object]:
    room = plan.rooms[number]
    return {
        "name": room.name,
        "description": room.description,
        "free": room.free if room.total else None,
        "reserve": room.reserve,
        "must_stay": plan.pinned(room),
        "with_mapped_weights": plan.hot(room),
        "verdict": plan.verdict(room),
    }


def _cost_dict(cost: DraftCost) -> dict[str, object]:
    return {
        "bytes": cost.n_bytes,
        "bytes_per_target_token": cost.bytes_per_token,
        "tokens": cost.tokens,
        "longest_context_with_draft": cost.longest_with,
        "longest_context_without_draft": cost.longest_without,
    }


def _suggestion_dict(suggestion: Suggestion) -> dict[str, object]:
    plan = suggestion.plan
    return {
        "what": suggestion.what,
        "flags": plan.setup.flags(),
        "command": plan.setup.command(),
        "n_ctx": plan.target.n_ctx,
        "must_stay": {room.name: plan.pinned(room) for room in plan.rooms},
    }
