"""What a self-test works on, and what it reports. Nothing here knows where the engines come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specli.decode import Decoder
from specli.drafters.base import Drafter, SequenceState
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.engine.base import Engine, Slice
from specli.errors import Cancelled
from specli.events import Finished
from specli.request import Request
from specli.samplers import Row
from specli.sampling import Sampler
from specli.verify import Verifier, make_verifier


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table. ``passed`` None: there was nothing to test. ``data``: figures, JSON types only."""

    name: str
    passed: bool | None
    detail: str
    data: Mapping[str, object] = field(default_factory=dict)
    elapsed_s: float = 0.0


@dataclass(frozen=True)
class Subject:
    """Engines and tokens to test with. ``draft`` None: only n-gram drafts are tried.

    ``prompts``: token ids of a few prompts; ``text``: ordinary tokens, for passes of given lengths. ``open_engine``
    makes another target engine whose K and V caches have the given type; the caller closes it.
    """

    target: Engine
    draft: Engine | None
    piece: Callable[[int], bytes]
    end_ids: frozenset[int]
    prompts: Sequence[Sequence[int]]
    text: Sequence[int]
    cache_type: str = "f16"
    open_engine: Callable[[str], Engine] | None = None
    cancelled: Callable[[], bool] = lambda: False
    progress: Callable[[float], None] = lambda _fraction: None

    def drafter(self, kind: str, verifier: Verifier) -> Drafter | None:
        """A fresh drafter: none, draft or ngram."""
        if kind == "draft" and self.draft is not None:
            return ModelDrafter(self.draft, verifier, self.target.n_vocab, self.end_ids)
        return NgramDrafter(self.end_ids) if kind == "ngram" else None

    @property
    def drafters(self) -> tuple[str, ...]:
        """The kinds that there are."""
        return ("draft", "ngram") if self.draft is not None else ("ngram",)

    def decode(
        self, prompt: Sequence[int], n: int, kind: str, k: int, *, sampler: Sampler, verify: str, seed: int = 0
    ) -> tuple[int, ...]:
        """The tokens of one generation from empty caches, through the loop that ``specli run`` uses."""
        self.target.rollback(0, 0)
        if self.draft is not None:
            self.draft.rollback(0, 0)
        verifier = make_verifier(verify, sampler)
        drafter = self.drafter(kind, verifier)
        state = SequenceState(0, list(prompt), seed, np.random.default_rng(seed))
        decoder = Decoder(self.target, verifier, self.piece, drafter, k if drafter else 0, self.cancelled)
        tokens: tuple[int, ...] = ()
        for event in decoder.run([Request(state, 0.0, n, self.end_ids)]):
            if isinstance(event, Finished):
                tokens = event.tokens
                if event.reason == "cancelled":
                    raise Cancelled("stopped during the self-test")
        return tokens

    def row_after(self, prompt: Sequence[int], tokens: Sequence[int]) -> Row:
        """The logits that plain decoding saw behind ``prompt`` and ``tokens``, float32 ``(n_vocab,)``."""
        target, text, row = self.target, [*prompt, *tokens], np.empty(0, np.float32)
        target.rollback(0, 0)
        while (start := target.n_past(0)) < len(text):
            end = min(start + target.n_batch, len(prompt)) if start < len(prompt) else start + 1
            row = target.evaluate([Slice(0, text[start:end], start, 1)]).rows[0][0].copy()
        return row

    def with_engines(self, target: Engine, draft: Engine | None) -> Subject:
        """The same with other engines."""
        return replace(self, target=target, draft=draft)
