"""Many answers at a time from one session, without sockets: for the tests and figures of ``specli serve``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

from specli.config import SamplingOptions
from specli.events import Event, Failed, Finished, RoundDone, Text
from specli.serve.job import Job
from specli.serve.metrics import Metrics
from specli.serve.pace import Pace
from specli.serve.scheduler import Scheduler
from specli.session import Session
from specli.stats import Stats

HANG_S = 300.0


@dataclass(eq=False)
class Answer:
    """What one client got, with a clock mark (s) of each delivery that held text. ``then`` is called at its end."""

    job: Job
    stats: Stats = field(default_factory=Stats)
    text: str = ""
    at_s: list[float] = field(default_factory=list)
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    then: Callable[[], None] = lambda: None

    def take(self, events: Sequence[Event]) -> None:
        """In the engine's thread."""
        for event in events:
            if hasattr(event, "sequence"):
                self.stats.sequence = event.sequence
            self.stats.observe(event)
            if isinstance(event, Text):
                self.text += event.text
                self.at_s.append(time.perf_counter())
            elif isinstance(event, Failed):
                self.error = event.error
            if isinstance(event, Finished | Failed):
                self.ended.set()
                self.then()

    def wait(self) -> Answer:
        """Until it is over."""
        assert self.ended.wait(HANG_S)
        if self.error is not None:
            raise self.error
        return self


def answer(
    session: Session, prompt: Sequence[int], n: int, sampling: SamplingOptions | None = None, **options
) -> Answer:
    """A client with a job of ``n`` tokens that EOS does not end."""
    sampling = sampling or SamplingOptions(temperature=0)
    now_s = time.perf_counter()
    made = Answer.__new__(Answer)
    values = {
        "prompt": prompt,
        "verifier": session.verifier_for(sampling),
        "seed": sampling.seed,
        "max_tokens": n,
        "stops": (),
        "end_ids": frozenset(),
        "n_logprobs": None,
        "reuse": False,
        "arrived_s": now_s,
        "deadline_s": now_s + HANG_S,
        "deliver": lambda events: made.take(events),
    }
    made.__init__(Job(**{**values, **options}))
    return made


class Recorder(Metrics):
    """Keeps the rounds."""

    def __init__(self, session: Session) -> None:
        super().__init__(max(1, session.speculation.k), session.engine.n_sequences)
        self.rounds: list[RoundDone] = []

    def observe_round(self, outcome: RoundDone, state: str) -> None:
        """See ``Metrics``."""
        super().observe_round(outcome, state)
        self.rounds.append(outcome)


@contextmanager
def serving(
    session: Session, *, speculate: bool = True, chunked: bool = True, recorder: Recorder | None = None
) -> Iterator[Scheduler]:
    """A scheduler at work; the caches are empty before and behind it."""
    shown = session if speculate else _plain(session)
    pace = Pace(is_chunked=chunked)
    scheduler = Scheduler(shown, recorder or Recorder(session), pace, 10_000)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop()
        scheduler.drop_caches()


def _plain(session: Session) -> SimpleNamespace:
    """The same without a drafter."""
    names = ("engine", "verifier", "model", "speculation", "settings")
    return SimpleNamespace(drafter=None, controller=None, **{name: getattr(session, name) for name in names})
