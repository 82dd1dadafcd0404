"""What clients may ask, checked field by field: OpenAI's names, and llama-server's where OpenAI has none.

A field that is not known, or known and not supported, is an error that names it; nothing is ignored. A field that is
null counts as left out.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from specli.chat import Message
from specli.config import SamplingOptions, ServeOptions

MAX_SCHEMA = 64 << 10  # characters of a JSON schema
MAX_BIASES = 1024
MAX_LOGPROBS = 20

Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(strict=True)]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_Asked = TypeVar("_Asked", bound=BaseModel)


class Refusal(Exception):
    """A request that is not answered. ``status``: HTTP; ``param``: the field at fault, or None."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(_Model):
    """``stream_options``."""

    include_usage: bool | None = None


class JsonSchema(_Model):
    """``response_format.json_schema``."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Model):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to type json_schema, and to no other")
        return self


class TextPart(_Model):
    """A part of a message's content; only text is taken."""

    type: Literal["text"]
    text: Text


class ChatMessage(_Model):
    """One of ``messages``."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart] | None = None
    name: Text | None = None

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.content is None:
            raise ValueError("content is missing")
        if self.name is not None:
            raise ValueError("name is not supported, chat templates have no place for it")
        return self

    def message(self) -> Message:
        """For the chat template."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        return Message(_ROLES[self.role], text)


class Sampling(_Model):
    """What both interfaces share: how an answer is drawn and where it ends."""

    model: Text | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[Number, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Text | list[Text] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Annotated[Number, Field(ge=-100, le=100)]] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    user: Text | None = None

    @model_validator(mode="after")
    def _agree(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options was given without stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a chunk of counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def repeating_seed(self) -> int | None:
        """The seed in 32 bits, or None: -1 (llama-server's word for none) and null promise nothing."""
        return None if self.seed in (None, -1) else (self.seed or 0) % 2**32

    def sampling(self, base: SamplingOptions) -> SamplingOptions:
        """``base`` with what was asked for. Raises ``ConfigError`` or ``Refusal``."""
        changes: dict[str, Any] = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.logit_bias:
            changes["logit_bias"] = (*base.logit_bias, *self._biases())
        if self.response_format is not None and self.response_format.type != "text":
            changes["grammar"], changes["json_schema"] = "", self._schema()
        return replace(base, seed=base.seed if self.seed is None else self.repeating_seed, **changes)

    def _biases(self) -> list[tuple[int, float]]:
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            raise Refusal(f"logit_bias has {len(biases)} entries, expected at most {MAX_BIASES}", "logit_bias")
        found = []
        for token, bias in biases.items():
            if not token.isascii() or not token.isdigit() or len(token) > 9:
                raise Refusal(f"logit_bias has the key {token!r}, expected token ids", "logit_bias")
            found.append((int(token), -math.inf if bias == -100 else bias))  # OpenAI: -100 bans
        return found

    def _schema(self) -> str:
        asked = self.response_format
        if asked is None or asked.json_schema is None:
            return '{"type": "object"}'
        text = json.dumps(asked.json_schema.schema_)
        if len(text) > MAX_SCHEMA:
            raise Refusal(
                f"the JSON schema has {len(text)} characters, expected at most {MAX_SCHEMA}", "response_format"
            )
        return text

    def check_limits(self, options: ServeOptions) -> None:
        """Raise ``Refusal`` for more than the server takes."""
        if len(self.stops) > options.max_stops:
            raise Refusal(f"stop has {len(self.stops)} texts, expected at most {options.max_stops}", "stop")
        if any(not stop for stop in self.stops):
            raise Refusal("stop has an empty text, which stands everywhere; leave it out", "stop")
        if (self.n or 1) > options.max_choices:
            raise Refusal(f"n is {self.n}, expected at most {options.max_choices}", "n")

    def limit(self, options: ServeOptions) -> int | None:
        """Most tokens of an answer; None: until its end."""
        asked = self.asked_limit
        if options.n_predict < 0:
            return asked
        return options.n_predict if asked is None else min(asked, options.n_predict)

    @property
    def asked_limit(self) -> int | None:
        """What the client says of it."""
        return self.max_tokens

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: report nothing."""
        raise NotImplementedError


class ChatRequest(Sampling):
    """``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs was given without logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; leave one out")
        return self

    @property
    def asked_limit(self) -> int | None:
        """Under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_logprobs(self) -> int | None:
        """See ``Sampling``."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_limits(self, options: ServeOptions) -> None:
        """See ``Sampling``."""
        super().check_limits(options)
        if len(self.messages) > options.max_messages:
            found = f"messages has {len(self.messages)} of them, expected at most {options.max_messages}"
            raise Refusal(found, "messages")


Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1)]


class CompletionRequest(Sampling):
    """``/v1/completions``. ``prompt``: a text or token ids, or a list of either; each gets ``n`` choices."""

    prompt: Text | Ids | Annotated[list[Text], Field(min_length=1)] | Annotated[list[Ids], Field(min_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        given = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else [*given]

    @property
    def n_logprobs(self) -> int | None:
        """See ``Sampling``."""
        return self.logprobs

    def check_limits(self, options: ServeOptions) -> None:
        """See ``Sampling``."""
        super().check_limits(options)
        n_choices = len(self.prompts) * (self.n or 1)
        if n_choices > options.max_choices:
            raise Refusal(f"the request asks for {n_choices} choices, expected at most {options.max_choices}", "prompt")


class TokenizeRequest(_Model):
    """``/tokenize`` (llama-server)."""

    content: Text
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(_Model):
    """``/detokenize`` (llama-server)."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


class ApplyTemplateRequest(_Model):
    """``/apply-template`` (llama-server)."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]


def parse(kind: type[_Asked], body: bytes) -> _Asked:
    """``body`` as ``kind``. Raises ``Refusal`` with one line that names the field."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refusal(f"the body is a JSON {type(found).__name__}, expected an object")
    asked = {name: value for name, value in found.items() if value is not None}
    try:
        return kind.model_validate(asked)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refusal(kind: type[BaseModel], error: ValidationError) -> Refusal:
    """The first fault, in one line. What the client sent is not repeated at length: it may be long, or no JSON."""
    faults = error.errors(include_url=False, include_context=False)
    deepest = max(faults, key=lambda fault: (fault["type"] == "extra_forbidden", len(fault["loc"])))
    names = [str(part) for part in deepest["loc"] if not _is_branch(part)]
    param = ".".join(names) or None
    if deepest["type"] == "extra_forbidden":
        return Refusal(f"{param} is not supported here; leave it out", param, code="unsupported_parameter")
    if deepest["type"] == "missing":
        return Refusal(f"{param} is missing", param, code="missing_required_parameter")
    text = deepest["msg"].removeprefix("Value error, ")
    if param is None:
        return Refusal(text)
    found = deepest["input"]
    shown = f" (got {json.dumps(found)[:60]})" if isinstance(found, str | int | float | bool) else ""
    return Refusal(f"{param}: {text}{shown}", param)


_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    *("repeat_penalty", "repeat_last_n", "ignore_eos"),
)


def _is_branch(part: int | str) -> bool:
    """Whether Pydantic added ``part`` to tell which branch of a union was tried."""
    return isinstance(part, str) and (
        part.startswith(("list[", "constrained-", "function-")) or part in ("str", "dict", "bool")
    )
