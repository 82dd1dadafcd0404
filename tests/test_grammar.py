"""Grammars and JSON schemas: llama.cpp's engine asked for few tokens gives what it gives for all of them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from specli.chain import check_constraint, make_sampler
from specli.config import ModelOptions, SamplingOptions
from specli.engine.grammar import REPETITION, Grammar, Pieces, check_grammar, compile_grammar
from specli.engine.llama import LlamaModel
from specli.engine.pattern import nested_repeats, optional_parts, optional_run
from specli.engine.schema import schema_grammar, unenforced
from specli.errors import ConfigError, EngineError
from specli.sampling import Context, Sampler, State

TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
GRAMMARS = {
    "words": r'root ::= ("yes" | "no" | "never") " "? [a-z]+ "."',
    "unicode": 'root ::= [à-ü€😀]+ "x"?',
    "list": 'root ::= "[" (item ("," item)*)? "]"\nitem ::= [0-9]+ | "\\"" [^"]* "\\""',
    "anything": "root ::= [^\\x00]*",
    "json": "",
    "tokens by id": 'root ::= <[40]> ("abc" | <[41]> | !<[42]>) [a-z]* # a comment, "quoted"',
}


@pytest.fixture(scope="module", params=["tiny", "real"])
def model(request: pytest.FixtureRequest) -> Iterator[LlamaModel]:
    """A vocabulary of single bytes, and a real one of 49,152 tokens."""
    if request.param == "tiny":
        path: Path = request.getfixturevalue("tiny_model")()
    else:
        path = request.getfixturevalue("q4_0_path")
    loaded = LlamaModel(ModelOptions(path), lambda _fraction: None, lambda: False)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def pieces(model: LlamaModel) -> Pieces:
    return Pieces(model)


def asked_for_all(grammar: Grammar, n_vocab: int) -> np.ndarray:
    """llama.cpp's own answer for the whole vocabulary."""
    data = np.zeros(n_vocab, TOKEN_DATA)
    data["id"] = np.arange(n_vocab)
    pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
    array = llama_cpp.llama_token_data_array(data=pointer, size=n_vocab, selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(grammar._sampler, ctypes.byref(array))
    return np.flatnonzero(data["logit"] == 0)


@pytest.mark.parametrize("name", GRAMMARS)
def test_few_questions_give_the_same_answer(model: LlamaModel, pieces: Pieces, name: str) -> None:
    text = GRAMMARS[name] or schema_grammar('{"type": "object"}')
    for seed in range(3):
        rng, grammar = np.random.default_rng(seed), compile_grammar(model, text, pieces)
        for step in range(12):
            wanted = asked_for_all(grammar, model.n_vocab)
            if wanted.size == 0:
                break
            row = rng.normal(0, 3, model.n_vocab).astype(np.float32)
            row[rng.random(row.size) < 0.1] = -np.inf
            best = wanted[row[wanted] > -np.inf]
            best = best[np.lexsort((best, -row[best]))]
            for n in (1, 40) if step % 2 else (40, None, 3):
                assert grammar.best(row, n).tolist() == best[:n].tolist()
            assert grammar.forced() == (int(wanted[0]) if wanted.size == 1 else None)
            token = int(rng.choice(wanted))
            assert grammar.allows(token)
            if token in model.end_ids:
                break
            before = grammar
            grammar = grammar.after(token)
            assert asked_for_all(before, model.n_vocab).tolist() == wanted.tolist()  # what was handed out stays


def test_the_end_comes_where_the_grammar_ends(model: LlamaModel, pieces: Pieces) -> None:
    grammar = compile_grammar(model, 'root ::= "ab"', pieces)
    a = next(token for token in range(model.n_vocab) if model.special_piece(token) == b"a")
    b = next(token for token in range(model.n_vocab) if model.special_piece(token) == b"b")
    assert not any(grammar.allows(token) for token in model.end_ids)
    assert grammar.after(a).forced() == b
    done = grammar.after(a).after(b)
    assert set(asked_for_all(done, model.n_vocab).tolist()) == model.end_ids
    end = min(model.end_ids)
    assert done.after(end).best(np.zeros(model.n_vocab, np.float32), 5).size == len(model.end_ids)


@pytest.mark.parametrize("options", [{}, {"top_k": 0}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 0.0}])
def test_the_mask_comes_before_the_chain(model: LlamaModel, pieces: Pieces, options: dict[str, float]) -> None:
    """A row with everything that is forbidden at -inf gives the same distribution."""
    grammar = compile_grammar(model, 'root ::= [0-9]+ | "no"', pieces)
    allowed = asked_for_all(grammar, model.n_vocab)
    plain, masked = Sampler(**options), Sampler(**options, constraint=grammar)  # type: ignore[arg-type]
    for seed in range(5):
        row = np.random.default_rng(seed).normal(0, 4, model.n_vocab).astype(np.float32)
        alone = np.full_like(row, -np.inf)
        alone[allowed] = row[allowed]
        context = Context(state=masked.start())
        if plain.is_greedy:
            assert masked.argmax(row, context) == plain.argmax(alone)
            continue
        ours, wanted = masked.distribution(row, context), plain.distribution(alone)
        assert ours.ids.tolist() == wanted.ids.tolist()
        np.testing.assert_allclose(ours.probs, wanted.probs, rtol=1e-12)


