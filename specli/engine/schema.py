"""JSON schemas as grammars: what llama-cpp-python's converter is given, what it would choke on, what it leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote

from llama_cpp.llama_grammar import INVALID_RULE_CHARS_RE, PRIMITIVE_RULES, SchemaConverter

from specli.engine.grammar import CLASS, REPETITION
from specli.engine.keys import can_leave_out, other_names
from specli.engine.pattern import as_gbnf, nested_repeats, optional_parts, optional_run, translated
from specli.errors import ConfigError

_MAX_REPEATS = 100_000  # of a schema, summed up: the converter writes each of them out
_MAX_NAME, _MAX_LETTERS = 64, 16_000_000  # of one rule's name, which repeats are written with; of all rules
# llama.cpp keeps a stack for each way on and compares each new one with all, in one call that nothing stops. To look at
# 49,152 tokens took 0.1 s behind 50 optional parts and 2 s behind 100, 0.05 s in an enum of 2,000 values, 1.4 s
# among 800 properties that are not required.
_MAX_OPTIONAL, _MAX_OPTIONAL_PROPERTIES, _MAX_CHOICES = 50, 200, 2000
# 0.2 s where repeats in repeats may end in 900 places, 0.45 s in 1,800; parts like [a-z]? take 0.06 s where 12 follow
# each other, 1 s with 20, 30 s with 40.
_MAX_NESTED, _MAX_RUN = 1000, 12
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")
_CONSTRAINTS = {  # keywords that say what is valid; others are remarks
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "type", "const", "enum", "format", "pattern"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "minContains", "maxContains"),
    *("minItems", "maxItems", "uniqueItems", "properties", "required", "additionalProperties", "patternProperties"),
    *("unevaluatedProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
    *("dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
}
_OF_STRINGS, _OF_NUMBERS = {"format", "pattern", "minLength", "maxLength"}, {"minimum", "maximum", "multipleOf"}
_OF_NUMBERS |= {"exclusiveMinimum", "exclusiveMaximum"}
_OF_ARRAYS = {name for name in _CONSTRAINTS if "tems" in name or "ontains" in name}
_OF_OBJECTS = {name for name in _CONSTRAINTS if "ropert" in name or "depend" in name} | {"required"}
_ONLY_OF = {  # keywords that say nothing about values of other types
    "string": _OF_STRINGS,
    "number": _OF_NUMBERS,
    "integer": _OF_NUMBERS,
    "array": _OF_ARRAYS,
    "object": _OF_OBJECTS,
}
_NO_COMPONENT = {"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "not", "if"}  # of an allOf with them
_ALL_OF = (
    "the JSON schema has an allOf of other things than objects with properties, each its own; write them out as one"
)
_FORMATS = re.compile(r"uuid[1-5]?|date|time|date-time")
_ANYTHING = ["object", "array", "string", "number", "boolean", "null"]
_TYPES = {*_ANYTHING, "integer"}
_NAMED = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # schemas by other names
_VALUES = {"const", "enum", "default", "example", "examples", "discriminator", "xml", "externalDocs"}  # and x-…
_UNESCAPED = r'"\\\x00-\x1F\x7F'  # not allowed in a JSON string as they are, in the words of a GBNF class
Part = dict[str, Any]  # one schema
_CHUNK = 100  # repeats in one rule, which for optional ones nests as many parentheses
_UNKNOWN = "\0"  # stands for a rule that is not written yet, and is none


def schema_grammar(schema: str) -> str:
    """GBNF for a JSON schema (llama.cpp's converter). Raises ``ConfigError`` for what it cannot express."""
    try:
        asked = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(asked, dict | bool):
        raise ConfigError(f"the JSON schema is {asked!r:.50}, an object was expected")
    try:
        grammar = _Converter(asked).grammar()
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
    root = json.loads(schema)
    leaves_out = can_leave_out(_open_names(root))
    found: set[str] = set()
    components = _components(root)
    for part in _schemas(root):
        try:
            read = _read(part, root)
            is_split = "anyOf" in read and "anyOf" not in part
            reads = [read, *(_read(one, root) for one in (read["anyOf"] if is_split else ()))]
        except (ConfigError, RecursionError):  # where the converter did not look: below a keyword that is told
            continue
        except (AttributeError, TypeError):  # malformed, the same
            found |= part.keys() & _CONSTRAINTS
            continue
        for one in reads:
            left = _left(one, leaves_out)
            found |= left - {"required"} if id(part) in components else left
    return sorted(found)


class _Converter(SchemaConverter):
    """llama-cpp-python's, given what it reads rightly, and stopped before it writes, or opens ways, without end.

    Every rule's name begins with ``answer`` or that of a reference, so none is taken for one that it knows itself.
    """

    def __init__(self, root: object) -> None:
        super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)  # type: ignore[no-untyped-call]
        self._root = root
        self._names: dict[str, str] = {}  # of references
        self._leaves_out = can_leave_out(_open_names(root))
        self._waiting: list[str] = []  # references whose rules are not written yet
        self._keys: dict[tuple[str, str], str] = {}  # of a name and a rule
        self._n_alike: dict[str, int] = {}
        self._n_letters = self._n_repeats = self._n_choices = self._n_optional = 0

    def grammar(self) -> str:
        """GBNF of the whole. References come last and one by one: a chain of them is no nesting."""
        self._rules["root"] = self.visit(self._root, "answer")
        while self._waiting:
            reference = self._waiting.pop()
            name = self._names[reference]
            self._rules[name] = self.visit(_target(reference, self._root), name)
        return str(self.format_grammar())  # type: ignore[no-untyped-call]

    def visit(self, schema: object, name: str) -> str:
        read = _read(schema, self._root)
        self._check(read)
        heeded = _heeded(read)
        if "minItems" in heeded and isinstance(read.get("items"), dict):
            return self._array(read, name)
        if "minLength" in heeded and {"minLength", "maxLength"} & read.keys():
            inside = self._repeated(
                f"{name}-n", self._primitive("char"), max(0, read.get("minLength", 0)), read.get("maxLength")
            )
            return self._add_rule(name, f'"\\"" {inside} "\\"" space')
        return str(super().visit(read, name[:_MAX_NAME]))  # type: ignore[no-untyped-call]

    def _check(self, schema: Mapping[str, Any]) -> None:
        kind = schema.get("type")
        if isinstance(kind, str) and kind not in _TYPES:
            raise ConfigError(f"the JSON schema has the type {kind!r:.50}; {', '.join(sorted(_TYPES))} were expected")
        for name in ("$dynamicRef", "$recursiveRef"):
            if name in schema:
                raise ConfigError(f"the JSON schema has a {name}, which cannot be made a grammar; write $ref")
        for name in ("enum", "anyOf", "oneOf", "type"):
            several = schema.get(name)
            if several == []:
                article = "an" if name[0] in "ae" else "a"
                raise ConfigError(
                    f"the JSON schema has {article} {name} without values: nothing would be allowed there"
                )
            if isinstance(several, list) and several is not _ANYTHING:
                self._count_choices(len(several))
        self._count_repeats(schema[name] for name in _COUNTS if isinstance(schema.get(name), int))

    def _add_rule(self, name: str, rule: str) -> str:
        """The same for names that begin alike, which are many where long ones are cut."""
        clean = INVALID_RULE_CHARS_RE.sub("-", name[:_MAX_NAME])
        self._n_letters += len(clean) + len(rule)
        if self._n_letters > _MAX_LETTERS:
            raise ConfigError(
                f"the JSON schema makes a grammar of more than {_MAX_LETTERS} letters; write smaller numbers, or allow "
                "any value somewhere"
            )
        key = self._keys.get((clean, rule), clean)
        while self._rules.get(key, rule) != rule:
            self._n_alike[clean] = self._n_alike.get(clean, 0) + 1
            key = f"{clean}-{self._n_alike[clean]}"
        self._keys[clean, rule] = key
        self._rules[key] = rule
        return key

    def _resolve_ref(self, ref: str) -> str:
        if ref not in self._names:
            self._names[ref] = name = f"ref-{len(self._names)}"
            self._rules[name] = _UNKNOWN
            self._waiting.append(ref)
        return self._names[ref]

    def _format_literal(self, literal: str) -> str:
        """With backslashes escaped, or GBNF would read the escapes that are meant for JSON."""
        return str(super()._format_literal(literal.replace("\\", "\\\\")))  # type: ignore[no-untyped-call]

    def _visit_pattern(self, pattern: str, name: str) -> str:
        text = translated(pattern)
        self._count_repeats(int(number) for pair in REPETITION.findall(text) for number in pair if number)
        self._count_choices(text.count("|"))
        if (n_optional := optional_parts(text)) > _MAX_OPTIONAL:
            raise ConfigError(
                f"the JSON schema has a pattern with {n_optional} parts that may be left out (? and *, as often as "
                f"groups repeat them), at most {_MAX_OPTIONAL} were expected; write it simpler"
            )
        if (n := nested_repeats(text)) > _MAX_NESTED:
            raise ConfigError(
                f"the JSON schema has a pattern with repeats in repeats that may end in {n} places, at most "
                f"{_MAX_NESTED} were expected; write smaller numbers, or + and *"
            )
        if (n := optional_run(text)) > _MAX_RUN:
            raise ConfigError(
                f"the JSON schema has a pattern with {n} parts in a row that may be left out, at most {_MAX_RUN} were "
                "expected; write it simpler"
            )
        inside = as_gbnf(text, partial(self._repeated, f"{name}-n"))
        return self._add_rule(name, f'"\\"" {inside} "\\"" space')

    def _array(self, read: Part, name: str) -> str:
        """An array whose items are all of one kind."""
        item = self.visit(read["items"], f"{name}-item")
        low, high = max(0, read.get("minItems", 0)), read.get("maxItems")
        if high == 0 == low:
            return self._add_rule(name, '"[" space "]" space')
        more = self._add_rule(f"{name}-more", f'"," space {item}')
        more = self._repeated(f"{name}-n", more, max(0, low - 1), None if high is None else high - 1)
        return self._add_rule(name, f'"[" space ({item} {more}){"" if low else "?"} "]" space')

    def _repeated(self, name: str, item: str, low: int, high: int | None) -> str:
        """``item`` from ``low`` to ``high`` times, with few rules and parentheses: llama.cpp counts to 2,000 itself."""
        if high is not None and high < low:
            raise ConfigError(
                "the JSON schema has a maximum (maxItems, maxLength) below its minimum; nothing would be allowed there"
            )
        if " " in item:
            item = self._add_rule(f"{name}-one", item)
        words = [item] * (low % _CHUNK)
        if max(low, high or 0) >= _CHUNK:
            chunk = self._add_rule(f"{name}-chunk", " ".join([item] * _CHUNK))
            words += [chunk] * (low // _CHUNK)
        n_chunks, n = divmod(0 if high is None else high - low, _CHUNK)
        rest = _up_to(item, n)
        if n_chunks:
            part = self._add_rule(f"{name}-part", _up_to(item, _CHUNK - 1))
        for _ in range(n_chunks):
            rest = self._add_rule(f"{name}-rest", f"{chunk} {rest} | {part}")
        words += [f"{item}*"] if high is None else [rest] if rest else []
        return " ".join(words) or '""'

    def _build_object_rule(
        self, properties: list[tuple[str, Any]], required: set[str], name: str, additional_properties: object
    ) -> str:
        """The required ones in their order, then any of the others in theirs, then additional ones."""
        needed = [one for one, _ in properties if one in required]
        optional = [one for one, _ in properties if one not in required]
        self._n_optional += len(optional)
        if self._n_optional > _MAX_OPTIONAL_PROPERTIES:
            raise ConfigError(
                f"the JSON schema has {self._n_optional} properties that are not required, at most "
                f"{_MAX_OPTIONAL_PROPERTIES} were expected; require some, or allow any object there"
            )
        pairs = {
            one: self._pair(f"{name}-{one}", self._format_literal(json.dumps(one)), schema)
            for one, schema in properties
        }
        ways, rest = [], ""
        if additional_properties is True or isinstance(additional_properties, dict):
            more = self._pair(f"{name}-additional", self._other_name(pairs), additional_properties)
            rest = f' ("," space {more})*'
            ways = [more + rest]
        for one in reversed(optional):
            ways.append(pairs[one] + rest)
            if one != optional[0]:
                rest = " " + self._add_rule(f"{name}-{one}-rest", f'("," space {pairs[one]})?{rest}')
        rule = ' "," space '.join(pairs[one] for one in needed)
        others = " | ".join(reversed(ways))
        if ways:
            rule += f' ("," space ({others}))?' if needed else f"({others})?"
        return f'"{{" space {rule} "}}" space'

    def _pair(self, name: str, key: str, schema: object) -> str:
        return self._add_rule(f"{name}-kv", f'{key} space ":" space {self.visit(schema, name)}')

    def _other_name(self, names: Collection[str]) -> str:
        char = self._primitive("char")
        chars = self._add_rule("chars", f"{char}*")
        return f'"\\"" {other_names(names if self._leaves_out else (), char, chars)} "\\""'

    def _primitive(self, name: str) -> str:
        return str(self._add_primitive(name, PRIMITIVE_RULES[name]))

    def _count_repeats(self, numbers: Iterable[int]) -> None:
        """Refuse what would take all memory, or minutes. Raises ``ConfigError``."""
        self._n_repeats += sum(map(abs, numbers))
        if self._n_repeats > _MAX_REPEATS:
            raise ConfigError(
                f"the JSON schema repeats things more than {_MAX_REPEATS} times in all (minItems, maxItems, minLength, "
                "maxLength, pattern); write smaller numbers"
            )

    def _count_choices(self, n: int) -> None:
        """Refuse what leaves more ways on at once than llama.cpp can follow. Raises ``ConfigError``."""
        self._n_choices += n
        if self._n_choices > _MAX_CHOICES:
            raise ConfigError(
                f"the JSON schema has {self._n_choices} alternatives (enum, anyOf, oneOf, | in patterns), at most "
                f"{_MAX_CHOICES} were expected; allow any string there"
            )


def _up_to(item: str, n: int) -> str:
    return f"({item} " * n + ")?" * n


def _heeded(part: Mapping[str, Any]) -> set[str]:
    """The keywords of one schema, as ``_read``, that the converter looks at: it takes the first case that fits."""
    kind, required, more = part.get("type"), part.get("required", []), part.get("additionalProperties", True)
    for keys in ({"$ref"}, {"oneOf"}, {"anyOf"}, {"const", "type"}, {"enum", "type"}):
        if keys & part.keys() - {"type"} and (keys & {"$ref", "oneOf", "anyOf"} or not isinstance(kind, list)):
            return keys
    heeded = {"type"} if required else {"type", "required"}
    if part.get("propertyNames") in (True, {}, {"type": "string"}):
        heeded.add("propertyNames")
    if more is True:
        heeded.add("additionalProperties")
    if isinstance(kind, list):
        return heeded
    if kind in (None, "object") and ("properties" in part or more is not True):
        is_known = isinstance(required, list) and set(required) <= set(part.get("properties", ()))
        return heeded | {"properties", "additionalProperties"} | ({"required"} if is_known else set())
    if kind in (None, "array") and ("items" in part or "prefixItems" in part):
        items = part.get("items") or part.get("prefixItems")
        if not isinstance(items, list):
            return heeded | {"items", "minItems", "maxItems"}
        heeded |= {"minItems"} if part.get("minItems", 0) <= len(items) else set()
        heeded |= {"maxItems"} if part.get("maxItems", len(items)) >= len(items) else set()
        return heeded | {"items", "prefixItems"}
    if kind in (None, "string") and "pattern" in part:
        return heeded | {"pattern"}
    if kind in (None, "string") and _FORMATS.fullmatch(str(part.get("format"))):
        return heeded | {"format"}
    return heeded | ({"minLength", "maxLength"} if kind == "string" else set())


def _left(part: Mapping[str, Any], leaves_out: bool) -> set[str]:
    """The keywords of one schema, as ``_read``, that the grammar does not follow."""
    try:
        heeded = _heeded(part)
    except (AttributeError, TypeError):  # malformed
        heeded = set()
    return part.keys() & _CONSTRAINTS - (heeded if leaves_out or not _is_open(part) else heeded - {"properties"})


def _components(root: object) -> dict[int, object]:
    """What is read only as a component of an allOf, which says as a whole whether what it requires is there."""
    found: dict[int, object] = {}
    for part in _schemas(root):
        is_several = False
        with suppress(ConfigError):
            is_several = isinstance(part.get("allOf"), list) and _plain(part) is part
        for one in part["allOf"] if is_several else ():
            found[id(one)] = one
            with suppress(ConfigError, AttributeError, TypeError):
                target = _target(one["$ref"], root) if "$ref" in one else one
                found[id(target)] = target
    for part in _schemas(root):
        if id(part) not in found and "$ref" in part:
            with suppress(ConfigError, AttributeError, TypeError):
                found.pop(id(_pointed(part["$ref"], root)), None)
    return found


def _is_open(part: Mapping[str, Any]) -> bool:
    """Whether an object may have properties that are not declared: it has to say so."""
    return part.get("additionalProperties", False) is not False and isinstance(part.get("properties"), dict)


def _open_names(root: object) -> list[str]:
    """What additional properties anywhere in a schema have to be told from."""
    return [name for part in _schemas(root) if _is_open(part) for name in part["properties"]]


def _read(schema: object, root: object) -> Part:
    """One schema of ``root`` for the converter: what allows anything as all types, an allOf as one object."""
    read = _plain(schema)
    if not read.keys() & _CONSTRAINTS:
        return {} if schema is root and schema is not True else {"type": _ANYTHING}
    read = _of_types(read)
    items = read.get("items")
    if items is True or items == {}:  # which the converter takes for none
        read = {**read, "items": {"type": _ANYTHING}}
    is_object = read.get("type") in (None, "object") and read.get("additionalProperties", True) is True
    if "allOf" not in read or not is_object or {"$ref", "anyOf", "oneOf", "const", "enum"} & read.keys():
        return read
    try:
        return _merged(read, root, set())
    except ConfigError:
        if "properties" in read:  # which are followed; the allOf is told
            return read
        raise


def _of_types(part: Part) -> Part:
    """A schema with values of its types only; one of several types as alternatives of one each."""
    kinds = part.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    is_known = isinstance(kinds, list) and kinds is not _ANYTHING and _TYPES.issuperset(kinds)
    if not is_known or not kinds or {"$ref", "anyOf", "oneOf"} & part.keys():
        return part
    name = "const" if "const" in part else "enum"
    values = [part["const"]] if "const" in part else part.get("enum")
    if isinstance(values, list) and values:
        beside = {key: value for key, value in part.items() if key not in ("type", name)}
        fitting = [value for value in values if not _kinds(value).isdisjoint(kinds)]
        return {**beside, "const": fitting[0]} if name == "const" and fitting else {**beside, "enum": fitting}
    if len(kinds) == 1:
        return {**part, "type": kinds[0]}
    if not part.keys() & _CONSTRAINTS - {"type"}:
        return part
    remarks = {key: value for key, value in part.items() if key not in _CONSTRAINTS}
    return {**remarks, "anyOf": [_of_type(part, kind) for kind in kinds]}


def _of_type(part: Part, kind: str) -> Part:
    others = set().union(*_ONLY_OF.values()) - _ONLY_OF.get(kind, set())
    return {**{key: value for key, value in part.items() if key in _CONSTRAINTS - others}, "type": kind}


def _kinds(value: object) -> set[str]:
    """The names of a value's types."""
    if isinstance(value, float) and value.is_integer():
        return {"number", "integer"}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"number", "integer"}
    names = {bool: "boolean", float: "number", str: "string", list: "array", dict: "object"}
    return {names.get(type(value), "null")}


