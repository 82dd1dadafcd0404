"""A requantized copy of a GGUF file, through ``llama_model_quantize``."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import llama_cpp

from specli.engine.base import CancelCheck
from specli.engine.log import LOG
from specli.errors import Cancelled, ConfigError, ModelLoadError

_FILE_TYPES = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}
_POLL_S = 0.1


def quantize(source: Path, destination: Path, file_type: str, cancelled: CancelCheck) -> None:
    """Write ``source`` as ``file_type`` (Q4_0, Q8_0) to ``destination``, whole or not at all.

    llama.cpp cannot be interrupted here, so it works in a thread that is left behind when the user stops. Raises
    ``ModelLoadError``, ``Cancelled``, ``ConfigError`` (unknown type).
    """
    if file_type not in _FILE_TYPES:
        raise ConfigError(f"cannot quantize to {file_type!r}, expected one of {', '.join(_FILE_TYPES)}")
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = _FILE_TYPES[file_type], True
    codes: list[int] = []

    def work() -> None:
        codes.append(llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(part), params))

    LOG.clear()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_POLL_S)
            if cancelled():
                raise Cancelled(f"stopped while making {destination.name}")
        if codes != [0]:
            raise ModelLoadError(f"llama.cpp could not quantize {source}: {LOG.last_error() or 'it gave no reason'}")
        part.replace(destination)
    finally:
        part.unlink(missing_ok=True)
