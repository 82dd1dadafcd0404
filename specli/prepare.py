"""A model of a pair made ready: requantized once where the pair says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specli.errors import ModelLoadError
from specli.registry import Model, quantized_copy


def quantized(model: Model, path: Path, notice: Callable[[str], None], cancelled: Callable[[], bool]) -> Path:
    """The copy of ``path``, the file of ``model``, that its pair asks for, made now if need be; else ``path``.

    Raises ``Cancelled``. A copy that cannot be kept is done without.
    """
    if model.quantize is None:
        return path
    copy = quantized_copy(path, model.quantize)
    if not copy.is_file():
        from specli.engine.quantize import quantize

        notice(f"making a {model.quantize} copy of {path.name}, once, in {copy.parent} (it verifies faster on CPUs)")
        try:
            quantize(path, copy, model.quantize, cancelled)
        except (OSError, ModelLoadError) as error:  # a full disk, a folder that cannot be written
            notice(f"no copy could be kept ({error}); using {path.name} as it is")
            return path
    return copy
