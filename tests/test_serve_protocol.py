"""What clients may ask: every field's range, and errors that name the field in one short line."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import pytest

from specli.config import SamplingOptions, ServeOptions
from specli.serve.protocol import (
    MAX_BIASES,
    ApplyTemplateRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refusal,
    TokenizeRequest,
    parse,
)

USER = {"role": "user", "content": "hi"}


def chat(**asked: object) -> ChatRequest:
    return parse(ChatRequest, json.dumps({"messages": [USER], **asked}).encode())


def complete(prompt: object = "hi", **asked: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": prompt, **asked}).encode())


def refusal(kind: type, body: object) -> Refusal:
    """The error, whose message must be one short line that JSON can say."""
    with pytest.raises(Refusal) as raised:
        parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    told = raised.value
    assert told.status == 400
    assert "\n" not in told.message
    assert len(told.message) < 300
    json.dumps([told.message, told.param], ensure_ascii=False, allow_nan=False).encode("utf-8")
    assert told.param is None or told.param in told.message
    assert not any(word in told.message for word in ("None ", "tagged-union", "function-", "str]", "<ids", "dict["))
    return told


def refused(**asked: object) -> Refusal:
    body = json.dumps({"messages": [USER], **asked}).replace("Infinity", "1e999")  # which is JSON
    return refusal(ChatRequest, body.encode())


# -- ranges

RANGES = [
    ("temperature", [0, 1e-9, 0.7, 2, 1e9], [-1, -1e-9, 1e999, "0.7", True, [], 10**400]),
    ("top_p", [1e-9, 0.5, 1, 1.0], [0, -1, 1.1, "1", False]),
    ("min_p", [0, 0.05, 1], [-0.1, 1.1, "0"]),
    ("typical_p", [0.1, 1], [0, 1.1, -1]),
    ("top_k", [-1, 0, 40, 2**31 - 1], [-2, 2**31, 1.5, "40", True, 10**400]),
    ("presence_penalty", [-2, 0, 2], [-2.1, 2.1, 10, "1"]),
    ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1, 10, "1"]),
    ("repeat_penalty", [1e-30, 1, 10], [0, -1, 10.1, 1e-300]),
    ("repeat_last_n", [-1, 0, 64], [-2, 2**31, 1.5]),
    ("seed", [-(2**63), -1, 0, 2**64 - 1], [-(2**63) - 1, 2**64, 1.5, "1", 10**400]),
    ("max_tokens", [0, 1, 2**31 - 1], [-1, 2**31, 1.5, "1"]),
    ("max_completion_tokens", [0, 1], [-1, 1.5]),
    ("n", [1, 16, 2**31], [0, -1, 1.0, "2", True]),
    ("stop", ["x", [], ["a", "b"]], [5, [5], ["a", None], {"a": 1}]),
    ("stream", [True, False], ["true", 1, 0]),
    ("logprobs", [True, False], [1, "true"]),
    ("logit_bias", [{}, {"1": 100, "2": -100}], [{"1": 101}, {"1": "x"}, [], {"1": 1e999}]),
    ("ignore_eos", [True, False], [1]),
    ("cache_prompt", [True, False], [1]),
    ("user", ["me"], [5]),
    ("model", ["x"], [5]),
    ("response_format", [{"type": "text"}, {"type": "json_object"}], [{"type": "xml"}, {}, "json", {"type": None}]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _ in RANGES for value in good])
def test_takes(name: str, value: object) -> None:
    assert getattr(chat(**{name: value}), name) is not None


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, bad in RANGES for value in bad])
def test_refuses(name: str, value: object) -> None:
    told = refused(**{name: value})
    assert told.message.startswith(name)
    assert told.param is not None
    assert told.param.split(".")[0] == name


@pytest.mark.parametrize("name", [name for name, _, _ in RANGES])
def test_null_is_the_default(name: str) -> None:
    assert chat(**{name: None}).sampling(SamplingOptions()) == SamplingOptions()


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("name", ["temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"])
def test_what_is_no_json_number_is_refused(name: str, text: str) -> None:
    """Cases H18, H19: NaN passes every comparison that looks for what is too small."""
    body = f'{{"messages": [{json.dumps(USER)}], "{name}": {text}}}'.encode()
    assert text in refusal(ChatRequest, body).message


def test_legacy_logprobs_are_a_number() -> None:
    assert [complete(logprobs=n).n_logprobs for n in (None, 0, 20)] == [None, 0, 20]
    for value in (21, -1, True):
        assert refusal(CompletionRequest, {"prompt": "hi", "logprobs": value}).param == "logprobs"


def test_top_logprobs_need_logprobs() -> None:
    assert chat(logprobs=True).n_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).n_logprobs == 20
    assert chat(logprobs=False).n_logprobs is None
    assert refused(top_logprobs=1).param == "top_logprobs"
    assert refused(logprobs=False, top_logprobs=0).param == "top_logprobs"
    assert refused(logprobs=True, top_logprobs=21).param == "top_logprobs"


# -- names


@pytest.mark.parametrize("name", ["foo", "tools", "best_of", "str", "dict", "list[x]", "<text>", "", "a.b", "schema_"])
def test_an_unknown_field_is_named(name: str) -> None:
    told = refused(**{name: 1})
    assert told.message == f"{name or repr(name)} is not supported here; leave it out"
    assert told.param == (name or None)
    assert told.code == "unsupported_parameter"


def test_an_unknown_field_that_is_null_counts_as_left_out() -> None:
    assert chat(tools=None).stops == ()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("x", "messages"),
        ({}, "messages"),
        ([5], "messages.0"),
        ([USER, []], "messages.1"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "bot", "content": "x"}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": {"str": 1}}], "messages.0.content"),
        ([{"role": "user", "content": [5]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0.type"),
        (
            [USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "A" * 9999}}]}],
            "messages.1.content.0.image_url",
        ),
        ([{"role": "user", "content": "x", "name": "bob"}], "messages.0.name"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages.0.tool_call_id"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls"),
    ],
)
def test_a_fault_in_messages_is_named(messages: object, param: str) -> None:
    for kind in (ChatRequest, ApplyTemplateRequest):
        told = refusal(kind, {"messages": messages})
        assert told.param == param
        assert told.message.startswith(param)


def test_an_answer_of_ours_may_be_sent_back() -> None:
    """Clients append the message as they got it, nulls and all."""
    told = {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": None}
    assert chat(messages=[USER, told, USER]).messages[1].message().content == "x"


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "developer", "content": parts}]).messages[0].message().content == "ab"
    assert chat(messages=[{"role": "developer", "content": "x"}]).messages[0].message().role == "system"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        *((value, "prompt") for value in (5, 1.5, {}, [], [{}], [1.5], [True], [None], True)),
        *(([1, "a"], "prompt.1"), (["a", 1], "prompt.1"), ([1, 2.5], "prompt.1"), ([-1], "prompt.0")),
        *(([2**31], "prompt.0"), ([10**400], "prompt.0"), ([[]], "prompt.0"), ([[1], []], "prompt.1")),
        *(([[1], ["a"]], "prompt.1.0"), ([[1], 2], "prompt.1"), ([[1], "a"], "prompt.1")),
    ],
)
def test_a_fault_in_prompt_is_named(prompt: object, param: str) -> None:
    told = refusal(CompletionRequest, {"prompt": prompt})
    assert told.param == param
    assert told.message.startswith(f"{param}: expected ")


def test_prompts() -> None:
    assert complete("a").prompts == ["a"]
    assert complete(["a", "b"]).prompts == ["a", "b"]
    assert complete([1, 2]).prompts == [[1, 2]]
    assert complete([[1], [2, 3]]).prompts == [[1], [2, 3]]


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_what_is_missing_is_named(kind: type) -> None:
    told = refusal(kind, {})
    assert told.param in ("messages", "prompt", "content", "tokens")
    assert told.message == f"{told.param} is missing"
    assert told.code == "missing_required_parameter"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "response_format"),
        ({"type": "json_schema", "json_schema": {"schema": 5}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "foo": 1}}, "response_format.json_schema.foo"),
        ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
        ({"type": "text", "x": 1}, "response_format.x"),
    ],
)
def test_a_fault_in_response_format_is_named(body: object, param: str) -> None:
    assert refused(response_format=body).param == param


def test_stream_options_need_a_stream() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).includes_usage
    assert not chat(stream=True, stream_options={}).includes_usage
    assert refused(stream_options={"include_usage": True}).param == "stream_options"
    assert refused(stream=True, stream_options={"x": 1}).param == "stream_options.x"
    assert refused(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


def test_two_limits_that_differ_are_refused() -> None:
    assert refused(max_tokens=1, max_completion_tokens=2).param == "max_completion_tokens"
    assert chat(max_tokens=1, max_completion_tokens=1).asked_limit == 1


def test_ignore_eos_has_no_place_beside_a_schema() -> None:
    assert refused(ignore_eos=True, response_format={"type": "json_object"}).param == "ignore_eos"


# -- bodies


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"true",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
        b'{"messages": [{"role": "user", "content": "\xc3"}]}',
        b"\0",
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
        "{}".encode("utf-16"),
    ],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    told = refusal(ChatRequest, body)
    assert told.message.startswith("the body ")
    assert told.param is None


def test_a_name_that_comes_twice_is_refused() -> None:
    """One of the two would be ignored, and a proxy before us may have looked at the other."""
    body = b'{"messages": [{"role": "user", "content": "hi", "content": "ho"}]}'
    assert '"content" twice' in refusal(ChatRequest, body).message
    assert "twice" in refusal(ChatRequest, b'{"n": 1, "messages": [], "n": 1}').message


@pytest.mark.parametrize("name", ["x" * 100_000, "\ud800", "a\nb", "\0", "temperature "])
def test_a_strange_name_is_not_repeated_at_length(name: str) -> None:
    assert refused(**{name: 1}).code == "unsupported_parameter"
    assert refused(messages=[{**USER, name: 1}]).code == "unsupported_parameter"
    assert refused(**{name: 1}, temperature=5).code == "unsupported_parameter"


@pytest.mark.parametrize("value", ["x" * 1_000_000, "\ud800", "a\nb", 10**4000, -(10**400), 1e999])
def test_a_strange_value_is_not_repeated_at_length(value: object) -> None:
    for name in ("temperature", "seed", "stream"):
        assert refused(**{name: value}).param == name


def test_lone_surrogates_become_replacement_characters() -> None:
    asked = chat(messages=[{"role": "user", "content": "a\ud800b\U0001f600"}], stop="\udc00", model="\ud800")
    assert asked.messages[0].message().content == "a�b\U0001f600"
    assert asked.stops == ("�",)
    assert complete("\ud83d").prompts == ["�"]


def test_nul_is_text() -> None:
    assert complete("a\0b").prompts == ["a\0b"]


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, b'{"messages": [' + b"1," * 500_000 + b"1]}"),
        (ChatRequest, b'{"messages": [' + b"{}," * 500_000 + b"{}]}"),
        (ChatRequest, b'{"messages": [{"role": "user", "content": [' + b"{}," * 500_000 + b"{}]}]}"),
        (CompletionRequest, b'{"prompt": [1' + b',"a"' * 500_000 + b"]}"),
        (CompletionRequest, b'{"prompt": [[1]' + b",[]" * 500_000 + b"]}"),
        (CompletionRequest, b'{"prompt": "x", "stop": [' + b"1," * 500_000 + b"1]}"),
        (DetokenizeRequest, b'{"tokens": [' + b"-1," * 500_000 + b"1]}"),
        (ChatRequest, json.dumps({"messages": [USER], **{f"x{i}": i for i in range(100_000)}}).encode()),
        (ChatRequest, json.dumps({"messages": [{**USER, **{f"x{i}": i for i in range(100_000)}}]}).encode()),
        (ChatRequest, json.dumps({"messages": [USER], "logit_bias": {str(i): "x" for i in range(100_000)}}).encode()),
    ],
)
def test_a_million_faults_are_not_all_written_down(kind: type, body: bytes) -> None:
    """They would be: several hundred bytes for each, and the event loop stands still."""
    import tracemalloc

    tracemalloc.start()
    try:
        refusal(kind, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 60 * len(body)


# -- what becomes of it


def test_an_unmentioned_setting_is_the_server_s() -> None:
    base = SamplingOptions(temperature=0.3, top_k=7, seed=5, logit_bias=((3, 1.0),))
    assert chat().sampling(base) == base
    changed = chat(temperature=0, seed=6, logit_bias={"4": -100}).sampling(base)
    assert (changed.temperature, changed.top_k, changed.seed) == (0, 7, 6)
    assert changed.logit_bias == ((3, 1.0), (4, -math.inf))


@pytest.mark.parametrize(("given", "seed"), [(-1, None), (0, 0), (2**32 + 5, 5), (-2, 2**32 - 2)])
def test_seeds_are_32_bits(given: int, seed: int | None) -> None:
    assert chat(seed=given).sampling(SamplingOptions(seed=3)).seed == seed


def test_ranges_are_within_those_of_the_chain() -> None:
    """Or the error would speak of a flag."""
    for name, good, _ in RANGES:
        for value in good:
            chat(**{name: value}).sampling(SamplingOptions())


@pytest.mark.parametrize("key", ["a", "-1", "1.5", "", "²", "1" * 5000, "\ud800"])
def test_biases_name_tokens(key: str) -> None:
    with pytest.raises(Refusal) as raised:
        chat(logit_bias={key: 1}).sampling(SamplingOptions())
    assert raised.value.param == "logit_bias"
    assert len(raised.value.message) < 200


def test_at_most_so_many_biases() -> None:
    chat(logit_bias={str(i): 1 for i in range(MAX_BIASES)})
    assert refused(logit_bias={str(i): 1 for i in range(MAX_BIASES + 1)}).param == "logit_bias"


def test_a_schema_is_bounded() -> None:
    schema = {"type": "string", "const": "x" * 70_000}
    asked = chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    with pytest.raises(Refusal) as raised:
        asked.sampling(SamplingOptions())
    assert raised.value.param == "response_format"


def test_a_schema_nested_as_deeply_as_json_can_be_is_no_fault_of_the_server() -> None:
    for depth in (300, 900, 950, 980):
        body = b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", '
        body += b'"json_schema": {"schema": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}}}"
        with suppress(Refusal):
            parse(ChatRequest, body).sampling(SamplingOptions())


OPTIONS = ServeOptions(max_stops=2, max_choices=3, max_messages=2, n_predict=5)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (lambda: chat(stop=["a", "b", "c"]), "stop"),
        (lambda: chat(stop=[""]), "stop"),
        (lambda: chat(stop=""), "stop"),
        (lambda: chat(n=4), "n"),
        (lambda: chat(messages=[USER] * 3), "messages"),
        (lambda: complete(["a", "b"], n=2), "prompt"),
        (lambda: complete([[1]] * 4), "prompt"),
        (lambda: complete(["a"] * 100_000), "prompt"),
    ],
)
def test_limits(asked, param: str) -> None:
    with pytest.raises(Refusal) as raised:
        asked().check_limits(OPTIONS)
    assert raised.value.param == param


def test_a_limit_on_tokens_holds_for_all() -> None:
    assert [chat(max_tokens=n).limit(OPTIONS) for n in (None, 0, 4, 6)] == [5, 0, 4, 5]
    assert [chat(max_tokens=n).limit(ServeOptions()) for n in (None, 0, 4)] == [None, 0, 4]
