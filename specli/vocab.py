"""Do a target and a draft mean the same by each token id? Read from their headers, without loading a model.

Only ids pass between the two models, and the target verifies every one, so a wrong pair can never change the text;
it only makes every draft useless. What llama.cpp asks (``common/speculative.cpp``) and what specli asks:

| Rule                | llama.cpp                          | specli                                               |
|---------------------|------------------------------------|------------------------------------------------------|
| vocabulary type     | equal                              | the same                                             |
| texts of shared ids | equal from id 5, below not read    | equal; a difference in ids 0 to 4 only is a note     |
| size gap            | at most 128                        | any, with a note: an id that one side lacks is never |
|                     |                                    | proposed, and ends drafting if the target emits it   |
| BOS                 | add_bos equal, ids equal if added  | the same; ids that differ but are not added: a note  |
| EOS                 | add_eos equal, ids equal if added  | the same; ids that differ but are not added: a note  |
| token types, EOT,   | not read                           | a note: the target's decide where text ends          |
| ids that end text   |                                    |                                                      |
| pre-tokenizer,      | not read                           | a note                                               |
| merges, scores,     |                                    |                                                      |
| normalizer          |                                    |                                                      |

The last row decides how text becomes ids. Only the target's way is used, so it does not matter to a draft, but it tells
that the two files do not encode text alike. ``specli check-tokenizers`` shows every row, ``specli run`` what differs.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specli.errors import VocabMismatch
from specli.gguf_file import GgufHeader, NumberArray, StringArray, check_vocabulary, fault, shown

FIRST_STRICT_ID = 5  # SPEC_VOCAB_CHECK_START_TOKEN_ID
LLAMA_CPP_MAX_GAP = 128  # tokens, SPEC_VOCAB_MAX_SIZE_DIFFERENCE
N_SHOWN = 3  # differing ids named in a message
WAY_OUT = "run without -md, or draft from the text itself with --spec-type ngram"


@dataclass(frozen=True, slots=True)
class _Type:
    """What llama_vocab::impl::load assumes for a tokenizer before it reads the special tokens' keys."""

    name: str
    bos: int | None = None
    eos: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    needs_scores: bool = False


_BPE = _Type("BPE", bos=11, eos=11)
_TYPES = {
    "llama": _Type("SPM", bos=1, eos=2, add_bos=True, needs_scores=True),
    "gpt2": _BPE,
    "hybriddna": _BPE,
    "whitespace": _BPE,
    "gemma4": _Type("BPE"),
    "bert": _Type("WPM", bos=101, add_bos=True),
    "t5": _Type("UGM", eos=1, add_eos=True, needs_scores=True),
    "rwkv": _Type("RWKV"),
    "plamo2": _Type("PLAMO2", bos=1, eos=2, needs_scores=True),
    "test": _Type("TEST"),
}
# BPE pre-tokenizers that add BOS unless tokenizer.ggml.add_bos_token says no.
_PRE_ADDS_BOS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon"),
    )
)
# Those that add it whatever the file says (llama.cpp PR 21500).
_PRE_FORCES_BOS = frozenset(["gemma4", "granite-embed-multi-311m"])
# Those whose texts are written plainly, a space as U+2581, not in the alphabet of byte-level BPE.
_PRE_ESCAPES_SPACES = frozenset(["gemma4", "granite-embed-multi-311m", "sarvam-moe"])
_BYTES_AS_THEY_ARE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_LEVEL = {0x100 + i: byte for i, byte in enumerate(b for b in range(256) if b not in _BYTES_AS_THEY_ARE)}
_TOKEN_TYPES = ("undefined", "normal", "unknown", "control", "user-defined", "unused", "byte")  # llama_token_type


# Texts that end generation whatever the file's keys say, and those that stand in for a missing key of a fill-in-the-
# middle token, some of which end it too (src/llama-vocab.cpp).
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
_END_KEYS = {
    "eos_token_id": (),
    "eot_token_id": (),
    "eom_token_id": (),
    "fim_pad_token_id": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep_token_id": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep_token_id": ("<|file_sep|>",),
}
_MAX_PADDING = 4096  # tokens
_UNUSED = 5  # llama_token_type: what converters give the tokens that only fill a matrix up
_PLACEHOLDER = re.compile(
    rb"[<\[]\|?(pad|padding|unused|extra|reserved|dummy|placeholder|empty)([ _-]?special)?([ _-]?token)?(_id)?"
    rb"[ _:-]?\d*\|?[>\]]",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, eq=False)
