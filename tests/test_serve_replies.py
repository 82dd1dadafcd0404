"""What clients get of scripted events: text, log probabilities, counts, and objects that are always JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest

from specli.events import (
    Event,
    Finished,
    FinishReason,
    Logprobs,
    PrefillDone,
    Provenance,
    RoundDone,
    SequenceRound,
    Span,
    Text,
    TokenLogprob,
)
from specli.serve.replies import Choice, Envelope, News, problem, timings, usage
from specli.stats import Stats
from specli.text import TextStream

PIECES = {1: b"Hello", 2: b" world", 3: b"\xf0\x9f", 4: b"\xa6\x99", 5: b"", 6: b"END", 7: b"EN", 8: b"\xff", 9: b"x"}
SEQUENCE = 3


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -token / 10, ((token, -token / 10), (9, -3.0)))


class Script:
    """One answer as the engine tells it: tokens through ``TextStream``, as ``decode`` does."""

    def __init__(self, stops: Sequence[str] = (), has_logprobs: bool = True, n_reused: int = 0) -> None:
        self.text, self.tokens, self.at_s = TextStream(PIECES.__getitem__, stops), [], 10.0
        self.has_logprobs, self.n_reused = has_logprobs, n_reused

    def burst(self, tokens: Sequence[int], proposed: int = 0, end: FinishReason | None = None) -> list[Event]:
        """A round's events; of the first burst the prefill's."""
        self.at_s += 0.5
        spans, n = [], 0
        for token in tokens:
            self.tokens.append(token)
            n += 1
            if not (end == "eos" and n == len(tokens)):
                spans += self.text.push(token, Provenance.TARGET)
            if self.text.stop is not None:
                end = "stop"
                break
        if len(self.tokens) == n:
            events: list[Event] = [PrefillDone(SEQUENCE, 20, 9.0, self.at_s, 0.4, self.n_reused)]
        else:
            parts = (SequenceRound(0, 9, 9, 10), SequenceRound(SEQUENCE, proposed, min(proposed, n - 1), n))
            events = [RoundDone(parts, self.at_s, 0.1, 0.3, 0.1)]
        if self.has_logprobs:
            events.append(Logprobs(SEQUENCE, tuple(map(logprob, tokens[:n]))))
        if spans:
            events.append(Text(SEQUENCE, tuple(spans)))
        return events if end is None else [*events, *self.finish(end)]

    def finish(self, reason: FinishReason) -> list[Event]:
        spans = self.text.finish()
        is_cut = self.text.stop is not None
        kept = self.tokens[: self.text.n_kept] if is_cut else self.tokens
        text: list[Event] = [Text(SEQUENCE, tuple(spans))] if spans else []
        n_cut = len(self.tokens) - len(kept)
        return [*text, Finished(SEQUENCE, "stop" if is_cut else reason, tuple(kept), self.at_s, n_cut, self.text.stop)]


def choice(has_logprobs: bool = True, index: int = 0) -> Choice:
    return Choice(index, PIECES.__getitem__, has_logprobs)


def told(taken: Choice) -> list[int]:
    return [token.token for token in taken.logprobs]


ENVELOPES = [Envelope("id-1", 1700000000, "model", is_chat) for is_chat in (True, False)]


def as_json(content: object) -> object:
    """Through JSON and back; NaN has no place in it."""
    return json.loads(json.dumps(content, allow_nan=False))


def test_text_comes_as_it_becomes_final() -> None:
    script, taken = Script(), choice()
    first = taken.take(script.burst([1]))
    assert (first.text, [t.token for t in first.logprobs], first.offsets) == ("Hello", [1], [0])
    assert first.finish_reason is None
    second = taken.take(script.burst([2, 1], proposed=3))
    assert (second.text, [t.token for t in second.logprobs], second.offsets) == (" worldHello", [2, 1], [5, 11])
    last = taken.take(script.burst([5], end="eos"))
    assert (last.text, [t.token for t in last.logprobs], last.finish_reason) == ("", [5], "stop")
    assert taken.text == "Hello worldHello"
    assert taken.n_tokens == len(taken.logprobs) == 4


def test_a_character_over_two_tokens_is_told_once() -> None:
    script, taken = Script(), choice()
    assert taken.take(script.burst([3])).text == ""
    assert told(taken) == []
    news = taken.take(script.burst([4]))
    assert news.text == "\U0001f999"
    assert [t.token for t in news.logprobs] == [3, 4]
    assert taken.take(script.burst([9], end="length")).finish_reason == "length"
    assert told(taken) == [3, 4, 9]
    assert taken.offsets == [0, 0, 1]


def test_an_unfinished_character_ends_as_a_replacement() -> None:
    script, taken = Script(), choice()
    news = taken.take(script.burst([3], end="length"))
    assert (news.text, taken.n_tokens, told(taken)) == ("�", 1, [3])


@pytest.mark.parametrize("bursts", [[[1, 2, 6, 9]], [[1], [2], [6], [9]], [[1], [2, 7, 9]], [[1, 2], [6, 1, 1]]])
def test_a_stop_string_takes_text_ids_and_logprobs_back_alike(bursts: list[list[int]]) -> None:
    script, taken, chunks = Script(stops=["END", "ENx"]), choice(), []
    for burst in bursts:
        chunks.append(taken.take(script.burst(burst, proposed=2)))
        if taken.finish_reason is not None:
            break
    assert taken.finish_reason == "stop"
    assert "".join(news.text for news in chunks) == taken.text == "Hello world"
    assert [t.token for news in chunks for t in news.logprobs] == told(taken) == [1, 2]
    assert taken.n_tokens == 2
    assert taken.stats.accepted <= taken.n_tokens


def test_what_may_begin_a_stop_string_waits_with_its_logprobs() -> None:
    script, taken = Script(stops=["ENDx"]), choice()
    assert taken.take(script.burst([1])).text == "Hello"
    held = taken.take(script.burst([6]))
    assert (held.text, held.logprobs) == ("", [])
    released = taken.take(script.burst([1]))
    assert (released.text, [t.token for t in released.logprobs]) == ("ENDHello", [6, 1])


def test_a_stop_string_behind_a_broken_character() -> None:
    """The U+FFFD of the bytes before belongs to them, so a token that begins in the stop is cut."""
    script, taken = Script(stops=["Hello world"]), choice()
    taken.take(script.burst([3]))
    taken.take(script.burst([1]))
    assert (taken.text, told(taken)) == ("�", [3])
    taken.take(script.burst([2]))
    assert (taken.text, taken.finish_reason) == ("�", "stop")
    assert told(taken) == [3]
    assert taken.n_tokens == 1


def test_no_tokens_at_all() -> None:
    for envelope in ENVELOPES:
        taken = choice()
        news = taken.take([Finished(SEQUENCE, "length", (), 10.0)])
        assert (news.text, news.finish_reason, taken.n_tokens) == ("", "length", 0)
        whole = as_json(envelope.whole([taken], 20))
        assert whole["usage"]["completion_tokens"] == 0
        assert whole["choices"][0]["logprobs"] is not None
        assert whole["timings"]["predicted_per_second"] is None


def test_logprobs_are_told_only_where_they_were_asked_for() -> None:
    for envelope in ENVELOPES:
        taken = choice(has_logprobs=False)
        news = taken.take(Script(has_logprobs=False).burst([1], end="length"))
        assert envelope.whole([taken], 1)["choices"][0]["logprobs"] is None
        assert [envelope.chunk(taken, part)["choices"][0]["logprobs"] for part in news.parted()] == [None, None]


def test_news_come_apart_into_what_is_said_and_the_end() -> None:
    assert News().parted() == []
    assert News("x").parted() == [News("x")]
    assert News(finish_reason="stop").parted() == [News(finish_reason="stop")]
    assert News("x", [logprob(1)], [0], "stop").parted() == [News("x", [logprob(1)], [0]), News(finish_reason="stop")]


@pytest.mark.parametrize("envelope", ENVELOPES)
def test_a_stream_says_what_the_whole_says(envelope: Envelope) -> None:
    script, taken, chunks = Script(stops=["END"]), choice(), []
    for burst, proposed in (([1], 0), ([2, 3], 4), ([4, 8, 9], 4), ([7, 2, 6, 1], 4)):
        parts = taken.take(script.burst(burst, proposed)).parted()
        chunks += [as_json(envelope.chunk(taken, news))["choices"][0] for news in parts]
    whole = as_json(envelope.whole([taken], 20))["choices"][0]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + [whole["finish_reason"]]
    if envelope.is_chat:
        assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
        entries = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
        assert entries == whole["logprobs"]["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in entries) == b"Hello world\xf0\x9f\xa6\x99\xffxEN world"
        assert [entry["top_logprobs"][1] for entry in entries] == [
            {"token": "x", "logprob": -3.0, "bytes": [120]}
        ] * len(entries)
    else:
        assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            parts = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"][name]]
            assert parts == whole["logprobs"][name]
        offsets, tokens = whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"]
        assert offsets == sorted(offsets)
        assert all(whole["text"][at:].startswith(token) for at, token in zip(offsets, tokens, strict=True) if at > 12)


def test_of_two_tokens_with_one_text_the_likelier_is_told() -> None:
    taken = choice()
    top = ((3, -0.1), (8, -2.0))  # both are no text by themselves
    taken.take([PrefillDone(SEQUENCE, 1, 0.0, 1.0, 0.1), Logprobs(SEQUENCE, (TokenLogprob(1, -0.5, top),))])
    taken.take([Finished(SEQUENCE, "length", (1,), 2.0)])
    assert ENVELOPES[1].whole([taken], 1)["choices"][0]["logprobs"]["top_logprobs"] == [{"�": -0.1}]


def test_a_probability_of_nothing_is_json() -> None:
    for envelope in ENVELOPES:
        taken, none = choice(), TokenLogprob(1, -math.inf, ((9, -math.inf),))
        news = taken.take(
            [PrefillDone(SEQUENCE, 1, 0.0, 1.0, 0.1), Logprobs(SEQUENCE, (none,)), Text(SEQUENCE, spans("Hello"))]
        )
        as_json(envelope.chunk(taken, news))
        taken.take([Finished(SEQUENCE, "length", (1,), 2.0)])
        assert "-9999.0" in json.dumps(envelope.whole([taken], 1), allow_nan=False)


def spans(text: str) -> tuple[Span, ...]:
    return (Span(text, Provenance.TARGET),)


def test_usage_adds_up() -> None:
    several = []
    for index, n_reused in enumerate((0, 15)):
        script, taken = Script(stops=["END"], n_reused=n_reused), choice(index=index)
        taken.take(script.burst([1]))
        taken.take(script.burst([2, 9, 2], proposed=5))
        taken.take(script.burst([7, 6, 9], proposed=2))
        several.append(taken)
    counts = usage(several, 20, 1)
    assert counts["prompt_tokens"] == 20
    assert counts["completion_tokens"] == sum(taken.n_tokens for taken in several) == 10
    assert counts["total_tokens"] == 30
    assert counts["prompt_tokens_details"] == {"cached_tokens": 15}
    details = counts["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] <= 14
    assert 0 < details["accepted_prediction_tokens"] <= counts["completion_tokens"]
    for envelope in ENVELOPES:
        assert envelope.counts(several, 20)["usage"] == envelope.whole(several, 20)["usage"] == counts
        assert envelope.counts(several, 20)["choices"] == []


def test_timings_say_null_where_nothing_is_known() -> None:
    nothing = as_json(timings(Stats()))
    assert nothing["predicted_per_second"] is None
    assert nothing["prompt_ms"] is None
    one = choice()
    one.take(Script().burst([1], end="length"))
    assert as_json(timings(one.stats))["predicted_per_token_ms"] is None
    cached = choice()
    cached.take(Script(n_reused=20).burst([1], end="length"))
    assert as_json(timings(cached.stats))["prompt_per_token_ms"] is None
    more = choice()
    script = Script()
    more.take(script.burst([1]))
    more.take(script.burst([2, 9], proposed=1, end="length"))
    assert as_json(timings(more.stats)) | {"predicted_n": 3, "predicted_ms": 500.0, "draft_n": 1} == as_json(
        timings(more.stats)
    )


def test_all_objects_of_a_reply_have_one_name() -> None:
    for envelope in ENVELOPES:
        taken = choice()
        news = taken.take(Script().burst([1], end="length"))
        kind = "chat.completion.chunk" if envelope.is_chat else "text_completion"
        parts = [envelope.role(taken), envelope.chunk(taken, news), envelope.counts([taken], 1)]
        for part in parts[0 if envelope.is_chat else 1 :]:
            assert (part["id"], part["object"], part["created"], part["model"]) == ("id-1", kind, 1700000000, "model")


def test_problems_have_openai_s_shape() -> None:
    assert problem("no", 400, "n", "code") == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "n", "code": "code"}
    }
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}
    kinds |= {500: "server_error", 503: "server_error", 504: "timeout_error"}
    assert {status: problem("no", status)["error"]["type"] for status in kinds} == kinds
