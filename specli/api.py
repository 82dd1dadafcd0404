"""specli from Python: what ``specli run`` does, as a plain call, a generator of events, and a conversation.

    import specli

    with specli.load("target.gguf", draft="draft.gguf", temperature=0) as model:
        print(model("Why is the sky blue?").text)

    for event in model.stream("Why is the sky blue?"):  # PrefillDone, RoundDone, Text, Logprobs, Finished
        if isinstance(event, specli.Text):
            print(event.text, end="", flush=True)

    chat = model.chat(system="Be brief.")
    chat("Hello!").text
    chat("And now?").stats.n_reused  # tokens that were not evaluated again

Everything raises ``specli.SpecError`` with one clear message. A model serves one generation at a time: a new one ends
the one before. Closing a generator, or leaving its loop, stops the work. Ctrl-C is ``KeyboardInterrupt``, also while
llama.cpp loads or evaluates, and leaves the model usable.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from specli import hub, registry
from specli.chat import Message
from specli.config import GenerationOptions, ModelOptions, SamplingOptions, Settings, SpeculationOptions
from specli.conversation import Conversation, Events
from specli.errors import Cancelled, ConfigError, ModelLoadError
from specli.events import Event, FinishReason, SpeculationState, Text
from specli.prepare import quantized
from specli.session import Hooks, Session
from specli.stats import Stats

LOGGER = logging.getLogger("specli")

Messages = Sequence[Message | Mapping[str, str]]
Prompt = str | Messages
ModelPath = str | os.PathLike[str]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer: its text, the ids it was made of, and every figure (``specli.stats.Stats``)."""

    text: str
    tokens: tuple[int, ...]
    stats: Stats

    @property
    def finish_reason(self) -> FinishReason:
        """``eos``, ``stop`` or ``length``."""
        return self.stats.finish_reason or "cancelled"


class Model:
    """A loaded target and its drafter. Use it as a context manager, or ``close`` it.

    ``load`` makes one from keywords; ``Model(Settings(...))`` has every setting of ``specli.config``. ``session`` is
    the layer below. ``progress`` is told (what is loading, fraction in [0, 1]); notices of one line go to the logger
    ``specli`` at level INFO.
    """

    def __init__(self, settings: Settings, progress: Progress | None = None) -> None:
        """Load. Raises ``ModelLoadError``, ``VocabMismatch``, ``ConfigError``."""
        self._ctrl_c = _CtrlC()
        hooks = Hooks(progress or _no_progress, LOGGER.info, self._ctrl_c)
        with self._ctrl_c.watched():
            self.session = Session(settings, hooks)

    @property
    def speculation(self) -> SpeculationState:
        """Whether the model drafts, with what, and why not if it does not."""
        return self.session.speculation

    def __call__(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        n_predict: int = GenerationOptions.n_predict,
        stops: Sequence[str] = GenerationOptions.stops,
        logprobs: int | None = GenerationOptions.n_logprobs,
    ) -> Completion:
        """The whole answer to ``prompt``; the parameters are those of ``stream``."""
        options = {"n_predict": n_predict, "stops": stops, "logprobs": logprobs}
        return _collect(self.stream(prompt, system=system, raw=raw, **options))  # type: ignore[arg-type]

    def stream(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        raw: bool = False,
        n_predict: int = GenerationOptions.n_predict,
        stops: Sequence[str] = GenerationOptions.stops,
        logprobs: int | None = GenerationOptions.n_logprobs,
    ) -> Events:
        """The answer as events; it begins with nothing in the caches.

        ``prompt``: a user's message, or messages with ``role`` and ``content``, through the model's chat template;
        ``raw`` completes a text as it is. ``n_predict``: tokens at most, -1 for no limit. ``stops``: texts to stop
        before. ``logprobs``: report each token's log probability and so many alternatives (``stats.logprobs``). Raises
        ``ConfigError``, ``ContextOverflow``, ``EngineError``.
        """
        options = GenerationOptions(n_predict, tuple(stops), n_logprobs=logprobs)
        started_s = time.perf_counter()
        ids = self._ids(prompt, system, raw)
        return self._ctrl_c.over(self.session.generate(ids, options, started_s))

    def chat(
        self,
        *,
        system: str | None = None,
        n_predict: int = GenerationOptions.n_predict,
        stops: Sequence[str] = GenerationOptions.stops,
        logprobs: int | None = GenerationOptions.n_logprobs,
    ) -> Chat:
        """A conversation, each turn of which evaluates only what is new. Raises ``ConfigError`` without a template."""
        options = GenerationOptions(n_predict, tuple(stops), n_logprobs=logprobs)
        return Chat(Conversation(self.session, options, system), self._ctrl_c)

    def close(self) -> None:
        """Free the memory. Calling it twice is fine."""
        self.session.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ids(self, prompt: Prompt, system: str | None, raw: bool) -> list[int]:
        if raw:
            if not isinstance(prompt, str) or system is not None:
                raise ConfigError("raw completes one text: messages and a system message have no place in it")
            return self.session.text_ids(prompt)
        messages = [Message("system", system)] if system is not None else []
        given: Messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        return self.session.chat_ids([*messages, *(_message(message) for message in given)])


