"""What clients may ask, checked field by field: OpenAI's names, and llama-server's where OpenAI has none.

A field that is not known, or known and not supported, is an error that names it; nothing is ignored. A field that is
null counts as left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)

from specli.chat import Message
from specli.config import SamplingOptions, ServeOptions

MAX_STOP = 500  # characters of a stop string: looking for its beginning takes their square, for each token
MAX_TEXT = 1 << 20  # bytes of UTF-8 for /tokenize
MAX_TOKENS = 1 << 17  # that /tokenize answers and /detokenize takes: as JSON they hold the process 0.2 s
MAX_SCHEMA = 64 << 10  # characters of a JSON schema
MAX_BIASES = 1024
MAX_LOGPROBS = 20

MAX_REPEATED = 64  # characters of what a client sent that an error repeats


class Refusal(Exception):
    """A request that is not answered. ``status``: HTTP; ``param``: the field at fault, or None."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def scalar(text: str) -> str:
    """``text`` with U+FFFD for lone surrogates, which JSON can escape and no encoding takes."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shortened(text: str) -> str:
    """As much of ``text`` as an error may repeat, on one line."""
    shown = " ".join(scalar(text[: MAX_REPEATED + 1]).split())
    return shown if len(text) <= MAX_REPEATED else f"{shown[:MAX_REPEATED]}…"


def _branches(expected: str, kind_of: Callable[[Any], str | None]) -> Discriminator:
    """Which of several shapes a value is meant to be, so that an error tells of that one."""
    return Discriminator(kind_of, custom_error_type="shape", custom_error_message=f"expected {expected}")


def _kind_of_texts(given: object) -> str | None:
    return _ONE if isinstance(given, str) else _MANY if isinstance(given, list) else None


def _kind_of_prompt(given: object) -> str | None:
    first = given[0] if isinstance(given, list) and given else None
    return _ONE if isinstance(given, str) else {int: _IDS, str: _MANY, list: _LISTS}.get(type(first))


_ONE, _MANY, _IDS, _LISTS = _TAGS = ("<text>", "<texts>", "<ids>", "<lists>")
Number = Annotated[float, Field(allow_inf_nan=False)]
Text = Annotated[str, StringConstraints(strict=True), AfterValidator(scalar)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_Asked = TypeVar("_Asked", bound=BaseModel)


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _tidy(cls, given: Any) -> Any:  # noqa: ANN401
        """Null counts as left out. Of the fields that are not known only one is told: there may be many."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        tidy = {name: value for name, value in given.items() if value is not None and name in known}
        unknown = next((name for name, value in given.items() if value is not None and name not in known), None)
        return tidy if unknown is None else {**tidy, scalar(unknown[: MAX_REPEATED + 1]): None}


def _require_schema(given: object) -> object:
    if not isinstance(given, dict | bool):
        raise ValueError("expected an object, or true or false")
    return given


def _at_most(most: int) -> BeforeValidator:
    """Entries of a list or an object; before each of them is looked at."""

    def require(given: object) -> object:
        if isinstance(given, dict | list) and len(given) > most:
            raise ValueError(f"has {len(given)} entries, expected at most {most}")
        return given

    return BeforeValidator(require)


def _require_short(text: str) -> str:
    if (n_bytes := len(text.encode())) > MAX_TEXT:
        raise ValueError(f"has {n_bytes} bytes, expected at most {MAX_TEXT}; send it in parts")
    return text


class StreamOptions(_Model):
    """``stream_options``."""

    include_usage: bool | None = None


class JsonSchema(_Model):
    """``response_format.json_schema``."""

    name: Text | None = None
    description: Text | None = None
    schema_: Annotated[Any, AfterValidator(_require_schema)] = Field(default_factory=dict, alias="schema")
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
    content: Annotated[
        Annotated[Text, Tag(_ONE)] | Annotated[list[TextPart], Field(fail_fast=True), Tag(_MANY)],
        _branches("a text or a list of text parts", _kind_of_texts),
    ]

    def message(self) -> Message:
        """For the chat template."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return Message(_ROLES[self.role], text)


Messages = Annotated[list[ChatMessage], Field(fail_fast=True), Field(min_length=1)]


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
    repeat_penalty: Annotated[Number, Field(ge=1e-30, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: (
        Annotated[
            Annotated[Text, Tag(_ONE)] | Annotated[Texts, Tag(_MANY)],
            _branches("a text or a list of texts", _kind_of_texts),
        ]
        | None
    ) = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Annotated[Number, Field(ge=-100, le=100)]], _at_most(MAX_BIASES)] | None = None
    response_format: ResponseFormat | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    user: Text | None = None

    @model_validator(mode="after")
    def _agree(self) -> Sampling:
        if self.stream_options is not None and not self.stream:
            raise Refusal("stream_options was given without stream", "stream_options")
        if self.ignore_eos and self.is_constrained:
            found = "ignore_eos was given with response_format, which says where the text ends; leave one out"
            raise Refusal(found, "ignore_eos")
        return self

    @property
    def is_constrained(self) -> bool:
        """Whether ``response_format`` says what may come next."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def bans(self) -> list[str]:
        """The fields by which tokens may be forbidden."""
        return [
            *(["response_format"] if self.is_constrained else []),
            *(["logit_bias"] if self.logit_bias else []),
        ]

    @property
    def is_strict(self) -> bool:
        """Whether a schema is to be kept to the letter, or refused."""
        return self.response_format is not None and bool((self.response_format.json_schema or JsonSchema()).strict)

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
        if self.is_constrained:
            changes["grammar"], changes["json_schema"] = "", self._schema()
        return replace(base, seed=base.seed if self.seed is None else self.repeating_seed, **changes)

    def _biases(self) -> list[tuple[int, float]]:
        found = []
        for token, bias in (self.logit_bias or {}).items():
            if not token.isascii() or not token.isdigit() or len(token) > 9:
                raise Refusal(f"logit_bias has the key {shortened(token)!r}, expected token ids", "logit_bias")
            found.append((int(token), -math.inf if bias == -100 else bias))  # OpenAI: -100 bans
        return found

    def _schema(self) -> str:
        asked = self.response_format
        if asked is None or asked.json_schema is None:
            return '{"type": "object"}'
        try:
            text = json.dumps(asked.json_schema.schema_)
        except RecursionError:
            raise Refusal("the JSON schema is nested too deeply", "response_format") from None
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
        if any(len(stop) > MAX_STOP for stop in self.stops):
            raise Refusal(f"stop has a text of over {MAX_STOP} characters", "stop")
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