def test_a_dead_end_is_named(model: LlamaModel, pieces: Pieces) -> None:
    grammar = compile_grammar(model, 'root ::= "ab"', pieces)
    chain = Sampler(constraint=grammar, banned=tuple(asked_for_all(grammar, model.n_vocab).tolist()))
    with pytest.raises(EngineError, match="allows no token behind 3 tokens"):
        chain.distribution(np.zeros(model.n_vocab, np.float32), Context([1, 2, 3], state=chain.start()))
    with pytest.raises(EngineError, match="nan"):
        Sampler(constraint=grammar).distribution(
            np.full(model.n_vocab, np.nan, np.float32), Context(state=State(grammar))
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('root ::= "a"\nitem := "b"', "in line 2, column 6: expecting ::="),
        ('root ::= "a" (', "in line 1, column 15"),
        ('root ::= "a" )', "in line 1, column 14"),
        ("root ::= thing", "Undefined rule identifier 'thing'"),
        ('thing ::= "a"', "does not contain a 'root' symbol"),
        ("root ::= root 'a'", "wrong"),
        ('root ::= root "a" | "b"', "left recursion"),
        ('root ::= "\\q"', "in line 1, column 11: unknown escape"),
        ('root ::= "ä"\n\n  x ::= %', "in line 3, column 9"),
        ('root ::= "a\0b"', "NUL"),
        ('root ::= "a"{5,2}', "{5,2}, whose maximum is below its minimum"),
        ('root ::= "a"{0,2001}', "repeats something 2001 times, at most 2000 were expected"),
        ('root ::= "a"{2001}', "repeats something 2001 times, at most 2000 were expected"),
        ('root ::= "a"{2001,}', "repeats something 2001 times, at most 2000 were expected"),
        ('root ::= "a"{1,99999999999999999999}', "numbers of at most 5 digits"),
        ("root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(20_000)), "rules, at most 10000"),
        ("root ::= " + "(" * 20_000 + "[a-z]" + ")" * 20_000, "nests 20000 parentheses, at most 1000"),
    ],
)
def test_a_wrong_grammar_is_named_with_its_place(text: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_grammar(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_parsing_from_several_threads_leaves_stderr_alone(capfd: pytest.CaptureFixture[str]) -> None:
    def check() -> None:
        for text in ('root ::= "a"', "root ::= (") * 20:
            with contextlib.suppress(ConfigError):
                check_grammar(text)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


SCHEMAS = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]},
    {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "number"}, {"const": "x"}]},
    {"$defs": {"n": {"type": "integer"}}, "type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_schemas_become_grammars_that_llama_cpp_takes(schema: object) -> None:
    check_grammar(schema_grammar(json.dumps(schema)))


def test_strings_of_a_schema_hold_nothing_that_json_forbids(model: LlamaModel, pieces: Pieces) -> None:
    """llama-cpp-python's own converter lets control characters in, and a quote where a pattern has a dot."""
    for schema in ({"type": "string"}, {"type": "string", "pattern": "^.*$"}, {"type": "string", "pattern": "^[^a]*$"}):
        grammar = compile_grammar(model, schema_grammar(json.dumps(schema)), pieces)
        quote = next(token for token in range(model.n_vocab) if model.special_piece(token) == b'"')
        allowed = asked_for_all(grammar.after(quote), model.n_vocab)
        texts = [model.special_piece(int(token)) for token in allowed if int(token) not in model.end_ids]
        assert len(texts) > 90
        assert not [text for text in texts if any(byte < 32 or byte == 127 for byte in text)]
        if "pattern" in schema:
            assert not [text for text in texts if b'"' in text.rstrip(b" ").removesuffix(b'"')]


@pytest.mark.parametrize("value", ["a\nb", "a\\b", 'a"b', "😀 ok", "\t\u0001", "plain", 3, None, "\u0000"])
def test_a_constant_comes_out_as_it_is(model: LlamaModel, pieces: Pieces, value: object) -> None:
    """Followed greedily, a row that prefers nothing gives JSON of that value; as a property name too."""
    for schema, wanted in (
        ({"const": value}, value),
        ({"type": "object", "properties": {str(value): {"const": 1}}, "required": [str(value)]}, {str(value): 1}),
    ):
        grammar, text = compile_grammar(model, schema_grammar(json.dumps(schema)), pieces), b""
        row = np.zeros(model.n_vocab, np.float32)
        row[sorted(model.end_ids)] = 1.0  # ends as soon as it may
        for _ in range(100):
            token = int(grammar.best(row, 1)[0])
            if token in model.end_ids:
                break
            text, grammar = text + model.special_piece(token), grammar.after(token)
        assert json.loads(text) == wanted


def test_what_a_schema_says_in_vain_is_told() -> None:
    schema = '{"type": "array", "items": {"type": "integer", "minimum": 3}, "uniqueItems": true}'
    note = check_constraint(SamplingOptions(json_schema=schema))
    assert note == "not enforced by the grammar of the JSON schema: minimum, uniqueItems"
    assert check_constraint(SamplingOptions(json_schema='{"type": "integer"}')) is None


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        '{"type": "colour"}',
        '{"type": "string", "pattern": "a"}',
        r'{"type": "string", "pattern": "^\"$"}',
        '{"$ref": "#/$defs/missing"}',
        '{"$ref": "https://example.com/a.json"}',
        "3",
        "[1]",
    ],
)
def test_a_schema_that_cannot_be_expressed_is_one_line(schema: str) -> None:
    with pytest.raises(ConfigError, match="JSON schema") as caught:
        check_constraint(SamplingOptions(json_schema=schema))
    assert "\n" not in str(caught.value)


