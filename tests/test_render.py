"""What a pipe and a terminal get. A terminal is pyte's, fed with exactly what the renderer wrote."""

from __future__ import annotations

import io
import os
import random
import re
import struct
import subprocess
import sys
import time
import unicodedata
from dataclasses import replace

import pyte
import pytest
from screens import rows_of

from specli.events import Finished, PrefillDone, Provenance, RoundDone, SequenceRound, Span, SpeculationState, Text
from specli.render.base import can_encode, encodable, one_line, visible
from specli.render.choose import choose
from specli.render.live import REFRESH_S, LiveRenderer, terminal_console
from specli.render.plain import PlainRenderer
from specli.render.status import progress_line, status_line
from specli.render.summary import bar, lay_out, plain_text, speculation_line, summary
from specli.stats import Stats

ENV = {"TERM": "xterm-256color"}
ACTIVE = SpeculationState(True, "", "draft smollm2-135m-draft-q8_0.gguf", k=3, verify="block", n_ctx=8192)
OFF = SpeculationState(False, "the draft has another vocabulary", "", k=0, verify="greedy", n_ctx=512)
PROSE = (
    "Speculative decoding lets a small model guess ahead, and the large one check.\n\n"
    "def f(x):\n    return x + 1  # indented\n\n"
    "It never changes the words: 日本語 stays 日本語, and a paragraph may be as long as it likes, wrapped or not. "
    "No newline at its end"
)


class Terminal(pyte.HistoryScreen):
    """pyte with what real terminals do besides: a wide character that does not fit wraps early (xterm, VTE, tmux).

    Erasing from the very first cell is refused: tmux saves the screen to its history then.
    """

    def __init__(self, columns, lines):
        super().__init__(columns, lines, history=5000, ratio=0.5)
        self.set_mode(pyte.modes.LNM)  # a tty driver sends CR LF for \n
        self.feed = pyte.Stream(self).feed

    def draw(self, data):
        for character in data:
            is_wide = pyte.screens.wcwidth(character) == 2
            if is_wide and self.cursor.x == self.columns - 1 and pyte.modes.DECAWM in self.mode:
                super().draw(" ")
            super().draw(character)

    def erase_in_display(self, how=0, *args, **kwargs):
        assert (self.cursor.x, self.cursor.y) != (0, 0)
        super().erase_in_display(how, *args, **kwargs)

    @property
    def rows(self):
        return rows_of(self)


class Stream(io.StringIO):
    """A text stream that may be a terminal, of any encoding; what does not fit it raises, as in a real one."""

    def __init__(self, encoding="utf-8", *, is_tty=False):
        super().__init__()
        self._encoding, self._is_tty, self.n_writes = encoding, is_tty, 0

    @property
    def encoding(self):
        return self._encoding

    def isatty(self):
        return self._is_tty

    def write(self, text):
        text.encode(self._encoding)
        self.n_writes += 1
        return super().write(text)


class Rig:
    """A live renderer on a terminal of a given size, a fake clock, and a generation to play."""

    def __init__(self, width, height, *, tint=True, show_summary=False, step_s=0.05, encoding="utf-8", state=ACTIVE):
        self.now_s, self.step_s, self.raw = 0.0, step_s, ""
        self.stream, self.stats = Stream(encoding, is_tty=True), Stats()
        console = terminal_console(self.stream, ENV, tint=tint)
        clock = lambda: self.now_s  # noqa: E731
        self.renderer = LiveRenderer(console, self.stream, env=ENV, show_summary=show_summary, clock=clock)
        self.screen = Terminal(width, height)
        self.resize(width, height)
        self.renderer.begin(state)

    def resize(self, width, height):
        self.renderer.console.size = self.renderer.stderr_console.size = (width, height)
        self.screen.resize(height, width)

    def pump(self):
        written = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        self.raw += written
        self.screen.feed(written)

    def send(self, event):
        self.stats.observe(event)
        self.renderer.on_event(event, self.stats)
        self.pump()

    def prefill(self, n_prompt=42):
        self.now_s += 0.2
        self.send(PrefillDone(0, n_prompt, self.now_s - 0.2, self.now_s, 0.19))

    def round(self, *spans, k=3):
        self.now_s += self.step_s
        accepted = sum(span.provenance is Provenance.DRAFT for span in spans)
        part = SequenceRound(0, k, accepted, accepted + 1)
        self.send(RoundDone((part,), self.now_s, 0.14 * self.step_s, 0.85 * self.step_s, 0.01 * self.step_s))
        self.send(Text(0, spans))

    def stream_text(self, text, seed=0):
        rnd, i = random.Random(seed), 0
        while i < len(text):
            n_accepted = rnd.randint(0, 3)
            spans = []
            for j in range(n_accepted + 1):
                spans.append(Span(text[i : i + 4], Provenance.DRAFT if j < n_accepted else Provenance.TARGET))
                i += 4
            self.round(*spans)

    def play(self, text):
        self.prefill()
        self.stream_text(text)
        self.finish()
        return self

    def finish(self):
        self.send(Finished(0, "eos", (1,), self.now_s))
        self.renderer.close()
        self.pump()

    @property
    def bottom(self):
        return self.screen.rows[-1]


