"""From token bytes to final text: characters split over tokens, and stop strings split over anything."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from specli.errors import ConfigError
from specli.events import Provenance, Span


class TextStream:
    """Turns one sequence's tokens into text that never has to be taken back.

    ``piece`` gives a token's bytes. Bytes that end inside a character wait for the next token; characters that may be
    the beginning of a stop string wait until they are not. Illegal bytes become U+FFFD, one per maximal subpart
    (Unicode 15, section 3.9), and nothing around them is lost.

    When a stop string is found ``stop`` names it, the text ends before it, and ``n_kept`` counts the tokens that have
    a part in the text before it. The stop that is completed first wins, the longest of those completed together: how
    the text is split into tokens does not matter.
    """

    def __init__(self, piece: Callable[[int], bytes], stops: Sequence[str] = ()) -> None:
        if any(not stop for stop in stops):
            raise ConfigError("an empty stop string was given (-r), it would match everywhere; leave it out")
        self.stop: str | None = None
        self.n_kept = 0
        self._piece = piece
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[Span] = []
        self._n_final = 0  # characters given out
        self._starts: list[tuple[int, int]] = []  # recent tokens: (first character, index), for the cut
        self._n_tokens = 0

    @property
    def n_open(self) -> int:
        """Tokens at the end that a stop string may still take back."""
        return self._n_tokens - self._starts[0][1] if self._starts else 0

    def push(self, token: int, provenance: Provenance) -> list[Span]:
        """Add one token; returns the spans that became final, perhaps none."""
        piece = self._piece(token)
        if self._stops:
            n_decoded = self._n_final + sum(len(span.text) for span in self._held)
            n_broken = breaks(self._decoder.getstate()[0], piece)  # its U+FFFD belongs to the tokens before
            self._starts.append((n_decoded + n_broken, self._n_tokens))
        self._n_tokens += 1
        self.n_kept = self._n_tokens
        text = self._decoder.decode(piece)
        return self._release(text, provenance) if text else []

    def finish(self) -> list[Span]:
        """The end without a stop string: what was held back is final, an unfinished character becomes U+FFFD."""
        if self.stop is not None:
            return []
        provenance = self._held[-1].provenance if self._held else Provenance.TARGET
        spans = self._release(self._decoder.decode(b"", final=True), provenance)
        if self.stop is None:
            spans += self._take(sum(len(span.text) for span in self._held))
        return spans

    def _release(self, text: str, provenance: Provenance) -> list[Span]:
        if text:
            self._held.append(Span(text, provenance))
        if not self._stops:
            return self._take(len(text))
        window = "".join(span.text for span in self._held)
        found = min(((window.find(s) + len(s), window.find(s), s) for s in self._stops if s in window), default=None)
        if found is None:
            n_final = len(window) - max(_overlap(window, stop) for stop in self._stops)
            spans = self._take(n_final)
            while self._starts and self._starts[0][0] < self._n_final:  # no cut can come before these any more
                self._starts.pop(0)
            return spans
        _, at, self.stop = found
        cut = self._n_final + at
        self.n_kept = next((index for start, index in self._starts if start >= cut), self._n_tokens)
        spans = self._take(at)
        self._held.clear()
        return spans

    def _take(self, n_characters: int) -> list[Span]:
        """Remove and return the first ``n_characters`` of what is held."""
        spans: list[Span] = []
        while n_characters > 0:
            first = self._held.pop(0)
            if len(first.text) > n_characters:
                self._held.insert(0, Span(first.text[n_characters:], first.provenance))
                first = Span(first.text[:n_characters], first.provenance)
            spans.append(first)
            n_characters -= len(first.text)
            self._n_final += len(first.text)
        return spans


def breaks(unfinished: bytes, piece: bytes) -> bool:
    """Whether ``piece`` does not go on with the ``unfinished`` character before it."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(unfinished + piece[:1])
    except UnicodeDecodeError:
        return bool(unfinished)
    return False


def _overlap(window: str, stop: str) -> int:
    """Characters at the end of ``window`` that may begin ``stop``."""
    for length in range(min(len(window), len(stop) - 1), 0, -1):
        if window.endswith(stop[:length]):
            return length
    return 0
