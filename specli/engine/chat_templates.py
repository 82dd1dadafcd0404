"""The chat templates that llama.cpp has built in, by name (``--chat-template chatml``)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp

from specli.errors import ConfigError


def builtin_templates() -> tuple[str, ...]:
    """Their names."""
    count = llama_cpp.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * count)()
    llama_cpp.llama_chat_builtin_templates(names, count)
    return tuple((name or b"").decode("utf-8") for name in names)


def render_builtin(name: str, messages: Sequence[tuple[str, str]]) -> str:
    """The conversation (pairs of role and content) by the template ``name``, ready for the answer.

    Raises ``ConfigError`` for content that a C string cannot hold.
    """
    if any("\0" in content for _role, content in messages):
        raise ConfigError(f"a message holds a NUL character, which --chat-template {name} cannot take; leave it out")
    pairs = [(role.encode("utf-8"), content.encode("utf-8")) for role, content in messages]
    chat = (llama_cpp.llama_chat_message * len(pairs))(*(llama_cpp.llama_chat_message(*pair) for pair in pairs))
    size = 512 + 2 * sum(len(content) for _role, content in pairs)
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama_cpp.llama_chat_apply_template(name.encode("utf-8"), chat, len(pairs), True, buffer, size)
        if n < 0:
            raise ConfigError(f"llama.cpp's template {name} refused this conversation; use another --chat-template")
        if n <= size:
            return buffer.raw[:n].decode("utf-8")
        size = n