def on_a_terminal(text, width, height):
    """The rows that a terminal makes of text written to it as it is."""
    screen = Terminal(width, height)
    screen.feed(text)
    return screen.rows


def without_codes(raw):
    return re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", raw)


def stats_of(rounds, *, finish="eos"):
    """J8's clock: 2 s of prompt (10 tokens), then a round each 0.1 s; draft 14%, verify 85%, host 1%."""
    stats, now_s = Stats(), 2.0
    stats.observe(PrefillDone(0, 10, 0.0, now_s, 1.9))
    for proposed, accepted in rounds:
        now_s += 0.1
        part = SequenceRound(0, proposed, accepted, accepted + 1)
        stats.observe(RoundDone((part,), now_s, 0.014, 0.085, 0.001))
    stats.observe(Finished(0, finish, tuple(range(stats.n_tokens)), now_s))
    return stats


def values(rows):
    return {row.label: row.value for row in [*rows.figures, *rows.acceptance, *rows.times]}


J1 = [(4, 4), (4, 1), (0, 0)]


# Text rules


def test_control_characters_become_visible_but_newline_and_tab():
    assert visible("a\x1b[31mb\r\x07\x7f\x9b2J\n\t") == "a␛[31mb␍␇␡\\x9b2J\n\t"
    assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in visible("".join(map(chr, range(256)))))


def test_what_an_encoding_lacks_is_escaped():
    assert encodable("à 🦙", "ascii") == "\\xe0 \\U0001f999"
    assert encodable("à 🦙 \udcff", "utf-8") == "à 🦙 \\udcff"
    assert encodable("à", None) == "à"
    assert can_encode("à", "latin-1")
    assert not can_encode("█", "latin-1")


def test_a_notice_is_one_line_whatever_a_file_name_holds():
    assert one_line("no such file:\n  a\x1b]0;b.gguf\r\n") == "no such file: a␛]0;b.gguf"


# Plain


def play_plain(text, *, stdout, stderr, show_summary=False):
    stats = Stats()
    with PlainRenderer(stdout, stderr, show_summary=show_summary) as renderer:
        renderer.begin(ACTIVE)
        renderer.progress("loading", 0.5)
        renderer.notice("a\nnotice")
        for event in [
            PrefillDone(0, 3, 0.0, 1.0, 0.9),
            *(Text(0, (Span(text[i : i + 3], Provenance.DRAFT),)) for i in range(0, len(text), 3)),
            Text(1, (Span("another sequence", Provenance.TARGET),)),
            Finished(0, "eos", (1,), 2.0),
        ]:
            stats.observe(event)
            renderer.on_event(event, stats)


@pytest.mark.parametrize("text", [PROSE, "", "\n", "raw \x1b[31m bytes\r\n\tpass", "🦙"])
def test_a_pipe_gets_the_text_as_it_is_and_nothing_else(text):
    stdout, stderr = Stream(), Stream()
    play_plain(text, stdout=stdout, stderr=stderr)
    assert stdout.getvalue() == text
    assert stderr.getvalue() == "a notice\n"


def test_plain_writes_each_event_at_once():
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", newline="")
    stats, renderer = Stats(), PlainRenderer(stdout, None)
    renderer.on_event(Text(0, (Span("日", Provenance.TARGET),)), stats)
    assert raw.getvalue() == "日".encode()


