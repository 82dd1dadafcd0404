"""The drafter that a session gets: a draft model, the text itself, or both, under a controller or at a fixed length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from specli.controller import Controller
from specli.drafters.adaptive import AdaptiveDrafter
from specli.drafters.base import Drafter
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.engine.base import Engine, Slice
from specli.errors import Cancelled
from specli.profile import load_profile, save_profile
from specli.verify import Verifier

# Eight passes, tokens of each: at the ends of kernel tiles; the first of each model pays for page faults.
TARGET_WIDTHS, TARGET_WIDTHS_ALONE = (1, 1, 2, 4, 8), (1, 1, 2, 3, 4, 5, 8, 16)
# below this estimate the n-gram drafter proposes nothing; a controller knows better
FIXED_HIT_RATE, CONTROLLED_HIT_RATE = 0.4, 0.2
SHARED_FEED = 128  # tokens of catching up in one round, where other texts wait for it
DRAFT_WIDTHS = (1, 1, 17)  # the last is a catch-up, to tell a flat curve from a linear one


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter is made of. ``profile``: where measurements are kept, None to keep none.

    ``k_max``: the longest draft, tokens. ``is_fixed``: every draft is as long as it can be, nothing is controlled.
    """

    target: Engine
    verifier: Verifier
    end_ids: frozenset[int]
    k_max: int
    n_min: int
    p_min: float
    is_fixed: bool
    draft: Engine | None = None
    uses_ngram: bool = False
    profile: Path | None = None
    cancelled: Callable[[], bool] = field(default=lambda: False)

    def make(self) -> tuple[Drafter | None, Controller | None]:
        """The drafter, and the controller over it unless it is fixed. Raises ``Cancelled`` while calibrating."""
        controller = None if self.is_fixed else Controller(self.k_max)
        model = self._model(controller) if self.draft is not None else None
        ngram = None
        sampler = self.verifier.sampler if self.is_fixed else None  # a controller uses a part of it only
        if self.uses_ngram:
            floor = FIXED_HIT_RATE if self.is_fixed else CONTROLLED_HIT_RATE
            ngram = NgramDrafter(self.end_ids, self.n_min, self.p_min, min_hit_rate=floor, sampler=sampler)
        if controller is None or (model is None and ngram is None):
            return model or ngram, None
        kept = load_profile(self.profile) if self.profile is not None else None
        if kept is None or not controller.restore(kept):
            self._calibrate(controller)
        return AdaptiveDrafter(controller, model, ngram, self.verifier.sampler), controller

    def keep(self, controller: Controller) -> None:
        """Keep what ``controller`` measured for the next run."""
        if self.profile is not None:
            save_profile(self.profile, controller.profile())

    def _model(self, controller: Controller | None) -> ModelDrafter:
        assert self.draft is not None
        feed_most = SHARED_FEED if self.target.n_sequences > 1 else None
        return ModelDrafter(
            self.draft, self.verifier, self.target.n_vocab, self.end_ids, self.n_min, self.p_min, controller, feed_most
        )

    def _calibrate(self, controller: Controller) -> None:
        """Measure v(n) at a few widths and the draft's step, on sequence 0, which is empty before and after."""
        longest = min(self.k_max + 1, self.target.n_rows_max, self.target.n_batch, self.target.n_ctx)
        for width in TARGET_WIDTHS_ALONE if self.draft is None else TARGET_WIDTHS:
            if width <= longest:
                controller.costs.observe_pass(width, self._pass_s(self.target, width))
        if self.draft is not None:
            for width in DRAFT_WIDTHS:
                n_lacking = min(width, self.draft.n_batch, self.draft.n_ctx)
                controller.costs.observe_draft(1, n_lacking, self._pass_s(self.draft, n_lacking))

    def _pass_s(self, engine: Engine, width: int) -> float:
        if self.cancelled():
            raise Cancelled("stopped while measuring")
        busy_s = engine.busy_s
        engine.evaluate([Slice(0, [0] * width, 0, min(width, engine.n_rows_max))])
        engine.rollback(0, 0)
        return engine.busy_s - busy_s
