"""What is asked: English-like text of a wanted length, no two beginning alike, or prompts of a file.

A prefix cache would answer for the server if prompts shared their beginning, and if a second run repeated the first
one's. So each prompt begins with a tag of its own: of the run (drawn anew each time) and of the request. Lengths and
words of a step's requests come from the seed and the step's number alone, however many the steps before it asked (how
many words, from the server's tokenizer too). A file's prompts come in an order of the seed that goes on from step to
step, so that none is asked twice before it must.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from specli.bench.workloads import Prompt
from specli.config import LoadOptions
from specli.loadtest.lengths import draw

CHARS_PER_TOKEN = 5.0  # where the server does not tokenize for us; 5.2 by a vocabulary of 49,152 tokens
_COMMON = """
the of and to in a is that for it was on are as with they be at one have this from by hot word but what some we
can out other were all there when up use your how said an each she which their time if will way about many then
them write would like so these her long make thing see him two has look more day could go come did number sound
no most people my over know water than call first who may down side been now find any new work part take get
place made live where after back little only round man year came show every good give our under name very
through just form sentence great think say help low line differ turn cause much mean before move right boy old
too same tell does set three want air well also play small end put home read hand port large spell add even land
here must big high such follow act why ask men change went light kind off need house picture try us again animal
point mother world near build self earth father head stand own page should country found answer school grow
study still learn plant cover food sun four between state keep eye never last let thought city tree cross farm
hard start might story saw far sea draw left late run while press close night real life few north open seem
together next white children begin got walk example ease paper group always music those both mark often letter
until mile river car feet care second book carry took science eat room friend began idea fish mountain stop once
base hear horse cut sure watch color face wood main enough plain girl usual young ready above ever red list
though feel talk bird soon body dog family direct pose leave song measure door product black short numeral class
wind question happen complete ship area half rock order fire south problem piece told knew pass since top whole
"""
_WORDS = _COMMON.split()
_PREFIX, _LENGTHS, _WORDING, _ORDER = 1, 3, 4, 5  # streams of random numbers under the seed; 2 is of the arrivals


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its text, and the tokens that were drawn for it (None: the length of a file's prompt)."""

    index: int
    text: str
    input_tokens: int | None
    max_tokens: int
    system: str | None = None


class Writer:
    """Writes the asks of a run. ``tag``: of the run; ``chars_per_token``: of the server's tokenizer on such text."""

    def __init__(
        self,
        options: LoadOptions,
        tag: str,
        *,
        chars_per_token: float = CHARS_PER_TOKEN,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        self._options, self._tag, self._prompts = options, tag, tuple(prompts)
        self._chars = chars_per_token
        self._order_rng = np.random.default_rng([options.seed, _ORDER])
        self._order: list[int] = []
        n_shared = round(options.shared_prefix * chars_per_token)
        self._shared = text(f"{tag}: ", n_shared, np.random.default_rng([options.seed, _PREFIX])) if n_shared else ""
        self.n_written = 0

    @property
    def repeats(self) -> bool:
        """Whether a prompt of the file was asked more than once."""
        return bool(self._prompts) and self.n_written > len(self._prompts)

    def asks(self, step: int) -> Iterator[Ask]:
        """Asks of the ``step``-th load, from 0, without end."""
        seed = self._options.seed
        lengths, words = (np.random.default_rng([seed, stream, step]) for stream in (_LENGTHS, _WORDING))
        for i in count():
            yield self._write(f"{step}-{i} {self._tag}: ", lengths, words)

    def _write(self, opening: str, lengths: np.random.Generator, words: np.random.Generator) -> Ask:
        index = self.n_written
        self.n_written += 1
        max_tokens = draw(self._options.output_length, lengths)
        if self._prompts:
            prompt = self._prompts[self._next_of_file()]
            return Ask(index, prompt.text, None, max_tokens, prompt.system)
        n_tokens = draw(self._options.input_length, lengths)
        n_chars = max(0, round(n_tokens * self._chars) - len(self._shared))
        return Ask(index, self._shared + text(opening, n_chars, words), n_tokens, max_tokens)

    def _next_of_file(self) -> int:
        """Every prompt once, in an order drawn by the seed, then again in another one."""
        if not self._order:
            self._order = [int(i) for i in self._order_rng.permutation(len(self._prompts))]
        return self._order.pop()


def text(opening: str, n_chars: int, rng: np.random.Generator) -> str:
    """``opening`` and random words, about ``n_chars`` characters in all, ended within a word's length of it."""
    parts, length = [opening], len(opening)
    while length < n_chars:
        n_words = max(1, min(4096, (n_chars - length) // 6))
        for i in rng.integers(len(_WORDS), size=n_words):
            word = _WORDS[int(i)]
            if length + len(word) > n_chars and length > len(opening):
                return "".join(parts).rstrip() + " "
            parts.append(word + " ")
            length += len(word) + 1
    return "".join(parts)
