"""``--stats-json``: text and figures as JSON, one object per answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from specli.errors import ConfigError

if TYPE_CHECKING:
    from specli.session import Session
    from specli.stats import Stats


class StatsJson:
    """A file, ``-`` for stdout, or nowhere. Looked at before anything is loaded.

    Each answer is one line: one object for one prompt, JSON Lines for a chat. The first one replaces the file.
    """

    def __init__(self, target: str | None) -> None:
        self._target = target
        self._mode = "w"
        path = Path(target) if target not in (None, "-") else None
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise ConfigError(f"--stats-json {path} cannot be written: it is a folder, or its folder does not exist")

    def write(self, session: Session, stats: Stats, text: str, **more: object) -> None:
        """Write one object; ``more`` stands before and beside the rest. ``ConfigError`` if the file refuses."""
        if self._target is None:
            return
        speculation = session.speculation
        why_idle = (stats.explanation or f"nothing was drafted in {stats.rounds} rounds") if stats.is_idle else None
        figures: dict[str, object] = {
            "text": text,
            **stats.as_dict(),
            "seed": session.seed,
            "verify": speculation.verify,
            "speculating": speculation.active and not stats.is_idle,
            "reason": speculation.reason or why_idle,
            "logprobs": _logprobs(session, stats),
            "controller": session.controller.report() if session.controller is not None else None,
            **more,
        }
        data = json.dumps(figures, ensure_ascii=False, allow_nan=False) + "\n"
        if self._target == "-":
            sys.stdout.write(data)
            sys.stdout.flush()
            return
        try:
            with Path(self._target).open(self._mode, encoding="utf-8") as file:
                file.write(data)
        except OSError as error:
            raise ConfigError(f"--stats-json {self._target} cannot be written: {error.strerror}") from error
        self._mode = "a"


def _logprobs(session: Session, stats: Stats) -> list[dict[str, object]] | None:
    """As llama-server's: id, text and bytes of each token, its log probability and those of the likeliest."""
    if stats.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, object]:
        piece = session.model.special_piece(token)
        return {"id": token, "token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}

    return [
        {**entry(found.token, found.logprob), "top_logprobs": [entry(*other) for other in found.top]}
        for found in stats.logprobs
    ]
