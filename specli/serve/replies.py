"""What clients get: one choice's text, tokens and log probabilities as they come, and the objects of the interface."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specli.events import Event, Finished, Logprobs, PrefillDone, Text, TokenLogprob
from specli.stats import Stats
from specli.text import breaks

Json = dict[str, Any]
PieceOf = Callable[[int], bytes]
_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "cancelled": "stop"}
LEAST_LOGPROB = -9999.0  # OpenAI's word for a probability of 0, whose logarithm is no JSON number


@dataclass(slots=True)
class News:
    """What is new of a choice: final text, the tokens whose text begins in it (where asked for), and its end.

    ``offsets``: the character of the answer that each of these tokens begins at.
    """

    text: str = ""
    logprobs: Sequence[TokenLogprob] = field(default_factory=list)
    offsets: Sequence[int] = field(default_factory=list)
    finish_reason: str | None = None

    def parted(self) -> list[News]:
        """As chunks: what there is to say, and, by itself, the end."""
        parts = [News(self.text, self.logprobs, self.offsets)] if self.text or self.logprobs else []
        return parts if self.finish_reason is None else [*parts, News(finish_reason=self.finish_reason)]


class Choice:
    """One answer as its client sees it. ``piece`` gives a token's bytes; ``has_logprobs``: they were asked for."""

    def __init__(self, index: int, piece: PieceOf, has_logprobs: bool = False) -> None:
        self.index, self.piece, self.has_logprobs = index, piece, has_logprobs
        self.stats = Stats()
        self.text = ""
        self.finish_reason: str | None = None
        self.logprobs: list[TokenLogprob] = []  # told so far
        self._starts: list[int] = []  # the character that each token's text begins at
        self._n_decoded = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, events: Sequence[Event]) -> News:
        """What ``events`` add. A token's log probability waits until nothing can take its text back."""
        text = ""
        for event in events:
            if isinstance(event, PrefillDone | Finished):
                self.stats.sequence = event.sequence
            self.stats.observe(event)
            if isinstance(event, Text):
                text += event.text
            elif isinstance(event, Logprobs):
                for token in event.tokens:
                    self._place(self.piece(token.token))
            elif isinstance(event, Finished):
                self.finish_reason = _REASONS[event.reason]
        self.text += text
        released = self._released()
        n_told = len(self.logprobs)
        return News(text, released, self._starts[n_told - len(released) : n_told], self.finish_reason)

    def _place(self, piece: bytes) -> None:
        """Find the next token's first character, as ``TextStream`` does."""
        n_broken = breaks(self._decoder.getstate()[0], piece)  # its U+FFFD belongs to the tokens before
        self._starts.append(self._n_decoded + n_broken)
        self._n_decoded += len(self._decoder.decode(piece))

    def _released(self) -> Sequence[TokenLogprob]:
        known, n_told = self.stats.logprobs or [], len(self.logprobs)
        n_final = n_told
        if self.finish_reason is not None:
            n_final = len(known)
        else:
            while n_final < len(known) and self._starts[n_final] < len(self.text):
                n_final += 1
        released = known[n_told:n_final]
        self.logprobs += released
        return released

    @property
    def offsets(self) -> Sequence[int]:
        """The character of the answer that each token of ``logprobs`` begins at."""
        return self._starts[: len(self.logprobs)]

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer, the one that ended it included."""
        return len(self.stats.tokens) if self.stats.tokens is not None else 0


def usage(choices: Sequence[Choice], n_prompt: int, n_each: int) -> Json:
    """Tokens counted; a prompt counts once, however many choices (``n_each``) it has: by the first of them.

    Rejected draft tokens are no part of ``completion_tokens``.
    """
    n_completion = sum(choice.n_tokens for choice in choices)
    accepted = sum(choice.stats.accepted for choice in choices)
    proposed = sum(choice.stats.proposed for choice in choices)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.stats.n_reused for choice in choices[::n_each])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
        },
    }


def timings(stats: Stats) -> Json:
    """As llama-server's ``timings`` of one answer; ms, tokens per second; undefined is null."""
    n_evaluated, prompt_ms = stats.n_evaluated, None if stats.prefill_s is None else 1000 * stats.prefill_s
    n, tpot_ms = stats.n_tokens, stats.tpot_ms
    return {
        "cache_n": stats.n_reused,
        "prompt_n": n_evaluated,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / n_evaluated if prompt_ms is not None and n_evaluated else None,
        "prompt_per_second": stats.prefill_tok_s,
        "predicted_n": n,
        "predicted_ms": None if tpot_ms is None else tpot_ms * (n - 1),
        "predicted_per_token_ms": tpot_ms,
        "predicted_per_second": stats.decode_tok_s,
        "draft_n": stats.proposed,
        "draft_n_accepted": stats.accepted,
    }


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all objects of one reply share. ``created``: Unix time (s). ``n_each``: choices of each prompt."""

    id: str
    created: int
    model: str
    is_chat: bool
    n_each: int = 1

    def whole(self, choices: Sequence[Choice], n_prompt: int) -> Json:
        """The reply in one piece."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        reply = self._object(kind, [self._whole_choice(choice) for choice in choices])
        reply["usage"] = usage(choices, n_prompt, self.n_each)
        reply["timings"] = timings(choices[0].stats)
        return reply

    def _whole_choice(self, choice: Choice) -> Json:
        if self.is_chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            logprobs = _chat_logprobs(choice.logprobs, choice.piece) if choice.has_logprobs else None
            return {
                "index": choice.index,
                "message": message,
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
            }
        logprobs = _legacy_logprobs(choice.logprobs, choice.piece, choice.offsets) if choice.has_logprobs else None
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }

    def role(self, choice: Choice) -> Json:
        """The first chunk of a chat's choice."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        part = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._object("chat.completion.chunk", [part])

    def chunk(self, choice: Choice, news: News) -> Json:
        """What is new, as a chunk of a stream; the last one says why the answer ended."""
        has_logprobs = choice.has_logprobs and bool(news.logprobs)
        if self.is_chat:
            logprobs = _chat_logprobs(news.logprobs, choice.piece) if has_logprobs else None
            part = {"index": choice.index, "delta": {"content": news.text} if news.text else {}}
            kind = "chat.completion.chunk"
        else:
            logprobs = _legacy_logprobs(news.logprobs, choice.piece, news.offsets) if has_logprobs else None
            part = {"index": choice.index, "text": news.text}
            kind = "text_completion"
        return self._object(kind, [{**part, "logprobs": logprobs, "finish_reason": news.finish_reason}])

    def counts(self, choices: Sequence[Choice], n_prompt: int) -> Json:
        """The chunk behind the last one, for ``include_usage``."""
        reply = self._object("chat.completion.chunk" if self.is_chat else "text_completion", [])
        return {**reply, "usage": usage(choices, n_prompt, self.n_each), "timings": timings(choices[0].stats)}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


def _chat_logprobs(tokens: Sequence[TokenLogprob], piece: PieceOf) -> Json:
    def entry(token: int, logprob: float) -> Json:
        raw = piece(token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(LEAST_LOGPROB, logprob), "bytes": list(raw)}

    content = [
        {**entry(told.token, told.logprob), "top_logprobs": [entry(*best) for best in told.top]} for told in tokens
    ]
    return {"content": content, "refusal": None}


def _legacy_logprobs(tokens: Sequence[TokenLogprob], piece: PieceOf, offsets: Sequence[int]) -> Json:
    """Of ``/v1/completions``. ``offsets``: the character of the answer that each token begins at."""

    def text(token: int) -> str:
        return piece(token).decode("utf-8", "replace")

    tops: list[dict[str, float]] = [{} for _ in tokens]
    for told, top in zip(tokens, tops, strict=True):
        for token, logprob in told.top:  # best first: of two with one text the likelier counts
            top.setdefault(text(token), max(LEAST_LOGPROB, logprob))
    return {
        "tokens": [text(told.token) for told in tokens],
        "token_logprobs": [max(LEAST_LOGPROB, told.logprob) for told in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def problem(message: str, status: int, param: str | None = None, code: str | None = None) -> Json:
    """The body of an error."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 504: "timeout_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
