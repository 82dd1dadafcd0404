"""Strings on which tokenizers part ways, and the comparison of how two of them encode these.

Pre-tokenizers differ in how they cut digits, contractions, runs of white space, letters with combining marks, and
punctuation before line breaks; merges differ anywhere. The first strings are those that differ most often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from specli.vocab import Comparison, VocabInfo

Encode = Callable[[str], list[int]]

_PLAIN = (
    *("Hello 123", "don't", "Hello world", "Hello, World!", " leading space", "trailing space "),
    *(
        "The quick brown fox.",
        "ENGLISH and CamelCase and snake_case",
        "end.\n\nNew paragraph",
        "e.g. i.e. etc.",
        "naïve café",
        "a",
        " ",
    ),
)
_DIGITS = (
    *("3", "33", "333", "3333", "33333", "1234567890", " 42", "3.14159", "1,000,000", "2024-01-31", "0x1F", "v1.2.3"),
    *("٣٣٣", "१२३", "x2", "½ ² ①"),
)
_CONTRACTIONS = ("I'm you're we'll they'd it's I've", "DON'T I'M", "’s don’t", "'tis", "rock'n'roll")
_WHITESPACE = (
    *("  ", "   ", "        x", "a  b   c", "\t", "\t\tx", "\n", "\n\n", "\n\n\n\nx", " \n", "\r\n\r\n", "a\n \n b"),
    *("line one  \nline two", "a\u00a0b", "a\u3000b", "x\t \n"),
)
_SCRIPTS = (
    *("สวัสดี", "日本語のテキスト", "你好，世界。", "안녕하세요 세계", "Привет, мир!", "Γειά σου Κόσμε", "مرحبا بالعالم"),
    *("שלום עולם", "नमस्ते दुनिया", "বাংলা", "தமிழ்", "ខ្មែរ", "ქართული", "Հայերեն", "አማርኛ", "Tiếng Việt"),
    *("cafe\u0301 e\u0308", "ﬁne ﬀ", "ǅ ß İ ı", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢"),
)
_SYMBOLS = (
    *(
        "🦙",
        "👩\u200d👩\u200d👧 👍🏽 🇩🇪",
        "🚀🚀🚀",
        "...",
        "?!?!",
        "----",
        "=====",
        '"quoted"',
        "(a) [b] {c}",
        "a/b\\c",
    ),
    *("€5 £6 ¥7", "http://example.com/?q=1&r=2#top", "user@example.com", "#tag @name", "<b>bold</b>", "\u200b\ufeff"),
    "→ ≤ ∑ ∞",
)
_CODE = (
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "if (x != null && !y) { return; }",
    "SELECT * FROM t WHERE id = 10;",
    '{"key": [1, 2.5, null, true]}',
    "        deep = {'a': 1}  # comment\n",
    "\\begin{equation} x^{2} \\end{equation}",
    "git commit -m 'fix: typo' && ls -la | grep .py",
    "x = y ** 2 // 3 != 4 or not z",
    "std::vector<int>& v->size()",
)
PROBES: tuple[str, ...] = (*_PLAIN, *_DIGITS, *_CONTRACTIONS, *_WHITESPACE, *_SCRIPTS, *_SYMBOLS, *_CODE)
N_AIMED = 16  # strings of each kind that are made to fit a difference that is already known


@dataclass(frozen=True, slots=True)
class Example:
    """A string and the ids that target and draft encode it to."""

    text: str
    target: tuple[int, ...]
    draft: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Encodings:
    """How two vocabularies encode the probes. ``untried`` says why nothing was encoded, or is None."""

    n_probes: int
    differing: tuple[Example, ...] = field(repr=False)
    untried: str | None = None


def compare_encodings(target: Encode, draft: Encode, probes: Sequence[str] = PROBES) -> Encodings:
    """Encode every probe with both, and keep those that differ."""
    differing = []
    for text in probes:
        target_ids, draft_ids = target(text), draft(text)
        if target_ids != draft_ids:
            differing.append(Example(text, tuple(target_ids), tuple(draft_ids)))
    return Encodings(len(probes), tuple(differing))


def probes_for(target: VocabInfo, draft: VocabInfo, comparison: Comparison) -> tuple[str, ...]:
    """The built-in probes, and strings aimed at the tokens and merges that only one of the two has."""
    aimed: list[str] = []
    for vocab in (target, draft):
        aimed += vocab.plain_texts(comparison.differing[:N_AIMED])
    if comparison.tail is not None:
        larger = target if comparison.tail.owner == "target" else draft
        aimed += larger.plain_texts(comparison.tail.real[:N_AIMED])
    is_same_family = len(comparison.differing) < N_AIMED  # else the merges tell nothing new, and cost 0.2 s
    for vocab, other in ((target, draft), (draft, target)) if is_same_family else ():
        aimed += islice(_own_merges(vocab, other), N_AIMED)
    usable = (text for text in aimed if text and "\ufffd" not in text and "\0" not in text)
    return tuple(dict.fromkeys((*PROBES, *usable)))


def _own_merges(vocab: VocabInfo, other: VocabInfo) -> Iterator[str]:
    """What the merges that only ``vocab`` has put together, in their order; nothing if the other has none at all."""
    if vocab.merges is None or other.merges is None or vocab.merges == other.merges:
        return
    theirs: Iterable[bytes] = set(other.merges[:])
    for merge in vocab.merges[:]:
        if merge not in theirs:
            yield vocab.plain_text(merge.replace(b" ", b""))
