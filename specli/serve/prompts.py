"""Prompts as token ids; what cannot fit is refused before it costs anything.

llama.cpp's time for a text grows with the square of the control texts in it: four megabytes of them would keep a core
busy for most of an hour. No more are taken than there is room for.
"""

from __future__ import annotations

import functools

from specli.errors import ConfigError
from specli.serve.protocol import MAX_TOKENS, ApplyTemplateRequest, ChatRequest, CompletionRequest, Refusal
from specli.session import Session

MAX_PARSED = 8192  # control texts in one /tokenize
_CHEAP = 4096  # characters: not worth a look
_ADVICE = "; use --raw"  # of the command line, to those who sit before it


class Prompts:
    """Makes token ids of what was asked. From any thread."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def ids(self, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Of each prompt, as many as fit the context. Raises ``Refusal``."""
        prompts = [self._chat(asked)] if isinstance(asked, ChatRequest) else [*map(self._raw, asked.prompts)]
        for prompt in prompts:
            self._check(prompt, _param(asked))
        return prompts

    def text(self, asked: ApplyTemplateRequest) -> str:
        """A conversation as the template renders it. Raises ``Refusal``."""
        template = self._session.template
        if template is None:
            raise Refusal("the model has no chat template; use /v1/completions", "messages")
        try:
            return "".join(template.parts([message.message() for message in asked.messages]))
        except ConfigError as error:
            raise Refusal(_said(error), "messages") from error

    def plain(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Ids of any text, for the context or not. Raises ``Refusal`` for too many, or too many control texts."""
        n_parsed = self._n_parsed(text)
        if n_parsed > MAX_PARSED:
            found = f"content has {n_parsed} control texts, expected at most {MAX_PARSED}; send it in parts"
            raise Refusal(found, "content")
        ids = self._session.model.tokenize(text, add_special, parse_special)
        if len(ids) > MAX_TOKENS:
            raise Refusal(f"content has {len(ids)} tokens, expected at most {MAX_TOKENS}; send it in parts", "content")
        return ids

    def _chat(self, asked: ChatRequest) -> list[int]:
        messages = [message.message() for message in asked.messages]
        self._check_length("".join(message.content for message in messages), "messages")
        if self._session.template is None:
            raise Refusal("the model has no chat template; use /v1/completions", "messages")
        try:
            return self._session.chat_ids(messages)
        except ConfigError as error:
            raise Refusal(_said(error), "messages") from error

    def _raw(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        self._check_length(prompt, "prompt")
        return self._session.text_ids(prompt)

    def _check(self, ids: list[int], param: str) -> None:
        engine = self._session.engine
        if not ids:
            raise Refusal("the prompt is empty (0 tokens), at least one token was expected", param)
        if len(ids) > engine.n_ctx:
            raise _too_long(f"{len(ids)}", engine.n_ctx, param)
        if max(ids) >= engine.n_vocab:
            raise Refusal(f"the prompt has the token {max(ids)}, the model has 0 to {engine.n_vocab - 1}", param)

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a text that cannot have few enough tokens."""
        if len(text) <= _CHEAP:
            return
        n_least = max(len(text.encode()) // self._session.model.longest_text, self._n_parsed(text))
        if n_least > self._session.engine.n_ctx:
            raise _too_long(f"at least {n_least}", self._session.engine.n_ctx, param)

    def _n_parsed(self, text: str) -> int:
        """How many tokens of ``text`` are control texts or the like, at least."""
        return 0 if len(text) <= _CHEAP else sum(map(text.count, self._parsed))

    @functools.cached_property
    def _parsed(self) -> tuple[str, ...]:
        """Texts that are one token wherever they stand, and part of no other."""
        texts = [text for text in self._session.model.parsed_texts if len(text) > 2]
        joined = "\0".join(texts)
        return tuple(text for text in texts if joined.count(text) == 1)


def _too_long(n: str, n_ctx: int, param: str) -> Refusal:
    found = f"the prompt has {n} tokens, the context of an answer holds {n_ctx}"
    return Refusal(found, param, code="context_length_exceeded")


def _param(asked: ChatRequest | CompletionRequest) -> str:
    return "messages" if isinstance(asked, ChatRequest) else "prompt"


def _said(error: ConfigError) -> str:
    return " ".join(str(error).partition(_ADVICE)[0].split())[:500]