def test_plain_summary_is_on_stderr_without_codes_and_na_where_undefined():
    stdout, stderr = Stream(), Stream()
    play_plain("hi", stdout=stdout, stderr=stderr, show_summary=True)
    assert stdout.getvalue() == "hi"
    told = stderr.getvalue()
    assert "\x1b" not in told
    assert "speculation: active (draft smollm2-135m-draft-q8_0.gguf, K 3, block)\n" in told
    assert re.search(r"^decode +n/a", told, re.M)
    assert "None" not in told
    assert "nan" not in told


@pytest.mark.parametrize("is_one", [True, False])
def test_the_summary_begins_a_line_where_the_answer_goes_to_the_same_file(tmp_path, is_one):
    with (tmp_path / "out").open("a") as stdout, (tmp_path / ("out" if is_one else "err")).open("a") as stderr:
        play_plain("an answer", stdout=stdout, stderr=stderr, show_summary=True)
    told = (tmp_path / "out").read_text()
    assert told.startswith("a notice\nan answer\nspeculation: active") if is_one else told == "an answer"


def test_a_dumb_terminal_is_a_terminal_all_the_same():
    stdout = Stream(is_tty=True)
    play_plain("an \x1b[31mescape", stdout=stdout, stderr=None)
    assert stdout.getvalue() == "an ␛[31mescape\n"


def test_plain_escapes_what_the_encoding_lacks():
    stdout, stderr = Stream("ascii"), Stream("ascii")
    play_plain("à 🦙", stdout=stdout, stderr=stderr, show_summary=True)
    assert stdout.getvalue() == "\\xe0 \\U0001f999"
    assert stderr.getvalue().isascii()
    assert "block efficiency tau" in stderr.getvalue()


class Closed(Stream):
    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_closed_pipe_is_the_callers_but_stderr_nobodys():
    with pytest.raises(BrokenPipeError):
        play_plain("text", stdout=Closed(), stderr=Stream())
    stdout = Stream()
    play_plain("text", stdout=stdout, stderr=Closed(), show_summary=True)
    assert stdout.getvalue() == "text"


# Live: the text


@pytest.mark.parametrize("size", [(80, 24), (30, 8), (21, 5), (10, 3)])
def test_the_terminal_holds_the_text_as_if_it_had_been_written_to_it(size):
    rig = Rig(*size).play(PROSE)
    assert rig.screen.rows == on_a_terminal(PROSE, *size)


@pytest.mark.parametrize("seed", range(40))
def test_any_text_on_any_size(seed):
    rnd = random.Random(seed)
    width, height = rnd.choice([(10, 4), (20, 6), (31, 5), (80, 24), (7, 3)])
    words = ["a", "b ", "word ", "日本", "é", "\n", "\n\n", "x" * 30, "長" * 20, "y" * 200]
    text = "".join(rnd.choices(words, k=rnd.randint(0, 40)))
    rig = Rig(width, height, step_s=rnd.choice([0.02, 0.2])).play(text)
    assert rig.screen.rows == on_a_terminal(text, width, height)


def test_pipe_and_terminal_hold_the_same_text():
    rig = Rig(200, 24).play(PROSE)
    assert "\n".join(rig.screen.rows) == PROSE


def test_an_answer_that_ends_its_line_gets_no_empty_one():
    rig = Rig(40, 10).play("one\n")
    assert (rig.screen.cursor.y, rig.screen.cursor.x) == (1, 0)
    rig = Rig(40, 10).play("one")
    assert (rig.screen.cursor.y, rig.screen.cursor.x) == (1, 0)


def test_an_empty_answer_leaves_nothing():
    rig = Rig(40, 10)
    rig.finish()
    assert rig.raw == ""


def test_a_line_longer_than_the_screen_has_no_newline_but_its_own():
    text = "word " * 200
    rig = Rig(20, 6).play(text)
    assert rig.screen.rows == on_a_terminal(text, 20, 6)
    assert len(rig.screen.history.top) > 40  # it went into the scrollback while it grew


def test_emoji_whose_width_is_disputed_are_broken_by_newlines_only_when_torn():
    text = "👩‍👩‍👧 and 🦙 " * 40
    rig = Rig(20, 6).play(text)
    rows = [row.replace(" ", "") for row in rig.screen.rows]
    assert "".join(rows) == on_a_terminal(text, 2000, 6)[0].replace(" ", "")


