"""A bench as JSON: what -o json prints and --save keeps."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specli.bench import files
from specli.bench.advice import Conclusion
from specli.bench.report import LEVELS, Cell, Costs
from specli.bench.workloads import Prompt

FORMAT = 1


@dataclass(frozen=True)
class Report:
    """A finished bench. ``circumstances``: date, versions, hardware, models with hashes, settings; JSON types only."""

    circumstances: Mapping[str, object]
    prompts: Sequence[Prompt]
    cells: Sequence[Cell]
    costs: Costs
    conclusion: Conclusion
    skipped: Mapping[str, str]
    ending: str
    n_done: int
    n_planned: int
    elapsed_s: float

    def as_dict(self) -> dict[str, object]:
        """JSON types only; undefined figures are None."""
        return {
            "format": FORMAT,
            **self.circumstances,
            "ended": self.ending,
            "runs": self.n_done,
            "runs_planned": self.n_planned,
            "elapsed_s": self.elapsed_s,
            "skipped_prompts": dict(self.skipped),
            "prompts": {prompt.name: text_hash(prompt) for prompt in self.prompts},
            "costs": {
                "c": self.costs.c,
                "v": {str(n): {"cost": cost, "passes": passes} for n, (cost, passes) in self.costs.v.items()},
            },
            "cells": [cell_dict(cell) for cell in self.cells],
            "verdict": self.conclusion.words,
            "command": self.conclusion.command,
        }

    def lines(self) -> Iterator[dict[str, object]]:
        """One object per cell, each with the circumstances (as llama-bench's jsonl)."""
        for cell in self.cells:
            figures = {name: value for name, value in cell_dict(cell).items() if name != "pairs"}
            yield {**self.circumstances, **figures}


def cell_dict(cell: Cell) -> dict[str, object]:
    """All figures of a cell; units in the names, rates and shares as fractions."""
    setting, counts = cell.setting, cell.counts
    return {
        "workload": cell.workload,
        "drafter": setting.drafter,
        "k": setting.k,
        "temperature": setting.temperature,
        "verify": setting.verify,
        "prompts": cell.n_prompts,
        "runs": len(cell.pairs),
        "tokens": cell.n_tokens,
        "decode_tok_s": dataclasses.asdict(cell.tok_s),
        "plain_decode_tok_s": dataclasses.asdict(cell.plain_tok_s),
        "speedup": {"value": cell.speedup.value, "low": cell.speedup.low, "high": cell.speedup.high},
        "speedup_predicted": cell.predicted,
        "verdict": cell.verdict,
        "proposed": counts.proposed,
        "accepted": counts.accepted,
        "rounds": counts.rounds,
        "acceptance_rate": counts.acceptance_rate,
        "per_position_acceptance": counts.per_position_acceptance,
        "mean_draft_length": counts.mean_draft_length,
        "mean_accepted_length": counts.mean_accepted_length,
        "block_efficiency": counts.block_efficiency,
        "ttft_s": cell.ttft_s,
        "plain_ttft_s": cell.plain_ttft_s,
        "tpot_ms": cell.tpot_ms,
        "itl_token_ms": _by_level(cell.itl_token_ms),
        "itl_burst_ms": _by_level(cell.itl_burst_ms),
        "time_shares": None if cell.shares is None else dict(cell.shares),
        "v": cell.v,
        "c": cell.c,
        "peak_bytes": cell.peak_bytes,
        "identity": None if cell.identity is None else dataclasses.asdict(cell.identity),
        "pairs": [[pair.prompt, pair.tokens, pair.before, pair.after] for pair in cell.pairs],
    }


def flat(figures: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """One level of columns for CSV: nested names joined by a dot, lists as JSON."""
    row: dict[str, object] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            row.update(flat(value, f"{prefix}{name}."))
        else:
            row[prefix + name] = json.dumps(value) if isinstance(value, list | tuple) else value
    return row


def text_hash(prompt: Prompt) -> str:
    """What tells two prompts of the same name apart."""
    return hashlib.sha256(f"{prompt.system or ''}\0{prompt.text}".encode()).hexdigest()[:16]


def _by_level(values: Sequence[float] | None) -> dict[str, float] | None:
    return None if values is None else {f"p{100 * level:.0f}": v for level, v in zip(LEVELS, values, strict=True)}


def load(path: Path) -> dict[str, object]:
    """A bench that was saved. Raises ``ConfigError`` for anything else."""
    return files.load(path, "bench", FORMAT, lambda found: {"cells", "models", "prompts"} <= set(found))