def test_tokens_that_a_model_does_not_have(model: LlamaModel) -> None:
    with pytest.raises(ConfigError, match=f"token {model.n_vocab}, the model has 0 to {model.n_vocab - 1}"):
        make_sampler(SamplingOptions(logit_bias=((model.n_vocab, 1.0),)), model)
    sampler = make_sampler(SamplingOptions(logit_bias=((3, 1.0), (3, 0.5)), ignore_eos=True), model)
    assert sampler.bias == {3: 1.5}
    assert set(sampler.banned) == model.end_ids


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {}, "minItems": 10**9},
        {"type": "array", "items": {}, "maxItems": 10**30},
        {"type": "string", "minLength": -(10**9)},
        {"type": "string", "pattern": "^(ab){1,1000000000}$"},
        {"type": "object", "properties": {f"p{i}": {"type": "string", "maxLength": 999} for i in range(200)}},
    ],
)
def test_a_schema_that_repeats_without_end_is_refused_before_it_is_written_out(schema):
    with pytest.raises(ConfigError, match="more than 100000 times"):
        schema_grammar(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"allOf": [{"type": "string", "minLength": 2}], "default": "ab", "title": "T"}, []),
        ({"type": "string", "allOf": [{"type": "string"}]}, ["allOf"]),
        (
            {"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "minProperties": 1}]},
            ["minProperties"],
        ),
        (
            {"allOf": [{"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"properties": {"c": {}}}]},
            ["allOf"],
        ),
        ({"properties": {"a": {"title": "A"}}, "additionalProperties": {"description": "any"}}, []),
        ({"allOf": [{"properties": {"a": {"type": "null"}}}, {"$ref": "#/$defs/b"}]}, []),
        ({"type": "string", "format": "email"}, ["format"]),
        ({"type": "string", "format": "date-time"}, []),
        ({"type": "string", "minLength": 20, "pattern": "^a+$"}, ["minLength"]),
        ({"type": "string", "minLength": 1, "maxLength": 9}, []),
        ({"type": "string", "enum": ["a"], "minLength": 9}, ["minLength"]),
        ({"properties": {"a": {"type": "null"}}, "required": ["zz"]}, ["required"]),
        ({"type": "integer", "anyOf": [{"type": "string"}]}, ["type"]),
        ({"type": "integer", "$ref": "#/$defs/s"}, ["type"]),
        ({"type": "array", "minItems": 2}, ["minItems"]),
        ({"type": "array", "items": {}, "minItems": 2}, []),
        ({"prefixItems": [{"type": "null"}], "minItems": 1, "maxItems": 1}, []),
        ({"prefixItems": [{"type": "null"}], "minItems": 0, "maxItems": 3, "items": False}, []),
        ({"prefixItems": [{"type": "null"}], "minItems": 2}, ["minItems"]),
        ({"prefixItems": [{"type": "null"}], "maxItems": 0}, ["maxItems"]),
        ({"type": ["string", "null"], "minLength": 2, "format": "email"}, ["format"]),
        ({"type": ["integer", "string", "null"], "minLength": 2, "minimum": 1}, ["minimum"]),
        ({"type": ["array", "null"], "items": {"type": "null"}, "uniqueItems": True}, ["uniqueItems"]),
        ({"type": ["object", "null"], "properties": {"a": {"type": "null"}}, "required": ["a"]}, []),
        ({"type": ["object", "null"], "allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, ["allOf"]),
        (
            {"type": ["object", "null"], "additionalProperties": {"type": "integer"}, "minProperties": 1},
            ["minProperties"],
        ),
        ({"type": ["string", "null"], "enum": ["a", None]}, []),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["a"]}]}, []),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["c"]}]}, ["required"]),
        ({"allOf": [{"$ref": "#/$defs/b"}], "$defs": {"b": {"properties": {}, "required": ["c"]}}}, ["required"]),
        ({"allOf": [{"$ref": "#/$defs/b"}, {"properties": {"c": {}}}], "$defs": {"b": {"required": ["c"]}}}, []),
        (
            {
                "properties": {"x": {"allOf": [{"$ref": "#/$defs/b"}, {"properties": {"c": {}}}]}},
                "additionalProperties": {"$ref": "#/$defs/b"},
                "$defs": {"b": {"properties": {"d": {}}, "required": ["c"]}},
            },
            ["required"],
        ),
        (
            {
                "type": "null",
                "example": {"minimum": 1},
                "x-more": {"minimum": 1},
                "discriminator": {"propertyName": "not", "mapping": {"not": "a"}},
                "xml": {"not": 1},
                "externalDocs": {"format": "x"},
            },
            [],
        ),
        ({"type": "object", "properties": {"x-a": {"type": "null", "minimum": 1}}}, ["minimum"]),
        ({"type": "object", "propertyNames": {"type": "string"}}, []),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, ["maxLength", "propertyNames"]),
        ({"type": "null", "not": {"$dynamicRef": "#a"}}, ["$dynamicRef", "not"]),
        ({"type": "object", "required": ["a"]}, ["required"]),
        ({"type": "null", "not": {"allOf": [True]}}, ["not"]),
        ({"type": "null", "not": {"allOf": [True, {"type": "null"}]}}, ["not"]),
        ({"type": "null", "not": {"allOf": [5]}}, ["not"]),
        ({"type": "null", "not": {"allOf": [{"$ref": 5}, 5]}}, ["allOf", "not"]),
        ({"type": "null", "not": {"pattern": "(?=a)"}}, ["not"]),
        ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "type": "null"}, []),
        ({"type": "null", "not": {"properties": {}, "required": [{}]}}, ["not", "properties", "required"]),
        ({"type": "object", "required": [], "additionalProperties": True, "title": "T", "x-order": 1}, []),
        (
            {
                "title": "Person",
                "type": "object",
                "properties": {"name": {"type": "string", "title": "Name"}, "age": {"anyOf": [{"type": "integer"}]}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
            [],
        ),
    ],
)
def test_what_the_grammar_leaves_unchecked_is_known(schema: dict[str, object], names: list[str]) -> None:
    assert unenforced(json.dumps(schema)) == names


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {}},
        {"type": "array", "items": True, "minItems": 2},
        {"properties": {"a": True, "b": {}}, "required": ["a"]},
        True,
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}},
        {},
    ],
)
def test_everyday_schemas_that_the_converter_cannot_read_by_itself(schema: object) -> None:
    check_grammar(schema_grammar(json.dumps(schema)))


def test_anything_is_any_value(model: LlamaModel, pieces: Pieces) -> None:
    grammar = compile_grammar(model, schema_grammar('{"type": "array", "items": {}, "minItems": 2}'), pieces)
    for token in model.tokenize('[1, "a", {"b": [null]}', False, False):
        assert grammar.allows(token)
        grammar = grammar.after(token)


def test_names_and_values_are_no_keywords():
    schema = {
        "properties": {"minimum": {"enum": [{"maximum": 1}]}, "not": {"uniqueItems": True, "default": {"if": 1}}},
        "$defs": {"contains": {"anyOf": [{"minProperties": 1}]}},
        "const": {"multipleOf": 2},
    }
    assert unenforced(json.dumps(schema)) == ["minProperties", "properties", "uniqueItems"]  # const decides alone


@pytest.mark.parametrize(
    ("pattern", "n"),
    [
        ("a?b*[?*]\\?c{2}", 2),
        ("a{0,3}b{,2}c{1,9}", 2),  # how often one character repeats opens no ways
        ("(a?b){7}", 7),
        ("([-]?)0{60}", 1),
        ("(a?)[0]{60}b{9}", 1),
        ("((a?){3}b*){2}c?", 9),
        ("(a?)+(b)*", 2),
        (")?(", 1),
        ("(a?b?", 2),  # llama-cpp-python closes it
    ],
)
def test_parts_of_a_pattern_that_may_be_left_out_are_counted(pattern: str, n: int) -> None:
    assert optional_parts(pattern) == n


