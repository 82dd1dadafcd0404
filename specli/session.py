"""Load, check, wire, close: a target, perhaps a drafter, and the decoder over them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from specli import gguf_file, vocab
from specli.chain import check_constraint, find_breakers, make_sampler
from specli.chat import ChatTemplate, Message, RenderBuiltin, check_template, tokenize_parts
from specli.config import GenerationOptions, ModelOptions, SamplingOptions, Settings, TemplateOptions
from specli.controller import Controller
from specli.decode import Decoder
from specli.drafters.base import Drafter, SequenceState
from specli.drafting import Drafting
from specli.errors import ConfigError, EngineError
from specli.events import Event, Finished, RoundDone, SpeculationState
from specli.prefix import KeptPrefix
from specli.profile import Profile, profile_path
from specli.request import Request
from specli.verify import Verifier, make_verifier

if TYPE_CHECKING:
    from specli.engine.grammar import Pieces
    from specli.engine.llama import LlamaEngine, LlamaModel
    from specli.samplers import Breakers

_WARMEST = 4  # in halves of a degree: what comes above is alike
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
    number that repeats the text, or None where nothing does. Where the block or rejection verifier draws and a
    controller decides how far to draft, from times that it measured, a seed repeats the coins alone, not the text.
    """

    def __init__(self, settings: Settings, hooks: Hooks | None = None) -> None:
        """Load everything. Raises ``ModelLoadError``, ``VocabMismatch``, ``ConfigError``, ``Cancelled``."""
        started_s = time.perf_counter()
        self.settings, self._hooks = settings, hooks or Hooks()
        self._closers: list[Callable[[], None]] = []
        self._drafting: Drafting | None = None
        self.controller: Controller | None = None
        self._events: Generator[Event, None, None] | None = None
        self._expectation = ""
        self._pieces: Pieces | None = None
        self._breakers: dict[tuple[str, ...], Breakers] = {}
        self.seed = settings.sampling.seed
        if settings.verify == "coupled" and self.seed is None:
            self.seed = _any_seed()
        try:
            self._load()
        except BaseException:
            self.close()
            raise
        self.load_s = time.perf_counter() - started_s

    def _load(self) -> None:
        settings, speculation = self.settings, self.settings.speculation
        header = _read_header(settings.target)
        shards = gguf_file.check_loadable(header, "target")
        for lora in settings.target.loras:
            gguf_file.check_adapter(gguf_file.read_header(lora.path), shards)
        builtin = _builtin(settings.template)
        if note := check_constraint(settings.sampling):
            self._hooks.notice(note)
        self._prepare_process()
        kind, reason = _drafter_kind(settings)
        k_max = speculation.k_max if kind != "none" else 0
        draft = settings.draft if kind == "draft" else None
        if draft is not None:
            self._check_draft(header, draft)
        target, draft = self._fit(settings.target, draft, k_max)
        self.model = self._load_model(target)
        n_rows = target.n_rows(k_max)
        if settings.exact:
            target, widest = self._settle(target)
            k_max, n_rows = min(k_max, widest - 1), min(n_rows, widest)
        self.target_options = target  # as loaded: memory and --exact settled
        self.engine = self._make_engine(self.model, target, n_rows)
        self.template = _template(header, self.model, settings.template, builtin)
        self._end_ids = frozenset[int]() if settings.sampling.ignore_eos else self.model.end_ids
        self.sampler = make_sampler(settings.sampling, self.model, self._pieces_once, self._breakers_once)
        self.verifier: Verifier = make_verifier(settings.verify, self.sampler)
        self.drafter: Drafter | None = None
        if kind != "none":
            kind, reason = self._make_drafter(kind, draft, k_max)
        self._kept = KeptPrefix(self.engine, self.drafter, self._hooks.notice)
        self.speculation = SpeculationState(
            active=kind != "none",
            reason=reason,
            drafter=self._drafter_label(kind, draft),
            k=k_max,
            verify=self.verifier.name,
            n_ctx=self.engine.n_ctx,
            is_fixed=speculation.fixed,
            expectation=self._expectation,
        )
        self._tell_of_seed()

    def _tell_of_seed(self) -> None:
        """A notice where the text under the seed that was asked for may depend on measured times."""
        name, seed = self.verifier.name, self.settings.sampling.seed
        if seed is not None and self.controller is not None and name in ("block", "rejection"):
            self._hooks.notice(
                f"-s {seed} with --verify {name}: the text repeats with --draft-fixed only; --verify coupled repeats "
                "it with any draft"
            )

    def _settle(self, target: ModelOptions) -> tuple[ModelOptions, int]:
        """``--exact``: settings that were proved exact, and the tokens that one pass may hold under them."""
        from specli import bits, exact
        from specli.engine.llama import LlamaEngine, library_build
        from specli.engine.parameters import context_length

        model, hooks = self.model, self._hooks
        n_ctx = context_length(target.n_ctx, model.n_ctx_train)
        target = replace(target, n_ctx=n_ctx, kv_unified=False)
        alike = replace(target, n_ctx=min(n_ctx, bits.LENGTHS[-1] + bits.MAX_WIDTH), path=Path(), name="")
        proof = exact.settle(
            target,
            lambda text: model.tokenize(text, False, False),
            lambda options, n_rows_max: LlamaEngine(model, options, n_rows_max, hooks.cancelled),
            profile_path("exact", library_build(), target.path, repr(alike)),
            lambda fraction: hooks.progress("checking exactness", fraction),
        )
        hooks.notice(proof.words())
        return proof.apply(target), proof.widest

    def verifier_for(self, sampling: SamplingOptions) -> Verifier:
        """Who draws and judges under other sampling settings than the session's. Raises ``ConfigError``."""
        name = replace(self.settings, sampling=sampling).verify
        return make_verifier(name, make_sampler(sampling, self.model, self._pieces_once, self._breakers_once))

    def _pieces_once(self) -> Pieces:
        """The vocabulary as grammars want it, made once."""
        from specli.engine.grammar import Pieces

        if self._pieces is None:
            self._pieces = Pieces(self.model)
        return self._pieces

    def _breakers_once(self, texts: tuple[str, ...]) -> Breakers:
        """DRY's breakers in the vocabulary, found once."""
        if texts not in self._breakers:
            self._breakers[texts] = find_breakers(texts, self.model)
        return self._breakers[texts]

    @property
    def drafting(self) -> Drafting | None:
        """What the drafter was made of, for those that make others like it; None where nothing drafts."""
        return self._drafting

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end a generation; none with ``--ignore-eos``."""
        return self._end_ids

    def _check_draft(self, target_header: gguf_file.GgufHeader, draft: ModelOptions) -> None:
        """Compare the vocabularies before any weight is loaded."""
        if draft.path.resolve() == self.settings.target.path.resolve():
            return
        header = _read_header(draft)
        gguf_file.check_loadable(header, "draft")
        comparison = vocab.require_compatible(
            vocab.VocabInfo.from_header(target_header), vocab.VocabInfo.from_header(header)
        )
        for note in comparison.notes:
            self._hooks.notice(note)

    def _prepare_process(self) -> None:
        """What must be done before llama.cpp starts a thread, and notices of flags that have no effect here."""
        from specli.engine.process import prepare, unused_kernels, without_effect

        models = [self.settings.target, *([self.settings.draft] if self.settings.draft else [])]
        for line in (*prepare(self.settings.process), *unused_kernels(), *without_effect(models)):
            self._hooks.notice(line)

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

    def _make_drafter(self, kind: str, draft: ModelOptions | None, k_max: int) -> tuple[str, str]:
        """Make the drafter; its kind, and why there is none."""
        settings, speculation = self.settings, self.settings.speculation
        if not self.engine.can_roll_back:
            return self._off(f"the memory of {settings.target.label} cannot drop rejected tokens; decoding plainly")
        if min(self.engine.n_batch, self.engine.n_ctx) < 2:
            return self._off("a batch of 1 token has no place for a draft; raise -b, -ub or -c")
        engine = self._load_draft(draft) if draft is not None else None
        if engine is not None and draft is not None and not engine.can_roll_back:
            return self._off(
                f"the memory of {draft.label} cannot drop rejected tokens, so it cannot draft; decoding plainly"
            )
        self._drafting = Drafting(
            self.engine,
            self.verifier,
            self._end_ids,
            k_max,
            speculation.n_min,
            speculation.p_min,
            is_fixed=speculation.fixed,
            draft=engine,
            uses_ngram=kind == "ngram" or (speculation.type == "auto" and not speculation.fixed),
            profile=None if speculation.fixed else self._profile(draft),
            is_measured_anew=speculation.measure_anew,
            cancelled=self._hooks.cancelled,
        )
        self.drafter, self.controller = self._drafting.make()
        controller = self.controller or Controller(k_max)
        c = controller.costs.c if engine is not None and controller.costs.knows_c else None
        self._expectation = controller.expectation(settings.sampling.temperature, c) or ""
        return kind, ""

    def _drafter_label(self, kind: str, draft: ModelOptions | None) -> str:
        if kind == "draft" and draft is not None:
            return f"draft {draft.label}" + (" or n-gram" if self._drafting and self._drafting.uses_ngram else "")
        return "n-gram" if kind == "ngram" else ""

    def _off(self, reason: str) -> tuple[str, str]:
        self._hooks.notice(f"speculation off: {reason}")
        return "none", reason

    def _load_draft(self, draft: ModelOptions) -> LlamaEngine:
        """Load the draft model, or only a context over the target's weights when both are one file."""
        is_same_file = draft.path.resolve() == self.settings.target.path.resolve()
        model = self.model if is_same_file else self._load_model(draft)
        n_ctx = min(self.engine.n_ctx, model.n_ctx_train) if draft.n_ctx is None else draft.n_ctx
        draft = replace(draft, n_ctx=n_ctx, n_sequences=self.engine.n_sequences)
        return self._make_engine(model, draft, draft.n_sequences)

    def _profile(self, draft: ModelOptions | None) -> Profile:
        """Where the controller's measurements of this pair, as it was loaded, are kept."""
        from specli.engine.llama import library_build

        target, sampling = self.target_options, self.settings.sampling
        parts: list[object] = [library_build(), target.n_sequences, sampling.is_constrained]
        for options in (target, draft) if draft is not None else (target,):
            parts += [options.path, options.n_gpu_layers, options.flash_attn, options.cache_type_k]
            parts += [options.cache_type_v, options.n_threads, options.n_threads_batch, options.placement]
            parts += [options.swa_full, *(lora.path for lora in options.loras)]
        parts += [sorted(self.settings.process.cpus or ())]
        warmth = math.ceil(min(2 * sampling.temperature, _WARMEST))  # halves of a degree: colder texts are easier
        chain = replace(sampling, seed=None, temperature=0.0, grammar="", json_schema="")
        habits = [*parts, self.settings.verify, warmth, repr(chain)]
        return Profile(profile_path("costs", *parts), profile_path("drafts", *habits))

    def _load_model(self, options: ModelOptions) -> LlamaModel:
        from specli.engine.llama import LlamaModel

        progress = self._hooks.progress
        model = LlamaModel(options, lambda done: progress(options.label, done), self._hooks.cancelled)
        self._closers.append(model.close)
        if not model.is_locked:
            limit = "raise the limit (ulimit -l), or use -lm mmap"
            self._hooks.notice(f"-lm {options.load_mode}: the system did not let {options.label} be locked; {limit}")
        return model

    def _make_engine(self, model: LlamaModel, options: ModelOptions, n_rows_max: int) -> LlamaEngine:
        from specli.engine.llama import LlamaEngine

        engine = LlamaEngine(model, options, n_rows_max, self._hooks.cancelled)
        self._closers.append(engine.close)
        return engine

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, rendered by the model's template. Raises ``ConfigError`` without one."""
        if self.template is None:
            raise ConfigError(
                "the model has no chat template; give one with --chat-template, or use --raw to complete the text as is"
            )
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
        *,
        reuse: bool = False,
        attempt: int = 0,
    ) -> Generator[Event, None, None]:
        """Continue ``prompt``. ``accepted_at_s``: the ``time.perf_counter`` mark that TTFT counts from (now).

        ``speculate`` False decodes plainly with the same model and settings, to compare. ``reuse`` True keeps what the
        caches hold from the last prompt that was given with it, as far as the two are the same, and evaluates the rest;
        False starts from nothing and leaves nothing. ``attempt``: another answer to the same prompt, under
        ``seed_of(attempt)``. A generation that is still under way ends when the next one begins.
        """
        self._end_generation()
        accepted_at_s = time.perf_counter() if accepted_at_s is None else accepted_at_s
        seed = self.seed_of(attempt)
        state = new_sequence(0, prompt, seed)
        if speculate and self.controller is not None:
            self.controller.begin_answer()
        limit = None if options.n_predict < 0 else options.n_predict
        reuse = reuse and speculate
        if not reuse:
            self._kept.drop()
        n_known = self._kept.open(state) if reuse else 0
        request = Request(state, accepted_at_s, limit, self._end_ids, options.stops, reuse, n_known, options.n_logprobs)
        drafter = self.drafter if speculate else None
        k_max = self.speculation.k if drafter else 0
        piece = self.model.special_piece if options.special else self.model.piece
        decoder = Decoder(self.engine, self.verifier, piece, drafter, k_max, self._hooks.cancelled)
        self._events = decoder.run([request])
        with closing(self._events) as events:  # closing ours closes the loop at once
            try:
                for event in events:
                    yield self._explained(event) if speculate else event
            except GeneratorExit:  # closed between two events, where everything is in order
                raise
            except BaseException:
                with suppress(EngineError):  # it would hide the failure
                    self._kept.drop()
                raise

    def seed_of(self, attempt: int) -> int | None:
        """The number that repeats the ``attempt``-th answer to a prompt (0: the first); None where nothing does."""
        return seed_of(self.seed, attempt)

    def _explained(self, event: Event) -> Event:
        """With what the controller has to say of it."""
        if self.controller is not None and isinstance(event, RoundDone):
            return replace(event, state=self.controller.record.state)
        if self.controller is not None and isinstance(event, Finished):
            return replace(event, explanation=self.controller.explain())
        return event

    def _end_generation(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def close(self) -> None:
        """Free contexts, then weights. Calling it twice is fine."""
        self._end_generation()
        if self._closers and self._drafting is not None and self.controller is not None:
            self._drafting.keep(self.controller)
        while self._closers:
            self._closers.pop()()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def new_sequence(id: int, prompt: Sequence[int], seed: int | None, verifier: Verifier | None = None) -> SequenceState:
    """Sequence ``id`` at its ``prompt``, with the coins that ``seed`` gives it; None: with any."""
    coins = None if seed is None else [seed, len(prompt)]  # no two turns of a conversation toss the same ones
    rng = np.random.default_rng(coins)
    return SequenceState(id, list(prompt), _any_seed() if seed is None else seed, rng, verifier=verifier)


def seed_of(seed: int | None, attempt: int) -> int | None:
    """The number that repeats the ``attempt``-th answer under ``seed`` (0: the first); None where nothing does."""
    if seed is None or attempt == 0:
        return seed
    return int(np.random.SeedSequence([seed, attempt]).generate_state(1)[0])


def _any_seed() -> int:
    """A seed where no repetition is promised."""
    return int(np.random.default_rng().integers(2**32))


def _drafter_kind(settings: Settings) -> tuple[str, str]:
    """Which drafter the settings ask for (draft, ngram, none), and why if none."""
    speculation = settings.speculation
    if speculation.type == "draft" and settings.draft is None:
        raise ConfigError(
            "--spec-type draft needs a draft model, none was given; add -md FILE or use --spec-type ngram"
        )
    if speculation.type == "none":
        return "none", "--spec-type none was given"
    if speculation.k_max == 0:
        return "none", "--spec-draft-n-max is 0"
    if speculation.type == "auto":
        return ("draft", "") if settings.draft is not None else ("ngram", "")
    return speculation.type, ""


def _read_header(options: ModelOptions) -> gguf_file.GgufHeader:
    """The header of a model's (first) file, as ``--override-kv`` has it."""
    overrides = {override.key: override.value for override in options.kv_overrides}
    return gguf_file.read_header(options.path).with_overrides(overrides)


def _template(
    header: gguf_file.GgufHeader, model: LlamaModel, options: TemplateOptions, builtin: RenderBuiltin | None
) -> ChatTemplate | None:
    """The chat template, the file's own or as asked, with the texts of all tokens that only it may write."""
    source = options.source or header.chat_template
    if not source:
        return None
    types = header.token_types if header.token_types is not None else np.zeros(0)
    control = {int(token) for token in np.flatnonzero(np.isin(types, _PARSED_TYPES))} | model.end_ids
    return ChatTemplate(
        source=source,
        bos_text=model.token_text(model.bos) if model.bos >= 0 else "",
        eos_text=model.token_text(model.eos) if model.eos >= 0 else "",
        control_texts=tuple(sorted(model.token_text(token) for token in control)),
        kwargs=options.kwargs,
        builtin=builtin,
    )


def _builtin(options: TemplateOptions) -> RenderBuiltin | None:
    """What renders llama.cpp's own template of that name, or None for jinja text and the file's template.

    Raises ``ConfigError`` for what is neither, before anything is loaded.
    """
    if options.source is None:
        return None
    from specli.engine.chat_templates import builtin_templates, render_builtin

    name, known = options.source, builtin_templates()
    if name in known:
        if options.kwargs:
            raise ConfigError(f"--chat-template-kwargs was given, but the built-in template {name} takes none")
        return partial(render_builtin, name)
    if "{" not in name:
        raise ConfigError(f"--chat-template got {name!r}, expected jinja text or one of {', '.join(known)}")
    check_template(name)
    return None