class Chat:
    """Turns with one model. ``conversation`` holds the messages, which may be read and changed."""

    def __init__(self, conversation: Conversation, ctrl_c: _CtrlC) -> None:
        self.conversation = conversation
        self._ctrl_c = ctrl_c

    def __call__(self, text: str) -> Completion:
        """Ask, and wait for the whole answer."""
        return _collect(self.stream(text))

    def stream(self, text: str) -> Events:
        """Ask; the answer as events. What there is of it when the generator is closed stays in the conversation."""
        return self._ctrl_c.over(self.conversation.ask(text, time.perf_counter()))

    def regenerate(self) -> Completion:
        """Another answer to the last question, in place of the old one."""
        return _collect(self._ctrl_c.over(self.conversation.regenerate(time.perf_counter())))

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, with the system message."""
        return self.conversation.messages

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.conversation.clear()


def load(
    target: ModelPath | None = None,
    draft: ModelPath | None = None,
    *,
    pair: str | None = None,
    temperature: float = SamplingOptions.temperature,
    top_k: int = SamplingOptions.top_k,
    top_p: float = SamplingOptions.top_p,
    min_p: float = SamplingOptions.min_p,
    seed: int | None = SamplingOptions.seed,
    ignore_eos: bool = SamplingOptions.ignore_eos,
    grammar: str = SamplingOptions.grammar,
    json_schema: str | Mapping[str, object] = SamplingOptions.json_schema,
    spec_type: str = SpeculationOptions.type,
    draft_max: int | None = SpeculationOptions.n_max,
    draft_min: int = SpeculationOptions.n_min,
    draft_p_min: float = SpeculationOptions.p_min,
    draft_fixed: bool = SpeculationOptions.fixed,
    verify: str | None = SpeculationOptions.verify,
    n_ctx: int | None = ModelOptions.n_ctx,
    n_threads: int | None = ModelOptions.n_threads,
    n_gpu_layers: int | str = ModelOptions.n_gpu_layers,
    n_gpu_layers_draft: int | str = ModelOptions.n_gpu_layers,
    flash_attn: str = ModelOptions.flash_attn,
    cache_type_k: str = ModelOptions.cache_type_k,
    cache_type_v: str = ModelOptions.cache_type_v,
    progress: Progress | None = None,
) -> Model:
    """A model ready to answer, set up as ``specli run`` would be by the options of the same names.

    ``target``, ``draft``: GGUF files, or ``USER/MODEL[:QUANT]`` on the hub; without a target the pair named ``pair``,
    or the default pair. ``seed``: the same seed gives the same text with any draft. ``draft_max``: the longest draft,
    tokens; None leaves it to the controller. ``grammar`` (GBNF) or ``json_schema`` says what the answer may be. For
    what has no keyword here: ``Model(Settings(...))``.

    Raises ``ConfigError``, ``ModelLoadError``, ``VocabMismatch``.
    """
    unnamed = ModelOptions(Path(), n_ctx=n_ctx, n_threads=n_threads, n_gpu_layers=str(n_gpu_layers))
    unnamed = replace(unnamed, flash_attn=flash_attn, cache_type_k=cache_type_k, cache_type_v=cache_type_v)
    settings = Settings(
        unnamed,
        replace(unnamed, n_ctx=None, n_gpu_layers=str(n_gpu_layers_draft)),
        SamplingOptions(
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            ignore_eos,
            grammar=grammar,
            json_schema=json_schema if isinstance(json_schema, str) else json.dumps(json_schema),
        ),
        SpeculationOptions(spec_type, draft_max, draft_min, draft_p_min, verify, draft_fixed),
    )
    return Model(_with_files(settings, target, draft, pair), progress)


def _with_files(
    settings: Settings, target: ModelPath | None, draft: ModelPath | None, pair_name: str | None
) -> Settings:
    """``settings`` with the files that were named: a pair's where no target was, and no draft where none is used."""
    if target is not None and pair_name is not None:
        raise ConfigError("a target and a pair were given, but each names the target; keep one of them")
    pair = registry.find_pair(pair_name or registry.DEFAULT_PAIR) if target is None else None
    try:
        if pair is not None:
            path = quantized(pair.target, _located(pair.target), LOGGER.info, lambda: False)
        else:
            path = _find(target or "")
        draft_path = None
        if settings.speculation.uses_draft:
            draft_path = _find(draft) if draft is not None else _located(pair.draft) if pair is not None else None
    except Cancelled as error:
        raise KeyboardInterrupt from error
    assert settings.draft is not None
    side = replace(settings.draft, path=draft_path) if draft_path is not None else None
    return replace(settings, target=replace(settings.target, path=path), draft=side)


