"""Regular expressions of JSON schemas as GBNF; llama-cpp-python's converter misreads many.

It takes escapes for text, repeats the whole literal before one, knows no lazy quantifiers, and lets classes hold what
JSON writes with a backslash. So each character with a meaning becomes a class, each class a list of ranges in GBNF's
escapes, and what no grammar expresses is refused. The dialect is ECMA 262 with the u flag, as JSON Schema has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from specli.engine.grammar import REPETITION
from specli.errors import ConfigError

Ranges = list[tuple[int, int]]  # of code points, both ends included
_LAST = 0x10FFFF
_UNWRITABLE = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0xD800, 0xDFFF)]  # in JSON as they are
_MAX_RANGES = 1000  # of one class: llama.cpp compares every letter of every token with each of them
_ESCAPE = r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]{1,8}\}|c[a-zA-Z]|[0-9]+|.)"
_PART = re.compile(
    rf"(?P<escape>{_ESCAPE})"
    r"|\[(?P<not>\^?)(?P<members>(?:\\.|[^\]\\])*)\]"
    r"|(?P<group>\((?:\?(?:<[=!]|P?<\w+>|P=|.)?)?)"
    r"|(?P<repeat>[*+?]|\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\})(?P<mode>[?+]?)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_MEMBER = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_GROUP = re.compile(r"\((?:\?:|\?P?<\w+>)?")
_DIGITS, _LINE_ENDS = [(0x30, 0x39)], [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_WORDS = [*_DIGITS, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES = [(0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
_SPACES += [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
_SETS = {"d": _DIGITS, "w": _WORDS, "s": _SPACES}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D, "0": 0x00}
_PLAIN = re.compile(r"[A-Za-z0-9 _]")  # others have a meaning to somebody on the way
_WORD = re.compile(r"\[(?:\\.|[^\]\\])*\]|\{[0-9]+(?:,[0-9]*)?\}|.", re.DOTALL)  # of a translated pattern
_ITEM = re.compile(rf"(?P<one>[(|]|\)|\\.|\[(?:\\.|[^\]\\])*\]|.)(?P<times>[?*+]|{REPETITION.pattern})?", re.DOTALL)


class _Refused(Exception):
    """Says what of a pattern cannot be made a grammar, as the end of a sentence about it."""


def translated(pattern: str) -> str:
    """``pattern`` in few words: the same texts, but for those that JSON writes with a backslash.

    Raises ``ConfigError`` for what no grammar expresses: lookarounds, references, inner anchors, quotes.
    """
    try:
        return _translated(pattern)
    except _Refused as why:
        raise ConfigError(f"the JSON schema has the pattern {pattern!r:.200}, {why}") from None


def as_gbnf(pattern: str, repeat: Callable[[str, int, int | None], str]) -> str:
    """What ``translated`` gave, in GBNF. ``repeat``: writes what stands there from so often to so often."""
    groups: list[list[str]] = [[]]
    for found in _WORD.finditer(pattern, 1, len(pattern) - 1):
        word = found[0]
        if word == "(":
            groups.append([])
        elif word == ")":
            word = f"({' '.join(groups.pop())})"
            groups[-1].append(word)
        elif word in "?*+":
            groups[-1][-1] += word
        elif word[0] == "{":
            low, comma, high = word[1:-1].partition(",")
            groups[-1][-1] = repeat(groups[-1][-1], int(low), int(high) if high else None if comma else int(low))
        else:
            groups[-1].append(word if word[0] in "[|" else f'"{word}"')
    return f"({' '.join(groups[0])})"


def optional_parts(pattern: str) -> int:
    """Parts of ``pattern`` that may be left out; those in a group that repeats count as often as it does."""
    groups = [0]  # of each open one
    for found in _ITEM.finditer(pattern):
        low, high, is_optional = _times(found)
        if found["one"] == "(":
            groups.append(0)
            continue
        inside = groups.pop() if found["one"] == ")" and len(groups) > 1 else 0
        groups[-1] += inside * max(1, low, high) + is_optional
    return sum(groups)


def nested_repeats(pattern: str) -> int:
    """How often repeats in repeats may end in different places, at most; a third level weighs four times as much."""
    groups = [(0, 0)]  # of each open one: what its repeats leave open, and repeats in repeats
    for found in _ITEM.finditer(pattern):
        low, high, _ = _times(found)
        if found["one"] == "(":
            groups.append((0, 0))
            continue
        alone, nested = 0, 0
        if found["one"] == ")" and len(groups) > 1:
            alone, nested = groups.pop()
            if (times := max(low, high)) > 1:
                alone, nested = 0, (alone + 4 * nested) * times
        before = groups.pop()
        groups.append((before[0] + alone + max(0, high - low), before[1] + nested))
    return sum(nested for _, nested in groups)


def optional_run(pattern: str) -> int:
    """The most parts in a row that may be left out and are of many letters: a token goes any way through them."""
    groups = [_Run()]
    for found in _ITEM.finditer(pattern):
        low, high, is_optional = _times(found)
        if found["one"] == "(":
            groups.append(_Run())
        elif found["one"] == "|":
            groups[-1].end_branch()
        elif found["one"] == ")" and len(groups) > 1:
            group = groups.pop()
            group.end_branch()
            if group.may_be_empty:
                groups[-1].add(group.longest * max(1, low, high), True)
            else:
                groups[-1].longest = max(groups[-1].longest, group.longest)
                groups[-1].add(1, is_optional)
        else:
            groups[-1].add(int("-" in found["one"][1:]), is_optional)
    return max(group.longest for group in groups)


class _Run:
    """Optional parts in a row, in one group."""

    def __init__(self) -> None:
        self.longest = self._now = 0
        self.may_be_empty, self._is_empty = False, True

    def add(self, n: int, is_optional: bool) -> None:
        self._now = self._now + n if is_optional else 0
        self._is_empty &= is_optional
        self.longest = max(self.longest, self._now)

    def end_branch(self) -> None:
        self.may_be_empty |= self._is_empty
        self._now, self._is_empty = 0, True


def _times(found: re.Match[str]) -> tuple[int, int, bool]:
    """How often an item stands there at least and, if that is bounded, at most; whether it may be left out."""
    text = found["times"] or "{1}"
    repeated = REPETITION.fullmatch(text)
    if repeated is None:
        return int(text == "+"), int(text == "?"), text != "+"
    low = int(repeated[1] or 0)
    return low, int(repeated[2] or (0 if "," in text else low)), low == 0


def _translated(pattern: str) -> str:
    if len(pattern) < 2 or pattern[0] != "^" or pattern[-1] != "$":
        raise _Refused("which does not begin with ^ and end with $, as a grammar needs it")
    written: list[str] = []
    depth, is_repeatable = 0, False
    for found in _PART.finditer(pattern, 1, len(pattern) - 1):
        text = found[0]
        if found["repeat"]:
            if not is_repeatable:
                raise _Refused(f"whose {text!r} has nothing before it to repeat")
            text = _repeat(found["repeat"], found["mode"])
        elif found["group"]:
            if not _GROUP.fullmatch(text):
                raise _Refused(f"whose {text!r} cannot be made a grammar; write it without")
            text = "("
        elif text not in "|)":
            text = _one(found)
        depth += (text == "(") - (text == ")")
        if depth < 0:
            break
        is_repeatable = not found["repeat"] and text not in "(|"
        written.append(text)
    if depth:
        raise _Refused("whose parentheses do not match")
    return f"^{''.join(written)}$"


def _one(found: re.Match[str]) -> str:
    """What stands for one character."""
    text = found[0]
    if found["escape"]:
        return _class(_escaped(text), text)
    if found["members"] is not None:
        members = _members(found["members"])
        return _class(_complement(members) if found["not"] else members, text)
    if text == ".":
        return _class(_complement(_LINE_ENDS), text)
    if text in "^$":
        raise _Refused(f"whose {text!r} stands inside; write one ^ first and one $ last, around all alternatives")
    if text == "[":
        raise _Refused("whose '[' is not closed")
    if text == "\\":
        raise _Refused("which ends with an escaped $, not with $, as a grammar needs it")
    return text if _PLAIN.match(text) else _class([(ord(text), ord(text))], text)


def _repeat(text: str, mode: str) -> str:
    """A quantifier; a lazy one allows the same texts as a greedy one."""
    if mode == "+":
        raise _Refused(f"whose possessive {text + mode!r} cannot be made a grammar; write {text!r}")
    low, _, high = text[1:-1].partition(",")
    if low and high and (len(low.lstrip("0")), low.lstrip("0")) > (len(high.lstrip("0")), high.lstrip("0")):
        raise _Refused(f"whose {text!r} has a maximum below its minimum")
    return f"{{0{text[1:]}" if text.startswith("{,") else text


def _escaped(text: str) -> Ranges:
    """What an escape stands for, outside of classes."""
    kind, digits = text[1], text[2:].strip("{}")
    if kind.lower() in _SETS:
        return _SETS[kind] if kind in _SETS else _complement(_SETS[kind.lower()])
    code = _LAST + 1
    if kind in "xu" and digits:
        code = int(digits, 16)
    elif kind == "c" and digits:
        code = ord(digits) % 32
    elif text[1:] in _CONTROLS:
        code = _CONTROLS[text[1:]]
    elif not re.match("[A-Za-z0-9]", kind):
        code = ord(kind)
    if code > _LAST or 0xD800 <= code <= 0xDFFF:
        raise _Refused(f"whose {text!r} cannot be made a grammar; write it with character classes such as [0-9]")
    return [(code, code)]


def _members(text: str) -> Ranges:
    """What stands in a class, without ``^``."""
    if not text:
        raise _Refused("whose class is empty")
    members = _MEMBER.findall(text)
    found: Ranges = []
    i = 0
    while i < len(members):
        one = _member(members[i])
        i += 1
        if i + 1 < len(members) and members[i] == "-" and _is_letter(one):
            last = _member(members[i + 1])
            if _is_letter(last):
                if one[0][0] > last[0][0]:
                    raise _Refused(f"whose class has the range {''.join(members[i - 1 : i + 2])!r} the wrong way round")
                one, i = [(one[0][0], last[0][0])], i + 2
        found += one
    return found


def _member(text: str) -> Ranges:
    if text == r"\b":  # a backspace in a class
        return [(0x08, 0x08)]
    return _escaped(text) if len(text) > 1 else [(ord(text), ord(text))]


def _is_letter(ranges: Ranges) -> bool:
    return len(ranges) == 1 and ranges[0][0] == ranges[0][1]


def _class(ranges: Ranges, source: str) -> str:
    """A class of GBNF, of what JSON writes as it is. ``source``: the same in the pattern."""
    left = _complement([*_complement(ranges), *_UNWRITABLE])
    if not left:
        raise _Refused(f"whose {source!r:.50} is nothing that JSON writes without a backslash")
    if len(left) > _MAX_RANGES:
        raise _Refused(f"which has a class of {len(left)} ranges, at most {_MAX_RANGES} were expected")
    return f"[{''.join(letter(low) if low == high else f'{letter(low)}-{letter(high)}' for low, high in left)}]"


def letter(code: int) -> str:
    """A character as a class of GBNF has it."""
    if _PLAIN.match(chr(code)):
        return chr(code)
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _complement(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Everything else, rising."""
    found: Ranges = []
    begin = 0
    for low, high in sorted(ranges):
        if low > begin:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*found, (begin, _LAST)] if begin <= _LAST else found
