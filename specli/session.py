"""Load, check, wire, close: a target, perhaps a drafter, and the decoder over them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from specli import gguf_file, vocab
from specli.chat import ChatTemplate, Message, tokenize_parts
from specli.config import GenerationOptions, ModelOptions, Settings
from specli.decode import Decoder, Request
from specli.drafters.base import Drafter, SequenceState
from specli.drafters.model import ModelDrafter
from specli.drafters.ngram import NgramDrafter
from specli.errors import ConfigError
from specli.events import Event, SpeculationState
from specli.sampling import Sampler
from specli.verify import Verifier, make_verifier

if TYPE_CHECKING:
    from specli.engine.llama import LlamaEngine, LlamaModel

_PARSED_TYPES = (2, 3)  # llama_token_type unknown and control: texts that llama.cpp turns into tokens on request
Progress = Callable[[str, float], None]  # (what is loading, fraction in [0, 1])
Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a session tells and asks while it works: loading progress, notices of one line, whether to stop."""

    progress: Progress = lambda _label, _fraction: None
    notice: Notice = lambda _line: None
    cancelled: Callable[[], bool] = lambda: False


class Session:
    """A loaded target and its drafter. Use it as a context manager.

    ``speculation`` says whether and why drafting is on; ``load_s`` is the seconds that loading took; ``seed`` is the
    number that repeats the text, or None where nothing does.
    """

    def __init__(self, settings: Settings, hooks: Hooks | None = None) -> None:
        """Load everything. Raises ``ModelLoadError``, ``VocabMismatch``, ``ConfigError``, ``Cancelled``."""
        started_s = time.perf_counter()
        self.settings, self._hooks = settings, hooks or Hooks()
        self._closers: list[Callable[[], None]] = []
        self.seed = settings.sampling.seed
        if settings.verify == "coupled" and self.seed is None:
            self.seed = int(np.random.default_rng().integers(2**32))
        try:
            self._load()
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started_s

    def _load(self) -> None:
        settings, speculation = self.settings, self.settings.speculation
        header = gguf_file.read_header(settings.target.path)
        gguf_file.check_loadable(header, "target")
        kind, reason = _drafter_kind(settings)
        n_max = speculation.n_max if kind != "none" else 0
        draft = settings.draft if kind == "draft" else None
        if draft is not None:
            self._check_draft(header, draft)
        target, draft = self._fit(settings.target, draft, n_max)
        self.model = self._load_model(target)
        self.engine = self._make_engine(self.model, target, n_max + 1)
        self.template = _template(header, self.model)
        self._end_ids = frozenset[int]() if settings.sampling.ignore_eos else self.model.end_ids
        banned = tuple(sorted(self.model.end_ids)) if settings.sampling.ignore_eos else ()
        sampling = settings.sampling
        sampler = Sampler(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, banned)
        self.verifier: Verifier = make_verifier(settings.verify, sampler)
        self.drafter: Drafter | None = None
        label = {"ngram": "n-gram", "draft": f"draft {draft.label}" if draft else ""}.get(kind, "")
        if kind != "none" and not self.engine.can_roll_back:
            kind, reason = (
                "none",
                f"the memory of {settings.target.label} cannot drop rejected tokens; decoding plainly",
            )
            self._hooks.notice(f"speculation off: {reason}")
        elif draft is not None:
            kind, reason = self._make_model_drafter(draft)
        elif kind == "ngram":
            self.drafter = NgramDrafter(end_ids=self._end_ids, n_min=speculation.n_min, p_min=speculation.p_min)
        self.speculation = SpeculationState(
            active=kind != "none",
            reason=reason,
            drafter=label,
            k=n_max,
            verify=self.verifier.name,
            n_ctx=self.engine.n_ctx,
        )

    def _check_draft(self, target_header: gguf_file.GgufHeader, draft: ModelOptions) -> None:
        """Compare the vocabularies before any weight is loaded."""
        if draft.path.resolve() == self.settings.target.path.resolve():
            return
        header = gguf_file.read_header(draft.path)
        gguf_file.check_loadable(header, "draft")
        comparison = vocab.require_compatible(
            vocab.VocabInfo.from_header(target_header), vocab.VocabInfo.from_header(header)
        )
        for note in comparison.notes:
            self._hooks.notice(note)

    def _fit(
        self, target: ModelOptions, draft: ModelOptions | None, n_max: int
    ) -> tuple[ModelOptions, ModelOptions | None]:
        """Refuse what cannot fit, before loading; settle ``-ngl auto`` and an unset ``-c``."""
        if self.settings.fit == "off":
            return target, draft
        from specli.engine.sizing import fit
        from specli.memory_plan import Setup

        names, spec_type = self.settings.names, self.settings.speculation.type
        if names is not None and draft is None and spec_type != "auto":
            names += ("--spec-type", spec_type)  # or the suggested command would load a pair's draft
        setup = fit(Setup(target, draft, n_max, names), self._hooks.notice)
        return setup.target, setup.draft

    def _make_model_drafter(self, draft: ModelOptions) -> tuple[str, str]:
        """Load the draft model; the kind of drafter that came of it, and why if none did."""
        is_same_file = draft.path.resolve() == self.settings.target.path.resolve()
        model = self.model if is_same_file else self._load_model(draft)
        n_ctx = min(self.engine.n_ctx, model.n_ctx_train) if draft.n_ctx is None else draft.n_ctx
        engine = self._make_engine(model, replace(draft, n_ctx=n_ctx), 1)
        if not engine.can_roll_back:
            reason = f"the memory of {draft.label} cannot drop rejected tokens, so it cannot draft; decoding plainly"
            self._hooks.notice(f"speculation off: {reason}")
            return "none", reason
        speculation = self.settings.speculation
        self.drafter = ModelDrafter(
            engine, self.verifier, self.model.n_vocab, self._end_ids, speculation.n_min, speculation.p_min
        )
        return "draft", ""

    def _load_model(self, options: ModelOptions) -> LlamaModel:
        from specli.engine.llama import LlamaModel

        progress = self._hooks.progress
        model = LlamaModel(options, lambda done: progress(options.label, done), self._hooks.cancelled)
        self._closers.append(model.close)
        return model

    def _make_engine(self, model: LlamaModel, options: ModelOptions, n_rows_max: int) -> LlamaEngine:
        from specli.engine.llama import LlamaEngine

        engine = LlamaEngine(model, options, n_rows_max, self._hooks.cancelled)
        self._closers.append(engine.close)
        return engine

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, rendered by the model's template. Raises ``ConfigError`` without one."""
        if self.template is None:
            raise ConfigError("the model has no chat template; use --raw to complete the text as is")
        bos = self.model.bos if self.model.adds_bos else None
        return tokenize_parts(self.template.parts(messages), self.model.tokenize, bos)

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text to complete as is; control text in it becomes control tokens, and BOS comes once."""
        ids = self.model.tokenize(text, True, True)
        has_two = self.model.adds_bos and ids[:2] == [self.model.bos] * 2
        return ids[1:] if has_two else ids

    def generate(
        self,
        prompt: Sequence[int],
        options: GenerationOptions,
        accepted_at_s: float | None = None,
        speculate: bool = True,
    ) -> Iterator[Event]:
        """Continue ``prompt``. ``accepted_at_s``: the ``time.perf_counter`` mark that TTFT counts from (now).

        ``speculate`` False decodes plainly with the same model and settings, to compare.
        """
        accepted_at_s = time.perf_counter() if accepted_at_s is None else accepted_at_s
        seed = self.seed or 0
        state = SequenceState(0, list(prompt), seed, np.random.default_rng(self.seed))
        limit = None if options.n_predict < 0 else options.n_predict
        request = Request(state, accepted_at_s, limit, self._end_ids, options.stops)
        drafter = self.drafter if speculate else None
        k_max = self.speculation.k if drafter else 0
        decoder = Decoder(self.engine, self.verifier, self.model.piece, drafter, k_max, self._hooks.cancelled)
        self.engine.rollback(0, 0)
        yield from decoder.run([request])

    def close(self) -> None:
        """Free contexts, then weights. Calling it twice is fine."""
        while self._closers:
            self._closers.pop()()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _drafter_kind(settings: Settings) -> tuple[str, str]:
    """Which drafter the settings ask for (draft, ngram, none), and why if none."""
    speculation = settings.speculation
    if speculation.type == "draft" and settings.draft is None:
        raise ConfigError(
            "--spec-type draft needs a draft model, none was given; add -md FILE or use --spec-type ngram"
        )
    if speculation.type == "none":
        return "none", "--spec-type none was given"
    if speculation.n_max == 0:
        return "none", "--spec-draft-n-max is 0"
    if speculation.type == "auto":
        return ("draft", "") if settings.draft is not None else ("ngram", "")
    return speculation.type, ""


def _template(header: gguf_file.GgufHeader, model: LlamaModel) -> ChatTemplate | None:
    """The file's chat template with the texts of all tokens that only the template may write."""
    if not header.chat_template:
        return None
    types = header.token_types if header.token_types is not None else np.zeros(0)
    control = {int(token) for token in np.flatnonzero(np.isin(types, _PARSED_TYPES))} | model.end_ids
    return ChatTemplate(
        source=header.chat_template,
        bos_text=model.token_text(model.bos) if model.bos >= 0 else "",
        eos_text=model.token_text(model.eos) if model.eos >= 0 else "",
        control_texts=tuple(sorted(model.token_text(token) for token in control)),
    )
