"""What ``specli check-tokenizers`` found, for people: verdicts first, then what was compared, then what differs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specli.gguf_file import shown
from specli.pairing import USEFUL_RATIO, Model, PairReport, Unread
from specli.render.base import is_terminal, visible
from specli.render.live import TerminalConsole, terminal_console
from specli.vocab import FIRST_STRICT_ID, LLAMA_CPP_MAX_GAP, Check

N_EXAMPLES = 5  # strings shown per draft
N_IDS = 8  # ids shown per string
_YES, _NO, _NOTE = "green", "red", "yellow"
_MARKS = {"equal": ("✓", _YES), "harmless": ("~", _NOTE), "breaks": ("✗", _NO)}


def print_reports(
    stdout: TextIO, env: Mapping[str, str], target: Model, results: Sequence[PairReport | Unread]
) -> None:
    """Print one pair in full, or several drafts ranked, each with what differs."""
    is_for_eyes = is_terminal(stdout)
    console = _console(stdout, env, is_for_eyes)
    names = _names([target.path, *(_path(result) for result in results)])
    if len(results) == 1 and isinstance(results[0], PairReport):
        parts = _pair(results[0], *names)
    else:
        parts = _ranking(target, results, names)
    with contextlib.nullcontext() if is_for_eyes else console.capture() as captured:
        for i, part in enumerate(parts):
            if i:
                console.print()
            console.print(part)
    if captured is not None:  # rich fills cells up with blanks, which nobody wants in a file
        stdout.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def _console(stdout: TextIO, env: Mapping[str, str], is_for_eyes: bool) -> Console:
    if is_for_eyes:
        return terminal_console(stdout, env, tint=not env.get("NO_COLOR"))
    return TerminalConsole(file=stdout, force_terminal=False, color_system=None, highlight=False, _environ=env)


def _path(result: PairReport | Unread) -> Path:
    return result.path if isinstance(result, Unread) else result.draft.path


def _names(paths: Sequence[Path]) -> list[str]:
    """File names; the paths as they were given where two files have the same name."""
    names = [path.name for path in dict.fromkeys(paths)]
    return [visible(path.name if names.count(path.name) == 1 else str(path)) for path in paths]


# -- one pair ----------------------------------------------------------------------------------------------------------


def _pair(report: PairReport, target: str, draft: str) -> Iterator[RenderableType]:
    yield _files([("target", target, report.target), ("draft", draft, report.draft)])
    yield _verdicts(report)
    yield _checks(report.comparison.checks)
    if details := _differences(report):
        yield details
    if examples := _examples(report):
        yield examples


def _files(rows: Sequence[tuple[str, str, Model]]) -> Table:
    grid = _grid()
    grid.add_column(justify="right", no_wrap=True)
    for role, name, model in rows:
        grid.add_row(Text(role, "dim"), Text(name, overflow="fold"), Text(_size(model)))
    return grid


def _verdicts(report: PairReport) -> Table:
    grid = _grid()
    grid.add_column(overflow="fold")
    comparison, size = report.comparison, report.size
    rows: list[tuple[str, Text, str]] = [
        (
            "ids interchangeable",
            _word(report.ids_interchangeable),
            comparison.reason or "safe to speculate: each id that both have means the same to both",
        ),
        ("text encodes alike", _word(report.text_alike), _encoding_words(report)),
        ("llama.cpp takes it", _word(report.llama_cpp is None), _llama_cpp_words(report)),
        ("size ratio", _ratio(report), size.words if size else _no_ratio(report)),
    ]
    if (overlap := report.overlap) is not None and comparison.differing:
        words = (
            f"of the target's tokens are the draft's under the same id, {_percent(overlap.same_text_percent)} under any"
        )
        rows.append(("overlap", Text(_percent(overlap.same_id_percent)), words))
    for fault, word in ((report.fault, _word(False)), (report.target.gap or report.draft.gap, Text("note", _NOTE))):
        if fault:
            rows.append(("can be loaded", word, fault))
    for label, verdict, words in rows:
        grid.add_row(Text(label), verdict, Text(words))
    return grid


def _checks(checks: Sequence[Check]) -> Table:
    """Everything that was compared, a mark in front."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("")
    table.add_column("compared", no_wrap=True)
    table.add_column("target", overflow="fold")
    table.add_column("draft", overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.outcome]
        is_said_once = check.target == check.draft
        other = Text("same", "dim") if check.outcome == "equal" else Text("" if is_said_once else check.draft, style)
        table.add_row(Text(mark, style), Text(check.name), Text(check.target), other)
    return table


def _differences(report: PairReport) -> Group | None:
    """In words: what does no harm where the pair fits, else what breaks it beside the reason that was given."""
    outcome = "harmless" if report.ids_interchangeable else "breaks"
    reason = report.comparison.reason or ""
    words = [check.words for check in report.comparison.checks if check.outcome == outcome]
    lines = [_bullet(Text(*_MARKS[outcome]), line) for line in words if not reason.startswith(line)]
    return Group(*lines) if lines else None


def _bullet(mark: Text, words: str) -> Table:
    grid = _grid()
    grid.add_row(mark, Text(words, overflow="fold"))
    return grid