# A letter of disputed width is not among those with 300: letters are trusted when a line is torn.
@pytest.mark.parametrize(("character", "cells", "n"), [("α", 2, 25), ("🦙", 1, 25), ("🦙", 1, 300), ("★", 2, 300)])
def test_a_terminal_that_measures_characters_otherwise_keeps_the_text(monkeypatch, character, cells, n):
    """It may wrap elsewhere, but no row is lost, doubled, or left from the region."""
    measure = pyte.screens.wcwidth
    monkeypatch.setattr(pyte.screens, "wcwidth", lambda c: cells if c == character else measure(c))
    text = "".join(f"{character}{i}" for i in range(n))
    rig = Rig(20, 6).play("before\n" + text)
    joined = "".join(rig.screen.rows).replace(" ", "")
    assert joined == "before" + text


def test_tabs_stop_every_eight_cells_also_across_events():
    rig = Rig(60, 6)
    rig.prefill()
    for part in ["a", "\tb\n", "日本", "\t", "c\t\td"]:
        rig.round(Span(part, Provenance.TARGET))
    rig.finish()
    assert rig.raw.count("\t") == 0
    # pyte follows each wide character with an empty cell
    assert rig.screen.rows == ["a       b", "日本    c               d"]


def test_a_model_cannot_send_escape_codes():
    rig = Rig(60, 6, tint=False).play("\x1b[2J\x1b]0;title\x07 \x9b31m red\x00")
    assert rig.screen.rows == ["␛[2J␛]0;title␇ \\x9b31m red␀"]
    assert "\x9b" not in rig.raw
    assert "\x07" not in rig.raw


def test_text_of_another_sequence_is_not_shown():
    rig = Rig(40, 6)
    rig.prefill()
    rig.send(Text(7, (Span("not mine", Provenance.TARGET),)))
    rig.finish()
    assert rig.screen.rows == []


def test_live_on_an_ascii_terminal_escapes():
    rig = Rig(60, 12, encoding="ascii", show_summary=True).play("à la 🦙")
    assert rig.raw.isascii()
    assert rig.screen.rows[0] == "\\xe0 la \\U0001f999"


def test_a_vanished_reader_is_the_callers():
    renderer = LiveRenderer(terminal_console(Closed(is_tty=True), ENV, tint=True), None, env=ENV)
    with pytest.raises(BrokenPipeError), renderer:
        renderer.on_event(Text(0, (Span("x", Provenance.TARGET),)), Stats())


# Live: colours


def test_accepted_draft_tokens_are_tinted_and_the_targets_are_not():
    rig = Rig(40, 6)
    rig.prefill()
    rig.round(Span("target ", Provenance.TARGET))
    rig.round(Span("draft", Provenance.DRAFT), Span(" own", Provenance.TARGET))
    rig.finish()
    colours = [rig.screen.buffer[0][x].fg for x in range(16)]
    assert colours == ["default"] * 7 + ["green"] * 5 + ["default"] * 4


def test_no_color_sends_no_colour_or_attribute_at_all():
    rig = Rig(60, 24, tint=False, show_summary=True)
    rig.renderer.notice("a notice")
    rig.play(PROSE)
    assert not re.search(r"\x1b\[[\d;]*m", rig.raw)
    assert rig.screen.rows[1:][: len(on_a_terminal(PROSE, 60, 24))] == on_a_terminal(PROSE, 60, 24)


# Live: the line below


def test_the_live_line_stands_below_the_text_while_it_grows_and_is_gone_after():
    rig = Rig(100, 12)
    rig.prefill()
    rig.stream_text("One line.\nAnd the beginning of another")
    rig.now_s += 1
    rig.round(Span(" one", Provenance.TARGET))
    *text, status = rig.screen.rows
    assert text == ["One line.", "And the beginning of another one"]
    assert re.fullmatch(
        r"[\d.]+ tok/s · accept \d+% · τ \d\.\d · K 3 · draft 14% verify 85% host 1% · ctx \d+/8192", status
    )
    rig.finish()
    assert rig.screen.rows == text
    assert not rig.screen.cursor.hidden
    assert pyte.modes.DECAWM in rig.screen.mode


