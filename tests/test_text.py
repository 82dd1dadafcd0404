"""Bytes to text: characters split over tokens, illegal bytes, and stop strings over any split."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specli.errors import ConfigError
from specli.events import Provenance, Span
from specli.text import TextStream

DRAFT, TARGET = Provenance.DRAFT, Provenance.TARGET


class Stream:
    """A ``TextStream`` over given pieces: what was given out after each, and at the end."""

    def __init__(self, pieces: Sequence[bytes], stops: Sequence[str] = ()) -> None:
        self.stream = TextStream(lambda token: pieces[token], stops)
        self.steps: list[str] = []
        for token in range(len(pieces)):
            self.steps.append("".join(span.text for span in self.stream.push(token, TARGET)))
            if self.stream.stop is not None:
                break
        self.end = "".join(span.text for span in self.stream.finish())

    @property
    def text(self) -> str:
        return "".join(self.steps) + self.end


def cut_at(data: bytes, *places: int) -> list[bytes]:
    """``data`` in pieces, cut at ``places``."""
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def characters(data: bytes) -> list[tuple[str, int]]:
    """The characters of ``data`` and the byte each begins at; U+FFFD for each maximal illegal subpart."""
    found: list[tuple[str, int]] = []
    at = 0
    while at < len(data):
        try:
            legal, end, after = data[at:].decode(), len(data) - at, len(data) - at
        except UnicodeDecodeError as error:
            legal, end, after = data[at : at + error.start].decode(), error.start, error.end
        offset = at
        for character in legal:
            found.append((character, offset))
            offset += len(character.encode())
        if after > end:
            found.append(("\ufffd", at + end))
        at += after
    return found


def cut_text(data: bytes, stops: Sequence[str]) -> tuple[str, str | None, int]:
    """What a stream over ``data`` must give: the text before the stop string that is completed first (the longest of
    those completed together), that stop, and the number of bytes that the text covers."""
    decoded = characters(data)
    text = "".join(character for character, _at in decoded)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None, len(data)
    _end, start, stop = min(ends)
    return text[:start], stop, decoded[start][1]


# F1, F5: characters


@pytest.mark.parametrize("text", ["🦙", "日本", "a🦙b", "👩‍👩‍👧", "é"])
def test_a_character_split_over_tokens_comes_out_whole(text: str) -> None:
    data = text.encode()
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            for stops in ((), ("\n",)):
                stream = Stream(cut_at(data, first, second), stops)
                assert stream.text == text
                assert stream.end == ""  # nothing waits for an end that is there already


def test_a_split_character_waits_for_its_last_byte() -> None:
    """F1: SmolLM2's tokens of the llama, 2 + 1 + 1 bytes."""
    assert Stream([b"\xf0\x9f", b"\xa6", b"\x99"]).steps == ["", "", "🦙"]
    assert Stream([b"a\xf0\x9f", b"\xa6\x99b"]).steps == ["a", "🦙b"]


@pytest.mark.parametrize(
    ("illegal", "replaced"),
    [
        (b"\xc0\x80", 2),
        (b"\xe0\x80\xaf", 3),
        (b"\xed\xa0\x80", 3),
        (b"\xf4\x90\x80\x80", 4),
        (b"\xf5\x80\x80\x80", 4),
        (b"\xff\xfe", 2),
        (b"\xf0\x9f\xa6", 1),  # one maximal subpart
        (b"\x80", 1),
    ],
)
def test_illegal_bytes_cost_nothing_around_them(illegal: bytes, replaced: int) -> None:
    """F4, F5: U+FFFD for each maximal subpart (Unicode 15, 3.9), text before and after kept, at every split."""
    data = b"before " + illegal + b" after"
    for place in range(len(data) + 1):
        for stops in ((), ("no such",)):
            assert Stream(cut_at(data, place), stops).text == "before " + "\ufffd" * replaced + " after"


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    stream = Stream([b"ok", b"\xf0\x9f"])
    assert (stream.steps, stream.end) == (["ok", ""], "\ufffd")
    assert Stream([b"ok\xf0\x9f"], ["x"]).text == "ok\ufffd"


def test_pieces_keep_their_leading_spaces() -> None:
    """F7, F6: pieces are joined as bytes, nothing is stripped, however long they are."""
    assert Stream([b"Dear", b" Name", b",", b" I", b" hope"]).text == "Dear Name, I hope"
    assert Stream([b" ", b"  ", b"\n", b" " * 128, b"X"]).text == "   \n" + " " * 128 + "X"
    assert Stream([b"", b"a", b"", b"\x00", b""]).text == "a\x00"


# Stop strings


def test_text_ends_before_the_stop() -> None:
    stream = Stream([b"one ", b"STOP", b" two"], ["STOP"])
    assert (stream.text, stream.stream.stop, stream.stream.n_kept) == ("one ", "STOP", 1)
    assert stream.end == ""


@pytest.mark.parametrize("pieces", [[b"?\n"], [b"?", b"\n"]])
def test_last_characters_before_a_stop_are_given_out(pieces: list[bytes]) -> None:
    """G5."""
    stream = Stream(pieces, ["\n"])
    assert (stream.text, stream.stream.n_kept) == ("?", 1)


def test_two_stops_that_share_a_beginning_do_not_double_the_text() -> None:
    """G7."""
    for pieces in ([b" Alice", b"!"], [b" Al", b"ice!"], [b" ", b"A", b"l", b"i", b"c", b"e", b"!"]):
        assert Stream(pieces, ["\n", "Alice:"]).text == " Alice!"