def _located(model: registry.Model) -> Path:
    if isinstance(model.source, hub.HubFile):
        return hub.fetch(model.source, notice=LOGGER.info)[0]
    return registry.find_file(model)


def _find(name: ModelPath) -> Path:
    """A file that exists, else a model on the hub."""
    if Path(name).exists():
        return Path(name)
    try:
        wanted = hub.parse_reference(str(name))
    except ConfigError:
        raise ModelLoadError(f"{name} is not there; expected a GGUF file, or USER/MODEL[:QUANT] on the hub") from None
    return hub.fetch(wanted, notice=LOGGER.info)[0]


def _message(message: Message | Mapping[str, str]) -> Message:
    if isinstance(message, Message):
        return message
    if set(message) != {"role", "content"}:
        raise ConfigError(f"a message has {sorted(message)}, expected role and content")
    return Message(message["role"], message["content"])


def _collect(events: Events) -> Completion:
    stats, parts = Stats(), list[str]()
    with closing(events):
        for event in events:
            stats.observe(event)
            if isinstance(event, Text):
                parts.append(event.text)
    return Completion("".join(parts), stats.tokens or (), stats)


def _no_progress(_label: str, _fraction: float) -> None:
    return


class _CtrlC:
    """Python's own Ctrl-C, carried through llama.cpp: an exception would be lost inside its callbacks.

    While our code runs in the main thread, and nobody else has taken SIGINT, it sets a flag that everything that may
    stop asks for; ``KeyboardInterrupt`` is raised as soon as the work has stopped.
    """

    def __init__(self) -> None:
        self._is_requested = False

    def __call__(self) -> bool:
        """Whether to stop."""
        return self._is_requested

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Work that asks for the flag."""
        is_ours = threading.current_thread() is threading.main_thread()
        if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._request)
        try:
            yield
        except Cancelled as error:
            raise KeyboardInterrupt from error
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            is_requested, self._is_requested = self._is_requested, False
        if is_requested:
            raise KeyboardInterrupt

    def over(self, events: Events) -> Generator[Event, None, None]:
        """``events``, each made under watch; between them Ctrl-C is the caller's."""
        with closing(events):
            while True:
                with self.watched():
                    event = next(events, None)
                if event is None:
                    return
                yield event

    def _request(self, _number: int, _frame: object) -> None:
        self._is_requested = True
