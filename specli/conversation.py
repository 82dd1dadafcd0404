"""Several turns with one model: the messages, and answers that evaluate only what is new.

Each turn the model's chat template renders the whole conversation, and the session keeps what its caches share with
that (``Session.generate`` with ``reuse``). An answer stands in the history as it was generated, whatever ended it;
templates that drop earlier thoughts, or write things in another way, only make the shared part shorter.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING

from specli.chat import Message
from specli.config import GenerationOptions
from specli.errors import ConfigError, ContextOverflow
from specli.events import Event, Finished, Text

if TYPE_CHECKING:
    from specli.session import Session

Events = Generator[Event, None, None]


class Conversation:
    """Questions and answers over a loaded ``session``, one generation at a time.

    ``history``: user and assistant messages in turn, which may be given and changed. ``system``: the system message,
    None or empty for none; changing it holds from the next answer on.
    """

    def __init__(self, session: Session, options: GenerationOptions | None = None, system: str | None = None) -> None:
        """Begin with no turns. Raises ``ConfigError`` where the model has no chat template."""
        if session.template is None:
            raise ConfigError(
                "the model has no chat template, so it cannot chat; give it a text to complete with -p or -f"
            )
        self.options = options or GenerationOptions()
        self.system = system
        self.history: list[Message] = []
        self.attempt = 0  # of the last answer: 0 for the first one to its question, n for the n-th new one
        self._session = session
        self._pending: str | None = None  # the last question, while it has no answer

    @property
    def messages(self) -> list[Message]:
        """What the template gets: the system message, if any, and the history."""
        return [*([Message("system", self.system)] if self.system else []), *self.history]

    @property
    def seed(self) -> int | None:
        """The number that repeats the last answer, given the same conversation before it; None where nothing does."""
        return self._session.seed_of(self.attempt)

    @property
    def last_question(self) -> str | None:
        """What ``regenerate`` would answer; None when nothing was asked."""
        if self._pending is None and [message.role for message in self.history[-2:]] == ["user", "assistant"]:
            return self.history[-2].content
        return self._pending

    def ask(self, question: str, accepted_at_s: float | None = None) -> Events:
        """Ask, and answer as events. Closing the generator stops the answer; what came of it stays in the history.

        A question of which no answer came is taken back. Raises as ``Session.generate`` does, and ``ContextOverflow``
        when the conversation has become too long; then nothing has changed.
        """
        yield from self._answer(question, accepted_at_s, 0)

    def regenerate(self, accepted_at_s: float | None = None) -> Events:
        """Answer the last question again, by other coins. Where nothing comes of it the old answer stays.

        Raises ``ConfigError`` when nothing was asked.
        """
        question = self.last_question
        if question is None:
            raise ConfigError("there is no question to answer again yet")
        old: list[Message] = []
        if self._pending is None:
            old = self.history[-2:]
            del self.history[-2:]
            self._pending = question
        try:
            yield from self._answer(question, accepted_at_s, self.attempt + 1)
        finally:
            if self._pending is not None and old:
                self.history += old
                self._pending = None

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.history.clear()
        self._pending, self.attempt = None, 0

    def _answer(self, question: str, accepted_at_s: float | None, attempt: int) -> Events:
        session, asked = self._session, Message("user", question)
        accepted_at_s = time.perf_counter() if accepted_at_s is None else accepted_at_s
        prompt = session.chat_ids([*self.messages, asked])
        n_ctx = session.engine.n_ctx
        if len(prompt) > n_ctx:
            raise ContextOverflow(
                f"the conversation with this message has {len(prompt)} tokens, the context holds {n_ctx}; say less, "
                "start anew, or raise -c"
            )
        self._pending, self.attempt = question, attempt
        parts: list[str] = []
        is_answer = False  # an empty one is one too, if the model said so
        try:
            with closing(session.generate(prompt, self.options, accepted_at_s, reuse=True, attempt=attempt)) as events:
                for event in events:
                    if isinstance(event, Text):
                        parts.append(event.text)
                    elif isinstance(event, Finished):
                        is_answer = event.reason != "cancelled" and bool(event.tokens or event.n_cut)
                    yield event
        finally:
            if parts or is_answer:
                self.history += [asked, Message("assistant", "".join(parts))]
                self._pending = None
