"""specli: faster local language models that say exactly what they said before.

    import specli

    with specli.load() as model:  # the default pair; or specli.load("target.gguf", draft="draft.gguf")
        print(model("What is the capital of France?").text)

``model.stream`` gives the same as events, ``model.chat`` a conversation. See ``specli.api``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specli.api import Chat, Completion, Model, load
    from specli.chat import Message
    from specli.errors import SpecError
    from specli.events import Event, Finished, PrefillDone, RoundDone, Text

__version__ = "0.1.0"
__all__ = [
    "Chat",
    "Completion",
    "Event",
    "Finished",
    "Message",
    "Model",
    "PrefillDone",
    "RoundDone",
    "SpecError",
    "Text",
    "__version__",
    "load",
]
# Where each name lives: nothing is imported before it is asked for, for the command line's start costs every user.
_HOMES = {
    "api": ("Chat", "Completion", "Model", "load"),
    "chat": ("Message",),
    "errors": ("SpecError",),
    "events": ("Event", "Finished", "PrefillDone", "RoundDone", "Text"),
}


def __getattr__(name: str) -> object:
    for home, names in _HOMES.items():
        if name in names:
            from importlib import import_module

            return getattr(import_module(f"specli.{home}"), name)
    raise AttributeError(f"module 'specli' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