class VocabInfo:
    """The vocabulary of one model, special tokens as llama.cpp would set them.

    ``token_types`` is int32 ``(n_tokens,)``, ``scores`` numbers ``(n_tokens,)`` or None where the tokenizer needs none.
    An id is None where the model has no such token. ``eot_id`` is only what the file says: llama.cpp guesses a missing
    one from the texts, and which of several is not defined. ``end_ids`` are all ids that end generation.
    ``normalizer`` holds the flags that this kind of tokenizer reads, as (name, value).
    """

    path: Path
    model: str
    kind: str  # BPE, SPM, WPM, UGM, RWKV, ...: llama.cpp's vocabulary type
    pre: str | None
    tokens: StringArray = field(repr=False)
    token_types: NumberArray = field(repr=False)
    merges: StringArray | None = field(repr=False)
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    add_bos: bool
    add_eos: bool
    end_ids: frozenset[int] = frozenset()
    scores: NumberArray | None = field(default=None, repr=False)
    normalizer: tuple[tuple[str, str], ...] = ()

    @property
    def n_tokens(self) -> int:
        """Tokens in the vocabulary."""
        return len(self.tokens)

    @property
    def is_byte_level(self) -> bool:
        """Whether texts are written in byte-level BPE's alphabet; the others write a space as U+2581."""
        return self.kind == "BPE" and self.pre not in _PRE_ESCAPES_SPACES

    def plain_texts(self, ids: Sequence[int] | None = None) -> list[str]:
        """What tokens (all, if no ``ids`` are given) stand for; bytes that are no UTF-8 by themselves become U+FFFD."""
        texts = self.tokens[:] if ids is None else [self.tokens[i] for i in ids]
        return [self.plain_text(text) for text in texts]

    def plain_text(self, text: bytes) -> str:
        """What one token text stands for."""
        readable = text.decode("utf-8", "replace")
        if not self.is_byte_level:
            return readable.replace("\u2581", " ")
        try:
            return readable.translate(_BYTE_LEVEL).encode("latin-1").decode("utf-8", "replace")
        except UnicodeEncodeError:  # not of that alphabet: an added token, written as it is
            return readable

    def padding_ids(self, start: int, stop: int) -> NDArray[np.intp]:
        """Ids in ``[start, stop)`` that only fill the vocabulary up: the type is unused, or the text ``[PAD32000]``."""
        is_unused = self.token_types[start:stop] == _UNUSED
        texts = self.tokens[start:stop]
        is_named = [text[:1] in (b"<", b"[") and _PLACEHOLDER.fullmatch(text) is not None for text in texts]
        return start + np.flatnonzero(is_unused | np.array(is_named, np.bool_))

    @classmethod
    def from_header(cls, header: GgufHeader) -> VocabInfo:
        """The vocabulary that ``header`` describes, by the rules of ``llama_vocab::impl::load``.

        Raises ``ModelLoadError`` if there is none, if arrays are missing or too short, or if its type is unknown.
        """
        tokens = check_vocabulary(header)
        model = header.tokenizer_model or ""
        if model not in _TYPES:
            expected = f"one of {', '.join(_TYPES)}"
            raise fault(header.path, f"the tokenizer is {shown(model)}", expected, "update specli")
        kind = _TYPES[model]
        token_types, scores = header.token_types, header.scores
        if token_types is None or (kind.needs_scores and scores is None):
            found = f"tokenizer.ggml.{'token_type' if token_types is None else 'scores'} is missing"
            raise fault(header.path, found, f"one for each of {len(tokens)} tokens", "convert the model again")
        pre = "gemma4" if model == "gemma4" else header.tokenizer_pre
        is_bpe = kind.name == "BPE"
        add_bos = _flag(header, "add_bos_token", kind.add_bos or (is_bpe and pre in _PRE_ADDS_BOS))
        eos_id = _special_id(header, "eos_token_id", kind.eos)
        return cls(
            path=header.path,
            model=model,
            kind=kind.name,
            pre=pre,
            tokens=tokens,
            token_types=token_types[: len(tokens)],
            merges=header.merges,
            bos_id=_special_id(header, "bos_token_id", kind.bos),
            eos_id=eos_id,
            eot_id=_special_id(header, "eot_token_id", None),
            add_bos=add_bos or (is_bpe and pre in _PRE_FORCES_BOS),
            add_eos=_flag(header, "add_eos_token", kind.add_eos),
            end_ids=_end_ids(header, tokens, eos_id),
            scores=scores[: len(tokens)] if kind.needs_scores and scores is not None else None,
            normalizer=_normalizer(header, kind.name, model),
        )


