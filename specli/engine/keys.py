"""Names of a JSON object's additional properties: every string but the names that are declared."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from specli.engine.pattern import letter

_MAX_LETTERS, _MAX_LENGTH = 1000, 100  # of all names, and of one: each letter is a rule of llama.cpp
_SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}  # JSON's escapes
_UNWRITABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")  # in a string but as \uXXXX
_END = ""
_Trie = dict[str, "_Trie"]


def can_leave_out(names: Collection[str]) -> bool:
    """Whether the names of all objects are few and short enough for ``other_names``."""
    return sum(map(len, names)) <= _MAX_LETTERS and max(map(len, names), default=0) <= _MAX_LENGTH


def other_names(names: Iterable[str], char: str, chars: str) -> str:
    r"""What stands between the quotes of a name that is none of ``names``, in GBNF.

    ``char``, ``chars``: the rules of one character and of any number. As long as it
    begins like one of them it holds no \uXXXX, which could spell any letter of theirs.
    """
    trie: _Trie = {}
    for name in names:
        node = trie
        for one in name:
            node = node.setdefault(one, {})
        node[_END] = {}
    return _others(trie, char, chars)


def _others(node: _Trie, char: str, chars: str) -> str:
    following = {one: child for one, child in node.items() if one != _END}
    if not following:
        return f"{char} {chars}" if _END in node else chars
    ways = [f"[^{''.join(map(letter, map(ord, following)))}] {chars}"]
    if escapes := "".join(letter(ord(short)) for one, short in _SHORT.items() if one not in following):
        ways.append(f"[\\x5C] [{escapes}] {chars}")
    ways += [f"{_spelled(one)} {_others(child, char, chars)}" for one, child in following.items() if _is_writable(one)]
    if _END not in node:
        ways.append('""')  # not a ?, before which llama.cpp allows 2,000 rules
    return f"({' | '.join(ways)})"


def _is_writable(one: str) -> bool:
    return one in _SHORT or not _UNWRITABLE.match(one)


def _spelled(one: str) -> str:
    if one not in _SHORT:
        return f"[{letter(ord(one))}]"
    escaped = f"[\\x5C] [{letter(ord(_SHORT[one]))}]"
    return f"([/] | {escaped})" if one == "/" else escaped