@pytest.mark.parametrize(
    ("pattern", "n"),
    [
        ("[a-z]{1,300}", 0),
        ("([a-z]{1,300}){1,300}", 299 * 300),
        ("([a-z]{1,300})+([a-z]{1,9})?[a-z]{2,}", 0),
        ("([a-z]{1,30} ?){1,20}", 30 * 20),
        ("(([a-z]{1,300})+,){2,}", 299 * 2),
        ("(([a-z]{1,9}){1,9}){1,9}", (8 + 4 * 8 * 9) * 9),
        ("([a-z]{3}){1,99}[{1,9}](x)", 0),
        (")[a]{1,3}(", 0),
    ],
)
def test_repeats_in_repeats_are_counted(pattern: str, n: int) -> None:
    assert nested_repeats(pattern) == n


@pytest.mark.parametrize(
    ("pattern", "n"),
    [
        ("[a-z]?[a-z]*[a-z]{0,9}a?[a-z]", 3),
        ("[a-z]?x[a-z]?[a-z]?x", 2),
        ("([a-z]?){40}", 40),
        ("([a-z]*){1,15}", 15),
        ("([a-z]?|x[a-z]?[a-z]?){3}", 6),
        ("([a-z]x){0,9}([a-z]x)?y", 2),
        ("([a-z]{1,30} ?){1,20}", 0),
        ("(a[a-z]?[a-z]?){20}", 2),
        (")?(", 0),
    ],
)
def test_parts_in_a_row_that_may_be_left_out_are_counted(pattern: str, n: int) -> None:
    assert optional_run(pattern) == n


@pytest.mark.parametrize("text", ["{" + " " * 60_000, "{1" + " " * 60_000 + "," + " " * 60_000, "{ " * 30_000])
def test_spaces_in_braces_are_no_work(text: str) -> None:
    before = time.monotonic()
    assert REPETITION.findall(text) == []
    assert time.monotonic() - before < 5  # 800 spaces took 72 s
    assert REPETITION.findall("{} { 1 } {2,} { , 3 } {4 , 5} {1 2}") == [
        ("", ""),
        ("1", ""),
        ("2", ""),
        ("", "3"),
        ("4", "5"),
    ]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "string", "pattern": "^([a-z]{1,300}){1,300}$"}, "repeats that may end in 89700 places"),
        ({"type": "string", "pattern": "^([a-z]?){40}$"}, "40 parts in a row that may be left out, at most 12"),
        ({"type": "string", "pattern": f"^{'a?' * 51}$"}, "51 parts that may be left out"),
        ({"type": "string", "pattern": "^(a?){51}$"}, "51 parts that may be left out"),
        ({"type": "string", "pattern": f"^({'a|' * 2001}b)$"}, "2001 alternatives"),
        ({"items": {"enum": [*range(2001)]}}, "2001 alternatives"),
        ({"anyOf": [{"const": i} for i in range(2001)]}, "2001 alternatives"),
        ({"properties": {f"k{i}": {} for i in range(202)}, "required": ["k1"]}, "201 properties that are not required"),
        ({"properties": {"a": {"enum": [*range(3000)]}}, "required": ["x"] * 2000}, "3000 alternatives"),
    ],
)
def test_schemas_that_leave_too_many_ways_on_are_refused(schema: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schema_grammar(json.dumps(schema))
    everyday = {"type": "string", "pattern": "^[0-9]{3}[- ]?[0-9]{3}(-[0-9]{2}){0,2}$"}
    assert "root" in schema_grammar(json.dumps(everyday))
    for pattern in (r"^(\w{1,30} ?){1,20}$", "^(-?)0{60}$", r"^([a-z0-9]{1,63}\.){1,10}[a-z]{2,63}$", "^(a?b?){0,20}$"):
        assert "root" in schema_grammar(json.dumps({"type": "string", "pattern": pattern}))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (5, "the JSON schema is 5, an object was expected"),
        ({"properties": 5}, "a part of it is of the wrong type"),
        ({"type": "string", "maxLength": 1e9}, "a part of it is of the wrong type"),
        ({"enum": []}, "an enum without values"),
        ({"type": "string", "pattern": "^(a$"}, "whose parentheses do not match"),
        ({"$ref": "https://example.com/x"}, "refers to 'https://example.com/x', and nothing is fetched"),
    ],
)
def test_schemas_that_are_none_are_told_in_words(schema: object, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        schema_grammar(json.dumps(schema))


@pytest.fixture(scope="module")
def byte_model(tiny_model) -> Iterator[LlamaModel]:
    """A vocabulary of single bytes."""
    loaded = LlamaModel(ModelOptions(tiny_model()), lambda _fraction: None, lambda: False)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def accepts(byte_model: LlamaModel) -> Callable[[object, str], bool]:
    """Whether the grammar of a schema lets a text through, to its end."""
    pieces = Pieces(byte_model)
    tokens = {byte_model.special_piece(token): token for token in range(byte_model.n_vocab)}

    def ask(schema: object, text: str) -> bool:
        grammar = compile_grammar(byte_model, schema_grammar(json.dumps(schema)), pieces)
        for byte in text.encode():
            token = tokens[bytes([byte])]
            if not grammar.allows(token):
                return False
            grammar = grammar.after(token)
        return any(grammar.allows(token) for token in byte_model.end_ids)

    return ask


COLOUR = {"$defs": {"Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"}}}
BASE = {"$defs": {"Base": {"properties": {"a": {"type": "null"}, "b": {"type": "null"}}, "required": ["a"]}}}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (  # pydantic's: a field that is an enum, with a default
            {
                **COLOUR,
                "properties": {"c": {"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"}},
                "required": ["c"],
            },
            ['{"c": "green"}'],
            ["{}", '{"c": {}}', '{"c": "blue"}'],
        ),
        ({**COLOUR, "allOf": [{"$ref": "#/$defs/Colour"}]}, ['"red"'], ["{}", "1"]),
        ({"items": {"allOf": [{"allOf": [{"type": "null"}], "title": "T"}]}}, ["[null]"], ["[{}]", "[1]"]),
        ({"items": {"allOf": [True]}}, ["[1]", '["a"]'], []),
        (
            {**BASE, "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"c": {"const": 1}}, "required": ["c"]}]},
            ['{"a":null,"c":1}', '{"a":null,"c":1,"b":null}'],
            ["{}", '{"a":null}', '{"c":1}'],
        ),
        (  # OpenAPI's: remarks, what is required of a base, properties beside, a base of a base
            {
                **BASE,
                "allOf": [{"$ref": "#/$defs/Base"}, {"required": ["b"]}, {"description": "D"}, {"type": "object"}],
            },
            ['{"a":null,"b":null}'],
            ["{}", '{"a":null}'],
        ),
        ({**COLOUR, "allOf": [{"$ref": "#/$defs/Colour"}, {"description": "D"}]}, ['"red"'], ["{}"]),
        (
            {**BASE, "properties": {"c": {"const": 1}}, "required": ["c"], "allOf": [{"$ref": "#/$defs/Base"}]},
            ['{"c":1,"a":null}', '{"c":1,"a":null,"b":null}'],
            ["{}", '{"c":1}', '{"a":null}'],
        ),
        (
            {
                "$defs": {
                    **BASE["$defs"],
                    "Mid": {
                        "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"m": {"const": 1}}, "required": ["m"]}]
                    },
                },
                "allOf": [{"$ref": "#/$defs/Base"}, {"$ref": "#/$defs/Mid"}, {"properties": {"c": {"const": 2}}}],
            },
            ['{"a":null,"m":1}', '{"a":null,"m":1,"b":null,"c":2}'],
            ["{}", '{"a":null}', '{"m":1}'],
        ),
    ],
)
def test_an_all_of_allows_what_it_says(accepts, schema, texts, others):
    assert [text for text in [*texts, *others] if accepts(schema, text)] == texts
    assert unenforced(json.dumps(schema)) == []


