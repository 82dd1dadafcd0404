"""What the decode loop is asked for, and how far it has come with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specli.drafters.base import Draft, SequenceState
from specli.engine.base import Slice
from specli.events import FinishReason
from specli.text import TextStream


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue. ``max_tokens`` None means until EOS or the end of the context.

    ``end_ids`` are the target's end-of-generation ids (a draft has no say in them). ``accepted_at_s`` is the clock
    mark from which time to first token counts. ``is_kept``: the sequence goes on in a later run, so the drafter is not
    told to forget it; ``n_known``: tokens at the prompt's beginning that the drafter knows from an earlier run.
    ``n_logprobs``: how many alternatives to report for each token with its log probability; None reports none.
    """

    state: SequenceState
    accepted_at_s: float
    max_tokens: int | None = None
    end_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    is_kept: bool = False
    n_known: int = 0
    n_logprobs: int | None = None


@dataclass(slots=True)
class Running:
    """A request under way. ``n_last``: tokens that its last commit kept."""

    request: Request
    text: TextStream
    finish: FinishReason | None = None
    n_last: int = 0
    n_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.request.state.tokens)

    @property
    def state(self) -> SequenceState:
        """The sequence's tokens, coins and sampler state."""
        return self.request.state

    def to_verify(self, draft: Draft) -> Slice:
        """The last committed token and ``draft``, a row wanted for each."""
        tokens = [self.state.tokens[-1], *draft.ids]
        return Slice(self.state.id, tokens, len(self.state.tokens) - 1, len(tokens))

    @property
    def n_left(self) -> int | None:
        """Tokens that may still be emitted; None without a limit."""
        limit = self.request.max_tokens
        return None if limit is None else limit - (len(self.state.tokens) - self.n_prompt)

    def limit_reached(self, n_ctx: int) -> FinishReason | None:
        """Why the last token was the last one, if it was: a stop string, the limit, or the end of the context."""
        if self.text.stop is not None:
            return "stop"
        if self.n_left == 0 or len(self.state.tokens) > n_ctx:
            return "length"
        return None