def test_the_cursor_rests_on_the_regions_first_cell():
    """So that a terminal that wraps rows anew when resized does not move the region's beginning away."""
    rig = Rig(20, 10)
    rig.prefill()
    rig.round(Span("finished\n", Provenance.TARGET))
    rig.now_s += 1
    rig.round(Span("x" * 50, Provenance.TARGET))
    assert rig.screen.rows[:4] == ["finished", "x" * 20, "x" * 20, "x" * 10]
    assert (rig.screen.cursor.y, rig.screen.cursor.x) == (1, 0)


@pytest.mark.parametrize(
    ("width", "status"),
    [
        (5, []),
        (12, ["62 tok/s"]),
        (30, ["62 tok/s · accept 86% · τ 3.6"]),
        (36, ["62 tok/s · accept 86% · τ 3.6 · K 3"]),
        (70, ["62 tok/s · accept 86% · τ 3.6 · K 3 · draft 14% verify 85% host 1%"]),
    ],
)
def test_the_live_line_never_wraps(width, status):
    rig = Rig(width, 10)
    rig.prefill()
    for _ in range(6):
        rig.round(*[Span("x", Provenance.DRAFT)] * 3, Span("\n", Provenance.TARGET))
    rig.now_s += 0.25 - 4 * rig.step_s
    rig.round(Span("abc", Provenance.TARGET))
    assert rig.screen.rows == ["xxx"] * 6 + ["abc", *status]


def test_text_comes_at_most_ten_times_a_second_and_the_first_word_at_once():
    rig = Rig(80, 24, step_s=0.01)
    rig.renderer.progress("loading", 0.5)
    rig.pump()
    rig.prefill()
    rig.round(Span("first", Provenance.TARGET))
    assert "first" in rig.screen.rows
    n_before = rig.stream.n_writes
    rig.stream_text("x" * 2000)
    n_rounds = rig.stats.rounds
    assert rig.stream.n_writes - n_before <= n_rounds * 0.01 / REFRESH_S + 1
    rig.finish()
    assert "\n".join(on_a_terminal("first" + "x" * 2000, 80, 24)) == "\n".join(rig.screen.rows)


def test_slow_tokens_are_shown_when_they_come():
    rig = Rig(80, 24, step_s=0.5)
    rig.prefill()
    for i in range(5):
        rig.round(Span(f"{i} ", Provenance.TARGET))
        assert rig.screen.rows[0].split()[-1] == str(i)


@pytest.mark.parametrize("sizes", [[(25, 12)], [(60, 12)], [(25, 12), (60, 12), (33, 12)]])
def test_a_resize_leaves_no_debris(sizes):
    text = "the quick brown fox jumps over the lazy dog and goes on"
    rig = Rig(40, 12)
    rig.prefill()
    rig.stream_text("done.\n")
    for size in sizes:
        rig.stream_text(text[:30])
        rig.resize(*size)
        rig.stream_text(text[30:] + "\n")
    rig.stream_text(text)
    rig.finish()
    rows = rig.screen.rows
    assert rows[0] == "done."
    assert not any("tok/s" in row for row in rows)
    # pyte does not wrap old rows anew, but cuts them: what was written after the last resize is whole
    last = on_a_terminal(text + "\n" + text, *sizes[-1]) if len(sizes) == 1 else on_a_terminal(text, *sizes[-1])
    assert rows[-len(last) :] == last
    if len(sizes) == 1:
        assert len(rows) == 1 + len(last)


def test_a_resize_while_a_line_is_torn_loses_nothing():
    rig = Rig(20, 5)
    rig.prefill()
    words = [f"w{i}" for i in range(200)]
    rig.stream_text(" ".join(words[:100]) + " ")
    rig.resize(30, 5)
    rig.stream_text(" ".join(words[100:]))
    rig.finish()
    assert "".join(rig.screen.rows).replace(" ", "") == "".join(words)


def test_a_torn_line_goes_on_at_the_cursor_after_a_resize():
    """A terminal that wraps anew has moved the line's rest to a column that nobody knows."""
    rig = Rig(20, 5, step_s=1)
    rig.prefill()
    rig.round(Span("x" * 100, Provenance.TARGET))
    rig.resize(30, 5)
    seen = len(rig.raw)
    rig.round(Span("yyy", Provenance.TARGET))
    assert without_codes(rig.raw[seen:]).startswith("x" * 60 + "yyy\n")
    assert rig.raw[seen:].startswith("\x1b[J")