@pytest.mark.parametrize(
    "several",
    [
        [{"type": "string"}, {"minLength": 3}],
        [{"$ref": "#/$defs/Colour"}, {"properties": {"a": {}}}],
        [{"properties": {"a": {}}}, {"properties": {"a": {}}}],
        [{"properties": {"a": {}}}, {"properties": {"b": {}}, "anyOf": [{"properties": {"c": {}}}]}],
        [{"properties": {"a": {}}}, {"properties": {"b": {}}, "oneOf": [{"required": ["b"]}]}],
        [{"properties": {"a": {}}}, {"allOf": [{"properties": {"b": {}}}, {"type": "string"}]}],
        [{"properties": {"a": {}}}, {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {}}}]}],
        [{"properties": {"a": {}}}, {"type": "object", "minProperties": 1}],
        [{"properties": {"a": {}}}, {"$ref": "#/$defs/Colour", "properties": {"b": {}}}],
        [],
    ],
)
def test_an_all_of_that_is_no_object_is_refused(several: list[object]) -> None:
    with pytest.raises(ConfigError, match="allOf of other things than objects with properties"):
        schema_grammar(json.dumps({**COLOUR, "allOf": several}))


@pytest.mark.parametrize(
    "name", ["value", "string", "char", "space", "object", "root", "dot", "ref-0", "answer", "a_b.c"]
)
def test_a_definition_may_have_any_name(accepts, name):
    node = {"properties": {"n": {"type": "integer"}, "more": {"$ref": f"#/$defs/{name}"}}, "required": ["n"]}
    schema = {"$defs": {name: node}, "items": {"$ref": f"#/$defs/{name}"}}
    assert accepts(schema, '[{"n":1,"more":{"n":2}}]')
    assert not accepts(schema, "[1]")
    assert not accepts(schema, '[{"n":"1"}]')
    one = {"$defs": {name: {"const": 1}}, "properties": {"s": {"type": "string"}, name: {"$ref": f"#/$defs/{name}"}}}
    assert accepts(one, json.dumps({"s": "a b", name: 1}))
    assert not accepts(one, json.dumps({name: "a"}))


def test_references_go_where_they_point(accepts):
    schema = {
        "$defs": {
            "a": {"$defs": {"Item": {"const": 1}}},
            "b": {"$defs": {"Item": {"const": 2}}},
            "x/y~z %": {"const": 3},
        },
        "prefixItems": [
            {"$ref": "#/$defs/a/$defs/Item"},
            {"$ref": "#/$defs/b/$defs/Item"},
            {"$ref": "#/$defs/x~1y~0z%20%25"},
            {"$ref": "#/prefixItems/0"},
        ],
    }
    assert accepts(schema, "[1,2,3,1]")
    assert not accepts(schema, "[1,1,3,1]")
    assert accepts({"properties": {"again": {"$ref": "#"}}}, '{"again":{"again":{}}}')
    assert accepts({"components": {"A": {"pattern": r"^\d$"}}, "$ref": "#/components/A"}, '"7"')
    assert accepts({"$defs": {"A": True, "B": {"$ref": "#/$defs/A"}}, "items": {"$ref": "#/$defs/B"}}, "[[1]]")
    assert accepts({"properties": {"$ref": {"const": 1}}, "required": ["$ref"]}, '{"$ref":1}')


@pytest.mark.parametrize(
    "definitions",
    [
        {"A": {"$ref": "#/$defs/A"}},
        {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [{"$ref": "#/$defs/A"}], "title": "B"}},
        {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]}},
        {"A": {"anyOf": [{"items": {"$ref": "#/$defs/B"}}, {"$ref": "#/$defs/B"}]}, "B": {"$ref": "#/$defs/A"}},
    ],
)
def test_references_that_lead_nowhere_are_refused(definitions: dict[str, object]) -> None:
    for schema in ({"$ref": "#/$defs/A"}, {"properties": {"a": {"$ref": "#/$defs/A"}}}):
        with pytest.raises(ConfigError):
            check_grammar(schema_grammar(json.dumps({**schema, "$defs": definitions})))