def _flag(header: GgufHeader, key: str, default: bool) -> bool:
    value = header.metadata.get(f"tokenizer.ggml.{key}", default)
    return bool(value)


def _special_id(header: GgufHeader, key: str, default: int | None) -> int | None:
    """The token id that the file names if the vocabulary has it, else the default if the vocabulary has that."""
    n_tokens = header.n_vocab or 0
    for value in (header.metadata.get(f"tokenizer.ggml.{key}"), default):
        if isinstance(value, int) and 0 <= value < n_tokens:
            return value
    return None


def _end_ids(header: GgufHeader, tokens: StringArray, eos_id: int | None) -> frozenset[int]:
    """``special_eog_ids``: by key, and by text. Of several texts for one missing key the lowest id is taken."""
    by_text = {text: token for text in _END_TEXTS if (token := _find(tokens, text)) is not None}
    ids = {eos_id, *by_text.values()}
    for key, texts in _END_KEYS.items():
        named = _special_id(header, key, None)
        ids |= {named} if named is not None else {min(found, default=None) for found in [_find_all(tokens, texts)]}
    names = by_text.keys()
    if {"<|call|>", "<|return|>"} <= names or ("<|flush|>" in names and names & {"<|call|>", "<|calls|>"}):
        ids.discard(by_text.get("<|end|>"))
    if "<|tool_response>" in names or (eos_id is not None and tokens[eos_id] == b"<|plamo:eos|>"):
        ids.discard(by_text.get("</s>"))
    return frozenset(token for token in ids if token is not None)


def _find_all(tokens: StringArray, texts: Sequence[str]) -> list[int]:
    return [token for text in texts if (token := _find(tokens, text)) is not None]


def _find(tokens: StringArray, text: str) -> int | None:
    """The id of the token ``text``, without unpacking the texts."""
    wanted = text.encode()
    place = tokens.raw.find(wanted)
    while place >= 0:
        token = int(np.searchsorted(tokens.starts, place - 8))
        if token < len(tokens) and int(tokens.starts[token]) == place - 8 and tokens[token] == wanted:
            return token
        place = tokens.raw.find(wanted, place + 1)
    return None


def _normalizer(header: GgufHeader, kind: str, model: str) -> tuple[tuple[str, str], ...]:
    """The flags that change how a tokenizer of this kind reads text, with llama.cpp's defaults."""
    flags: dict[str, str | bool] = {}
    if kind in ("SPM", "UGM"):
        flags["add_space_prefix"] = _flag(header, "add_space_prefix", kind == "SPM")
    if kind == "UGM":
        flags["remove_extra_whitespaces"] = _flag(header, "remove_extra_whitespaces", False)
        charsmap = header.metadata.get("tokenizer.ggml.precompiled_charsmap")
        raw = charsmap.tobytes() if isinstance(charsmap, np.ndarray) else b""
        flags["precompiled_charsmap"] = f"{len(raw)} bytes, crc32 {zlib.crc32(raw):08x}"
    if kind == "WPM" or model == "whitespace":
        flags["lowercase"] = lowercase = _flag(header, "normalizer.lowercase", kind == "WPM")
        if kind == "WPM":
            flags["strip_accents"] = _flag(header, "normalizer.strip_accents", lowercase)
    return tuple((name, _yes_no(value) if isinstance(value, bool) else value) for name, value in flags.items())


