"""A draft model and the text itself under one controller: each round the one that pays, as far as it pays, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specli.controller import Controller, Kind
from specli.drafters.base import EMPTY, Draft, SequenceState
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.events import RoundDone


@dataclass(slots=True)
class _Pending:
    """What one sequence proposed and has not been judged yet."""

    kind: Kind
    chances: Sequence[float]
    k: int


class AdaptiveDrafter:
    """Asks ``controller`` before each draft which of ``model`` and ``ngram`` proposes, and tells it what came of it.

    An n-gram draft costs nothing to make and is a point mass, so it is made first and cut to the length that pays. The
    model's draft grows under the controller's eyes (its ``pacer``), which decides before each token is drawn.
    """

    def __init__(self, controller: Controller, model: ModelDrafter | None, ngram: NgramDrafter | None) -> None:
        self.controller = controller
        self._model, self._ngram = model, ngram
        self._pending: dict[int, _Pending] = {}
        self._n_passes = 0  # of the model in this round
        self._n_lacking = 0

    @property
    def busy_s(self) -> float:
        """Seconds spent in the draft model's passes."""
        return self._model.busy_s if self._model else 0.0

    def propose(self, sequences: Sequence[SequenceState], budgets: Sequence[int]) -> list[Draft]:
        """One draft per sequence, by whoever pays. Raises ``Cancelled`` as the model does."""
        controller = self.controller
        controller.begin(len(sequences))
        guesses = self._ngram.propose(sequences, budgets) if self._ngram else [EMPTY] * len(sequences)
        drafts = [EMPTY] * len(sequences)
        by_model: list[int] = []
        for i, (state, guess, budget) in enumerate(zip(sequences, guesses, budgets, strict=True)):
            chances = [] if guess.confidence is None else guess.confidence.tolist()
            n_lacking = self._model.n_lacking(state) if self._model else 0
            plan = controller.plan(self._model is not None, n_lacking, chances, budget)
            self._pending[state.id] = _Pending(plan.kind, chances[: plan.k], 0)
            if plan.kind == "ngram" and guess.confidence is not None:
                drafts[i] = Draft(guess.ids[: plan.k], guess.distributions[: plan.k], guess.confidence[: plan.k])
                controller.take(plan.k)
            elif plan.kind == "draft":
                by_model.append(i)
                self._n_lacking = max(self._n_lacking, n_lacking)
        self._draft_by_model(sequences, budgets, by_model, drafts)
        for state, draft in zip(sequences, drafts, strict=True):
            self._pending[state.id].k = len(draft)
        return drafts

    def _draft_by_model(
        self, sequences: Sequence[SequenceState], budgets: Sequence[int], chosen: Sequence[int], drafts: list[Draft]
    ) -> None:
        if self._model is None or not chosen:
            return
        n_before, k_max = self._model.n_passes, self.controller.k_max
        made = self._model.propose([sequences[i] for i in chosen], [min(budgets[i], k_max) for i in chosen])
        self._n_passes = self._model.n_passes - n_before
        for i, draft in zip(chosen, made, strict=True):
            drafts[i] = draft
            chances = [] if draft.confidence is None else draft.confidence.tolist()
            self._pending[sequences[i].id].chances = chances

    def commit(self, sequence: SequenceState, tokens: Sequence[int]) -> None:
        """Tell both drafters."""
        for drafter in (self._model, self._ngram):
            if drafter is not None:
                drafter.commit(sequence, tokens)

    def observe(self, outcome: RoundDone) -> None:
        """Teach the controller what the round cost and brought."""
        controller = self.controller
        n_tokens = sum(1 + part.proposed for part in outcome.sequences)
        emitted = sum(part.emitted for part in outcome.sequences)
        controller.costs.observe_draft(self._n_passes, self._n_lacking, outcome.draft_s)
        controller.observe_round(n_tokens, emitted, outcome.verify_s + outcome.host_s, outcome.draft_s)
        for part in outcome.sequences:
            pending = self._pending.pop(part.sequence, _Pending("none", (), 0))
            controller.note(pending.kind, pending.k)
            controller.observe_draft(pending.kind, pending.chances, part.accepted)
        self._n_passes = self._n_lacking = 0

    def rewind(self, sequence: SequenceState, n_tokens: int) -> None:
        """Tell both drafters."""
        self._pending.pop(sequence.id, None)
        for drafter in (self._model, self._ngram):
            if drafter is not None:
                drafter.rewind(sequence, n_tokens)

    def forget(self, sequence: SequenceState) -> None:
        """Tell both drafters; what the controller learned stays."""
        self._pending.pop(sequence.id, None)
        for drafter in (self._model, self._ngram):
            if drafter is not None:
                drafter.forget(sequence)