def test_a_chain_of_definitions_is_no_nesting() -> None:
    chain = {f"d{i}": {"properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["x"]} for i in range(500)}
    check_grammar(schema_grammar(json.dumps({"$defs": {**chain, "d500": {"const": 1}}, "$ref": "#/$defs/d0"})))


def _inlined(depth: int) -> dict[str, object]:
    """Each definition twice in the one before, written out each time."""
    definitions = {
        f"d{i}": {
            "properties": {
                name: {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"properties": {}}]} for name in ("a" * 40, "b" * 40)
            },
            "required": ["a" * 40, "b" * 40],
        }
        for i in range(depth)
    }
    return {"$defs": {**definitions, f"d{depth}": {"properties": {}}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"p" * 60_000: {"items": {"const": 1}, "minItems": 99_999}}},
        {"properties": {"p" * 300 + str(i): {"type": "null"} for i in range(190)}},
        {"properties": (names := {"p" * 70 + str(i): {"enum": [i]} for i in range(700)}), "required": [*names][150:]},
        {"properties": {"p" * 30_000: {"properties": {f"q{i}": {"enum": [i]} for i in range(190)}}}},
        {"items": [{"enum": [i]} for i in range(2000)]},
        {"items": [{} for _ in range(20_000)]},
        _inlined(100),
    ],
    ids=range(7),
)
def test_no_schema_of_64_kib_takes_all_memory(schema: dict[str, object]) -> None:
    try:
        grammar = schema_grammar(json.dumps(schema))
    except ConfigError as error:
        grammar = str(error)
    assert len(grammar) < 10_000_000


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("^[ -~]{1,20}$", ["a b~!#[]"], ["", 'a"b', "a\\b", "é"]),
        ("^[!-~]+$", ["!#[]~"], ['"', "\\", " ", "\x7f"]),
        ("^[A-z]+$", ["aZ[]^_`"], ["\\", "@", "{"]),
        ("^[\\u0000-\\u{1F600}]+$", ["a é😀"], ['"', "\\", "\x01", "\x7f", "😁"]),
        ("^[\x01-a]$", ["a", "!"], ["\x01", '"', "b"]),
        (r"^v\d+\.\d+$", ["v1.20"], ["v1x2", "v1", "v1\\.2"]),
        (r"^a\-\$\/\^\*\+\?\(\)\[\]\{\}\|b$", ["a-$/^*+?()[]{}|b"], ["a-$/"]),
        (r"^\w\s\W$", ["a !", "_\u00a0-"], ["a a", "- -", 'a "', "a \\"]),
        (r"^\D\S$", ["ab"], ["1b", "a ", 'a"', "a\\", "a\x01"]),
        (r"^[\w.\-+]+@[\d\s]$", ["a.-+_@1", "a@ "], ["@1", "a@b"]),
        (r"^[\s\S]*$", ["", "a b😀"], ['"', "\\"]),
        (r"^[^\W_]+$", ["aZ9"], ["_", "-", '"']),
        ("^(?:ab)+(?<x>c)(?P<y>d)$", ["abcd", "ababcd"], ["cd", "?:abcd"]),
        (r"^a\)+$", ["a)", "a))"], ["a", "a)a)"]),
        (r"^ab\.*c$", ["abc", "ab..c"], ["ab.ab.c", "c"]),
        ("^a+?b*?c??d{1,2}?$", ["ad", "aabbcdd"], ["d", "a?d", "addd"]),
        ("^a{2}b{,2}c{1,}$", ["aac", "aabbccc"], ["ac", "aabbbc", "aa"]),
        ("^foo|bar$", ["foo", "bar"], ["foobar", "fooar", "fo"]),
        ("^(a|b|)$", ["a", "b", ""], ["ab", "|"]),
        ("^(a?b*|c){0,2}(d(e|)f?)+$", ["d", "abcdef", "bbded"], ["abcc", ""]),
        ("^()$", [""], ["a"]),
        (r"^[\^a]$", ["^", "a"], ["b", "\\"]),
        (r"^[^\^a]$", ["b", "]"], ["^", "a", '"', "\\", "\x02"]),
        (r"^[a\]\[-]$", ["a", "]", "[", "-"], ["b", "\\"]),
        (r"^[\w-.]$", ["a", "-", "."], [",", "\\"]),
        (r"^[\x41\u0042\u{43}\cA\b]$", ["A", "B", "C"], ["x", "u", "c", "b"]),
        ("^{a}]$", ["{a}]"], ["a"]),
        ("^a{ 2 }$", ["a{ 2 }"], ["aa"]),
        ("^.$", ["é", "😀"], ["", "ab", "\u2028"]),
        ("^é+ü?$", ["é", "ééü"], ["éüé", "ü"]),
        ("^a{0}b$", ["b"], ["ab"]),
    ],
)
def test_a_pattern_allows_what_it_says(accepts, pattern, texts, others):
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in [*texts, *others] if accepts(schema, f'"{text}"')] == texts
    assert not any(accepts(schema, text) for text in texts)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("a", "which does not begin with ^ and end with $"),
        ("^", "which does not begin with ^ and end with $"),
        (r"^a\$", "which ends with an escaped $"),
        ("^foo$|^bar$", "whose '$' stands inside"),
        ("^(^a)$", "whose '^' stands inside"),
        ("^a++$", "whose possessive '++' cannot be made a grammar; write '+'"),
        ("^a{2}+$", "whose possessive '{2}+'"),
        ("^*a$", "whose '*' has nothing before it to repeat"),
        ("^(?a$", "whose '(?a' cannot"),
        ("^a($", "whose parentheses do not match"),
        ("^(+a)$", "whose '+' has nothing before it to repeat"),
        ("^a|{2}$", "whose '{2}' has nothing before it to repeat"),
        ("^a{2}{3}$", "whose '{3}' has nothing before it to repeat"),
        ("^a{3,2}$", "whose '{3,2}' has a maximum below its minimum"),
        ("^(?=a)b$", "whose '(?=' cannot be made a grammar"),
        ("^(?<!a)b$", "whose '(?<!' cannot be made a grammar"),
        ("^(?i)b$", "whose '(?i' cannot be made a grammar"),
        (r"^(a)\1$", r"whose '\\1' cannot be made a grammar"),
        (r"^a\b$", r"whose '\\b' cannot be made a grammar"),
        (r"^\p{L}$", r"whose '\\p' cannot be made a grammar"),
        (r"^[\p{L}]$", r"whose '\\p' cannot be made a grammar"),
        (r"^\u{110000}$", "cannot be made a grammar"),
        (r"^\ud83d\ude00$", r"whose '\\ud83d' cannot be made a grammar"),
        ('^"$', "whose '\"' is nothing that JSON writes without a backslash"),
        (r"^\\$", "is nothing that JSON writes without a backslash"),
        (r"^\n$", "is nothing that JSON writes without a backslash"),
        (r'^["\\\x00-\x1f]$', "is nothing that JSON writes without a backslash"),
        ("^[]$", "whose class is empty"),
        ("^[^]$", "whose class is empty"),
        ("^[a$", "whose '[' is not closed"),
        ("^[z-a]$", "whose class has the range 'z-a' the wrong way round"),
        ("^a)$", "whose parentheses do not match"),
        ("^[" + "".join(chr(0x4E00 + 2 * i) for i in range(1001)) + "]$", "a class of 1001 ranges"),
        (rf"^{'a?' * 51}$", "51 parts that may be left out"),
        ("^[{9}]{200000}$", "more than 100000 times"),
    ],
)
def test_a_pattern_that_no_grammar_expresses_is_named(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        schema_grammar(json.dumps({"type": "string", "pattern": pattern}))
    assert "\n" not in str(caught.value)


def test_what_only_looks_like_a_quantifier_counts_for_nothing() -> None:
    check_grammar(schema_grammar(json.dumps({"type": "string", "pattern": r"^[{999999}|?*]\{999999\}(?:a)\?$"})))
    check_grammar(schema_grammar(json.dumps({"const": {"pattern": "^(a$", "minItems": 10**9, "$ref": "x"}})))


@pytest.mark.parametrize("anything", [{"title": "Payload"}, {"description": "d", "default": None}, {}, True])
def test_remarks_alone_allow_anything(accepts, anything):
    texts = ["1", "null", '"a"', '{"a":[1]}', "[{}]"]
    for before, schema, behind in (
        ("[", {"items": anything}, "]"),
        ('{"a":', {"properties": {"a": anything}}, "}"),
        ('{"b":', {"properties": {"a": {}}, "additionalProperties": anything}, "}"),
        ('{"b":', {"additionalProperties": anything if anything is not True else {}}, "}"),
        ("[", {"prefixItems": [anything]}, "]"),
        ("[", {"items": {"anyOf": [anything, {"type": "null"}]}}, "]"),
        ("[", {"items": {"$ref": "#/$defs/A"}, "$defs": {"A": anything}}, "]"),
    ):
        assert [text for text in texts if accepts(schema, before + text + behind)] == texts
    assert accepts({"title": "Answer", "$defs": {}}, '{"a":1}')
    assert not accepts({"title": "Answer", "$defs": {}}, "1")


def test_a_property_without_a_name_is_one(accepts):
    schema = {"properties": {"": {"const": 1}, "date_time": {"const": 2}, "at": {"format": "date-time"}}}
    assert accepts(schema, '{"":1,"date_time":2,"at":"2024-01-31T10:00:00Z"}')
    assert not accepts(schema, "1")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "char"}, "the type 'char'"),
        ({"type": ["char", "null"], "minLength": 1}, "the type 'char'"),
        ({"type": ["string", "null"], "enum": [1]}, "an enum without values"),
        ({"type": "string", "const": 1}, "an enum without values"),
        ({"type": "object", "$dynamicRef": "#a"}, "a $dynamicRef, which cannot be made a grammar; write $ref"),
        ({"$defs": {"A": (a := {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"a": {}}}]})}, **a}, "an allOf of"),
        ({"anyOf": []}, "an anyOf without values"),
        ({"items": {"type": []}}, "a type without values"),
        ({"properties": {"a": 5}}, "has 5 where an object was expected"),
        ({"$ref": "#/$defs/a", "$defs": {}}, "refers to '#/$defs/a', which it does not hold"),
        ({"$ref": "#a"}, "refers to '#a', which it does not hold"),
    ],
)
def test_what_the_converter_would_misread_is_told(schema: object, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        schema_grammar(json.dumps(schema))


INT, NULL = {"type": "integer"}, {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        (
            {"properties": {"a": {"type": "string"}}, "additionalProperties": True},
            ["{}", '{"a":"x"}', '{"a":"x","b":1}', '{"a":"x","b":1,"c":[]}', '{"b":1}', '{"b":{},"c":2}', '{"":1}'],
            ['{"a":"x""b":1}', '{"a":"x",}', "{,}", '{"a":1}', '{"a":"x","a":[1]}', '{"b":1,"a":"x"}'],
        ),
        (
            {"properties": {"a": NULL, "b": NULL}, "additionalProperties": INT},
            [
                "{}",
                '{"a":null}',
                '{"b":null}',
                '{"a":null,"b":null}',
                '{"a":null,"b":null,"c":1}',
                '{"b":null,"c":1}',
                '{"c":1,"d":2}',
                '{"a":null,"aa":1}',
            ],
            ['{"a":null"b":null}', '{"c":null}', '{"a":1}', '{"b":1}', '{"a":null,"b":null"c":1}'],
        ),
        (
            {"properties": {"a": NULL, "b": NULL, "r": NULL}, "required": ["r"], "additionalProperties": INT},
            [
                '{"r":null}',
                '{"r":null,"a":null}',
                '{"r":null,"b":null,"c":1}',
                '{"r":null,"c":1}',
                '{"r":null,"a":null,"b":null,"c":1,"d":2}',
            ],
            ["{}", '{"a":null}', '{"r":null"c":1}', '{"r":null,"r":1}', '{"r":null,}', '{"r":null,"c":1"d":1}'],
        ),
        (
            {"properties": {"r": NULL}, "required": ["r"], "additionalProperties": {}},
            ['{"r":null}', '{"r":null,"R":1}', '{"r":null,"rr":1}'],
            ['{"r":null,"r":null}', '{"r":null,"\\u0072":1}', "{}"],
        ),
        (
            {"properties": {"*": INT, "a": NULL}, "additionalProperties": NULL},
            ['{"*":1}', '{"*":1,"a":null,"b":null}'],
            ['{"*":null}', '{"*":1,"*":null}'],
        ),
        (
            {"properties": {"name": INT, "names": INT, "/": INT, '"': INT, "é\n": INT}, "additionalProperties": NULL},
            [
                '{"nam":null}',
                '{"namesx":null,"name_":null,"n\\n":null,"//":null,"é":null,"\\"\\"":null}',
                '{"x\\u0061":null}',
                '{"name\\"":null}',
                '{"é\\nx":null}',
                '{"é\\t":null}',
                '{"\\t":null}',
                '{"":null}',
            ],
            [
                '{"name":null}',
                '{"names":null}',
                '{"\\/":null}',
                '{"/":null}',
                '{"\\"":null}',
                '{"é\\n":null}',
                '{"\\u006eame":null}',
                '{"nam\\u0065":null}',
                '{"\x01":null}',
            ],
        ),
        (
            {"properties": {"": INT, "\x01": INT, "\x7f": INT}, "additionalProperties": NULL},
            ['{"":1,"\\u0001":2,"a":null}'],
            ['{"":null}', '{"\\u0001":null}', '{"\x01":null}', '{"\x7f":null}'],
        ),
    ],
)
def test_additional_properties_are_others_than_the_declared_ones(accepts, schema, texts, others):
    assert [text for text in [*texts, *others] if accepts(schema, text)] == texts
    assert unenforced(json.dumps(schema)) == []
    assert all(json.loads(text) is not None for text in texts)


