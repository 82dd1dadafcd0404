"""``import specli``: what the command line does, in three lines; lazily, typed, and interruptible."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from support import HANG_S

import specli
from specli import api
from specli.config import ModelOptions, SamplingOptions, Settings
from specli.errors import ConfigError, ModelLoadError, VocabMismatch
from specli.events import Finished, PrefillDone, RoundDone, Text

QUIET = {"temperature": 0, "n_threads": 1, "ignore_eos": True}


@pytest.fixture
def load(closing_stack, tiny_model):
    """``specli.load``, closed at the end; a tiny model unless another target is named."""

    def load(target=None, draft=None, **options):
        return closing_stack.enter_context(specli.load(target or tiny_model(), draft, **{**QUIET, **options}))

    return load


# -- the package


def test_importing_specli_imports_nothing_heavy():
    code = (
        "import sys, specli; print(sorted({'numpy', 'llama_cpp', 'rich', 'jinja2', 'typer', 'specli.api'} "
        "& set(sys.modules))); specli.load; print('specli.api' in sys.modules, 'llama_cpp' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(specli.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, timeout=HANG_S, check=True
    )
    assert done.stdout.decode().splitlines() == ["[]", "True False"]


def test_every_public_name_is_there():
    for name in specli.__all__:
        assert getattr(specli, name) is not None
    assert set(specli.__all__) <= set(dir(specli))
    assert specli.load is api.load
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        specli.lode  # noqa: B018


def test_types_are_shipped():
    assert (Path(specli.__file__).parent / "py.typed").exists()


@pytest.mark.model
def test_three_lines_give_the_command_lines_answer(specli, q4_0_path, cache_home, monkeypatch):
    """The default pair, found and prepared as by ``specli run``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_home))
    question = "What is the capital of France?"
    import specli as package

    with package.load(temperature=0) as model:
        answer = model(question, n_predict=12).text
    shown = specli("run", "--temp", "0", "-n", "12", "-p", question)
    assert (shown.code, shown.out.decode()) == (0, answer)


# -- calls and streams


def test_a_call_is_its_stream_collected(load, tiny_model):
    model = load(draft=tiny_model(noise=0.1))
    answer = model("once", n_predict=12)
    events = list(model.stream("once", n_predict=12))
    assert "".join(event.text for event in events if isinstance(event, Text)) == answer.text
    assert isinstance(events[0], PrefillDone)
    assert any(isinstance(event, RoundDone) for event in events)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.tokens, len(finished.tokens)) == (answer.tokens, 12)
    assert answer.finish_reason == answer.stats.finish_reason == "length"
    assert model.speculation.active


