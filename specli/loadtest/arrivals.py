"""When requests arrive in an open loop: a Poisson process, which does not care how busy the server is.

A closed loop has no arrivals: a request follows the one that ended (``run``).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def poisson(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Seconds from the beginning at which requests arrive, without end; ``rate`` in requests/s."""
    at_s = 0.0
    while True:
        at_s += float(rng.exponential(1 / rate))
        yield at_s
