"""One answer that a client waits for: asked in the event loop, made in the engine's thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from specli.errors import SpecError
from specli.events import Event, Failed
from specli.verify import Verifier

Deliver = Callable[[Sequence[Event]], None]


@dataclass(slots=True, eq=False)
class Job:
    """What one answer is made of. Times are ``time.perf_counter`` marks (s).

    ``seed`` None: no promise of repetition. ``reuse``: the prompt's beginning may come from a slot's cache. ``deliver``
    takes events to the client; it is called in the engine's thread. The scheduler sets ``slot`` while the job has one,
    and ``request``, the same for all that came together. ``has_left``: the client has gone.
    """

    prompt: Sequence[int]
    verifier: Verifier
    seed: int | None
    max_tokens: int | None
    stops: tuple[str, ...]
    end_ids: frozenset[int]
    n_logprobs: int | None
    reuse: bool
    arrived_s: float
    deadline_s: float
    deliver: Deliver
    request: int = 0
    slot: int | None = None
    started_s: float | None = None
    has_left: bool = False
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self, *, has_left: bool = True) -> None:
        """Nobody waits any more; the slot is free within a round. From any thread.

        ``has_left``: the client went away; otherwise what its request needs besides has failed.
        """
        if not self._is_cancelled.is_set():
            self.has_left = has_left
            self._is_cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for it."""
        return self._is_cancelled.is_set()

    def fail(self, error: SpecError) -> None:
        """Tell the client that there will be no (more) answer."""
        self.deliver([Failed(-1 if self.slot is None else self.slot, error)])


class Mailbox:
    """Events of one job on their way from the engine's thread to a coroutine.

    Bounded by the answer, however slow its reader: a few events per round, and no more rounds than the context holds.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Sequence[Event]] = asyncio.Queue()

    def deliver(self, events: Sequence[Event]) -> None:
        """Put ``events`` in, from any thread. A loop that was closed has no reader: nothing is lost."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, events)

    async def get(self) -> Sequence[Event]:
        """The next events, in the order that they happened."""
        return await self._queue.get()