def _check_messages(messages: Sequence[ChatMessage], options: ServeOptions) -> None:
    if len(messages) > options.max_messages:
        raise Refusal(f"messages has {len(messages)} of them, expected at most {options.max_messages}", "messages")


class ChatRequest(Sampling):
    """``/v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _chat_agrees(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal("top_logprobs was given without logprobs", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise Refusal("max_tokens and max_completion_tokens differ; leave one out", "max_completion_tokens")
        return self

    @property
    def asked_limit(self) -> int | None:
        """Under either of its names."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: report nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check_limits(self, options: ServeOptions) -> None:
        """See ``Sampling``."""
        super().check_limits(options)
        _check_messages(self.messages, options)


Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True), Field(min_length=1)]


class CompletionRequest(Sampling):
    """``/v1/completions``. ``prompt``: a text or token ids, or a list of either; each gets ``n`` choices."""

    prompt: Annotated[
        Annotated[Text, Tag(_ONE)]
        | Annotated[Texts, Tag(_MANY)]
        | Annotated[Ids, Tag(_IDS)]
        | Annotated[list[Ids], Field(fail_fast=True), Tag(_LISTS)],
        _branches("a text, token ids, or a list of either, not empty", _kind_of_prompt),
    ]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        given = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else [*given]

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives to report for each token; None: report nothing."""
        return self.logprobs

    def check_limits(self, options: ServeOptions) -> None:
        """See ``Sampling``."""
        super().check_limits(options)
        n_choices = len(self.prompts) * (self.n or 1)
        if n_choices > options.max_choices:
            raise Refusal(f"the request asks for {n_choices} choices, expected at most {options.max_choices}", "prompt")


class TokenizeRequest(_Model):
    """``/tokenize`` (llama-server)."""

    content: Annotated[Text, AfterValidator(_require_short)]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(_Model):
    """``/detokenize`` (llama-server)."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True), _at_most(MAX_TOKENS)]


class ApplyTemplateRequest(_Model):
    """``/apply-template`` (llama-server)."""

    messages: Messages

    def check_limits(self, options: ServeOptions) -> None:
        """See ``Sampling``."""
        _check_messages(self.messages, options)


def parse(kind: type[_Asked], body: bytes) -> _Asked:
    """``body`` as ``kind``. Raises ``Refusal`` with one line that names the field."""
    found = _decoded(body)
    if not isinstance(found, dict):
        raise Refusal(f"the body is {_JSON_NAMES[type(found)]}, expected a JSON object")
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        raise _refusal(error) from None


def _decoded(body: bytes) -> object:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_object)
    except (json.JSONDecodeError, UnicodeDecodeError, _NotJson) as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    except RecursionError:
        raise Refusal("the body is nested too deeply") from None
    except ValueError:  # Python turns no more than some thousand digits into an int
        raise Refusal("the body has a number of too many digits") from None


class _NotJson(ValueError):
    pass


def _no_constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is not a JSON number")


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: of two alike one would be ignored."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise _NotJson(f"it has {json.dumps(shortened(twice))} twice")
    return found


def _refusal(error: ValidationError) -> Refusal:
    """One fault in one line. What the client sent is not repeated at length: it may be long, or no JSON."""
    faults = error.errors(include_url=False, include_context=False)
    told = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    *path, last = told["loc"] or ("",)
    is_extra = told["type"] == "extra_forbidden"
    names = [str(part) for part in (*path, last) if part not in _TAGS or (is_extra and part is last)]
    param = ".".join(shortened(name) for name in names) or None
    if is_extra:
        return Refusal(f"{param or repr('')} is not supported here; leave it out", param, code="unsupported_parameter")
    if told["type"] == "missing":
        return Refusal(f"{param} is missing", param, code="missing_required_parameter")
    text = _WORDS.get(told["type"], told["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1))
    found = told["input"]
    shown = f" (got {shortened(json.dumps(found))})" if isinstance(found, str | int | float | bool) else ""
    return Refusal(f"{param}: {text}{shown}", param)


_JSON_NAMES = {list: "a JSON list", str: "a JSON text", int: "a JSON number", float: "a JSON number"}
_JSON_NAMES |= {bool: "a JSON boolean", type(None): "null"}
_WORDS = {
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "expected an object"),
    "list_type": "expected a list",
    "too_short": "expected at least one",
}
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    *("repeat_penalty", "repeat_last_n", "ignore_eos"),
)
