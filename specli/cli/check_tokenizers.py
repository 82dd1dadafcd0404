"""``specli check-tokenizers``: does this draft fit that target? Read from headers, never from weights.

Exit codes: 0 a draft fits, 1 none does, 2 a file could not be read (whatever became of the others).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specli.cli import options as o
from specli.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from specli.pairing import Model, PairReport, Unread
    from specli.vocab import VocabInfo

FORMATS = ("table", "json")
_NONE_FITS, _CANNOT_READ = 1, 2
_N_IDS = 20  # differing ids listed in the JSON

Drafts = Annotated[list[Path] | None, typer.Argument(metavar="DRAFT", help="Draft GGUF files, as after -md.")]
DraftModels = Annotated[
    list[Path] | None,
    typer.Option(
        "-md",
        "--model-draft",
        "--spec-draft-model",
        envvar="LLAMA_ARG_SPEC_DRAFT_MODEL",
        rich_help_panel=o.MODEL,
        help="Draft GGUF file; may be repeated, several are ranked.",
    ),
]
Output = Annotated[
    str, typer.Option("-o", "--output", rich_help_panel=o.PROMPT, help=f"{' or '.join(FORMATS)}, on stdout.")
]


def check_tokenizers(
    drafts: Drafts = None,
    model: o.Model = None,
    draft_models: DraftModels = None,
    output: Output = FORMATS[0],
    verbose: o.Verbose = False,
    debug: o.Debug = False,
) -> None:
    """Tell whether a draft fits a target, from their headers alone. Files that hold a vocabulary only will do.

    Two verdicts: ids interchangeable (safe to speculate) and text encodes alike (the same tokenizer).

    Exit code: 0 a draft fits, 1 none does, 2 a file cannot be read.
    """
    if output not in FORMATS:
        raise ConfigError(f"-o/--output got {output!r}, expected one of {', '.join(FORMATS)}")
    from specli.pairing import check_drafts, read_model

    target_path, draft_paths = _files(model, [*(draft_models or []), *(drafts or [])])
    if verbose:
        from specli.engine.log import LOG

        LOG.verbose = True
    try:
        target = read_model(target_path, "target")
    except ModelLoadError as error:
        raise ConfigError(str(error)) from error
    results = check_drafts(target, draft_paths)
    _print(target, results, output)
    raise typer.Exit(_exit_code(results))


def _files(model: Path | None, drafts: Sequence[Path]) -> tuple[Path, Sequence[Path]]:
    """The target and its drafts: what was named, or the default pair's. Names of pairs and of the hub belong here."""
    if model is not None and not drafts:
        raise ConfigError(f"-m {model} was given without a draft to compare it with; add -md FILE")
    if model is not None:
        return model, drafts
    from specli import registry

    pair = registry.load_pairs()[registry.DEFAULT_PAIR]
    try:
        return registry.find_file(pair.target), drafts or [registry.find_file(pair.draft)]
    except ModelLoadError as error:
        raise ConfigError(str(error)) from error


def _exit_code(results: Sequence[PairReport | Unread]) -> int:
    from specli.pairing import PairReport

    reports = [result for result in results if isinstance(result, PairReport)]
    if len(reports) < len(results):
        return _CANNOT_READ
    return 0 if any(report.is_compatible for report in reports) else _NONE_FITS


def _print(target: Model, results: Sequence[PairReport | Unread], output: str) -> None:
    """The answer on stdout. A single draft that cannot be read is an error like any other."""
    from specli.pairing import Unread

    if output == "json":
        found = {"target": _model(target), "drafts": [_result(result) for result in results]}
        sys.stdout.write(json.dumps(found, ensure_ascii=False, allow_nan=False, indent=2) + "\n")
        return
    if len(results) == 1 and isinstance(results[0], Unread):
        raise ConfigError(results[0].reason)
    from specli.render.pairs import print_reports

    print_reports(sys.stdout, os.environ, target, results)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _model(model: Model) -> dict[str, object]:
    info = model.vocab
    return {
        "path": str(model.path),
        "name": model.header.name,
        "architecture": model.header.architecture,
        "parameters": model.n_params,
        "active_parameters": model.n_active,
        "vocabulary_only": model.header.is_vocab_only,
        "fault": model.fault or model.gap,
        "tokenizer": {
            "model": info.model,
            "type": info.kind,
            "pre": info.pre,
            "tokens": info.n_tokens,
            "merges": None if info.merges is None else len(info.merges),
            "normalizer": dict(info.normalizer),
            "bos": info.bos_id,
            "eos": info.eos_id,
            "eot": info.eot_id,
            "end_ids": sorted(info.end_ids),
            "add_bos": info.add_bos,
            "add_eos": info.add_eos,
        },
    }


def _result(result: PairReport | Unread) -> dict[str, object]:
    from specli.pairing import Unread

    if isinstance(result, Unread):
        return {"path": str(result.path), "error": result.reason, "compatible": None}
    size = result.size
    return {
        **_model(result.draft),
        "error": None,
        "compatible": result.is_compatible,
        "ids": _ids(result),
        "text": _text(result),
        "llama_cpp": {"accepts": result.llama_cpp is None, "reason": result.llama_cpp},
        "size": size and {"ratio": round(size.ratio, 3), "useful": size.is_useful, "reason": size.words},
        "checks": [
            {"name": check.name, "target": check.target, "draft": check.draft, "outcome": check.outcome}
            for check in result.comparison.checks
        ],
    }


def _ids(report: PairReport) -> dict[str, object]:
    comparison, overlap, tail = report.comparison, report.overlap, report.comparison.tail
    target, draft = report.target.vocab, report.draft.vocab
    return {
        "interchangeable": comparison.compatible,
        "reason": comparison.reason,
        "notes": comparison.notes,
        "shared": comparison.n_shared,
        "differing": len(comparison.differing),
        "first_differing": [
            {"id": token, "target": _text_of(target, token), "draft": _text_of(draft, token)}
            for token in comparison.differing[:_N_IDS]
        ],
        "extra": tail and {"in": tail.owner, "from": tail.first, "count": tail.n, "not_padding": len(tail.real)},
        "overlap_percent": overlap
        and {"same_id": round(overlap.same_id_percent, 2), "same_text": round(overlap.same_text_percent, 2)},
    }


def _text_of(info: VocabInfo, token: int) -> str:
    return info.tokens[token].decode("utf-8", "replace")


def _text(report: PairReport) -> dict[str, object]:
    encodings = report.encodings
    return {
        "alike": report.text_alike,
        "differences": [check.words for check in report.text_differences],
        "tried": encodings.n_probes,
        "not_tried_because": encodings.untried,
        "differing": [
            {"text": example.text, "target": example.target, "draft": example.draft} for example in encodings.differing
        ],
    }