def _plain(schema: object) -> Part:
    """A schema without an allOf of one around it (pydantic's, to say something beside a reference)."""
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ConfigError(f"the JSON schema has {schema!r:.50} where an object was expected")
    several = schema.get("allOf")
    beside = {name: value for name, value in schema.items() if name != "allOf"}
    if not isinstance(several, list) or not several or beside.keys() & _CONSTRAINTS:
        return schema
    telling = [one for one in several if not isinstance(one, dict) or one.keys() & _CONSTRAINTS]
    if len(telling) > 1:
        return schema
    return beside | _plain(telling[0]) if telling else beside


def _merged(schema: Part, root: object, passed: set[str]) -> Part:
    """An allOf of objects as one; alternatives in it lose what they require, and are left in the allOf to be told.

    ``passed``: references that are in it already, which is enough.
    """
    properties: Part = dict(schema.get("properties", {}))
    required, loose = [*schema.get("required", [])], []
    for each in map(_plain, schema["allOf"]):
        if not each.keys() & _CONSTRAINTS or each.get("$ref") in passed:
            continue
        if "anyOf" in each:
            loose.append({name: value for name, value in each.items() if name != "anyOf"})
        for one in map(_plain, each.get("anyOf", [each])):
            part = _component(one, root, None if "anyOf" in each else passed)
            if properties.keys() & part["properties"].keys():
                raise ConfigError(_ALL_OF)
            properties |= part["properties"]
            required += [] if "anyOf" in each else part.get("required", [])
    if not schema["allOf"] or any(each.keys() & _CONSTRAINTS - {"type"} for each in loose):
        raise ConfigError(_ALL_OF)
    read = {name: value for name, value in schema.items() if name not in ("allOf", "additionalProperties")}
    return {**read, "properties": properties, "required": required} | ({"allOf": loose} if loose else {})


