"""Every failure that specli reports on purpose, and the exit code each one ends the command with.

    SpecError                     1   anything below; one clear line, no traceback without --debug
    ├── ConfigError               2   an option, prompt or template that cannot be used as given
    ├── ModelLoadError            3   a model file that is missing, damaged, of the wrong kind, or too large
    │   └── VocabMismatch         4   target and draft do not share token ids
    ├── ContextOverflow           5   a prompt that does not fit the context
    ├── EngineError               6   an evaluation that failed (device lost, NaN logits, cache full)
    │   ├── DeadEnd               6   a grammar, or bans, that allow no token
    │   └── RollbackUnsupported   6   a memory that cannot drop its last tokens
    ├── ServerError               7   a server that cannot be reached, or does not answer as it should
    ├── QueueFull                 1   specli serve: more requests wait than may
    ├── TimedOut                  1   specli serve: an answer that was not finished in time
    ├── Unavailable               1   specli serve: stopping, or the engine has failed for good
    └── Cancelled               130   Ctrl-C

A message says what was found, what was expected, and what to do. ``tests/test_errors.py`` keeps this tree complete.
"""

from __future__ import annotations


class SpecError(Exception):
    """Base of every failure that the command line reports in one line."""

    exit_code = 1


class ConfigError(SpecError):
    """An option, prompt or chat template that cannot be used as given."""

    exit_code = 2


class ModelLoadError(SpecError):
    """A model file that is missing, damaged, of the wrong kind, or larger than the memory at hand."""

    exit_code = 3


class VocabMismatch(ModelLoadError):
    """Target and draft do not share token ids, so a draft token would mean something else to the target."""

    exit_code = 4


class ContextOverflow(SpecError):
    """A prompt longer than the context."""

    exit_code = 5


class EngineError(SpecError):
    """An evaluation failed: the device, the cache, or the numbers."""

    exit_code = 6


class DeadEnd(EngineError):
    """What may come next, by the grammar and the bans, is nothing. ``n_drafted``: tokens of a draft that lead there."""

    def __init__(self, message: str, n_drafted: int = 0) -> None:
        super().__init__(message)
        self.n_drafted = n_drafted


class RollbackUnsupported(EngineError):
    """The memory of this model cannot drop a tail (recurrent and hybrid architectures)."""


class ServerError(SpecError):
    """A server that cannot be reached, refuses, or does not answer as an OpenAI-compatible one."""

    exit_code = 7


class QueueFull(SpecError):
    """More requests wait than may. ``retry_after_s``: when one of the places should be free."""

    def __init__(self, n_waiting: int, retry_after_s: int) -> None:
        waiting = "1 request is" if n_waiting == 1 else f"{n_waiting} requests are"
        super().__init__(f"{waiting} waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class TimedOut(SpecError):
    """An answer that was not finished in time."""


class Unavailable(SpecError):
    """The server is stopping, or its engine has failed for good."""


class Cancelled(SpecError):
    """The user asked to stop (Ctrl-C)."""

    exit_code = 130
