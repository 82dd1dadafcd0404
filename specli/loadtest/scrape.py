"""Acceptance out of a server's ``/metrics``: the counters that specli, llama-server and vLLM have under one schema.

llama-server has them since August 2026 (pull request 26389), under ``--metrics``; vLLM's version 1 engine always.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_PREFIXES = {"specli_": "specli", "llamacpp:": "llama-server", "vllm:": "vLLM"}
_SAMPLE = re.compile(
    r"^(?P<prefix>specli_|llamacpp:|vllm:)spec_decode_num_(?P<what>draft_tokens|accepted_tokens)(?:_total)?"
    r"(?:\{(?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*\})?[ \t]+(?P<value>\S+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Counters:
    """Draft tokens since the server began, over all of its engines and labels."""

    server: str
    proposed: int
    accepted: int


def counters(exposition: str) -> Counters | None:
    """The counters of a text exposition; None where it has none of them."""
    sums: dict[tuple[str, str], float] = {}
    for found in _SAMPLE.finditer(exposition):
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if math.isfinite(value):
            key = (found["prefix"], found["what"])
            sums[key] = sums.get(key, 0.0) + value
    for prefix, server in _PREFIXES.items():
        proposed, accepted = _of(sums, prefix, "draft_tokens"), _of(sums, prefix, "accepted_tokens")
        if proposed is not None and accepted is not None:
            return Counters(server, proposed, accepted)
    return None


def _of(sums: Mapping[tuple[str, str], float], prefix: str, what: str) -> int | None:
    value = sums.get((prefix, what))
    return None if value is None else round(value)


def between(before: Counters | None, after: Counters | None) -> tuple[int, int] | None:
    """Proposed and accepted tokens between two scrapes; None without both, or when the server began anew meanwhile."""
    if before is None or after is None or before.server != after.server:
        return None
    proposed, accepted = after.proposed - before.proposed, after.accepted - before.accepted
    return (proposed, accepted) if 0 <= accepted <= proposed else None
