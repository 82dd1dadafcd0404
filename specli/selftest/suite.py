"""All checks in their order, each of which may fail by an error too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from specli.errors import Cancelled, SpecError
from specli.selftest import continuations, identity, laws, rollback
from specli.selftest.subject import Check, Subject

VERIFIERS = ("block", "rejection", "coupled")


def run(subject: Subject, on_start: Callable[[str], None] = lambda _name: None) -> Iterator[Check]:
    """Yield every check when it is done; ``on_start`` is told what begins. Raises ``Cancelled``."""
    pure: list[tuple[str, Callable[[], Check]]] = [
        *((f"law of {name}", partial(laws.check_matching, name)) for name in ("greedy", "coupled")),
        *((f"law of {name}", partial(laws.check_law, name)) for name in ("rejection", "block")),
        *((f"rollback of the {role}", partial(rollback.check_rollback, subject, role)) for role in ("target", "draft")),
    ]
    for name, check in pure:
        yield _timed(name, check, subject, on_start)
    maps: list[identity.BitMap] = []

    def measure() -> Check:
        check, found = identity.check_map(subject)
        maps.append(found)
        return check

    yield _timed("bit identity of widths", measure, subject, on_start)
    if maps:
        yield _timed("greedy text", partial(identity.check_greedy, subject, maps[0]), subject, on_start)
        yield _timed("text of a seed", partial(identity.check_seed, subject, maps[0]), subject, on_start)
    for verify in VERIFIERS:
        check = partial(continuations.check_continuations, subject, verify)
        yield _timed(f"sampled text, {verify}", check, subject, on_start)


def _timed(name: str, check: Callable[[], Check], subject: Subject, on_start: Callable[[str], None]) -> Check:
    if subject.cancelled():
        raise Cancelled("stopped during the self-test")
    on_start(name)
    started_s = time.perf_counter()
    try:
        found = check()
    except Cancelled:
        raise
    except SpecError as error:
        found = Check(name, False, f"failed: {error}")
    return replace(found, elapsed_s=time.perf_counter() - started_s)
