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
| token types, EOT,   | not read                           | a note                                               |
| pre-tokenizer,      |                                    |                                                      |
| merges              |                                    |                                                      |

The pre-tokenizer and the merges decide how text becomes ids. Only the target's are used, so they do not matter to a
draft, but they tell that the two files do not encode text alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

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
_TOKEN_TYPES = ("undefined", "normal", "unknown", "control", "user-defined", "unused", "byte")  # llama_token_type


@dataclass(frozen=True, slots=True, eq=False)
class VocabInfo:
    """The vocabulary of one model, special tokens as llama.cpp would set them.

    ``token_types`` is int32 ``(n_tokens,)``. An id is None where the model has no such token. ``eot_id`` is only what
    the file says: llama.cpp guesses a missing one from the texts, and which of several is not defined.
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

    @property
    def n_tokens(self) -> int:
        """Tokens in the vocabulary."""
        return len(self.tokens)

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
        token_types = header.token_types
        if token_types is None or (kind.needs_scores and header.scores is None):
            found = f"tokenizer.ggml.{'token_type' if token_types is None else 'scores'} is missing"
            raise fault(header.path, found, f"one for each of {len(tokens)} tokens", "convert the model again")
        pre = "gemma4" if model == "gemma4" else header.tokenizer_pre
        is_bpe = kind.name == "BPE"
        add_bos = _flag(header, "add_bos_token", kind.add_bos or (is_bpe and pre in _PRE_ADDS_BOS))
        return cls(
            path=header.path,
            model=model,
            kind=kind.name,
            pre=pre,
            tokens=tokens,
            token_types=token_types[: len(tokens)],
            merges=header.merges,
            bos_id=_special_id(header, "bos_token_id", kind.bos),
            eos_id=_special_id(header, "eos_token_id", kind.eos),
            eot_id=_special_id(header, "eot_token_id", None),
            add_bos=add_bos or (is_bpe and pre in _PRE_FORCES_BOS),
            add_eos=_flag(header, "add_eos_token", kind.add_eos),
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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Whether token ids mean the same to both models.

    ``reason`` says why not, with both values and the way out; ``notes`` are differences that do no harm. ``n_shared``
    is the number of ids that both have; only those may be proposed or fed to the draft.
    """

    compatible: bool
    reason: str | None
    notes: tuple[str, ...]
    n_shared: int


def compare(target: VocabInfo, draft: VocabInfo) -> Comparison:
    """Compare by the rules of the module docstring. Equal vocabularies cost one comparison of bytes."""
    n_shared = min(target.n_tokens, draft.n_tokens)
    differing = _differing_ids(target.tokens, draft.tokens, n_shared)
    rule = (
        _type_rule(target, draft)
        or _text_rule(target, draft, differing, n_shared)
        or _added_rule("BOS", (target.add_bos, draft.add_bos), (target.bos_id, draft.bos_id))
        or _added_rule("EOS", (target.add_eos, draft.add_eos), (target.eos_id, draft.eos_id))
    )
    if rule is None:
        return Comparison(True, None, _notes(target, draft, differing, n_shared), n_shared)
    sizes = f"the target has {target.n_tokens} tokens and the draft {draft.n_tokens}"
    return Comparison(False, f"{rule} ({sizes}); {WAY_OUT}", (), n_shared)


def require_compatible(target: VocabInfo, draft: VocabInfo) -> Comparison:
    """``compare``, but raise ``VocabMismatch`` with the reason if the draft cannot serve the target."""
    comparison = compare(target, draft)
    if comparison.reason is not None:
        raise VocabMismatch(f"this draft does not fit this target: {comparison.reason}")
    return comparison


def _differing_ids(target: StringArray, draft: StringArray, n_shared: int) -> list[int]:
    if target.head(n_shared) == draft.head(n_shared):
        return []
    pairs = zip(target[:n_shared], draft[:n_shared], strict=True)
    return [i for i, (target_text, draft_text) in enumerate(pairs) if target_text != draft_text]


def _type_rule(target: VocabInfo, draft: VocabInfo) -> str | None:
    if target.kind == draft.kind:
        return None
    return (
        f"vocabulary types must be equal, but the target's is {target.kind} ({shown(target.model)}) and the draft's "
        f"{draft.kind} ({shown(draft.model)})"
    )


