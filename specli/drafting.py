"""The drafter that a session gets: a draft model, the text itself, or both, under a controller or at a fixed length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specli.controller import NEGLIGIBLE, Controller
from specli.drafters.adaptive import AdaptiveDrafter
from specli.drafters.base import Drafter
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.engine.base import Engine, Slice
from specli.errors import Cancelled
from specli.estimates import MOST_DOUBTED, N_TRUSTED, CostModel
from specli.profile import Profile
from specli.verify import Verifier

# Eight passes at most, tokens of each: at the ends of kernel tiles; the first of each model pays for page faults.
TARGET_WIDTHS, TARGET_WIDTHS_ALONE = (1, 1, 2, 4, 8), (1, 1, 2, 3, 4, 5, 8, 16)
# below this estimate the n-gram drafter proposes nothing; a controller knows better
FIXED_HIT_RATE, CONTROLLED_HIT_RATE = 0.4, 0.2
SHARED_FEED = 128  # tokens of catching up in one round, where other texts wait for it
DRAFT_WIDTHS = (1, 1, 17)  # the last is a catch-up, to tell a flat curve from a linear one
N_DRAFT_STEPS = 2  # of a step in one calibration


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a drafter is made of. ``profile``: where measurements are kept, None to keep none.

    ``k_max``: the longest draft, tokens. ``is_fixed``: every draft is as long as it can be, nothing is controlled.
    ``is_measured_anew``: costs that were kept do not count.
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
    profile: Profile | None = None
    is_measured_anew: bool = False
    cancelled: Callable[[], bool] = field(default=lambda: False)

    def make(self) -> tuple[Drafter | None, Controller | None]:
        """The drafter, and the controller over it unless it is fixed. Raises ``Cancelled`` while calibrating."""
        controller = None if self.is_fixed else Controller(self.k_max, n_min=self.n_min)
        model = self._model(controller) if self.draft is not None else None
        ngram = None
        sampler = self.verifier.sampler if self.is_fixed else None  # a controller uses a part of it only
        if self.uses_ngram:
            floor, reach = (FIXED_HIT_RATE, 0.0) if self.is_fixed else (CONTROLLED_HIT_RATE, NEGLIGIBLE)
            ngram = NgramDrafter(
                self.end_ids, self.n_min, self.p_min, min_hit_rate=floor, min_reach=reach, sampler=sampler
            )
        if controller is None or (model is None and ngram is None):
            return model or ngram, None
        kept = self.profile.load() if self.profile is not None else {}
        if self.is_measured_anew:
            kept.pop("costs", None)
        controller.restore(kept)
        controller.n_calibrating = self._calibrate(controller.costs)
        return AdaptiveDrafter(controller, model, ngram, self.verifier.sampler), controller

    def keep(self, controller: Controller) -> None:
        """Keep what ``controller`` measured for the next run."""
        if self.profile is not None:
            self.profile.save(controller.profile())

    def _model(self, controller: Controller | None) -> ModelDrafter:
        assert self.draft is not None
        feed_most = SHARED_FEED if self.target.n_sequences > 1 else None
        return ModelDrafter(
            self.draft, self.verifier, self.target.n_vocab, self.end_ids, self.n_min, self.p_min, controller, feed_most
        )

    def _calibrate(self, costs: CostModel) -> int:
        """Measure v(n) at a few widths and the draft's step, on sequence 0, which is empty before and after; in passes.

        Only what was measured too few times: a time that was disturbed makes a width look dear, and then it would never
        be seen again. Where nothing seems to pay, that is made sure of once more.
        """
        longest = min(self.k_max + 1, self.target.n_rows_max, self.target.n_batch, self.target.n_ctx)
        enough = 2 if costs.break_even(self.k_max, c=0.0) is not None else N_TRUSTED
        widths = [n for n in (TARGET_WIDTHS_ALONE if self.draft is None else TARGET_WIDTHS) if 1 < n <= longest]
        widths = [n for n in widths if costs.n_samples(n) < enough]
        doubted = N_DRAFT_STEPS if costs.break_even(self.k_max) is not None else MOST_DOUBTED - 1
        has_draft = self.draft is not None and costs.n_steps <= doubted
        of_target = (1, 1, *widths) if widths or has_draft else ()
        for n in of_target:
            costs.observe_pass(n, self._pass_s(self.target, n))
        if self.draft is None or not has_draft:
            return len(of_target)
        for n in DRAFT_WIDTHS:
            n_lacking = min(n, self.draft.n_batch, self.draft.n_ctx)
            costs.observe_draft(1, n_lacking, self._pass_s(self.draft, n_lacking))
        return len(of_target) + len(DRAFT_WIDTHS)

    def _pass_s(self, engine: Engine, width: int) -> float:
        if self.cancelled():
            raise Cancelled("stopped while measuring")
        busy_s = engine.busy_s
        engine.evaluate([Slice(0, [0] * width, 0, min(width, engine.n_rows_max))])
        engine.rollback(0, 0)
        return engine.busy_s - busy_s