@pytest.mark.parametrize("names", [["n" * 101], [f"{i:020}" for i in range(51)]], ids=len)
def test_too_many_names_to_be_left_out_are_told(accepts, names):
    schema = {"properties": dict.fromkeys(names, NULL), "required": names, "additionalProperties": INT}
    declared = dict.fromkeys(names)
    assert unenforced(json.dumps(schema)) == ["properties"]
    assert accepts(schema, json.dumps(declared))
    assert accepts(schema, json.dumps({**declared, "b": 1}))
    assert unenforced(json.dumps({**schema, "additionalProperties": False})) == []


@pytest.mark.parametrize(
    ("schema", "begin", "more", "end"),
    [
        ({"type": "string", "minLength": "low", "maxLength": "high"}, "", "a", '"'),
        ({"type": "array", "items": {"const": 1}, "minItems": "low", "maxItems": "high"}, "1", ",1", "]"),
        ({"type": "string", "pattern": "^(ab)$"}, "", "ab", '"'),
    ],
    ids=["string", "array", "pattern"],
)
@pytest.mark.parametrize("low", [0, 1, 99, 101, 200])
@pytest.mark.parametrize("n", [0, 1, 99, 100, 101, 200, 203, None])
def test_things_repeat_as_often_as_a_schema_says(byte_model, schema, begin, more, end, low, n):
    high = None if n is None else low + n
    numbers = {"low": low, "high": high, "^(ab)$": f"^(ab){{{low},{'' if high is None else high}}}$"}
    asked = {key: numbers.get(str(value), value) for key, value in schema.items()}
    text = schema_grammar(json.dumps({key: value for key, value in asked.items() if value is not None}))
    tokens = {byte_model.special_piece(token).decode("latin-1"): token for token in range(byte_model.n_vocab)}
    grammar = compile_grammar(byte_model, text, Pieces(byte_model)).after(tokens[end.replace("]", "[")])
    lengths = []
    for length in range(low + 250):
        if grammar.allows(tokens[end]):
            lengths.append(length)
        for letter in begin if begin and not length else more:
            if not grammar.allows(tokens[letter]):
                break
            grammar = grammar.after(tokens[letter])
        else:
            continue
        break
    assert lengths == [*range(low, min(low + 250, low + 250 if high is None else high + 1))]


