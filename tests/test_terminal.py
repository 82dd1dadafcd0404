"""``specli run`` on a terminal: a real pseudo-terminal, and pyte for the screen."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import pyte
import pytest
from screens import rows_of
from support import HANG_S, CommandLine, first_difference

if os.name == "nt":
    pytest.skip("pseudo-terminals are POSIX's", allow_module_level=True)
import pexpect

LINES = 30
LIVE_LINE = re.compile(r"^\d+(\.\d)? tok/s · ")
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PROMPT = "Write a Python function that returns the n-th Fibonacci number."
COMMAND = ("run", "--temp", "0", "--draft-fixed", "-n", "90", "-p", PROMPT)


@dataclass
class Seen:
    """What a command left: every byte, the rows of scrollback and screen, and snapshots on the way."""

    code: int | None
    raw: bytes
    screen: pyte.HistoryScreen
    snapshots: list[list[str]] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        return rows_of(self.screen)

    @property
    def answer(self) -> list[str]:
        """The rows above the summary."""
        rows = self.rows
        end = next(i for i, row in enumerate(rows) if row.startswith("speculation: "))
        return rows[:end]

    @property
    def colours(self) -> set[str]:
        lines = [*self.screen.history.top, *(self.screen.buffer[y] for y in range(self.screen.lines))]
        return {cell.fg for line in lines for cell in line.values() if cell.data != " "}


@pytest.fixture
def on_terminal(specli: CommandLine):
    """Run a command on a terminal of ``columns``; ``act`` is called once, when ``ready`` says so of the rows."""
    children = []

    def run(
        *arguments: str,
        columns: int = 100,
        env: dict[str, str] | None = None,
        ready: Callable[[list[str]], bool] | None = None,
        act: Callable[[pexpect.spawn, pyte.HistoryScreen], None] | None = None,
        program: str = sys.executable,
    ) -> Seen:
        environment = specli.environment({"TERM": "xterm-256color", **(env or {})})
        words = [str(word) for word in arguments]
        words = ["-m", "specli", *words] if program == sys.executable else words
        child = pexpect.spawn(program, words, dimensions=(LINES, columns), env=environment, cwd=specli.home)
        children.append(child)
        screen = pyte.HistoryScreen(columns, LINES, history=2000, ratio=0.5)
        stream = pyte.ByteStream(screen)
        seen = Seen(None, b"", screen)
        while True:
            try:
                data = child.read_nonblocking(1 << 16, HANG_S)
            except pexpect.EOF:
                break
            seen.raw += data
            stream.feed(data)
            seen.snapshots.append(rows_of(screen))
            if act is not None and ready is not None and ready(seen.snapshots[-1]):
                act(child, screen)
                act = None
        child.close()
        assert act is None, "the moment never came"
        seen.code = child.exitstatus
        return seen

    yield run
    for child in children:
        child.close(force=True)


@pytest.fixture(scope="module")
def piped(specli, q4_0_path) -> str:
    """What a pipe gets of the same command."""
    run = specli(*COMMAND)
    assert (run.code, run.err) == (0, "")
    return run.out.decode()


def wrapped(text: str, width: int) -> list[str]:
    """The rows that a terminal makes of ASCII text, empty ones at the end dropped."""
    assert text.isascii()
    rows = [row[i : i + width].rstrip() for row in text.split("\n") for i in range(0, max(len(row), 1), width)]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def without_empty_end(rows: list[str]) -> list[str]:
    while rows and not rows[-1]:
        rows = rows[:-1]
    return rows


def live_lines(rows: list[str]) -> list[str]:
    return [row for row in rows if LIVE_LINE.match(row)]


@pytest.mark.model
@pytest.mark.parametrize("columns", [60, 100])
def test_the_screen_holds_the_pipes_text_the_tint_and_the_summary(on_terminal, piped, columns):
    """Cases L1."""
    seen = on_terminal(*COMMAND, columns=columns)
    assert seen.code == 0
    assert without_empty_end(seen.answer) == wrapped(piped, columns)
    assert {"green", "default"} <= seen.colours <= {"green", "default", "brightblack"}
    summary = seen.rows[len(seen.answer) :]
    assert summary[0].startswith("speculation: active (draft smollm2-135m-draft-q8_0.gguf,")
    for label in ("decode", "TPOT", "TTFT", "generated             90 tokens", "acceptance", "position 3", "host time"):
        assert any(label in row for row in summary), label
    assert summary[-1] == "tint: accepted draft, target's own"
    assert max(map(len, seen.rows)) <= columns
    assert not seen.screen.cursor.hidden


@pytest.mark.model
def test_a_live_line_stands_below_the_growing_text(on_terminal, piped):
    seen = on_terminal(*COMMAND)
    assert live_lines(seen.rows) == []
    with_figures = [rows for rows in seen.snapshots if live_lines(rows)]
    assert with_figures
    for rows in with_figures:
        assert len(live_lines(rows)) == 1
        assert LIVE_LINE.match(rows[-1])
        grown = " ".join(" ".join(rows[:-1]).split())
        assert " ".join(piped.split()).startswith(grown)
    assert any("accept" in row and "K 3" in row and "ctx" in row for row in (rows[-1] for rows in with_figures))


@pytest.mark.model
def test_the_load_is_shown_until_the_first_word(on_terminal, q4_0_path):
    """A bar in the place of the figures, which leaves nothing behind."""
    seen = on_terminal(*COMMAND[:-4], "-n", "4", *COMMAND[-2:])
    loading = [rows for rows in seen.snapshots if any(row.endswith("%") and q4_0_path.name in row for row in rows)]
    assert loading
    assert not any("%" in row for row in seen.answer)


@pytest.mark.model
@pytest.mark.parametrize(("before", "after"), [(60, 100), (100, 60), (100, 45)])
def test_a_resize_leaves_no_debris(on_terminal, piped, before, after):
    """pyte, unlike terminals, cuts what does not fit; so text is compared when the window grows."""

    def resize(child: pexpect.spawn, screen: pyte.HistoryScreen) -> None:
        screen.resize(LINES, after)
        child.setwinsize(LINES, after)

    seen = on_terminal(*COMMAND, columns=before, ready=lambda rows: any("def " in row for row in rows), act=resize)
    assert seen.code == 0
    assert live_lines(seen.rows) == []
    assert not seen.screen.cursor.hidden
    assert seen.rows[-1] == "tint: accepted draft, target's own"
    if after > before:
        assert "".join("".join(seen.answer).split()) == "".join(piped.split())


@pytest.mark.model
def test_ctrl_c_keeps_the_text_so_far(on_terminal, piped):
    """Cases L4."""
    seen = on_terminal(
        *COMMAND, ready=lambda rows: any("def " in row for row in rows), act=lambda child, _: child.sendintr()
    )
    assert seen.code == 130
    assert not seen.screen.cursor.hidden
    answer, whole = without_empty_end(seen.answer), wrapped(piped, 100)
    at = first_difference(answer, whole)
    assert at is None or at == len(answer) or (at == len(answer) - 1 and whole[at].startswith(answer[at]))
    assert "def " in "".join(answer)
    assert any(re.match(r"finish +cancelled", row) for row in seen.rows)


@pytest.mark.model
def test_plain_decoding_has_no_tint(on_terminal, q4_0_path):
    seen = on_terminal(*COMMAND, "--spec-type", "none", "-n", "12")
    assert seen.code == 0
    assert "speculation: off: --spec-type none was given" in seen.rows
    tinted = [cell.data for y in range(3) for cell in seen.screen.buffer[y].values() if cell.fg == "green"]
    assert tinted == []


@pytest.mark.model
def test_no_color_is_obeyed(on_terminal, piped):
    seen = on_terminal(*COMMAND, env={"NO_COLOR": "1"})
    assert without_empty_end(seen.answer) == wrapped(piped, 100)
    assert seen.colours == {"default"}
    assert not re.search(rb"\x1b\[[0-9;]*m", seen.raw)


@pytest.mark.model
def test_a_dumb_terminal_gets_plain_text(on_terminal, piped):
    seen = on_terminal(*COMMAND, env={"TERM": "dumb"})
    assert b"\x1b" not in seen.raw
    assert seen.raw.decode().replace("\r\n", "\n").startswith(piped + "\n")


@pytest.mark.model
def test_a_redirected_answer_has_no_codes_though_stderr_is_a_terminal(on_terminal, specli, piped, tmp_path):
    out = tmp_path / "answer.txt"
    shell = ("-c", f'exec "$@" --stats > {out}', "sh", *specli.argv(*COMMAND))
    seen = on_terminal(*shell, program="/bin/sh")
    assert seen.code == 0
    assert out.read_text("utf-8") == piped
    assert any("block efficiency" in row for row in seen.rows)


def test_a_model_cannot_send_codes_to_a_terminal(on_terminal, tiny_model):
    """The tiny model writes random bytes; only the renderer's own codes may arrive."""
    seen = on_terminal(
        *(
            "run",
            "-m",
            tiny_model(),
            "-t",
            "1",
            "-s",
            "1",
            "--temp",
            "1",
            "-n",
            "240",
            "--ignore-eos",
            "--raw",
            "-p",
            "x",
        )
    )
    assert seen.code == 0
    text = CODES.sub("", seen.raw.decode("utf-8"))
    assert all(character in "\r\n" or ord(character) >= 0x20 for character in text)
    assert not any(0x7F <= ord(character) < 0xA0 for character in text)
    assert any(0x2400 <= ord(character) < 0x2420 for character in text)  # they are shown


def test_no_text_to_complete_on_a_terminal_is_told(on_terminal, tiny_model):
    """Nobody would know that it waits."""
    seen = on_terminal("run", "--raw", "-m", tiny_model())
    assert seen.code == 2
    assert seen.rows == ["specli: error: no prompt was given; use -p TEXT, -f FILE, or pipe one in"]


def test_an_error_leaves_the_terminal_tidy(on_terminal, tiny_model, tmp_path):
    seen = on_terminal("run", "-m", tiny_model(), "-c", "8", "-p", "far too long for that")
    assert seen.code == 5
    rows = [row for row in seen.rows if not row.startswith("what to expect: ")]
    assert [row.startswith("specli: error: the prompt has") for row in rows][-2:] in ([True, False], [True])
    assert live_lines(seen.rows) == []
    assert not seen.screen.cursor.hidden
