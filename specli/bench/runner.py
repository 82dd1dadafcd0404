"""The harness's decode function over a loaded session: its engines, and a fresh drafter for every run.

Every run begins with empty caches, an empty n-gram index and a controller that knows what the warm-up measured, as
``specli run`` would with the profile of an earlier run. With ``share`` drafters stay as they are, so that a prompt may
profit from those before it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from specli.bench import machine
from specli.bench.harness import Interrupted, Run, Setting, record
from specli.bench.workloads import Prompt
from specli.chat import Message
from specli.config import AUTO_K
from specli.decode import Decoder
from specli.drafters.base import Drafter, SequenceState
from specli.engine.base import Slice
from specli.errors import ConfigError, ContextOverflow
from specli.profile import Profile
from specli.request import Request
from specli.verify import Verifier, make_verifier

if TYPE_CHECKING:
    from specli.session import Session

WARM_UP = 16  # tokens
_EVERYTHING = 2**31  # tokens


def _nothing() -> None:
    """There is no controller whose measurements could be kept."""


class Runner:
    """Decodes prompts on ``session``. ``n_predict``: the most tokens of a run. Use it as a context manager.

    ``stopped`` is asked before each pass; a run that it ends raises ``Interrupted``.
    """

    def __init__(
        self,
        session: Session,
        n_predict: int,
        *,
        raw: bool = False,
        share: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session, self._n_predict, self._raw, self._share = session, n_predict, raw, share
        self._stopped = stopped
        self._shared: dict[tuple[Setting, str], Drafter | None] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="specli-bench-")

    def decode(self, prompt: Prompt, setting: Setting, seed: int) -> Run:
        """One run. Raises ``ContextOverflow`` for a prompt that does not fit, ``Interrupted``."""
        return self._decode(prompt, setting, seed, self._n_predict)

    def warm_up(self, prompt: Prompt, settings: Sequence[Setting]) -> None:
        """A short run of plain decoding and of each drafter at its longest; the controller's first measurements."""
        longest: dict[tuple[object, ...], Setting] = {}
        for setting in (*(setting.plain for setting in settings[:1]), *settings):
            learned = () if setting.k is not None else (setting.temperature, setting.verify)
            key = setting.drafter, setting.k is None, learned
            if key not in longest or (setting.k or 0) > (longest[key].k or 0):
                longest[key] = setting
        for setting in longest.values():
            n_tokens = self._n_predict if setting.k is None else min(WARM_UP, self._n_predict)  # a controller learns
            self._decode(prompt, setting, 0, n_tokens, is_warm_up=True)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids, through the chat template unless the text is to be completed as is. Raises ``ContextOverflow``."""
        session = self._session
        if self._raw or session.template is None:
            ids = session.text_ids(prompt.text)
        else:
            system = [Message("system", prompt.system)] if prompt.system is not None else []
            ids = session.chat_ids([*system, Message("user", prompt.text)])
        if len(ids) + 1 >= session.engine.n_ctx:  # no room for a second token: nothing could be timed
            raise ContextOverflow(
                f"the prompt has {len(ids)} tokens, the context holds {session.engine.n_ctx}; shorten it or raise -c"
            )
        return ids

    def margin(self, prompt: Prompt, tokens: Sequence[int], at: int, other: int) -> float:
        """How much higher plain decoding's logit of ``tokens[at]`` was than that of ``other``, one token at a time."""
        engine, ids = self._session.engine, self.prompt_ids(prompt)
        engine.rollback(0, 0)
        text = [*ids, *tokens[:at]]
        while (start := engine.n_past(0)) < len(text):
            part = text[start : min(start + engine.n_batch, len(ids))] if start < len(ids) else text[start : start + 1]
            row = engine.evaluate([Slice(0, part, start, 1)]).rows[0][0]
        margin = float(row[tokens[at]] - row[other])
        engine.rollback(0, 0)
        return margin

    def _decode(self, prompt: Prompt, setting: Setting, seed: int, max_tokens: int, is_warm_up: bool = False) -> Run:
        session = self._session
        session.engine.rollback(0, 0)
        if session.drafting is not None and session.drafting.draft is not None:
            session.drafting.draft.rollback(0, 0)
        verifier = make_verifier(setting.verify, dataclasses.replace(session.sampler, temperature=setting.temperature))
        drafter, keep = self._drafter(prompt, setting, verifier)
        k_max = 0 if drafter is None else self._k(setting)
        machine.reset_peak()
        accepted_at_s = time.perf_counter()
        state = SequenceState(0, self.prompt_ids(prompt), seed, np.random.default_rng(seed))
        request = Request(state, accepted_at_s, max_tokens, session.end_ids, is_kept=self._share)
        decoder = Decoder(session.engine, verifier, session.model.piece, drafter, k_max, self._stopped)
        run = record(decoder.run([request]), machine.peak_bytes)
        if run is None:
            raise Interrupted
        if is_warm_up:
            keep()
        return run

    def _drafter(
        self, prompt: Prompt, setting: Setting, verifier: Verifier
    ) -> tuple[Drafter | None, Callable[[], None]]:
        """The drafter of a run, and what keeps its controller's measurements for the next."""
        if setting.drafter == "none":
            return None, _nothing
        key = setting, prompt.workload
        if self._share and key in self._shared:
            drafter = self._shared[key]
            if drafter is not None:  # the draft model's cache is empty; what the n-gram drafter has indexed stays
                drafter.rewind(SequenceState(0, []), _EVERYTHING)
            return drafter, _nothing
        drafting = self._session.drafting
        if drafting is None:
            raise ConfigError(f"there is nothing to speculate with: {self._session.speculation.reason}")
        folder, kind = Path(self._folder.name), setting.drafter
        drafts = folder / f"{kind}-{setting.verify}-{setting.temperature:g}.json"
        made = dataclasses.replace(
            drafting,
            verifier=verifier,
            k_max=self._k(setting),
            is_fixed=setting.k is not None,
            draft=drafting.draft if setting.drafter in ("draft", "auto") else None,
            uses_ngram=setting.drafter in ("ngram", "auto"),
            profile=Profile(folder / f"{kind}-costs.json", drafts),
        )
        drafter, controller = made.make()
        if self._share:
            self._shared[key] = drafter
        return drafter, _nothing if controller is None else partial(made.keep, controller)

    def _k(self, setting: Setting) -> int:
        """The longest draft, tokens, as far as the session allows."""
        return min(AUTO_K if setting.k is None else setting.k, self._session.speculation.k)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._folder.cleanup()