def _component(part: Part, root: object, passed: set[str] | None) -> Part:
    """An object with properties, which one of an allOf has to be. ``passed``: None for one that stays as it is."""
    if "$ref" in part:
        if part.keys() & _CONSTRAINTS - {"$ref"}:
            raise ConfigError(_ALL_OF)
        if passed is not None:
            passed.add(part["$ref"])
        part = _target(part["$ref"], root)
    if passed is not None and "allOf" in part and not part.keys() & _NO_COMPONENT - {"allOf"}:
        part = _merged(part, root, passed)
    if part.keys() & _CONSTRAINTS <= {"type", "required"}:
        part = {**part, "properties": {}}
    if part.get("type") not in (None, "object") or "properties" not in part or part.keys() & _NO_COMPONENT:
        raise ConfigError(_ALL_OF)
    return part


def _target(reference: str, root: object) -> Part:
    """What a JSON pointer leads to, over references that are nothing else."""
    passed: set[str] = set()
    while True:
        if reference in passed:
            raise ConfigError(f"the JSON schema refers from {reference!r:.100} to itself, and to nothing else")
        passed.add(reference)
        found = _plain(_pointed(reference, root))
        if found.get("$ref") is None:
            return found
        reference = found["$ref"]


def _pointed(reference: str, root: object) -> object:
    if not reference.startswith("#"):
        raise ConfigError(
            f"the JSON schema refers to {reference!r:.100}, and nothing is fetched; put it into $defs and refer to "
            "'#/$defs/…'"
        )
    start, *steps = unquote(reference[1:]).split("/")
    found: Any = None if start else root
    for step in (one.replace("~1", "/").replace("~0", "~") for one in steps):
        if isinstance(found, dict):
            found = found.get(step)
        else:
            found = found[int(step)] if isinstance(found, list) and re.fullmatch("[0-9]{1,4}", step) else None
    if found is None:
        raise ConfigError(f"the JSON schema refers to {reference!r:.100}, which it does not hold")
    return found


def _schemas(schema: object) -> Iterator[dict[str, Any]]:
    """A schema and the schemas in it: no property's name is taken for a keyword, and nothing in a value."""
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            yield one
            for key, value in one.items():
                if key in _NAMED and isinstance(value, dict):
                    waiting += value.values()
                elif key not in _VALUES and not key.startswith("x-"):
                    waiting.append(value)


def _without_control(found: re.Match[str]) -> str:
    """A negated class that leaves out what a JSON string may not hold unescaped.

    llama-cpp-python's converter lets control characters in; llama.cpp's own has left them out since.
    """
    text = found[0]
    return f"[^{_UNESCAPED}{text[2:]}" if text.startswith("[^") else text