@pytest.mark.parametrize("number", [2083, 50_000])
def test_long_strings_and_arrays_nest_little(number: int) -> None:
    for schema in (
        {"type": "string", "minLength": 1, "maxLength": number, "format": "uri"},
        {"type": "string", "minLength": number, "maxLength": number},
        {"items": {}, "maxItems": number},
        {"type": "string", "pattern": f"^[a-z]{{1,{number}}}$"},
    ):
        text = schema_grammar(json.dumps(schema))
        check_grammar(text)
        assert len(text) < 100_000


@pytest.mark.parametrize("schema", [{"type": "string", "minLength": 2, "maxLength": 1}, {"items": {}, "maxItems": -1}])
def test_a_maximum_below_its_minimum_is_told(schema: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="below its minimum"):
        schema_grammar(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "texts", "others"),
    [
        ({"type": ["string", "null"], "enum": ["F", "C", None]}, ['"F"', "null"], ['"x"', '"null"']),
        (
            {"type": ["string", "null"], "enum": ["F", 1, 1.5, True, [1], {}, None]},
            ['"F"', "null"],
            ["1", "true", "[1]"],
        ),
        ({"type": ["integer"], "enum": [1, 2.0, 1.5, True]}, ["1", "2.0"], ["1.5", "true"]),
        ({"type": ["string", "null"], "const": None}, ["null"], ['""']),
        ({"type": ["string", "null"], "pattern": "^a$"}, ['"a"', "null"], ['"b"']),
        ({"type": ["string", "null"], "minLength": 1, "maxLength": 2}, ['"a"', '"ab"', "null"], ['""', '"abc"']),
        ({"type": ["string", "null"], "format": "date"}, ['"2024-01-31"', "null"], ['"a"']),
        (
            {"type": ["object", "null"], "properties": {"a": NULL}, "required": ["a"], "additionalProperties": False},
            ['{"a":null}', "null"],
            ["{}", "[]", '{"b":null}'],
        ),
        ({"type": ["array", "null"], "items": INT, "minItems": 1}, ["[1]", "[1,2]", "null"], ["[]", '["a"]', "{}"]),
        (
            {"type": ["array", "integer"], "items": {"type": ["string", "null"]}},
            ["[]", '["a",null]', "1"],
            ["[1]", "null"],
        ),
        ({"type": ["string"], "maxLength": 1}, ['"a"', '""'], ['"ab"', "null"]),
        ({"items": {"type": ["string", "null"], "title": "T"}}, ['["a",null]'], ["[1]"]),
    ],
)
def test_one_of_several_types_keeps_what_is_said_of_it(accepts, schema, texts, others):
    assert [text for text in [*texts, *others] if accepts(schema, text)] == texts
    assert unenforced(json.dumps(schema)) == []
