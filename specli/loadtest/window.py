"""When a load is steady: from the end of the warm-up to the moment from which it is no longer full."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extent:
    """How long: warm-up in requests that ended well or seconds, the measured part in requests or seconds."""

    warmup_requests: int = 0
    warmup_s: float = 0.0
    n_requests: int | None = None
    duration_s: float = 60.0


class SteadyWindow:
    """Decides of each request whether it is sent and measured. Times are of the caller's clock."""

    def __init__(self, extent: Extent, begun_s: float) -> None:
        self.extent, self.begun_s = extent, begun_s
        self.started_s: float | None = None
        self.ended_s: float | None = None
        self.n_measured = 0
        self._n_good = 0
        self._start_if_warm(begun_s)

    def take(self, at_s: float) -> bool | None:
        """Whether the request that is due at ``at_s`` is measured; None when no more are sent.

        However late it is taken: a load that lost the requests for which this machine was late would be another one.
        """
        self.tick(at_s)
        if self.ended_s is not None and at_s >= self.ended_s:
            return None
        if self.started_s is None or at_s < self.started_s:
            return False
        if self.n_measured == self.extent.n_requests:
            self.close(at_s)
            return None
        self.n_measured += 1
        return True

    def tick(self, at_s: float) -> None:
        """Time goes by."""
        self._start_if_warm(at_s)
        if self.started_s is not None and self.ended_s is None and self.extent.n_requests is None:
            end_s = self.started_s + self.extent.duration_s
            if at_s >= end_s:
                self.ended_s = end_s

    def note_success(self, at_s: float) -> None:
        """A request has ended well. What a server refuses warms nothing up."""
        self._n_good += 1
        self._start_if_warm(at_s)

    def begin(self, at_s: float) -> None:
        """Warm enough, whatever was planned."""
        if self.started_s is None and self.ended_s is None:
            self.started_s = at_s

    def close(self, at_s: float) -> None:
        """No more, whatever was planned."""
        if self.ended_s is None:
            self.ended_s = at_s

    def fraction(self, at_s: float) -> float | None:
        """How much of the measured part is done; None before it."""
        if self.started_s is None:
            return None
        n = self.extent.n_requests
        done = self.n_measured / n if n is not None else (at_s - self.started_s) / self.extent.duration_s
        return min(max(done, 0.0), 1.0)

    def _start_if_warm(self, at_s: float) -> None:
        if self.started_s is None and self.ended_s is None and self._n_good >= self.extent.warmup_requests:
            ready_s = self.begun_s + self.extent.warmup_s
            if at_s >= ready_s:
                self.begin(ready_s if self.extent.warmup_requests == 0 else at_s)