def test_a_notice_goes_above_what_still_grows():
    rig = Rig(60, 10)
    rig.prefill()
    rig.round(Span("finished\nunfini", Provenance.TARGET))
    rig.renderer.notice("careful\x1b[2J")
    rig.pump()
    assert rig.screen.rows[:3] == ["finished", "careful␛[2J", "unfini"]
    rig.now_s += 1
    rig.round(Span("shed", Provenance.TARGET))
    rig.finish()
    assert rig.screen.rows == ["finished", "careful␛[2J", "unfinished"]


def test_a_notice_to_a_redirected_stderr_leaves_the_terminal_alone():
    stdout, stderr = Stream(is_tty=True), Stream()
    renderer = LiveRenderer(terminal_console(stdout, ENV, tint=True), stderr, env=ENV, show_summary=True)
    renderer.notice("a notice")
    stats = stats_of(J1)
    renderer.on_event(Finished(0, "eos", (), 1.0), stats)
    assert stdout.getvalue() == ""
    assert stderr.getvalue().startswith("a notice\nspeculation: off: nothing was loaded\n")
    assert "\x1b" not in stderr.getvalue()


def test_progress_gives_way_to_the_answer():
    rig = Rig(60, 10)
    for fraction in (0.0, 0.25, 1.0):
        rig.now_s += 1
        rig.renderer.progress("loading smollm2.gguf", fraction)
        rig.pump()
    assert rig.screen.rows == ["loading smollm2.gguf " + "█" * 30 + " 100%"]
    rig.renderer.progress("reading the prompt", None)
    rig.pump()
    assert rig.screen.rows == ["reading the prompt …"]
    rig.play("answer")
    assert rig.screen.rows == ["answer"]


def test_closing_after_an_error_keeps_what_was_said():
    rig = Rig(60, 10)
    with pytest.raises(ZeroDivisionError), rig.renderer:  # noqa: PT012
        rig.prefill()
        rig.round(Span("half an ans", Provenance.TARGET))
        raise ZeroDivisionError
    rig.pump()
    assert rig.screen.rows == ["half an ans"]
    assert not rig.screen.cursor.hidden


def test_two_answers_in_a_row():
    rig = Rig(60, 10).play("one")
    rig.stats = Stats()
    rig.play("two")
    assert rig.screen.rows == ["one", "two"]


