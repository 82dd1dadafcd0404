"""Chat on the command line: messages of several lines, commands, and a person at a real pseudo-terminal."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyte
import pytest
from screens import row_of, rows_of
from support import HANG_S, CommandLine

from specli.cli import line_input
from specli.cli.chat import wants_chat
from specli.cli.interrupt import Interrupt
from specli.cli.line_input import MORE, PROMPT, History, read_message
from specli.errors import ConfigError

if os.name == "nt":
    pytest.skip("pseudo-terminals are POSIX's", allow_module_level=True)
import pexpect

LINES, COLUMNS = 40, 100
TINY = ("--temp", "0", "-t", "1", "--ignore-eos", "-n", "5")
FIGURES = re.compile(r"^\d+(\.\d)? tok/s · ")


# -- what makes a message


class Typed:
    """Lines from a list; an exception in it is raised."""

    def __init__(self, lines: Sequence[str | BaseException], is_terminal: bool = True) -> None:
        self._lines = list(lines)
        self.is_terminal = is_terminal
        self.prompts: list[str] = []

    def read(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        if not self._lines:
            return None
        line = self._lines.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello"], "hello"),
        ([""], ""),
        (["one \\", "two"], "one \ntwo"),
        (["one\\", "\\", "three"], "one\n\nthree"),
        (["C:\\ and more"], "C:\\ and more"),
        (['"""one', "", "  two", 'three"""'], "one\n\n  two\nthree"),
        (['"""', "one\\", '"""'], "one\\"),
        (['  """one"""  '], "one"),
        (['""""""'], ""),
        (['say """ twice'], 'say """ twice'),
        (["pasted\nlines"], "pasted\nlines"),
        (['"""pasted\nlines"""'], "pasted\nlines"),
    ],
)
def test_lines_become_one_message(lines, message):
    typed = Typed(lines)
    assert read_message(typed) == message
    assert typed.prompts == [PROMPT, *[MORE] * (len(lines) - 1)]


def test_an_end_in_the_middle_of_a_message():
    """A person who types Ctrl-D leaves; a pipe's last lines are a message."""
    for lines in (["one\\"], ['"""one']):
        assert read_message(Typed(lines)) is None
        assert read_message(Typed(lines, is_terminal=False)) == "one"
    assert read_message(Typed([])) is None


def test_an_interrupt_drops_the_whole_message():
    typed = Typed(["one\\", KeyboardInterrupt(), "next"])
    with pytest.raises(KeyboardInterrupt):
        read_message(typed)
    assert read_message(typed) == "next"


# -- history


def test_history_is_kept_private_and_short(tmp_path, monkeypatch):
    monkeypatch.setattr(line_input, "HISTORY_LENGTH", 3)
    path = tmp_path / "state" / "chat_history"
    history = History(path)
    for line in ("one", "one", " ", "two\nlines \\n", "ende \u2028"):
        history.add(line)
    assert path.read_text("utf-8") == "one\ntwo\\nlines \\\\n\nende \u2028\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert History(path)._load() == ["one", "two\nlines \\n", "ende \u2028"]
    for line in ("4", "5", "6", "7"):
        history.add(line)
    assert History(path)._load() == ["5", "6", "7"]
    assert path.read_text("utf-8") == "5\n6\n7\n"


