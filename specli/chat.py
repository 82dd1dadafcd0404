"""Chat templates: the GGUF's own jinja2 template, sandboxed, and content that cannot forge control tokens.

Control text inside a user's message ("<|im_end|>") must stay text. Before rendering, a mark is put inside each such
text; after rendering the prompt is cut at the marks, and llama.cpp tokenizes the parts one by one, so that no part
holds a whole control text that the user wrote. A prompt without such text is one part: llama.cpp's own tokenization.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from specli.errors import ConfigError

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

_MARK = "\U0010fffe"  # a noncharacter: it means nothing in any text

Tokenize = Callable[[str, bool, bool], list[int]]  # (text, add_special, parse_special)
RenderBuiltin = Callable[[Sequence[tuple[str, str]]], str]  # pairs of role and content -> the prompt


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: ``role`` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's jinja2 ``source`` and the texts it may refer to. ``control_texts`` are all control tokens' texts.

    ``kwargs`` are more variables for the template (switches for thinking); ``builtin`` renders pairs of role and
    content in its place.
    """

    source: str
    bos_text: str = ""
    eos_text: str = ""
    control_texts: tuple[str, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    builtin: RenderBuiltin | None = None

    def parts(self, messages: Sequence[Message]) -> list[str]:
        """The rendered prompt, cut where content holds control text.

        Raises ``ConfigError`` with the template's own message.
        """
        guarded = [Message(m.role, self._guard(m.content)) for m in messages]
        return self._render(guarded).split(_MARK)

    def _guard(self, content: str) -> str:
        content = content.replace(_MARK, "\ufffd")
        texts = sorted((text for text in self.control_texts if len(text) > 1), key=len, reverse=True)
        if not any(text in content for text in texts):
            return content
        pattern = re.compile("|".join(map(re.escape, texts)))
        while (split := pattern.sub(lambda found: found[0][0] + _MARK + found[0][1:], content)) != content:
            content = split  # again: a shorter control text may remain in what was cut
        return content

    def _render(self, messages: Sequence[Message]) -> str:
        if self.builtin is not None:
            return self.builtin([(message.role, message.content) for message in messages])
        try:
            rendered: str = _environment().from_string(self.source).render(self._variables(messages))
        except Exception as error:  # a template is somebody else's program: it can raise anything
            raise ConfigError(
                f"the model's chat template refused this conversation: {error}; use --raw to complete the text as is"
            ) from error
        return rendered

    def _variables(self, messages: Sequence[Message]) -> dict[str, object]:
        return {
            "bos_token": self.bos_text,
            "eos_token": self.eos_text,
            "tools": None,
            "documents": None,
            **self.kwargs,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            "add_generation_prompt": True,
        }


def check_template(source: str) -> None:
    """Raise ``ConfigError`` if ``source`` is not jinja text."""
    from jinja2 import TemplateSyntaxError

    try:
        _environment().from_string(source)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template is not jinja text: line {error.lineno}: {error.message}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """The settings of Hugging Face's renderer, for which templates are written."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def tokenize_parts(parts: Sequence[str], tokenize: Tokenize, bos: int | None) -> list[int]:
    """Token ids of a rendered prompt. ``bos`` is put first if it is to be added and the template did not write it.

    Parts after the first are tokenized behind a newline, which is then dropped, so that vocabularies that put a
    space before a text (SentencePiece) do not put one at each cut.
    """
    ids: list[int] = []
    newline = tokenize("\n", False, True)
    for i, part in enumerate(parts):
        part_ids = tokenize("\n" + part if i else part, False, True)
        if i and part_ids[: len(newline)] == newline:
            part_ids = part_ids[len(newline) :]
        elif i:
            part_ids = tokenize(part, False, True)
        ids += part_ids
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