CHILD = """
import os, sys, time
from specli.events import *
from specli.render.choose import choose
from specli.stats import Stats
stats = Stats()
with choose(sys.stdout, sys.stderr, os.environ) as renderer:
    def show(*words):
        for word in words:
            time.sleep(0.11)
            renderer.on_event(Text(0, (Span(word, Provenance.DRAFT),)), stats)
    renderer.on_event(PrefillDone(0, 1, 0.0, 1.0, 1.0), stats)
    show("whole line\\n", "beginning of a line that wraps ", "at thirty columns")
    while os.get_terminal_size(1).columns == 30:
        time.sleep(0.01)
    show(" and not at", " fifty.")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_real_terminal_of_another_size():
    import fcntl
    import termios

    def set_size(fd, columns):
        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 12, columns, 0, 0))

    master, slave = os.openpty()
    set_size(master, 30)
    env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)}
    for name in ("NO_COLOR", "COLUMNS", "LINES"):
        env.pop(name, None)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=slave, stdout=slave, stderr=slave, env=env)
    os.close(slave)
    screen, seen, deadline_s = Terminal(30, 12), "", time.monotonic() + 30
    try:
        while time.monotonic() < deadline_s:
            try:
                data = os.read(master, 65536).decode()
            except OSError:  # the other end is closed
                break
            seen += data
            screen.feed(data)
            if "columns" in without_codes(seen) and screen.columns == 30:
                screen.resize(12, 60)
                set_size(master, 60)
    finally:
        os.close(master)
        assert child.wait(timeout=30) == 0
    assert screen.rows == ["whole line", "beginning of a line that wraps at thirty columns and not at", "fifty."]
    assert screen.buffer[0][0].fg == "green"
    assert not screen.cursor.hidden


# The status line


def test_status_line_says_what_the_stats_say():
    stats = stats_of([(3, 3), (3, 2), (3, 1), (3, 2)])
    line = status_line(stats, ACTIVE, 100)
    assert line == "30 tok/s · accept 67% · τ 3.0 · K 3 · draft 14% verify 85% host 1% · ctx 23/8192"


def test_status_line_drops_parts_from_the_right():
    stats = stats_of([(3, 3), (3, 2), (3, 1), (3, 2)])
    full = status_line(stats, ACTIVE, 200)
    for width in range(len(full) + 1):
        line = status_line(stats, ACTIVE, width)
        assert len(line) <= width
        assert full.startswith(line)
        assert line == "" or line == full or full[len(line) :].startswith(" · ")
    assert status_line(stats, ACTIVE, 30) == "30 tok/s · accept 67% · τ 3.0"


def test_status_line_leaves_out_what_is_not_defined():
    assert status_line(Stats(), ACTIVE, 80) == "K 3"
    controlled = replace(ACTIVE, is_fixed=False)
    assert status_line(Stats(), controlled, 80) == ""
    stats = Stats()
    for k, state in ((3, "draft"), (2, "draft"), (0, "off")):
        stats.observe(RoundDone((SequenceRound(0, k, 1, 2),), 1.0, 0.1, 0.8, 0.1, state))
        assert f"K {2.5 if k < 3 else 3.0} {state}" in status_line(stats, controlled, 80)
    assert status_line(Stats(), None, 80) == ""
    assert status_line(stats_of([(0, 0)] * 4), OFF, 80, use_symbols=False) == (
        "10 tok/s | speculation off | draft 14% verify 85% host 1% | ctx 15/512"
    )


def test_progress_line_fits():
    for width in range(60):
        for fraction in (None, 0.0, 0.5, 2.0):
            assert len(progress_line("loading a model", fraction, width)) <= width
    assert progress_line("loading", 0.5, 80, use_symbols=False) == "loading " + "#" * 15 + " " * 15 + "  50%"


# The summary


def test_summary_of_j1():
    rows = summary(stats_of(J1), ACTIVE)
    assert rows.head == "speculation: active (draft smollm2-135m-draft-q8_0.gguf, K 3, block)"
    assert values(rows) == {
        "decode": "26.7 tok/s",
        "TPOT": "37.5 ms/token",
        "TTFT": "2.00 s",
        "prefill": "5.26 tok/s",
        "prompt": "10 tokens",
        "generated": "9 tokens",
        "finish": "eos",
        "drafted": "5 of 8 accepted",
        "mean accepted length": "2.50",
        "block efficiency τ": "2.67 tokens/round",
        "acceptance": "62.5%",
        "position 1": "100.0%",
        "position 2": "50.0%",
        "position 3": "50.0%",
        "position 4": "50.0%",
        "draft time": "14.0%",
        "verify time": "85.0%",
        "host time": "1.0%",
    }
    assert [row.fraction for row in rows.acceptance] == [0.625, 1.0, 0.5, 0.5, 0.5]


def test_summary_of_j8():
    shown = values(summary(stats_of([(0, 0)] * 9, finish="length"), OFF))
    assert shown["TTFT"] == "2.00 s"
    assert shown["TPOT"] == "100 ms/token"
    assert shown["decode"] == "10.0 tok/s"
    assert shown["generated"] == "10 tokens"
    assert shown["acceptance"] == shown["drafted"] == shown["mean accepted length"] == "n/a"
    assert shown["finish"] == "length"


def test_summary_of_nothing():
    shown = values(summary(Stats(), None))
    assert shown.pop("generated") == "0 tokens"
    assert set(shown.values()) == {"n/a"}


def test_a_draft_that_was_never_asked_is_off_in_every_round():
    stats = stats_of([(0, 0)] * 8)
    stats.explanation = "speculated in 0% of rounds"
    idle = summary(stats, ACTIVE).head
    assert idle.startswith("speculation: off in every round (draft smollm2")
    assert idle.endswith("; speculated in 0% of rounds")
    for rounds in ([(0, 0)] * 7, [*[(0, 0)] * 20, (1, 0)]):
        assert summary(stats_of(rounds), ACTIVE).head.startswith("speculation: active (draft")


def test_speculation_line_says_who_drafts_or_why_nobody_does():
    assert speculation_line(OFF) == "speculation: off: the draft has another vocabulary"
    assert speculation_line(SpeculationState(True, "", "n-gram", 8, "coupled", 512)) == (
        "speculation: active (n-gram, K 8, coupled)"
    )


@pytest.mark.parametrize("width", [24, 30, 40, 60, 80, 120])
@pytest.mark.parametrize("use_blocks", [True, False])
def test_summary_respects_the_width(width, use_blocks):
    rows = summary(stats_of([(16, 9), *J1]), ACTIVE)
    lines = [plain_text(line) for line in lay_out(rows, width, use_blocks=use_blocks)]
    assert max(len(line) for line in lines) <= width
    text = " ".join(" ".join(lines).split())
    for value in values(rows).values():
        assert value in text
    assert use_blocks or text.isascii()


def test_summary_at_80_columns():
    lines = [plain_text(line) for line in lay_out(summary(stats_of(J1), ACTIVE), 80, use_blocks=True)]
    assert lines == [
        "speculation: active (draft smollm2-135m-draft-q8_0.gguf, K 3, block)",
        "",
        "decode                26.7 tok/s           acceptance    62.5%  ██████████",
        "TPOT                  37.5 ms/token        position 1   100.0%  ████████████████",
        "TTFT                  2.00 s               position 2    50.0%  ████████",
        "prefill               5.26 tok/s           position 3    50.0%  ████████",
        "prompt                10 tokens            position 4    50.0%  ████████",
        "generated             9 tokens",
        "finish                eos                  draft time    14.0%  ██▎",
        "drafted               5 of 8 accepted      verify time   85.0%  █████████████▋",
        "mean accepted length  2.50                 host time      1.0%  ▏",
        "block efficiency τ    2.67 tokens/round",
    ]


def test_the_terminals_summary_tells_the_same_and_explains_the_tint():
    rig = Rig(80, 40, show_summary=True).play("hello")
    plain = [plain_text(line) for line in lay_out(summary(rig.stats, ACTIVE), 80, use_blocks=True)]
    assert rig.screen.rows == ["hello", "", *plain, "", "tint: accepted draft, target's own"]
    y = rig.screen.rows.index("tint: accepted draft, target's own")
    assert rig.screen.buffer[y][6].fg == "green"
    assert "tint" not in "\n".join(Rig(80, 40, tint=False, show_summary=True).play("hello").screen.rows)


def test_bars():
    assert bar(0.5, 4, use_blocks=True) == "██  "
    assert bar(1 / 16, 2, use_blocks=True) == "▏ "
    assert bar(1.0, 3, use_blocks=True) == "███"
    assert bar(-1, 3, use_blocks=True) == "   "
    assert bar(7, 3, use_blocks=False) == "###"
    assert bar(0.5, 0, use_blocks=True) == ""


# Who gets what


@pytest.mark.parametrize(
    ("is_tty", "env", "color", "kind"),
    [
        (False, ENV, "auto", PlainRenderer),
        (False, ENV, "on", PlainRenderer),
        (True, {"TERM": "dumb"}, "on", PlainRenderer),
        (True, ENV, "auto", LiveRenderer),
        (True, {**ENV, "NO_COLOR": "1"}, "auto", LiveRenderer),
    ],
)
def test_choose(is_tty, env, color, kind):
    assert type(choose(Stream(is_tty=is_tty), Stream(), env, color=color)) is kind


@pytest.mark.parametrize(
    ("env", "color", "has_tint"),
    [
        (ENV, "auto", True),
        ({**ENV, "NO_COLOR": "1"}, "auto", False),
        ({**ENV, "NO_COLOR": ""}, "auto", True),
        ({**ENV, "NO_COLOR": "1"}, "on", True),
        (ENV, "off", False),
    ],
)
def test_who_decides_about_colour(env, color, has_tint):
    stdout = Stream(is_tty=True)
    renderer = choose(stdout, None, env, color=color)
    renderer.on_event(Text(0, (Span("x", Provenance.DRAFT),)), Stats())
    renderer.close()
    assert ("\x1b[32m" in stdout.getvalue()) is has_tint


def test_plain_needs_no_rich():
    code = (
        "import sys, io; from specli.render.choose import choose; choose(io.StringIO(), None, {}); "
        "sys.exit(any(name.split('.')[0] == 'rich' for name in sys.modules))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
