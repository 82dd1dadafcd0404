"""JSON schemas as grammars: what llama-cpp-python's converter is given, what it would choke on, what it leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specli.engine.grammar import CLASS, REPETITION
from specli.errors import ConfigError

_MAX_REPEATS = 100_000  # of a schema, summed up: the converter writes each of them out
# llama.cpp keeps a stack for each way on and compares each new one with all, in one call that nothing stops. To look at
# 49,152 tokens took 0.1 s behind 50 optional parts and 2 s behind 100, 0.05 s in an enum of 2,000 values, 1.4 s
# among 800 properties that are not required.
_MAX_OPTIONAL, _MAX_OPTIONAL_PROPERTIES, _MAX_CHOICES = 50, 200, 2000
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_PATTERN_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\{\s*\d*\s*,?\s*\d*\s*\}|[()?*]")
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
Parts = Sequence[Mapping[str, Any]]  # of a schema, whatever they stand for
_UNESCAPED = r'"\\\x00-\x1F\x7F'  # not allowed in a JSON string as they are, in the words of a GBNF class


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
        parts = list(_parts(asked))
        for check in (_check_patterns, _check_repeats, _check_choices, _check_references):
            check(parts)
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
    return CLASS.sub(_without_control, grammar)


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


def _check_patterns(parts: Parts) -> None:
    for part in parts:
        if part.get("enum") == []:
            raise ConfigError("the JSON schema has an enum without values: nothing would be allowed there")
        pattern = part.get("pattern")
        if isinstance(pattern, str) and not _is_balanced(pattern):
            raise ConfigError(f"the JSON schema has the pattern {pattern!r:.200}, whose parentheses do not match")
        if isinstance(pattern, str) and (found := _NO_PATTERN.search(pattern)):
            raise ConfigError(
                f"the JSON schema has the pattern {pattern!r:.200}, whose {found[0]!r} cannot be made a grammar; write "
                "it with character classes such as [0-9], and without quotes and backslashes"
            )


def _check_repeats(parts: Parts) -> None:
    """Refuse what would take all memory, or minutes. Raises ``ConfigError``."""
    n = 0
    for part in parts:
        n += sum(abs(part[name]) for name in _COUNTS if isinstance(part.get(name), int))
        if isinstance(pattern := part.get("pattern"), str):
            n += sum(int(number) for pair in REPETITION.findall(pattern) for number in pair if number)
    if n > _MAX_REPEATS:
        raise ConfigError(
            f"the JSON schema repeats things more than {_MAX_REPEATS} times in all (minItems, maxItems, minLength, "
            "maxLength, pattern); write smaller numbers"
        )


def _check_choices(parts: Parts) -> None:
    """Refuse what leaves more ways on at once than llama.cpp can follow. Raises ``ConfigError``."""
    n_choices = n_properties = 0
    for part in parts:
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


def _check_references(parts: Parts) -> None:
    for part in parts:
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
        elif repeated := REPETITION.fullmatch(part):
            low, high = (int(number or 0) for number in repeated.groups())
            open_groups[-1] += ended * (max(1, low, high) - 1) + (low == 0)
    return sum(open_groups)


def _without_control(found: re.Match[str]) -> str:
    """A negated class that leaves out what a JSON string may not hold unescaped.

    llama-cpp-python's converter lets control characters in; llama.cpp's own has left them out since.
    """
    text = found[0]
    return f"[^{_UNESCAPED}{text[2:]}" if text.startswith("[^") else text