def _text_rule(target: VocabInfo, draft: VocabInfo, differing: list[int], n_shared: int) -> str | None:
    strict = [i for i in differing if i >= FIRST_STRICT_ID]
    if not strict:
        return None
    return (
        f"token texts must be equal over the shared ids 0 to {n_shared - 1}, but differ at {len(differing)} of "
        f"{n_shared}: {_texts(target, draft, strict)}"
    )


def _added_rule(name: str, added: tuple[bool, bool], ids: tuple[int | None, int | None]) -> str | None:
    """BOS (EOS) must be added by both models or by neither, and be the same token if added."""
    if added[0] != added[1]:
        says = ["adds it" if add else "does not" for add in added]
        return f"both models or neither must add {name}, but the target {says[0]} and the draft {says[1]}"
    if added[0] and ids[0] != ids[1]:
        return f"both models add {name}, so its id must be equal, but the target's is {ids[0]} and the draft's {ids[1]}"
    return None


def _texts(target: VocabInfo, draft: VocabInfo, ids: list[int]) -> str:
    """The first few ids with both texts."""
    parts = [
        f"id {i} (target {shown(target.tokens[i], 24)}, draft {shown(draft.tokens[i], 24)})" for i in ids[:N_SHOWN]
    ]
    return ", ".join(parts) + ", …" * (len(ids) > N_SHOWN)


def _notes(target: VocabInfo, draft: VocabInfo, differing: list[int], n_shared: int) -> tuple[str, ...]:
    """What differs and does no harm."""
    notes = []
    gap = abs(target.n_tokens - draft.n_tokens)
    if gap:
        limit = f", more than llama.cpp allows ({LLAMA_CPP_MAX_GAP})" if gap > LLAMA_CPP_MAX_GAP else ""
        notes.append(
            f"the target has {target.n_tokens} tokens and the draft {draft.n_tokens}, a gap of {gap}{limit}: ids from "
            f"{n_shared} are never drafted"
        )
    if differing:
        notes.append(f"token texts below id {FIRST_STRICT_ID} differ: {_texts(target, draft, differing)}")
    for name, target_id, draft_id in (
        ("BOS", target.bos_id, draft.bos_id),
        ("EOS", target.eos_id, draft.eos_id),
        ("end-of-turn", target.eot_id, draft.eot_id),
    ):
        if target_id != draft_id:
            why = "neither model adds it" if name == "BOS" else "the target's decides where text ends"
            notes.append(f"{name} ids differ, target {_or_none(target_id)}, draft {_or_none(draft_id)}: {why}")
    notes.extend(_type_note(target, draft, n_shared))
    notes.extend(_encoding_notes(target, draft))
    return tuple(notes)


def _or_none(token_id: int | None) -> str:
    return "none" if token_id is None else str(token_id)


def _type_note(target: VocabInfo, draft: VocabInfo, n_shared: int) -> list[str]:
    unequal = np.flatnonzero(target.token_types[:n_shared] != draft.token_types[:n_shared]).tolist()
    if not unequal:
        return []
    parts = [
        f"id {i} {shown(target.tokens[i], 24)} (target {_type_name(target, i)}, draft {_type_name(draft, i)})"
        for i in unequal[:N_SHOWN]
    ]
    return [f"token types differ at {len(unequal)} ids: {', '.join(parts)}{', …' * (len(unequal) > N_SHOWN)}"]


def _type_name(vocab: VocabInfo, token_id: int) -> str:
    number = int(vocab.token_types[token_id])
    return _TOKEN_TYPES[number] if 0 <= number < len(_TOKEN_TYPES) else str(number)


def _encoding_notes(target: VocabInfo, draft: VocabInfo) -> list[str]:
    """Differences in how the two files turn text into ids; only the target's way is used."""
    notes = []
    if target.pre != draft.pre:
        names = [repr(pre) if pre else "none" for pre in (target.pre, draft.pre)]
        notes.append(
            f"pre-tokenizers differ, target {names[0]}, draft {names[1]}: they may encode text differently, and only "
            "the target's is used"
        )
    if target.merges != draft.merges:
        counts = ["missing" if merges is None else f"{len(merges)}" for merges in (target.merges, draft.merges)]
        notes.append(f"merges differ, target {counts[0]}, draft {counts[1]}: only the target's are used")
    return notes