def test_what_may_begin_a_stop_waits_and_no_more() -> None:
    assert Stream([b"a#", b"#", b"b#", b"c"], ["###"]).steps == ["a", "", "##b", "#c"]
    assert Stream([b"xA", b"B"], ["AC", "BD"]).steps == ["x", "A"]
    assert Stream([b"abab", b"c"], ["ababc", "zz"]).text == ""
    assert Stream([b"ab#"], ["#!"]).end == "#"


def test_the_first_completed_stop_wins_at_every_split() -> None:
    """Whether "xabc" or the "ab" in it is found must not depend on where the tokens end."""
    for place in range(6):
        stream = Stream(cut_at(b"-xabc", place), ["xabc", "ab"])
        assert (stream.text, stream.stream.stop) == ("-x", "ab")
    for place in range(5):  # completed together: the longer one
        stream = Stream(cut_at(b"-xab", place), ["ab", "xab"])
        assert (stream.text, stream.stream.stop) == ("-", "xab")


def test_kept_tokens_have_a_part_in_the_text() -> None:
    llama = "🦙".encode()
    for pieces, n_kept in (
        ([b"a", b"##", b"#EN", b"D"], 1),
        ([b"a##", b"#EN", b"D"], 1),
        ([b"##", b"#END"], 0),
        ([b"a", b"", b"###END"], 1),
        ([b"a", b"", b"##", b"#END"], 1),  # the same cut, the stop over two tokens
        ([b"a", b"x" + b"#", b"##END"], 2),
    ):
        assert Stream(pieces, ["###END"]).stream.n_kept == n_kept
    for pieces, n_kept in (
        ([b"a", llama[:2], llama[2:] + b"X"], 1),
        ([b"a", llama[:2], llama[2:], b"X"], 1),  # half a character is no part of the text
        ([b"a", llama[:2], llama[2:3], llama[3:], b"X"], 1),
        ([b"a" + llama[:2], llama[2:], b"X"], 1),
    ):
        stream = Stream(pieces, ["🦙X"])
        assert (stream.text, stream.stream.n_kept) == ("a", n_kept)
    broken = Stream([b"a\xf0", b"STOP"], ["STOP"])  # the replacement belongs to the first token
    assert (broken.text, broken.stream.n_kept) == ("a\ufffd", 1)
    begun = Stream([b"a", llama[:2], llama[2:] + b"STOP"], ["STOP"])
    assert (begun.text, begun.stream.n_kept) == ("a🦙", 3)


def test_without_a_stop_every_token_is_kept() -> None:
    assert Stream([b"a", b"", b"b#"], ["##"]).stream.n_kept == 3
    assert Stream([b"a", b"b"]).stream.n_kept == 2


@pytest.mark.parametrize("stops", [[""], ["", "x"], ["x", ""]])
def test_an_empty_stop_is_refused(stops: list[str]) -> None:
    """G9."""
    with pytest.raises(ConfigError, match="empty stop string"):
        TextStream(lambda _token: b"", stops)


def test_a_hundred_stops() -> None:
    stops = [f"<{i}>" for i in range(100)]
    stream = Stream([b"a<4", b"2", b"> b"], stops)
    assert (stream.text, stream.stream.stop) == ("a", "<42>")


def test_spans_carry_the_provenance_of_the_token_that_completed_them() -> None:
    pieces = [b"a", b"b#", b"\xc3", b"\xa9c", b"##"]
    stream = TextStream(lambda token: pieces[token], ["###"])
    assert stream.push(0, TARGET) == [Span("a", TARGET)]
    assert stream.push(1, DRAFT) == [Span("b", DRAFT)]
    assert stream.push(2, DRAFT) == []
    assert stream.push(3, TARGET) == [Span("#", DRAFT), Span("éc", TARGET)]
    assert stream.push(4, DRAFT) == []
    assert stream.finish() == [Span("##", DRAFT)]


TEXTS = st.text(alphabet="ab#é🦙\n", max_size=24)
STOPS = st.lists(st.text(alphabet="ab#é🦙\n", min_size=1, max_size=4), max_size=3)
PLACES = st.lists(st.integers(0, 200), max_size=12)


@settings(max_examples=600, deadline=None)
@given(TEXTS, STOPS, PLACES)
def test_any_split_gives_the_text_cut_at_its_earliest_stop(text: str, stops: list[str], places: list[int]) -> None:
    check(cut_at(text.encode(), *places), stops)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(
        st.sampled_from([b"a", b"b", b"#", b"\xf0", b"\x9f", b"\xa6\x99", b"\xc3", b"\xe2\x82", b"\xff"]), max_size=14
    ),
    st.lists(st.text(alphabet="ab#\ufffd", min_size=1, max_size=3), max_size=2),
    PLACES,
)
def test_any_split_of_illegal_bytes(parts: list[bytes], stops: list[str], places: list[int]) -> None:
    check([piece for piece in cut_at(b"".join(parts), *places) if piece], stops)


def check(pieces: list[bytes], stops: list[str]) -> None:
    """The stream gives out the right text, never more than that at any step, and keeps the right tokens."""
    wanted, stop, n_bytes = cut_text(b"".join(pieces), stops)
    stream = Stream(pieces, stops)
    assert stream.text == wanted
    assert stream.stream.stop == stop
    given_out = ""
    for step in stream.steps:
        given_out += step
        assert wanted.startswith(given_out)
    edges = itertools.accumulate([0, *map(len, pieces)])
    n_kept = sum(edge < n_bytes for edge, _piece in zip(edges, pieces, strict=False))
    assert stream.stream.n_kept == (len(pieces) if stop is None else n_kept)
    longest, seen = max((len(s) for s in stops), default=1), ""
    for i, step in enumerate(stream.steps, start=1):
        seen += step
        if stream.stream.stop is None:  # held back: an unfinished character, and what may begin a stop
            assert len(seen) >= len(characters(b"".join(pieces[:i]))) - 1 - (longest - 1)