def test_prompts_are_messages_or_texts(load):
    model = load()
    alone = model("hi", n_predict=5).tokens
    assert model([specli.Message("user", "hi")], n_predict=5).tokens == alone
    assert model([{"role": "user", "content": "hi"}], n_predict=5).tokens == alone
    with_system = model([{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], n_predict=5)
    assert with_system.tokens == model("hi", system="s", n_predict=5).tokens
    raw = model("hi", raw=True, n_predict=5)
    assert raw.stats.n_prompt == 2  # one token per byte
    for wrong in ({"system": "s"}, {}):
        with pytest.raises(ConfigError, match="raw completes one text"):
            model("hi" if wrong else [specli.Message("user", "hi")], raw=True, **wrong)
    with pytest.raises(ConfigError, match="a message has"):
        model([{"role": "user"}])


def test_wrong_use_is_one_clear_error(load, draft_path, tmp_path):
    for options, error, words in (
        ({"target": tmp_path / "none.gguf"}, ModelLoadError, "is not there; expected a GGUF file"),
        ({"temperature": -1}, ConfigError, "--temp got -1"),
        ({"draft": draft_path}, VocabMismatch, "49152"),
        ({"pair": "default"}, ConfigError, "each names the target"),
        ({"spec_type": "draft"}, ConfigError, "needs a draft model"),
    ):
        with pytest.raises(error, match=words):
            load(**options)
    with pytest.raises(ConfigError, match="--predict"):
        load()("hi", n_predict=-5)
    with pytest.raises(specli.SpecError, match="the context holds"):
        load(n_ctx=32)("x" * 100)


def test_options_reach_the_model(load, tiny_model):
    draft = tiny_model(noise=0.1)
    off = load(draft=draft, spec_type="none")
    assert not off.speculation.active
    fixed = load(draft=draft, draft_max=2, draft_fixed=True)
    assert (fixed.speculation.k, fixed.speculation.is_fixed) == (2, True)
    seeded = load(temperature=1, seed=5)
    assert seeded("hi", n_predict=8).tokens == seeded("hi", n_predict=8).tokens
    assert seeded.speculation.verify == "coupled"
    assert load(n_ctx=64).speculation.n_ctx == 64


def test_every_setting_is_open_to_python(tiny_model):
    settings = Settings(ModelOptions(tiny_model(), n_threads=1), sampling=SamplingOptions(temperature=0))
    with specli.Model(settings) as model:
        assert model("hi", n_predict=3).tokens
    model.close()
    with pytest.raises(specli.SpecError, match="closed"):
        model("hi")


def test_leaving_a_stream_leaves_the_model_usable(load):
    model = load()
    whole = model("once", n_predict=10)
    for _ in model.stream("once", n_predict=10):
        break
    left = model.stream("once", n_predict=10)
    next(left)
    assert model("once", n_predict=10).tokens == whole.tokens
    assert list(left) == []


def test_progress_and_notices_are_told(tiny_model, caplog):
    fractions: list[float] = []
    caplog.set_level(logging.INFO, "specli")
    options = {**QUIET, "progress": lambda _label, fraction: fractions.append(fraction)}
    with specli.load(tiny_model("mamba"), spec_type="ngram", **options) as model:
        assert not model.speculation.active
    assert fractions[-1] == 1
    assert any("speculation off" in record.message for record in caplog.records)


# -- conversations


def test_a_chat_evaluates_only_what_is_new(load):
    chat = load().chat(system="s", n_predict=4)
    first = chat("one")
    second = chat("two")
    assert (first.stats.n_reused, second.stats.n_reused > 0) == (0, True)
    assert [message.role for message in chat.messages] == ["system", *["user", "assistant"] * 2]
    again = chat.regenerate()
    assert again.tokens == second.tokens  # greedy
    events = chat.stream("three")
    text = next(event.text for event in events if isinstance(event, Text))
    events.close()
    assert chat.messages[-1].content == text
    chat.clear()
    assert [message.role for message in chat.messages] == ["system"]


# -- Ctrl-C


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


def ask_forever(model, prompt: str, n: int) -> None:
    while True:
        model(prompt, n_predict=n)


def test_ctrl_c_while_generating_is_a_keyboard_interrupt(load):
    model = load(n_ctx=8192, spec_type="none")
    wanted = model("once", n_predict=20)
    timer = interrupt_after(0.2)
    with pytest.raises(KeyboardInterrupt):
        ask_forever(model, "once", 190)
    timer.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert model("once", n_predict=20).tokens == wanted.tokens


def test_ctrl_c_between_events_is_the_callers(load):
    events = load().stream("once", n_predict=20)
    next(events)
    timer = interrupt_after(0.2)
    with pytest.raises(KeyboardInterrupt):
        time.sleep(30)
    timer.join()
    assert next(events) is not None  # nothing has happened to it
    events.close()


@pytest.mark.parametrize("after", [0, 3, 40])
def test_ctrl_c_while_loading_or_evaluating_a_prompt(tiny_model, after):
    """Where llama.cpp calls back: an exception there would be lost, with a message on stderr."""
    n_calls = [0]

    def progress(_label: str, _fraction: float) -> None:
        n_calls[0] += 1
        if n_calls[0] == after + 1:
            os.kill(os.getpid(), signal.SIGINT)

    if after > 3:
        model = specli.load(tiny_model(), **QUIET)
        with closing(model):
            timer = interrupt_after(0.05)
            with pytest.raises(KeyboardInterrupt):
                ask_forever(model, "x" * 200, 1)
            timer.join()
            assert len(model("x", n_predict=2).tokens) == 2
    else:
        with pytest.raises(KeyboardInterrupt):
            specli.load(tiny_model(), **QUIET, progress=progress)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_or_handler_is_left_alone(load):
    model = load()
    found: list[object] = []

    def work() -> None:
        found.append(model("once", n_predict=5).tokens)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(HANG_S)
    previous = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        own = signal.getsignal(signal.SIGINT)
        found.append(model("once", n_predict=5).tokens)
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, previous)
    assert found[0] == found[1]
