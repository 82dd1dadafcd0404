"""What the decode loop is asked for, and how far it has come with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from specli.drafters.base import Draft, SequenceState
from specli.engine.base import Engine, Rows, Slice
from specli.errors import ConfigError, ContextOverflow
from specli.events import FinishReason, Logprobs
from specli.sampling import log_probabilities
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

    def check_fits(self, n_ctx: int) -> None:
        """Raise ``ConfigError`` for an empty prompt, ``ContextOverflow`` for one of more than ``n_ctx`` tokens."""
        n_prompt = len(self.state.tokens)
        if n_prompt == 0:
            raise ConfigError("the prompt is empty (0 tokens), at least one token was expected; give one with -p or -f")
        if n_prompt > n_ctx:
            raise ContextOverflow(
                f"the prompt has {n_prompt} tokens, the context holds {n_ctx}; shorten it or raise -c"
            )


@dataclass(slots=True)
class Running:
    """A request under way. ``n_last``: tokens that its last commit kept.

    ``n_reused`` prompt tokens were in the cache already; evaluating the others has taken ``prefill_s`` so far.
    """

    request: Request
    text: TextStream
    finish: FinishReason | None = None
    n_last: int = 0
    n_reused: int = 0
    prefill_s: float = 0.0
    n_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_prompt = len(self.request.state.tokens)

    @property
    def state(self) -> SequenceState:
        """The sequence's tokens, coins and sampler state."""
        return self.request.state

    @property
    def is_feeding(self) -> bool:
        """Whether a part of the prompt is still to be evaluated."""
        return self.finish is None and len(self.state.tokens) == self.n_prompt

    def room(self, engine: Engine, k_max: int, n_active: int) -> int:
        """The longest draft that fits the tokens left to emit, an even share of the batch, ``k_max``.

        Drafters learn how many tokens are left (``SequenceState.n_left``).
        """
        self.state.n_left = self.n_left(engine.n_ctx)
        return max(0, min(k_max, min(engine.n_batch, engine.n_rows_max) // n_active - 1, self.state.n_left - 1))

    def logprobs(self, rows: Rows) -> list[Logprobs]:
        """Of the tokens that were just committed, one per row; none where nobody asked."""
        n = self.request.n_logprobs
        committed = self.state.tokens[len(self.state.tokens) - self.n_last :]
        return [] if n is None else [Logprobs(self.state.id, log_probabilities(rows, committed, n))]

    def to_verify(self, draft: Draft) -> Slice:
        """The last committed token and ``draft``, a row wanted for each."""
        tokens = [self.state.tokens[-1], *draft.ids]
        return Slice(self.state.id, tokens, len(self.state.tokens) - 1, len(tokens))

    def n_left(self, n_ctx: int) -> int:
        """Tokens that may still be emitted; the last one needs no place in the context."""
        in_context, limit = n_ctx + 1 - len(self.state.tokens), self.request.max_tokens
        return in_context if limit is None else min(in_context, limit - (len(self.state.tokens) - self.n_prompt))

    def limit_reached(self, n_ctx: int) -> FinishReason | None:
        """Why the last token was the last one, if it was: a stop string, the limit, or the end of the context."""
        if self.text.stop is not None:
            return "stop"
        return "length" if self.n_left(n_ctx) <= 0 else None