def _examples(report: PairReport) -> Group | None:
    """The first strings that are encoded differently, with both encodings."""
    differing, n = report.encodings.differing, report.encodings.n_probes
    if not differing:
        return None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("text", overflow="fold", max_width=30)
    table.add_column("target ids", overflow="fold")
    table.add_column("draft ids", overflow="fold")
    for example in differing[:N_EXAMPLES]:
        table.add_row(Text(shown(example.text)), Text(_ids(example.target)), Text(_ids(example.draft)))
    more = f", the first {N_EXAMPLES}" if len(differing) > N_EXAMPLES else ""
    return Group(Text(f"Encoded differently ({len(differing)} of {n} strings{more}):"), table)


def _ids(ids: Sequence[int]) -> str:
    if not ids:
        return "none"
    return " ".join(map(str, ids[:N_IDS])) + (f" … ({len(ids)} ids)" if len(ids) > N_IDS else "")


# -- several drafts ----------------------------------------------------------------------------------------------------


def _ranking(target: Model, results: Sequence[PairReport | Unread], names: Sequence[str]) -> Iterator[RenderableType]:
    yield _files([("target", names[0], target)])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("", "draft", "ids", "text", "llama.cpp", "size", "remark"):
        table.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for number, (result, name) in enumerate(zip(results, names[1:], strict=True), 1):
        if isinstance(result, Unread):
            table.add_row("–", Text(name), *[Text("–", "dim")] * 4, Text("cannot be read", _NO))
        else:
            verdicts = map(_word, (result.ids_interchangeable, result.text_alike, result.llama_cpp is None))
            table.add_row(str(number), Text(name), *verdicts, _ratio(result), Text(_remark(result)))
    yield table
    for number, (result, name) in enumerate(zip(results, names[1:], strict=True), 1):
        if isinstance(result, Unread):
            yield Group(Text(f"–  {name}", "bold"), Padding(Text(result.reason, overflow="fold"), (0, 0, 0, 3)))
        elif details := _details(result):
            yield Group(Text(f"{number}  {name}", "bold"), Padding(Group(*details), (0, 0, 0, 3)))


def _details(report: PairReport) -> list[RenderableType]:
    """What there is to say of a draft that is not like its target in every respect."""
    reason = report.comparison.reason
    lines = [("breaks", reason), ("breaks", report.fault), ("harmless", report.target.gap or report.draft.gap)]
    if report.llama_cpp is not None and not (reason or "").startswith(report.llama_cpp):
        lines.append(("breaks", f"llama.cpp would refuse the pair: {report.llama_cpp}"))
    details: list[RenderableType] = [_bullet(Text(*_MARKS[outcome]), words) for outcome, words in lines if words]
    parts = (_differences(report), _examples(report) if report.ids_interchangeable else None)
    details += [part for part in parts if part is not None]
    return details


def _remark(report: PairReport) -> str:
    if report.fault:
        return "cannot be loaded"
    broken = next((check.name for check in report.comparison.checks if check.outcome == "breaks"), None)
    if broken is not None:
        return f"other {broken}"
    if report.size is None:
        return "size unknown"
    return report.size.remark


# -- words -------------------------------------------------------------------------------------------------------------


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    return grid


def _percent(value: float) -> str:
    """One decimal, rounded down: 100.0% is all."""
    return f"{math.floor(10 * value) / 10:.1f}%"


def _word(verdict: bool | None) -> Text:
    return Text("unknown", _NOTE) if verdict is None else Text("yes", _YES) if verdict else Text("no", _NO)


def _encoding_words(report: PairReport) -> str:
    encodings = report.encodings
    same = "what decides about it is equal in both files" if report.text_alike else "the files differ"
    if report.fault and encodings.untried is not None:
        return f"not tried, see below; {same}"
    if encodings.untried is not None:
        return f"not tried, but {same}: {encodings.untried}"
    differing = [check.name for check in report.text_differences]
    beside = f" ({' and '.join(differing)} {'differs' if differing == ['pre-tokenizer'] else 'differ'})"
    if encodings.differing:
        said = f"ids differ for {len(encodings.differing)} of {encodings.n_probes} strings{beside if differing else ''}"
        return f"{said}; harmless, only the target encodes text" if report.ids_interchangeable else said
    return f"all {encodings.n_probes} strings become the same ids{beside if differing else ''}"


def _llama_cpp_words(report: PairReport) -> str:
    if report.llama_cpp is not None:
        return f"it would refuse the pair: {report.llama_cpp}"
    sizes = f"sizes (at most {LLAMA_CPP_MAX_GAP} apart)"
    return f"it compares type, {sizes}, BOS and EOS where they are added, and texts from id {FIRST_STRICT_ID}"


def _ratio(report: PairReport) -> Text:
    if report.size is None:
        return Text("–", "dim")
    return Text(f"1:{report.size.ratio:.1f}", _YES if report.size.is_useful else _NOTE)


def _no_ratio(report: PairReport) -> str:
    low, high = USEFUL_RATIO
    which = [role for role, model in (("target", report.target), ("draft", report.draft)) if not model.n_active]
    return f"unknown: no weights to count in the {' and the '.join(which)} (1:{low} to 1:{high} is useful)"


def _size(model: Model) -> str:
    if model.n_params is None or model.n_active is None:
        return "vocabulary only" if model.header.is_vocab_only else "size unknown"
    active = f", {_count(model.n_active)} active" if model.n_active != model.n_params else ""
    return f"{_count(model.n_params)} parameters{active}"


def _count(n: int) -> str:
    for limit, unit in ((1_000_000_000, "B"), (1_000_000, "M"), (1_000, "k")):
        if n >= limit:
            return f"{n / limit:.1f}{unit}"
    return str(n)