Outcome = Literal["equal", "harmless", "breaks"]
About = Literal["ids", "text"]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of a comparison: what each model has, and, where they differ, how and with what effect.

    ``about`` says which verdict it belongs to: whether ids mean the same, or whether text is encoded alike.
    """

    name: str
    target: str
    draft: str
    outcome: Outcome = "equal"
    words: str = ""
    about: About = "ids"


@dataclass(frozen=True, slots=True)
class Tail:
    """The ids that only one model has, the larger: from ``first`` on, ``n`` of them; ``real`` are not padding."""

    owner: Literal["target", "draft"]
    first: int
    n: int
    real: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether token ids mean the same to both models.

    ``reason`` says why not, with both values and the way out; ``notes`` are differences that do no harm. ``n_shared``
    is the number of ids that both have; only those may be proposed or fed to the draft. ``differing`` are the shared
    ids whose texts differ, ``checks`` everything that was compared.
    """

    compatible: bool
    reason: str | None
    notes: tuple[str, ...]
    n_shared: int
    differing: tuple[int, ...] = field(default=(), repr=False)
    tail: Tail | None = None
    checks: tuple[Check, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much two vocabularies that differ have in common, in tokens; percentages are of the target's."""

    n_target: int
    n_same_id: int
    n_same_text: int  # whatever the id

    @property
    def same_id_percent(self) -> float:
        """Target tokens that have the same text under the same id in the draft."""
        return 100 * self.n_same_id / self.n_target

    @property
    def same_text_percent(self) -> float:
        """Target tokens whose text the draft has too, under any id."""
        return 100 * self.n_same_text / self.n_target


def compare(target: VocabInfo, draft: VocabInfo) -> Comparison:
    """Compare by the rules of the module docstring. Equal vocabularies cost one comparison of bytes."""
    n_shared = min(target.n_tokens, draft.n_tokens)
    differing = _differing_ids(target.tokens, draft.tokens, n_shared)
    tail = _tail(target, draft, n_shared)
    checks = tuple(_checks(target, draft, differing, tail))
    broken = next((check.words for check in checks if check.outcome == "breaks"), None)
    if broken is None:
        notes = tuple(check.words for check in checks if check.outcome == "harmless")
        return Comparison(True, None, notes, n_shared, differing, tail, checks)
    sizes = f"the target has {target.n_tokens} tokens and the draft {draft.n_tokens}"
    return Comparison(False, f"{broken} ({sizes}); {WAY_OUT}", (), n_shared, differing, tail, checks)


def require_compatible(target: VocabInfo, draft: VocabInfo) -> Comparison:
    """``compare``, but raise ``VocabMismatch`` with the reason if the draft cannot serve the target."""
    comparison = compare(target, draft)
    if comparison.reason is not None:
        raise VocabMismatch(f"this draft does not fit this target: {comparison.reason}")
    return comparison


def overlap(target: VocabInfo, draft: VocabInfo, comparison: Comparison) -> Overlap | None:
    """What both vocabularies have, or None when they are the same."""
    if not comparison.differing and comparison.tail is None:
        return None
    if target.is_byte_level == draft.is_byte_level:
        n_same_text = len(set(target.tokens[:]) & set(draft.tokens[:]))
    else:
        n_same_text = len(set(target.plain_texts()) & set(draft.plain_texts()))
    return Overlap(target.n_tokens, comparison.n_shared - len(comparison.differing), n_same_text)


def llama_cpp_refuses(target: VocabInfo, draft: VocabInfo, comparison: Comparison) -> str | None:
    """Why llama.cpp's ``common_speculative_are_compatible`` says no to the pair, or None; in its order of rules."""
    if (rule := _type_rule(target, draft)) is not None:
        return rule
    for check in _added_checks(target, draft):
        if check.outcome == "breaks":
            return check.words
    gap = comparison.tail.n if comparison.tail is not None else 0
    if gap > LLAMA_CPP_MAX_GAP:
        return f"the sizes differ by {gap} tokens, and it allows {LLAMA_CPP_MAX_GAP} at most"
    first = next((token for token in comparison.differing if token >= FIRST_STRICT_ID), None)
    return None if first is None else f"texts differ first at {_texts(target, draft, [first])}"


def _checks(target: VocabInfo, draft: VocabInfo, differing: Sequence[int], tail: Tail | None) -> Iterator[Check]:
    """All rows, those that break in the order in which they are reported."""
    n_shared = min(target.n_tokens, draft.n_tokens)
    kinds = [f"{vocab.kind} ({vocab.model})" for vocab in (target, draft)]
    yield _check("vocabulary type", *kinds, breaks=_type_rule(target, draft))
    yield _check("tokens", str(target.n_tokens), str(draft.n_tokens), harmless=_gap_note(target, draft, tail))
    yield _text_check(target, draft, differing, n_shared)
    yield from _added_checks(target, draft)
    yield from _end_checks(target, draft)
    yield _type_check(target, draft, n_shared)
    yield from _encoding_checks(target, draft, n_shared)


def _check(
    name: str, target: str, draft: str, *, breaks: str | None = None, harmless: str | None = None, about: About = "ids"
) -> Check:
    outcome: Outcome = "breaks" if breaks else "harmless" if harmless else "equal"
    return Check(name, target, draft, outcome, breaks or harmless or "", about)


def _differing_ids(target: StringArray, draft: StringArray, n_shared: int) -> tuple[int, ...]:
    if target.head(n_shared) == draft.head(n_shared):
        return ()
    pairs = zip(target[:n_shared], draft[:n_shared], strict=True)
    return tuple(i for i, (target_text, draft_text) in enumerate(pairs) if target_text != draft_text)


def _tail(target: VocabInfo, draft: VocabInfo, n_shared: int) -> Tail | None:
    n = abs(target.n_tokens - draft.n_tokens)
    if not n:
        return None
    larger = target if target.n_tokens > n_shared else draft
    ids = np.arange(n_shared, n_shared + n)
    real = np.setdiff1d(ids, larger.padding_ids(n_shared, n_shared + n), assume_unique=True)
    return Tail("target" if larger is target else "draft", n_shared, n, tuple(real.tolist()))


def _type_rule(target: VocabInfo, draft: VocabInfo) -> str | None:
    if target.kind == draft.kind:
        return None
    return (
        f"vocabulary types must be equal, but the target's is {target.kind} ({shown(target.model)}) and the draft's "
        f"{draft.kind} ({shown(draft.model)})"
    )


def _gap_note(target: VocabInfo, draft: VocabInfo, tail: Tail | None) -> str | None:
    if tail is None:
        return None
    limit = f", more than llama.cpp allows ({LLAMA_CPP_MAX_GAP})" if tail.n > LLAMA_CPP_MAX_GAP else ""
    if tail.real:
        larger = target if tail.owner == "target" else draft
        named = ", ".join(f"id {token} {shown(larger.tokens[token], 24)}" for token in tail.real[:N_SHOWN])
        contents = f"{len(tail.real)} of them no padding ({named}{', …' * (len(tail.real) > N_SHOWN)})"
    else:
        contents = "all of it padding"
    return (
        f"the target has {target.n_tokens} tokens and the draft {draft.n_tokens}, a gap of {tail.n}{limit}, "
        f"{contents}: ids from {tail.first} are never drafted"
    )


def _text_check(target: VocabInfo, draft: VocabInfo, differing: Sequence[int], n_shared: int) -> Check:
    strict = [i for i in differing if i >= FIRST_STRICT_ID]
    breaks = harmless = None
    if strict:
        n_padding = 0
        if len(strict) <= _MAX_PADDING:  # more of them: other vocabularies, not one that was filled up
            padding = {
                *target.padding_ids(strict[0], n_shared).tolist(),
                *draft.padding_ids(strict[0], n_shared).tolist(),
            }
            n_padding = len(padding.intersection(strict))
        of_them = f" ({n_padding} of them padding in one model)" if n_padding else ""
        breaks = (
            f"token texts must be equal over the shared ids 0 to {n_shared - 1}, but differ at {len(differing)} of "
            f"{n_shared}{of_them}: {_texts(target, draft, strict)}"
        )
    elif differing:
        harmless = f"token texts below id {FIRST_STRICT_ID} differ: {_texts(target, draft, differing)}"
    value = f"{len(differing)} of {n_shared} differ" if differing else f"{n_shared} shared"
    return _check("token texts", value, value, breaks=breaks, harmless=harmless)


def _added_checks(target: VocabInfo, draft: VocabInfo) -> Iterator[Check]:
    """BOS (EOS) must be added by both models or by neither, and be the same token if added."""
    for name, added, ids in (
        ("BOS", (target.add_bos, draft.add_bos), (target.bos_id, draft.bos_id)),
        ("EOS", (target.add_eos, draft.add_eos), (target.eos_id, draft.eos_id)),
    ):
        breaks = harmless = None
        if added[0] != added[1]:
            says = ["adds it" if add else "does not" for add in added]
            breaks = f"both models or neither must add {name}, but the target {says[0]} and the draft {says[1]}"
        elif added[0] and ids[0] != ids[1]:
            breaks = (
                f"both models add {name}, so its id must be equal, but the target's is {ids[0]} and the draft's "
                f"{ids[1]}"
            )
        elif ids[0] != ids[1]:
            why = "neither model adds it" if name == "BOS" else "the target's decides where text ends"
            harmless = f"{name} ids differ, target {_or_none(ids[0])}, draft {_or_none(ids[1])}: {why}"
        values = [
            f"{_token(vocab, token)}, {'added' if add else 'not added'}"
            for vocab, token, add in zip((target, draft), ids, added, strict=True)
        ]
        yield _check(name, *values, breaks=breaks, harmless=harmless)


def _end_checks(target: VocabInfo, draft: VocabInfo) -> Iterator[Check]:
    """The end of turn as the files say, and all ids that end text; only the target's matter."""
    for name, what, target_ids, draft_ids in (
        ("end of turn", "end-of-turn ids differ", target.eot_id, draft.eot_id),
        ("ids that end text", "the ids that end text differ", target.end_ids, draft.end_ids),
    ):
        note = None
        if target_ids != draft_ids:
            values = f"target {_or_none(target_ids)}, draft {_or_none(draft_ids)}"
            note = f"{what}, {values}: the target's decides where text ends"
        yield _check(name, _token(target, target_ids), _token(draft, draft_ids), harmless=note)


def _texts(target: VocabInfo, draft: VocabInfo, ids: Sequence[int]) -> str:
    """The first few ids with both texts."""
    parts = [
        f"id {i} (target {shown(target.tokens[i], 24)}, draft {shown(draft.tokens[i], 24)})" for i in ids[:N_SHOWN]
    ]
    return ", ".join(parts) + ", …" * (len(ids) > N_SHOWN)


def _token(vocab: VocabInfo, token: int | frozenset[int] | None) -> str:
    """An id with its text; of several ids only the numbers, and the first ones."""
    if isinstance(token, int) and token < vocab.n_tokens:
        return f"{token} {shown(vocab.tokens[token], 24)}"
    return _or_none(token).strip("{}")


def _or_none(token: int | frozenset[int] | None) -> str:
    if isinstance(token, int):
        return str(token)
    ids = sorted(token or ())
    return f"{{{', '.join(map(str, ids[:8]))}{', …' * (len(ids) > 8)}}}" if ids else "none"


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _type_check(target: VocabInfo, draft: VocabInfo, n_shared: int) -> Check:
    unequal = np.flatnonzero(target.token_types[:n_shared] != draft.token_types[:n_shared]).tolist()
    if not unequal:
        return Check("token types", f"{n_shared} shared", f"{n_shared} shared")
    parts = [
        f"id {i} {shown(target.tokens[i], 24)} (target {_type_name(target, i)}, draft {_type_name(draft, i)})"
        for i in unequal[:N_SHOWN]
    ]
    note = f"token types differ at {len(unequal)} ids: {', '.join(parts)}{', …' * (len(unequal) > N_SHOWN)}"
    value = f"{len(unequal)} of {n_shared} differ"
    return _check("token types", value, value, harmless=note)


def _type_name(vocab: VocabInfo, token_id: int) -> str:
    number = int(vocab.token_types[token_id])
    return _TOKEN_TYPES[number] if 0 <= number < len(_TOKEN_TYPES) else str(number)


def _encoding_checks(target: VocabInfo, draft: VocabInfo, n_shared: int) -> Iterator[Check]:
    """How the two files turn text into ids; only the target's way is used."""
    note = None
    if target.pre != draft.pre:
        names = [repr(pre) if pre else "none" for pre in (target.pre, draft.pre)]
        note = (
            f"pre-tokenizers differ, target {names[0]}, draft {names[1]}: they may encode text differently, and only "
            "the target's is used"
        )
    yield _check("pre-tokenizer", target.pre or "none", draft.pre or "none", harmless=note, about="text")
    if "BPE" in (target.kind, draft.kind):
        yield _merges_check(target, draft)
    if target.scores is not None and draft.scores is not None:
        n_differing = int(np.count_nonzero(target.scores[:n_shared] != draft.scores[:n_shared]))
        value = f"{n_differing} of {n_shared} differ" if n_differing else f"{n_shared} shared"
        note = f"scores differ at {n_differing} ids: only the target's are used" if n_differing else None
        yield _check("scores", value, value, harmless=note, about="text")
    if target.normalizer or draft.normalizer:
        values = [", ".join(f"{name} {value}" for name, value in vocab.normalizer) for vocab in (target, draft)]
        pairs = [value or "none" for value in values]
        note = f"normalizer flags differ, target {pairs[0]}, draft {pairs[1]}: only the target's are used"
        yield _check("normalizer", *pairs, harmless=note if pairs[0] != pairs[1] else None, about="text")


def _merges_check(target: VocabInfo, draft: VocabInfo) -> Check:
    counts = ["missing" if vocab.merges is None else f"{len(vocab.merges)}" for vocab in (target, draft)]
    note = None
    if target.merges != draft.merges:
        note = f"merges differ, target {counts[0]}, draft {counts[1]}: only the target's are used"
    return _check("merges", *counts, harmless=note, about="text")
