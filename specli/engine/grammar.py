"""llama.cpp's grammar engine (GBNF) as a ``sampling.Constraint``.

A state is a clone of llama.cpp's grammar sampler; nothing that is handed out changes any more. llama.cpp looks at every
candidate it is given, 20 ms for a vocabulary of 150,000. So it is given few: the highest logits first, and where these
do not suffice only tokens whose first byte may come next at all (a piece is accepted only if each beginning of it is).
The answer is the same as for all of them; the tests compare the two.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from specli.engine.llama import LlamaModel
from specli.engine.log import LOG
from specli.errors import ConfigError
from specli.samplers import Ids, Row, require_finite, top_ids

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_N_FIRST = 64  # highest logits that are looked at before anything else
_ROOT = b"root"
_CLASS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')  # literals of GBNF, and its character classes
_COMMENT = re.compile(_CLASS.pattern + r"|#[^\n]*")
_MAX_NESTING = 1000  # of parentheses: llama.cpp's parser calls itself for each, and 20,000 end the process
_MAX_RULES, _MAX_DIGITS = 10_000, 5  # the same: a chain of 100,000 rules ends it
_MAX_REPEATS = 100_000  # of a schema, summed up: the converter writes each of them out
# llama.cpp keeps a stack for each way on and compares each new one with all, in one call that nothing stops. To look at
# 49,152 tokens took 0.1 s behind 50 optional parts and 2 s behind 100, 0.05 s in an enum of 2,000 values, 1.4 s
# among 800 properties that are not required.
_MAX_OPTIONAL, _MAX_OPTIONAL_PROPERTIES, _MAX_CHOICES = 50, 200, 2000
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_REPETITION = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
_PATTERN_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\s*\d*\s*,?\s*\d*\s*\}|[()?*]")
_STDERR = threading.Lock()
_NO_PATTERN = re.compile(r'"|\\[\\a-zA-Z]')
_CONSTRAINTS = {  # keywords that say what is valid; others are remarks
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "type", "const", "enum", "format", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains"),
    *("minItems", "maxItems", "uniqueItems", "properties", "required", "additionalProperties", "patternProperties"),
    *("unevaluatedProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
    *("dependentSchemas", "dependencies"),
}
_FORMATS = re.compile(r"uuid[1-5]?|date|time|date-time")
_ANYTHING = ["object", "array", "string", "number", "boolean", "null"]
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # schemas by other names
_VALUES = {"const", "enum", "default", "examples"}
_UNESCAPED = r'"\\\x00-\x1F\x7F'  # not allowed in a JSON string as they are, in the words of a GBNF class
_AT = re.compile(r" at (.*)$", re.DOTALL)


class Pieces:
    """The tokens of a vocabulary by their first byte; one per model."""

    def __init__(self, model: LlamaModel) -> None:
        self.n_vocab = model.n_vocab
        first = np.full(model.n_vocab, -1, np.int32)  # -1: no text, so never allowed unless it ends the text
        alone: dict[int, int] = {}
        for token in range(model.n_vocab):
            piece = model.special_piece(token)
            if piece and piece[0]:
                first[token] = piece[0]
                if len(piece) == 1:
                    alone.setdefault(piece[0], token)
        ends = np.array(sorted(model.end_ids), np.int64)
        first[ends] = -1
        self.ends = ends
        self._by_byte: dict[int, Ids] = {
            byte: np.flatnonzero(first == byte) for byte in range(256) if (first == byte).any()
        }
        self.probes = np.array([alone[byte] for byte in self._by_byte if byte in alone], np.int64)
        self._probed = [byte for byte in self._by_byte if byte in alone]
        self._unprobed = [byte for byte in self._by_byte if byte not in alone]

    def beginning_with(self, is_allowed: NDArray[np.bool_]) -> Ids:
        """Tokens whose first byte is allowed (``is_allowed``: of ``probes``) or cannot be asked for alone."""
        allowed = [byte for byte, yes in zip(self._probed, is_allowed.tolist(), strict=True) if yes]
        return np.concatenate([self.ends, *(self._by_byte[byte] for byte in (*allowed, *self._unprobed))])


class Grammar:
    """Where a text stands in a grammar. Make one with ``compile_grammar``."""

    def __init__(self, sampler: object, pieces: Pieces, names_tokens: bool, is_root: bool = False) -> None:
        """``is_root``: it outlives the texts that begin with it, so it does not remember how they went on."""
        self._sampler, self._pieces, self._names_tokens = sampler, pieces, names_tokens
        self._close = weakref.finalize(self, llama_cpp.llama_sampler_free, sampler)
        self._all: Ids | None = None
        self._next: dict[int, Grammar] | None = None if is_root else {}

    def best(self, row: Row, n: int | None) -> Ids:
        """See ``Constraint``. Tokens with a logit of -inf are banned."""
        if n is not None:
            first = top_ids(row, max(_N_FIRST, 2 * n))
            allowed = first[self._allowed(first)]
            if allowed.size >= n or first.size < max(_N_FIRST, 2 * n):
                return allowed[:n]
        require_finite(row.max())
        ids = self._everything()
        ids = ids[ids < row.size]
        ids = ids[row[ids] > -np.inf]
        return ids[np.lexsort((ids, -row[ids]))][:n]

    def allows(self, token: int) -> bool:
        """See ``Constraint``."""
        return bool(self._allowed(np.array([token]))[0])

    def forced(self) -> int | None:
        """See ``Constraint``. Two first bytes, or a byte and an end, are answer enough."""
        if not self._names_tokens:
            n_ways = int(self._allowed(self._pieces.probes).sum()) + int(self._allowed(self._pieces.ends).sum())
            if n_ways > 1:
                return None
        ids = self._everything()
        return int(ids[0]) if ids.size == 1 else None

    def after(self, token: int) -> Grammar:
        """See ``Constraint``."""
        if token in self._pieces.ends:  # the text is over; llama.cpp would look for it in the grammar
            return self
        known = self._next  # a draft and its judge go the same way
        if known is not None and token in known:
            return known[token]
        clone = llama_cpp.llama_sampler_clone(self._sampler)
        llama_cpp.llama_sampler_accept(clone, token)
        found = Grammar(clone, self._pieces, self._names_tokens)
        if known is not None:
            known[token] = found
        return found

    def _everything(self) -> Ids:
        """Every token that may come next, rising; asked for once."""
        if self._all is None:
            if self._names_tokens:  # which llama.cpp looks up by id, whatever their text
                ids = np.arange(self._pieces.n_vocab)
            else:
                ids = self._pieces.beginning_with(self._allowed(self._pieces.probes))
            self._all = np.sort(ids[self._allowed(ids)])
        return self._all

    def _allowed(self, ids: Ids) -> NDArray[np.bool_]:
        data = np.zeros(ids.size, _TOKEN_DATA)
        data["id"] = ids
        pointer = ctypes.cast(data.ctypes.data, llama_cpp.llama_token_data_p)
        candidates = llama_cpp.llama_token_data_array(data=pointer, size=ids.size, selected=-1, sorted=False)
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(candidates))
        allowed: NDArray[np.bool_] = data["logit"] == 0
        return allowed


def compile_grammar(model: LlamaModel, text: str, pieces: Pieces) -> Grammar:
    """The beginning of a text under the GBNF ``text``. Raises ``ConfigError`` as ``check_grammar``."""
    names_tokens = "<" in _CLASS.sub("", _COMMENT.sub(_without_comment, text))
    return Grammar(_parse(llama_cpp.llama_model_get_vocab(model.handle), text), pieces, names_tokens, is_root=True)


def check_grammar(text: str) -> None:
    """Raise ``ConfigError`` with line and column for GBNF that llama.cpp does not take; no model is needed.

    Token references (``<[42]>``, ``<text>``) are known with a vocabulary only; a grammar with one is checked later.
    """
    try:
        llama_cpp.llama_sampler_free(_parse(None, text))
    except ConfigError as error:
        if "no vocab to parse token" not in str(error):
            raise


def schema_grammar(schema: str) -> str:
    """GBNF for a JSON schema (llama.cpp's converter). Raises ``ConfigError`` for what it cannot express."""
    from llama_cpp.llama_grammar import SchemaConverter

    class Converter(SchemaConverter):
        """With backslashes escaped in literals, or GBNF would read the escapes that are meant for JSON."""

        def _format_literal(self, literal: str) -> str:
            return str(super()._format_literal(literal.replace("\\", "\\\\")))  # type: ignore[no-untyped-call]

    try:
        asked = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is not JSON: {error}") from None
    try:
        if not isinstance(asked, dict | bool):
            raise ConfigError(f"the JSON schema is {asked!r:.50}, an object was expected")
        _check_patterns(asked)
        _check_repeats(asked)
        _check_choices(asked)
        _check_references(asked)
        make: Any = Converter
        converter = make(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        converter.visit(converter.resolve_refs(_readable(asked), "schema"), "")
        grammar = str(converter.format_grammar())
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError("the JSON schema is nested too deeply for a grammar; flatten it") from None
    except (AttributeError, TypeError) as error:
        raise ConfigError("the JSON schema cannot be made a grammar: a part of it is of the wrong type") from error
    except Exception as error:  # the converter asserts, and raises ValueError, KeyError, TypeError and plain Exception
        words = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the JSON schema cannot be made a grammar: {words[:200]}") from error
    return _CLASS.sub(_without_control, grammar)


def unenforced(schema: str) -> list[str]:
    """Keywords of a JSON schema, a text, that a grammar of it leaves unchecked; sorted."""
    found: set[str] = set()
    for part in _schemas(json.loads(schema)):
        try:
            heeded = _heeded(part)
        except (AttributeError, TypeError):  # malformed, where the converter did not look (below "not")
            heeded = set()
        found |= part.keys() & _CONSTRAINTS - heeded
    return sorted(found)


def _heeded(part: Mapping[str, Any]) -> set[str]:
    """The keywords of one schema that llama-cpp-python's converter looks at: it takes the first case that fits."""
    kind, required, more = part.get("type"), part.get("required", []), part.get("additionalProperties", True)
    for keys in ({"$ref"}, {"oneOf"}, {"anyOf"}, {"const", "type"}, {"enum", "type"}):
        if keys & part.keys() - {"type"} and (keys & {"$ref", "oneOf", "anyOf"} or not isinstance(kind, list)):
            return keys
    heeded = {"type"} if required else {"type", "required"}
    if more is True:
        heeded.add("additionalProperties")
    if isinstance(kind, list):
        return heeded
    if kind in (None, "object") and ("properties" in part or more is not True):
        is_known = isinstance(required, list) and set(required) <= set(part.get("properties", ()))
        return heeded | {"properties", "additionalProperties"} | ({"required"} if is_known else set())
    if kind in (None, "object") and "allOf" in part:
        alternatives = [one for each in part["allOf"] for one in each.get("anyOf", [each])]
        return heeded | ({"allOf"} if all({"$ref", "properties"} & one.keys() for one in alternatives) else set())
    if kind in (None, "array") and ("items" in part or "prefixItems" in part):
        items = part.get("items") or part.get("prefixItems")
        return heeded | ({"items", "prefixItems"} if isinstance(items, list) else {"items", "minItems", "maxItems"})
    if kind in (None, "string") and "pattern" in part:
        return heeded | {"pattern"}
    if kind in (None, "string") and _FORMATS.fullmatch(str(part.get("format"))):
        return heeded | {"format"}
    return heeded | ({"minLength", "maxLength"} if kind == "string" else set())


def _readable(schema: object, *, is_root: bool = True) -> object:
    """The same for the converter: what allows anything (true, {}) as all types, references beside $defs apart."""
    if schema is True or (schema == {} and not is_root):
        return {"type": _ANYTHING}
    if not isinstance(schema, dict):
        return schema
    read: dict[str, object] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            value = {name: _readable(one, is_root=False) for name, one in value.items()}
        elif key in ("allOf", "anyOf", "oneOf", "items", "prefixItems") and isinstance(value, list):
            value = [_readable(one, is_root=False) for one in value]
        elif key == "items":
            value = _readable(value, is_root=False)
        read[key] = value
    if "$ref" in read and {"$defs", "definitions"} & read.keys():
        read["anyOf"] = [{"$ref": read.pop("$ref")}]
    return read


def _schemas(schema: object) -> Iterator[dict[str, object]]:
    """A schema and the schemas in it: no property's name is taken for a keyword, and nothing in a value."""
    if isinstance(schema, list):
        for one in schema:
            yield from _schemas(one)
    if not isinstance(schema, dict):
        return
    yield schema
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            yield from _schemas([*value.values()])
        elif key not in _VALUES:
            yield from _schemas(value)


def _parts(schema: object) -> Iterator[dict[str, object]]:
    """Every object in a schema, whatever it stands for."""
    if isinstance(schema, dict):
        yield schema
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _parts(part)


def _check_patterns(schema: object) -> None:
    for part in _parts(schema):
        if part.get("enum") == []:
            raise ConfigError("the JSON schema has an enum without values: nothing would be allowed there")
        pattern = part.get("pattern")
        if isinstance(pattern, str) and not _is_balanced(pattern):
            raise ConfigError(f"the JSON schema has the pattern {pattern!r:.200}, whose parentheses do not match")
        if isinstance(pattern, str) and (found := _NO_PATTERN.search(pattern)):
            raise ConfigError(
                f"the JSON schema has the pattern {pattern!r}, whose {found[0]!r} cannot be made a grammar; write it "
                "with character classes such as [0-9], and without quotes and backslashes"
            )


def _check_repeats(schema: object) -> None:
    """Refuse what would take all memory, or minutes. Raises ``ConfigError``."""
    n = 0
    for part in _parts(schema):
        n += sum(abs(part[name]) for name in _COUNTS if isinstance(part.get(name), int))  # type: ignore[arg-type]
        if isinstance(pattern := part.get("pattern"), str):
            n += sum(int(number) for pair in _REPETITION.findall(pattern) for number in pair if number)
    if n > _MAX_REPEATS:
        raise ConfigError(
            f"the JSON schema repeats things more than {_MAX_REPEATS} times in all (minItems, maxItems, minLength, "
            "maxLength, pattern); write smaller numbers"
        )


def _check_choices(schema: object) -> None:
    """Refuse what leaves more ways on at once than llama.cpp can follow. Raises ``ConfigError``."""
    n_choices = n_properties = 0
    for part in _parts(schema):
        for several in (part.get("enum"), part.get("anyOf"), part.get("oneOf"), part.get("type")):
            n_choices += len(several) if isinstance(several, list) else 0
        properties, required = part.get("properties"), part.get("required")
        if isinstance(properties, dict):
            named = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
            n_properties += len(properties.keys() - named)
        if isinstance(pattern := part.get("pattern"), str):
            n_choices += pattern.count("|")
            if (n_optional := _optional_parts(pattern)) > _MAX_OPTIONAL:
                raise ConfigError(
                    f"the JSON schema has a pattern with {n_optional} parts that may be left out (? and *, as often as "
                    f"groups repeat them), at most {_MAX_OPTIONAL} were expected; write it simpler"
                )
    if n_properties > _MAX_OPTIONAL_PROPERTIES:
        raise ConfigError(
            f"the JSON schema has {n_properties} properties that are not required, at most {_MAX_OPTIONAL_PROPERTIES} "
            "were expected; require some, or allow any object there"
        )
    if n_choices > _MAX_CHOICES:
        raise ConfigError(
            f"the JSON schema has {n_choices} alternatives (enum, anyOf, oneOf, | in patterns), at most {_MAX_CHOICES} "
            "were expected; allow any string there"
        )


def _check_references(schema: object) -> None:
    for part in _parts(schema):
        reference = part.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            raise ConfigError(
                f"the JSON schema refers to {reference!r:.100}, and nothing is fetched; put it into $defs and refer to "
                "'#/$defs/…'"
            )


def _is_balanced(pattern: str) -> bool:
    depth = 0
    for found in _PATTERN_PART.finditer(pattern):
        depth += (found[0] == "(") - (found[0] == ")")
        if depth < 0:
            return False
    return depth == 0


def _optional_parts(pattern: str) -> int:
    """Parts of ``pattern`` that may be left out; those in a group that repeats count as often as it does."""
    open_groups, last = [0], 0  # parts in each, the innermost last; in the group that has just ended
    for found in _PATTERN_PART.finditer(pattern):
        part, ended = found[0], last
        last = 0
        if part == "(":
            open_groups.append(0)
        elif part == ")" and len(open_groups) > 1:
            last = open_groups.pop()
            open_groups[-1] += last
        elif part in "?*":
            open_groups[-1] += 1
        elif repeated := _REPETITION.fullmatch(part):
            low, high = (int(number or 0) for number in repeated.groups())
            open_groups[-1] += ended * (max(1, low, high) - 1) + (low == 0)
    return sum(open_groups)


def _without_control(found: re.Match[str]) -> str:
    """A negated class that leaves out what a JSON string may not hold unescaped.

    llama-cpp-python's converter lets control characters in; llama.cpp's own has left them out since.
    """
    text = found[0]
    return f"[^{_UNESCAPED}{text[2:]}" if text.startswith("[^") else text


def _without_comment(found: re.Match[str]) -> str:
    return "" if found[0].startswith("#") else found[0]


def _nesting(text: str) -> int:
    """The most parentheses that are open at once."""
    depth = deepest = 0
    for character in _CLASS.sub("", _COMMENT.sub(_without_comment, text)):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _check_size(text: str) -> None:
    """Refuse what would end or hang llama.cpp's parser. Raises ``ConfigError``."""
    bare = _CLASS.sub("", _COMMENT.sub(_without_comment, text))
    if (n_rules := bare.count("::=")) > _MAX_RULES:
        raise ConfigError(f"the grammar has {n_rules} rules, at most {_MAX_RULES} were expected; write it smaller")
    for low, high in _REPETITION.findall(bare):
        if max(len(low), len(high)) > _MAX_DIGITS:
            raise ConfigError(
                f"the grammar repeats something {low or high} times; numbers of at most 5 digits were expected"
            )
        if high and int(high) < int(low or 0):
            raise ConfigError(f"the grammar has {{{low},{high}}}, whose maximum is below its minimum; turn them round")


def _parse(vocab: object, text: str) -> object:
    LOG.clear()
    _check_size(text)
    if "\0" in text:
        raise ConfigError("the grammar holds a NUL character; take it out")
    if (depth := _nesting(text)) > _MAX_NESTING:
        raise ConfigError(
            f"the grammar nests {depth} parentheses, at most {_MAX_NESTING} were expected; write it flatter (in a "
            "schema a smaller maxLength or maxItems)"
        )
    with _stderr_of_library() as written:
        sampler = llama_cpp.llama_sampler_init_grammar(vocab, text.encode("utf-8", "replace"), _ROOT)
    if sampler:
        return sampler
    raise ConfigError(f"the grammar is wrong{_reason(text, written())}")


def _reason(text: str, written: str) -> str:
    """Where and why, from what llama.cpp printed: it quotes the rest of the text behind ' at '."""
    found = re.search(r"error parsing grammar: (.*)", written, re.DOTALL)
    if found is None:
        return f": {LOG.last_error() or 'llama.cpp gave no reason'}"
    message = found[1].removesuffix("\n").removesuffix(text).rstrip("\n")
    at = _AT.search(message)
    if at is None or not text.endswith(at[1]):
        return f": {' '.join(message.split())[:200]}"
    before = text[: len(text) - len(at[1])]
    line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    return f" in line {line}, column {column}: {message[: at.start()]}"


@contextmanager
def _stderr_of_library() -> Iterator[Callable[[], str]]:
    """llama.cpp's parser prints its errors to the process's stderr: catch them there."""
    with _STDERR, tempfile.TemporaryFile() as file:
        written = ""
        try:
            saved = os.dup(2)
        except OSError:  # there is no stderr
            yield lambda: ""
            return
        try:
            os.dup2(file.fileno(), 2)
            yield lambda: written
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            written = file.read().decode("utf-8", "replace")
