"""llama.cpp's grammar engine (GBNF) as a ``sampling.Constraint``.

A state is a clone of llama.cpp's grammar sampler; nothing that is handed out changes any more. llama.cpp looks at every
candidate it is given, 20 ms for a vocabulary of 150,000. So it is given few: the highest logits first, and where these
do not suffice only tokens whose first byte may come next at all (a piece is accepted only if each beginning of it is).
The answer is the same as for all of them; the tests compare the two.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
CLASS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]')  # literals of GBNF, and its character classes
_COMMENT = re.compile(CLASS.pattern + r"|#[^\n]*")
_MAX_NESTING = 1000  # of parentheses: llama.cpp's parser calls itself for each, and 20,000 end the process
_MAX_RULES, _MAX_DIGITS = 10_000, 5  # the same: a chain of 100,000 rules ends it
_MAX_REPEATS = 2000  # llama.cpp's MAX_REPETITION_THRESHOLD
REPETITION = re.compile(r"\{\s*(?:(\d+)\s*)?(?:,\s*(?:(\d+)\s*)?)?\}")  # no two runs of spaces meet: that takes long
_STDERR = threading.Lock()
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
    names_tokens = "<" in CLASS.sub("", _COMMENT.sub(_without_comment, text))
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


def _without_comment(found: re.Match[str]) -> str:
    return "" if found[0].startswith("#") else found[0]


def _nesting(text: str) -> int:
    """The most parentheses that are open at once."""
    depth = deepest = 0
    for character in CLASS.sub("", _COMMENT.sub(_without_comment, text)):
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    return deepest


def _check_size(text: str) -> None:
    """Refuse what would end or hang llama.cpp's parser. Raises ``ConfigError``."""
    bare = CLASS.sub("", _COMMENT.sub(_without_comment, text))
    if (n_rules := bare.count("::=")) > _MAX_RULES:
        raise ConfigError(f"the grammar has {n_rules} rules, at most {_MAX_RULES} were expected; write it smaller")
    for low, high in REPETITION.findall(bare):
        if max(len(low), len(high)) > _MAX_DIGITS:
            raise ConfigError(
                f"the grammar repeats something {low or high} times; numbers of at most 5 digits were expected"
            )
        least, most = int(low or 0), int(high or low or 0)
        if most < least:
            raise ConfigError(f"the grammar has {{{low},{high}}}, whose maximum is below its minimum; turn them round")
        if most > _MAX_REPEATS:
            raise ConfigError(
                f"the grammar repeats something {high or low} times, at most {_MAX_REPEATS} were expected: llama.cpp "
                "refuses a higher minimum, and takes a higher maximum for none; write {0,} for any number"
            )


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
