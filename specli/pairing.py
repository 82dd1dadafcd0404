"""Does a draft fit a target? Everything that can be said from two headers and their vocabularies, without weights.

Two verdicts that are apart: ids interchangeable (safe to speculate, since only ids pass between the models), and text
encoded alike (the two files hold the same tokenizer). ``specli check-tokenizers`` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from specli import gguf_file, vocab
from specli.errors import ModelLoadError
from specli.gguf_file import GgufHeader, Role
from specli.probes import Encodings, compare_encodings, probes_for
from specli.vocab import Comparison, Overlap, VocabInfo

if TYPE_CHECKING:
    from specli.engine.vocabulary import Vocabulary

USEFUL_RATIO = (4, 20)  # target ÷ draft, by parameters that work on one token
_K = 3  # tokens: the default draft length, to say what drafting costs


@dataclass(frozen=True)
class Model:
    """One file, read. Parameters are counted in the headers of all its shards and None where there are no tensors.

    ``n_active`` leaves out the experts that a token does not pass through. ``fault`` says why llama.cpp or specli would
    not load the file as it is, although its vocabulary can be read; ``gap`` which of its shards are missing.
    """

    header: GgufHeader = field(repr=False)
    vocab: VocabInfo = field(repr=False)
    n_params: int | None = None
    n_active: int | None = None
    fault: str | None = None
    gap: str | None = None

    @property
    def path(self) -> Path:
        """The file that was named."""
        return self.header.path


@dataclass(frozen=True, slots=True)
class SizeRatio:
    """How many times larger the target is, by active parameters; quantization moves the real costs a little."""

    ratio: float

    @property
    def is_useful(self) -> bool:
        """Within the range where a draft can pay."""
        return USEFUL_RATIO[0] <= self.ratio <= USEFUL_RATIO[1]

    @property
    def remark(self) -> str:
        """The judgement in two or three words."""
        return (
            "useful size"
            if self.is_useful
            else "large for a draft"
            if self.ratio < USEFUL_RATIO[0]
            else "small for a draft"
        )

    @property
    def words(self) -> str:
        """The judgement and its reason."""
        low, high = USEFUL_RATIO
        place = f"{'in' if self.is_useful else 'outside'} the useful range, 1:{low} to 1:{high}: "
        if self.is_useful:
            return place + f"a draft pass costs about {100 / self.ratio:.0f}% of a target pass"
        if self.ratio < low:
            return place + f"drafting {_K} tokens costs about {_K / self.ratio:.1f} passes of the target"
        return place + "so small a draft seldom says what the target would say"


@dataclass(frozen=True)
class PairReport:
    """One draft for the target. ``llama_cpp`` says why llama.cpp would refuse the pair, or is None."""

    target: Model
    draft: Model
    comparison: Comparison
    overlap: Overlap | None
    encodings: Encodings
    size: SizeRatio | None
    llama_cpp: str | None

    @property
    def fault(self) -> str | None:
        """Why one of the two files would not be loaded as it is."""
        return self.target.fault or self.draft.fault

    @property
    def ids_interchangeable(self) -> bool:
        """Every id that both have means the same to both: safe to speculate."""
        return self.comparison.compatible

    @property
    def text_alike(self) -> bool | None:
        """Text becomes the same ids; None where it could not be tried and the files differ."""
        if self.encodings.untried is None:
            return not self.encodings.differing
        if any(check.name == "merges" and "missing" in (check.target, check.draft) for check in self.text_differences):
            return False
        is_same = not (self.comparison.differing or self.comparison.tail or self.text_differences)
        return True if is_same else None

    @property
    def text_differences(self) -> tuple[vocab.Check, ...]:
        """The rows about encoding that differ."""
        return tuple(check for check in self.comparison.checks if check.about == "text" and check.outcome != "equal")

    @property
    def is_compatible(self) -> bool:
        """``specli run`` would take this pair (vocabulary-only files stand for the models they were cut from)."""
        return self.ids_interchangeable and self.fault is None


@dataclass(frozen=True, slots=True)
class Unread:
    """A draft file that could not be read, and why."""

    path: Path
    reason: str


def read_model(path: Path, role: Role) -> Model:
    """Read one file. Raises ``ModelLoadError`` if it holds no vocabulary that can be compared."""
    header = gguf_file.read_header(path)
    headers: Sequence[GgufHeader] = ()
    fault = gap = None
    try:
        headers = _check_whole(header, role)
    except ModelLoadError as error:
        if header.split_no > 0 or header.tokens is None:
            raise
        fault, gap = (None, str(error)) if _is_whole_but_for_shards(header, role) else (str(error), None)
    info = VocabInfo.from_header(header)
    if fault is None and gap is None and not header.is_vocab_only:
        return Model(header, info, *_parameters(headers))
    return Model(header, info, fault=fault, gap=gap)


def _check_whole(header: GgufHeader, role: Role) -> Sequence[GgufHeader]:
    """The headers of all shards. Raises ``ModelLoadError`` for what llama.cpp would not load, weights apart."""
    if not header.is_vocab_only:
        return gguf_file.check_loadable(header, role)
    gguf_file.check_vocabulary(header)
    gguf_file.check_loading_vocabulary(header)
    return (header,)


def _is_whole_but_for_shards(header: GgufHeader, role: Role) -> bool:
    """Whether the file would do if it were not the first of several."""
    if header.split_count == 1:
        return False
    metadata = {key: value for key, value in header.metadata.items() if not key.startswith("split.")}
    alone = replace(header, metadata=MappingProxyType(metadata))
    try:
        _check_whole(alone, role)
    except ModelLoadError:
        return False
    return True


def _parameters(headers: Sequence[GgufHeader]) -> tuple[int, int]:
    """All parameters, and those that one token passes through: of the experts only the share that is used."""
    total = experts = 0
    for header in headers:
        for tensor in header.tensors:
            n = math.prod(tensor.shape)
            total += n
            experts += n if "_exps" in tensor.name else 0
    n_experts, n_used = headers[0].hparam("expert_count"), headers[0].hparam("expert_used_count")
    if experts and isinstance(n_experts, int) and isinstance(n_used, int) and 0 < n_used <= n_experts:
        return total, total - experts + experts * n_used // n_experts
    return total, total


def size_ratio(target: Model, draft: Model) -> SizeRatio | None:
    """Target ÷ draft, or None where one of them has no weights to count."""
    if not target.n_active or not draft.n_active:
        return None
    return SizeRatio(target.n_active / draft.n_active)


def check_drafts(target: Model, drafts: Sequence[Path]) -> list[PairReport | Unread]:
    """Every draft against the target, the best first: those that fit, by useful size ratio; unreadable files last."""
    # Loading the target meanwhile in a thread is slower: each line of llama.cpp's log would wait for this one.
    results: list[PairReport | Unread] = []
    opened = _open(target, "target")
    try:
        for path in drafts:
            try:
                draft = read_model(path, "draft")
            except ModelLoadError as error:
                results.append(Unread(path, str(error)))
            else:
                results.append(_report(target, draft, opened))
    finally:
        if not isinstance(opened, str):
            opened.close()
    return sorted(results, key=_rank)


def _report(target: Model, draft: Model, opened: Vocabulary | str) -> PairReport:
    comparison = vocab.compare(target.vocab, draft.vocab)
    shared = vocab.overlap(target.vocab, draft.vocab, comparison)
    encodings = _encodings(target, draft, comparison, opened)
    refusal = vocab.llama_cpp_refuses(target.vocab, draft.vocab, comparison)
    if refusal is None and encodings.untried is not None and (target.fault or draft.fault):
        refusal = f"it cannot load the vocabulary of the {'target' if isinstance(opened, str) else 'draft'}"
    return PairReport(target, draft, comparison, shared, encodings, size_ratio(target, draft), refusal)


def _encodings(target: Model, draft: Model, comparison: Comparison, opened: Vocabulary | str) -> Encodings:
    """The probes through both vocabularies, or why not."""
    if isinstance(opened, str):
        return Encodings(0, (), opened)
    other = _open(draft, "draft")
    if isinstance(other, str):
        return Encodings(0, (), other)
    with other:
        return compare_encodings(opened.encode, other.encode, probes_for(target.vocab, draft.vocab, comparison))


def _open(model: Model, role: Role) -> Vocabulary | str:
    """The vocabulary in llama.cpp, or why it cannot be loaded."""
    from specli.engine.vocabulary import Vocabulary

    try:
        if model.fault is not None:  # perhaps one that llama.cpp does not survive
            gguf_file.check_loading_vocabulary(model.header)
        return Vocabulary(model.header, model.vocab)
    except ModelLoadError as error:
        return f"the {role}'s vocabulary cannot be loaded ({error})"


def _rank(result: PairReport | Unread) -> tuple[int, int, float]:
    """What fits comes first, then what has a useful size, then what is nearest to the middle of that range."""
    if isinstance(result, Unread):
        return 2, 0, 0.0
    size, middle = result.size, math.sqrt(math.prod(USEFUL_RATIO))
    is_useful = 1 if size is None else 0 if size.is_useful else 2
    return int(not result.is_compatible), is_useful, abs(math.log(size.ratio / middle)) if size else 0.0