def test_a_history_that_cannot_be_kept_is_no_failure(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("x")
    for path in (None, tmp_path / "file" / "below", tmp_path):
        history = History(path)
        history.add("one")
        assert history._load() == []
    monkeypatch.setitem(sys.modules, "readline", None)  # as on Windows
    History(tmp_path / "new").add("one")
    assert not (tmp_path / "new").exists()


# -- when it is a chat


def test_flags_that_ask_for_a_chat(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    for flags in ((True, False, False), (None, True, False), (None, False, True)):
        assert wants_chat(*flags, has_prompt=True, raw=False)
        with pytest.raises(ConfigError, match="--raw, which completes"):
            wants_chat(*flags, has_prompt=False, raw=True)
    for flags in ((None, False, False), (False, False, False)):
        assert not wants_chat(*flags, has_prompt=False, raw=False)
    for flags in ((False, True, False), (False, False, True)):
        with pytest.raises(ConfigError, match="-no-cnv, which asks for the opposite"):
            wants_chat(*flags, has_prompt=False, raw=False)


def test_patience_ends():
    """Ctrl-C asks so often; then it kills."""
    interrupt, killed = Interrupt(), []
    interrupt.patience, interrupt.before_kill = 3, lambda: killed.append(True)
    for _ in range(3):
        interrupt._on_signal(2, None)
    assert (interrupt.requested, killed) == (True, [])
    interrupt.reset()
    assert not interrupt.requested
    with pytest.raises(KeyboardInterrupt), interrupt.as_exception():
        interrupt._on_signal(2, None)
    assert not interrupt.requested


# -- without a person: each line of a pipe is a message


@pytest.fixture
def piped(specli, tiny_model, tmp_path):
    """Run with lines on stdin; the process, and the JSON objects it wrote."""

    def run(text: str, *arguments: str | Path, target: Path | None = None):
        figures = tmp_path / "figures.jsonl"
        command = ("run", "-m", target or tiny_model(), *TINY, "--stats-json", figures, *arguments)
        done = specli(*command, stdin=text.encode())
        turns = figures.read_text("utf-8").splitlines() if figures.exists() else []
        return done, [json.loads(line) for line in turns]

    return run


def test_a_pipe_may_be_a_conversation(piped):
    done, turns = piped('one\ntwo \\\nthree\n\n"""four\nfive\n', "-cnv")
    assert (done.code, done.err) == (0, "")
    assert [turn["question"] for turn in turns] == ["one", "two \nthree", "four\nfive"]
    assert [turn["turn"] for turn in turns] == [1, 2, 3]
    assert done.out.decode() == "".join(turn["text"].removesuffix("\n") + "\n" for turn in turns)
    assert turns[0]["reused_tokens"] == 0 < turns[1]["reused_tokens"] < turns[2]["reused_tokens"]


def test_a_piped_prompt_stays_one_prompt(piped):
    done, turns = piped("one\ntwo\n")
    assert done.code == 0
    assert done.out.decode() == turns[0]["text"]
    assert len(turns) == 1
    assert "question" not in turns[0]


def test_a_single_turn_ends_after_its_answer(piped):
    done, turns = piped("one\ntwo\n", "-st")
    assert (done.code, len(turns), done.out.decode()) == (0, 1, turns[0]["text"])
    done, turns = piped("never read\n", "-st", "-p", "/help is a text here")
    assert [turn["question"] for turn in turns] == ["/help is a text here"]


def test_a_first_message_may_come_from_the_command_line(piped):
    done, turns = piped("two\n", "-cnv", "-p", "one", "-sys", "be brief")
    assert done.code == 0
    assert [turn["question"] for turn in turns] == ["one", "two"]


def test_commands_work_in_a_pipe(piped, tmp_path):
    saved, text = tmp_path / "talk.json", tmp_path / "talk.md"
    lines = ["one", "/regen", "/system shout", "two", f"/save {saved}", f"/save {text}", f"/save {saved}", "/SAVE"]
    lines += [
        "/system",
        "/clear",
        "/regen",
        "/nonsense",
        "/help",
        "/stats",
        '/system ""',
        " /no command",
        "/exit",
        "three",
    ]
    done, turns = piped("\n".join(lines), "-i")
    assert done.code == 0
    assert [turn["question"] for turn in turns] == ["one", "one", "two", " /no command"]
    messages = json.loads(saved.read_text("utf-8"))
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert messages[2]["content"] == turns[1]["text"]
    assert text.read_text("utf-8").startswith("## system\n\nshout\n\n## user\n\none\n\n## assistant\n")
    said = done.err.splitlines()
    for expected in (
        "at temperature 0 the answer will be the same",
        "system: shout",
        f"5 messages written to {saved}",
        f"5 messages written to {text}",
        "error: /save needs a file name",
        "the conversation is empty, the system message stays",
        "error: there is no question to answer again yet",
        "/nonsense is not a command; /help lists them (a message may begin with a space and a slash)",
        "conversation: 0 answers, 0 tokens generated; prompts 0 tokens evaluated, 0 reused",
        "there is no system message",
    ):
        assert expected in said
    assert said.count(f"5 messages written to {saved}") == 2  # its own file may be written again
    assert any(line.startswith("  /regen ") for line in said)


def test_a_file_of_somebody_else_is_not_overwritten(piped, tmp_path):
    (tmp_path / "mine").write_text("mine")
    done, _ = piped(f"one\n/save {tmp_path / 'mine'}\n/save {tmp_path / 'no' / 'folder'}\n", "-cnv")
    assert (tmp_path / "mine").read_text() == "mine"
    assert "exists and was not written by this chat" in done.err
    assert "cannot be written: No such file or directory" in done.err


@pytest.mark.parametrize("name", ["~nobody-of-that-name/x", "x" * 300])
def test_a_name_that_no_file_can_have_does_not_end_the_chat(piped, name):
    done, _ = piped(f"one\n/save {name}\n/save {'y' * 300}\ntwo\n/stats\n", "-cnv")
    assert done.code == 0
    assert done.err.count("is no file name") + done.err.count("cannot be written") == 2
    assert "2 answers" in done.err


def test_figures_may_replace_the_text(specli, tiny_model):
    done = specli("run", "-m", tiny_model(), *TINY, "-cnv", "--stats-json", "-", stdin=b"one\ntwo\n")
    assert done.code == 0
    assert [json.loads(line)["turn"] for line in done.out.splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "text", "code", "words"),
    [
        (("-cnv",), "x" * 300 + "\n", 5, "the conversation with this message has"),
        (("-st",), "x" * 300 + "\n", 5, "the context holds 256; say less"),
        (("-cnv", "--raw"), "x\n", 2, "-cnv was given with --raw"),
        (("-st", "-no-cnv"), "x\n", 2, "-st was given with -no-cnv"),
    ],
)
def test_what_goes_wrong_in_a_pipe_ends_it(piped, arguments, text, code, words):
    done, _ = piped(text, *arguments)
    assert done.code == code
    assert words in done.error


def test_bytes_that_are_not_utf_8_are_named(specli, tiny_model):
    done = specli("run", "-m", tiny_model(), *TINY, "-cnv", stdin=b"one\nt\xffo\n")
    assert done.code == 2
    assert "standard input is not UTF-8: byte 0xff in a message" in done.err


def test_a_model_without_a_template_cannot_chat(piped, tiny_model):
    done, _ = piped("one\n", "-cnv", target=tiny_model(chat_template=None))
    assert done.code == 2
    assert "the model has no chat template, so it cannot chat" in done.error


# -- with a person


class Terminal:
    """A chat on a terminal: what the screen shows, and what is typed."""

    def __init__(self, specli: CommandLine, arguments: Sequence[str | Path], env: dict[str, str] | None = None) -> None:
        environment = specli.environment({"TERM": "xterm-256color", **(env or {})})
        words = ["-m", "specli", *map(str, arguments)]
        self.child = pexpect.spawn(
            sys.executable, words, dimensions=(LINES, COLUMNS), env=environment, cwd=str(specli.home), timeout=HANG_S
        )
        self.screen = pyte.HistoryScreen(COLUMNS, LINES, history=2000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""

    @property
    def rows(self) -> list[str]:
        return rows_of(self.screen)

    @property
    def line(self) -> str:
        """The row that the cursor is in, to its left."""
        return row_of(self.screen, self.screen.cursor.y, self.screen.cursor.x)

    def wait(self, ready: Callable[[], bool]) -> Terminal:
        """Read until ``ready``. Fails when nothing comes for a long time."""
        until_s = time.monotonic() + HANG_S
        while not ready():
            assert time.monotonic() < until_s, "\n".join(self.rows)
            self._read(0.05)
        return self

    def _read(self, seconds: float) -> bool:
        try:
            data = self.child.read_nonblocking(1 << 16, seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def prompted(self, prompt: str = PROMPT) -> Terminal:
        """Wait until it asks for something."""
        return self.wait(lambda: self.line == prompt)

    def say(self, line: str, prompt: str = PROMPT) -> Terminal:
        """Type a line, and wait until it asks again."""
        n_before = len(self.raw)
        self.child.send(line + "\r")
        self.wait(lambda: len(self.raw) > n_before and line[-10:] in self.raw[n_before:].decode("utf-8", "replace"))
        return self.prompted(prompt)

    def resize(self, columns: int) -> None:
        """Another width."""
        self.screen.resize(LINES, columns)
        self.child.setwinsize(LINES, columns)

    def ended(self) -> int | None:
        """Wait for the end; the exit code."""
        until_s = time.monotonic() + HANG_S
        while self._read(0.2):
            assert time.monotonic() < until_s, "\n".join(self.rows)
        self.child.close()
        return self.child.exitstatus

    def leave(self) -> int | None:
        """Ctrl-D."""
        self.child.sendeof()
        return self.ended()


@pytest.fixture
def chat(specli, tiny_model, tmp_path) -> Iterator[Callable[..., Terminal]]:
    """Start a chat with a tiny model, or with ``arguments`` alone."""
    started: list[Terminal] = []

    def start(*arguments: str | Path, env: dict[str, str] | None = None, is_tiny: bool = True) -> Terminal:
        model = ("-m", tiny_model(), *TINY) if is_tiny else ()
        terminal = Terminal(specli, ("run", *model, *arguments), env={"XDG_STATE_HOME": str(tmp_path), **(env or {})})
        started.append(terminal)
        return terminal.prompted()

    yield start
    for terminal in started:
        terminal.child.close(force=True)


def turns_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.model
def test_three_turns_an_interrupt_regen_resize_and_exit(chat, q4_0_path, tmp_path):
    """The default pair, from the first question to the last; what was evaluated is counted."""
    figures = tmp_path / "figures.jsonl"
    terminal = chat("--temp", "0", "-n", "500", "--stats-json", figures, is_tiny=False)
    assert terminal.rows[0].startswith("speculation: active (draft smollm2-135m-draft-q8_0.gguf")
    assert "Ctrl-D leaves" in terminal.rows[1]
    assert not any("%" in row for row in terminal.rows)  # the loading bar is gone
    terminal.say("What is the capital of France?")
    assert "Paris" in " ".join(terminal.rows)
    assert FIGURES.match(terminal.rows[-2])
    terminal.say("And of Germany?")
    assert "Berlin" in " ".join(terminal.rows)

    terminal.child.send("Write a long story about a fox, a raven and a wolf.\r")
    n_rows = len(terminal.rows)
    terminal.wait(lambda: len(terminal.rows) > n_rows + 2).resize(80)  # while the answer grows
    n_rows = len(terminal.rows)
    terminal.wait(lambda: len(terminal.rows) > n_rows + 2)
    terminal.child.sendintr()
    terminal.prompted().resize(70)  # at the prompt
    terminal.say("/stats")
    assert max(map(len, terminal.rows[-12:])) <= 70
    figures_lines = [row for row in terminal.rows if FIGURES.match(row)]
    assert len(figures_lines) == 3  # one for each answer: the live lines have left nothing behind
    assert any(row.startswith("conversation: 3 answers") for row in terminal.rows)
    n_rows = len(terminal.rows)
    terminal.child.send("/regen\r")
    terminal.wait(lambda: len(terminal.rows) > n_rows + 6)
    terminal.child.sendintr()
    terminal.prompted()
    terminal.child.send("/exit\r")
    assert terminal.ended() == 0
    assert not terminal.screen.cursor.hidden
    assert b"Traceback" not in terminal.raw

    first, second, third, again = turns_of(figures)
    assert [turn["finish_reason"] for turn in (first, second, third)] == ["eos", "eos", "cancelled"]
    assert [turn["turn"] for turn in (first, second, third, again)] == [1, 2, 3, 4]
    # All of turn 1 but its end token, whose logits nobody wanted, is in the cache when turn 2 begins.
    assert second["reused_tokens"] == first["prompt_tokens"] + len(first["tokens"]) - 1
    assert second["prompt_tokens"] - second["reused_tokens"] < 20
    assert third["reused_tokens"] == second["prompt_tokens"] + len(second["tokens"]) - 1
    assert again["question"] == third["question"]
    assert again["reused_tokens"] == third["prompt_tokens"] - 1  # regenerating evaluates one token


def test_ctrl_c_at_the_prompt_drops_the_line_and_then_says_how_to_leave(chat):
    terminal = chat()
    terminal.child.send("half a line")
    terminal.wait(lambda: terminal.line == "> half a line")
    terminal.child.sendintr()
    terminal.prompted()
    assert not any("leaves" in row for row in terminal.rows[2:])
    n_rows = len(terminal.rows)
    terminal.child.sendintr()
    terminal.wait(lambda: len(terminal.rows) > n_rows).prompted()
    assert terminal.rows[-2] == "Ctrl-D or /exit leaves"
    terminal.say("/stats")
    assert any(row.startswith("conversation: 0 answers") for row in terminal.rows)
    assert terminal.leave() == 0
    assert b"Traceback" not in terminal.raw


def test_a_storm_of_ctrl_c_stops_the_answer_only(chat):
    terminal = chat("-n", "-1", "-c", "8192", "--spec-type", "none")
    for _ in range(3):
        n_before = len(terminal.raw)
        terminal.child.send("go on\r")
        terminal.wait(lambda n_before=n_before: len(terminal.raw) > n_before + 200)
        for _ in range(3):
            terminal.child.sendintr()
        terminal.wait(lambda: terminal.line.endswith(PROMPT))  # behind "^C", where the terminal echoed one in between
    assert terminal.leave() == 0
    assert b"Traceback" not in terminal.raw


def test_several_lines_are_one_message(chat, tmp_path):
    figures = tmp_path / "figures.jsonl"
    terminal = chat("--stats-json", figures)
    terminal.say("one \\", MORE).say("two")
    terminal.say('"""three', MORE).say('four"""')
    terminal.child.send("\x1b[200~five\n  six\x1b[201~")  # as a terminal pastes
    terminal.wait(lambda: "six" in terminal.line)
    terminal.child.send("\r")
    terminal.wait(lambda: len(turns_of(figures)) == 3).prompted()
    assert [turn["question"] for turn in turns_of(figures)] == ["one \ntwo", "three\nfour", "five\n  six"]
    terminal.say('"""never sent', MORE)
    assert terminal.leave() == 0
    assert len(turns_of(figures)) == 3


def test_lines_are_remembered_from_chat_to_chat(chat, tmp_path):
    terminal = chat()
    terminal.say("remember this")
    assert terminal.leave() == 0
    assert (tmp_path / "specli" / "chat_history").read_text("utf-8") == "remember this\n"
    terminal = chat()
    terminal.child.send("\x1b[A")
    terminal.wait(lambda: terminal.line == "> remember this")
    terminal.child.sendintr()
    terminal.prompted()
    assert terminal.leave() == 0


def test_what_is_typed_ahead_waits_for_the_prompt(chat):
    """It is not echoed into the answer."""
    terminal = chat("-n", "-1", "-c", "4096", "--spec-type", "none")
    n_before = len(terminal.raw)
    terminal.child.send("go on\r")
    terminal.wait(lambda: len(terminal.raw) > n_before + 200)
    terminal.child.send("typed ahead")
    time.sleep(0.3)
    assert b"typed ahead" not in terminal.raw[n_before:]
    terminal.wait(lambda: terminal.line == "> typed ahead")
    terminal.child.sendintr()
    terminal.prompted()
    assert terminal.leave() == 0


def test_a_full_context_is_told_and_the_chat_stays_usable(chat):
    terminal = chat("-n", "-1", "-c", "128")
    terminal.say("one")
    assert any(row == "the context of 128 tokens is full; /clear starts anew, -c N gives more" for row in terminal.rows)
    terminal.say("two")
    assert any(row.startswith("error: the conversation with this message has") for row in terminal.rows)
    assert "/clear starts anew" in " ".join(terminal.rows[-4:])
    terminal.say("/clear")
    terminal.say("three")
    assert terminal.leave() == 0


def test_a_dumb_terminal_can_chat(chat):
    terminal = chat(env={"TERM": "dumb"})
    terminal.say("one")
    assert b"\x1b[" not in terminal.raw
    assert terminal.leave() == 0


def test_an_answer_into_a_file_is_asked_for_on_stderr(specli, tiny_model, tmp_path):
    """stdout holds answers alone."""
    out = tmp_path / "answers.txt"
    words = [str(word) for word in specli.argv("run", "-m", tiny_model(), *TINY, "-cnv")]
    child = pexpect.spawn(
        "/bin/sh", ["-c", f'exec "$@" > {out}', "sh", *words], env=specli.environment({"TERM": "xterm"}), timeout=HANG_S
    )
    child.expect_exact("Ctrl-D leaves")
    child.expect_exact("> ")
    child.send("one\r")
    child.expect_exact("> ")
    child.sendeof()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    text = out.read_bytes()
    assert text.endswith(b"\n")
    assert b"> " not in text


def test_a_single_turn_on_a_terminal(chat):
    terminal = chat("-st")
    terminal.child.send("one\r")
    assert terminal.ended() == 0
    assert not any("Ctrl-D leaves" in row for row in terminal.rows)


def test_a_single_turn_that_is_stopped_is_interrupted(chat):
    terminal = chat("-st", "-n", "-1", "-c", "8192", "--spec-type", "none")
    n_before = len(terminal.raw)
    terminal.child.send("one\r")
    terminal.wait(lambda: len(terminal.raw) > n_before + 200)
    terminal.child.sendintr()
    assert terminal.ended() == 130


def test_a_first_message_on_a_terminal_is_shown(chat):
    terminal = chat("-cnv", "-p", "what is this")
    assert "> what is this" in terminal.rows
    assert terminal.leave() == 0
