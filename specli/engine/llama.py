"""llama.cpp as an ``Engine``, over the low-level functions of llama-cpp-python 0.3.36.

The high-level ``Llama`` class is not used: it copies every logits row, holds one sequence, and drops pieces of more
than 32 bytes.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from specli.config import Lora, ModelOptions
from specli.engine.base import CacheLedger, CancelCheck, Evaluation, Rows, Slice
from specli.engine.log import LOG
from specli.engine.parameters import ModelParameters, context_length, context_params, physical_batch
from specli.engine.vocabulary import tokenize
from specli.errors import Cancelled, EngineError, ModelLoadError, RollbackUnsupported

ProgressFunction = Callable[[float], None]  # a fraction in [0, 1]

_NO_SLOT, _ABORTED = 1, 2  # llama_decode's return codes


class LlamaModel:
    """Weights and vocabulary of one GGUF file; contexts (``LlamaEngine``) share them.

    ``is_locked`` False: ``-lm mlock`` was asked for, and the system did not allow it.
    """

    def __init__(self, options: ModelOptions, on_progress: ProgressFunction, cancelled: CancelCheck) -> None:
        """Load the weights and LoRA adapters. Raises ``ModelLoadError``, ``ConfigError`` or ``Cancelled``."""
        self.options = options
        self._handle: int | None = None
        self.adapters: list[Any] = []  # llama.cpp's pointers in the order of ``options.loras``; freed with the weights
        self._pieces: dict[tuple[int, bool], bytes] = {}
        llama_cpp.llama_backend_init()
        parameters = ModelParameters(options)

        def report(fraction: float, _user_data: object) -> bool:
            on_progress(fraction)
            return not cancelled()  # False makes llama.cpp stop; a KeyboardInterrupt here would be swallowed

        parameters.params.progress_callback = callback = llama_cpp.llama_progress_callback(report)
        LOG.clear()
        self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(options.path), parameters.params)
        del callback, parameters
        if cancelled():
            self.close()
            raise Cancelled(f"stopped while loading {options.label}")
        if not self._handle:
            raise ModelLoadError(f"llama.cpp could not load {options.path}: {LOG.last_error() or 'it gave no reason'}")
        self.is_locked = options.load_mode not in ("mlock", "mmap+mlock") or not LOG.has("failed to mlock")
        vocab = self._vocab
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(vocab)
        self.n_ctx_train: int = llama_cpp.llama_model_n_ctx_train(self._handle)
        self.n_swa: int = llama_cpp.llama_model_n_swa(self._handle)
        self.adds_bos: bool = llama_cpp.llama_vocab_get_add_bos(vocab)
        self.bos: int = llama_cpp.llama_vocab_bos(vocab)  # -1: none
        self.eos: int = llama_cpp.llama_vocab_eos(vocab)
        is_eog = llama_cpp.llama_vocab_is_eog
        self.end_ids = frozenset(token for token in range(self.n_vocab) if is_eog(vocab, token))
        self.suppressed = _suppressed(vocab)  # ids that the model's makers ban (tokenizer.ggml.suppress_tokens)
        try:
            self.adapters = [self._load_adapter(lora) for lora in options.loras]
        except ModelLoadError:
            self.close()
            raise

    def _load_adapter(self, lora: Lora) -> object:
        LOG.clear()
        adapter = llama_cpp.llama_adapter_lora_init(self.handle, os.fsencode(lora.path))
        if not adapter:
            reason = LOG.last_error() or "it gave no reason"
            raise ModelLoadError(f"llama.cpp could not lay {lora.path} over {self.options.label}: {reason}")
        return adapter

    @property
    def keeps_state(self) -> bool:
        """A recurrent or hybrid architecture, whose memory cannot drop a tail (``llama_memory_recurrent``)."""
        is_kind = llama_cpp.llama_model_is_recurrent, llama_cpp.llama_model_is_hybrid
        return any(asked(self.handle) for asked in is_kind)

    @property
    def handle(self) -> int:
        """llama.cpp's model pointer. Raises ``EngineError`` after ``close``."""
        if self._handle is None:
            raise EngineError("the model was closed")
        return self._handle

    @property
    def _vocab(self) -> object:
        """llama.cpp's vocabulary pointer. After ``close`` it raises, where llama.cpp would end the process."""
        return llama_cpp.llama_model_get_vocab(self.handle)

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``.

        ``add_special`` adds BOS and EOS as the file says; only with ``parse_special`` does control text in it become
        control tokens.
        """
        return tokenize(self._vocab, text, add_special, parse_special)

    def piece(self, token: int) -> bytes:
        """The bytes of one token, however many; control tokens are empty."""
        return self._piece(token, False)

    def special_piece(self, token: int) -> bytes:
        """The same with control tokens as the vocabulary lists them (``--special``)."""
        return self._piece(token, True)

    def _piece(self, token: int, shows_control: bool) -> bytes:
        key = (token, shows_control)
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._read_piece(token, shows_control)
        return found

    def _read_piece(self, token: int, shows_control: bool) -> bytes:
        buffer = ctypes.create_string_buffer(512)  # its own: a server asks from several threads
        n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, shows_control)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, shows_control)
        return buffer.raw[:n]

    @functools.cached_property
    def parsed_texts(self) -> tuple[str, ...]:
        """Texts that become one token each wherever they stand (control tokens: where control text is parsed)."""
        wanted = llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN | llama_cpp.LLAMA_TOKEN_ATTR_CONTROL
        wanted |= llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED
        ids = (token for token in range(self.n_vocab) if llama_cpp.llama_vocab_get_attr(self._vocab, token) & wanted)
        return tuple(text for token in ids if (text := self.token_text(token)))

    @functools.cached_property
    def longest_text(self) -> int:
        """Bytes: no token stands for more of a text."""
        return max(len(llama_cpp.llama_vocab_get_text(self._vocab, token) or b"") for token in range(self.n_vocab))

    def token_text(self, token: int) -> str:
        """The text that the vocabulary lists for ``token`` (control tokens too)."""
        text: bytes | None = llama_cpp.llama_vocab_get_text(self._vocab, token)
        return (text or b"").decode("utf-8", "replace")

    def close(self) -> None:
        """Free the weights. Contexts must be closed before."""
        if self._handle:
            llama_cpp.llama_model_free(self._handle)
            self._handle = None


class LlamaEngine(CacheLedger):
    """A context: caches for ``options.n_sequences`` sequences over the weights of ``model``.

    ``n_rows_max`` logits rows can be asked for at once. ``can_roll_back`` was tried out at construction, by the
    two-token pass that also warms the model up; with ``--no-warmup`` the architecture decides. ``n_batch`` is what one
    evaluate takes: llama.cpp's physical batch, so that an interrupt waits for one of them at most.
    """

    def __init__(self, model: LlamaModel, options: ModelOptions, n_rows_max: int, cancelled: CancelCheck) -> None:
        """Allocate the caches. Raises ``EngineError`` (memory) or ``Cancelled``."""
        n_ctx = context_length(options.n_ctx, model.n_ctx_train)
        n_ubatch = physical_batch(options, n_ctx)
        n_rows_max = max(n_rows_max, options.n_sequences)
        super().__init__(n_ctx, n_ubatch, n_rows_max, options.n_sequences, model.n_vocab)
        self.busy_s = 0.0
        self.model = model
        self._cancelled = cancelled
        try:
            self._batch = _Batch(n_ubatch)
        except MemoryError:
            raise EngineError(f"no memory for passes of {n_ubatch} tokens; try a smaller -ub, -b or -c") from None
        self._rows: Rows | None = None
        self._rows_address = 0
        self._context: int | None = None
        LOG.clear()
        self._context = llama_cpp.llama_init_from_model(model.handle, context_params(options, n_ctx, n_rows_max))
        if not self._context:
            raise EngineError(
                f"llama.cpp could not make a context of {n_ctx} tokens for {options.label}: "
                f"{LOG.last_error() or 'it gave no reason'}; try a smaller -c, -ctk q8_0 -ctv q8_0, or a smaller -ngl"
            )
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._abort = llama_cpp.ggml_abort_callback(lambda _data: cancelled())
        self._no_abort = llama_cpp.ggml_abort_callback()
        try:
            self._apply_adapters(options.loras)
            self.can_roll_back = self._probe_rollback() if options.warmup else not model.keeps_state
        except BaseException:
            self.close()
            raise

    def evaluate(self, slices: Sequence[Slice], interruptible: bool = False) -> Evaluation:
        """See ``Engine.evaluate``. Rows are views of llama.cpp's own buffer."""
        self._require_open()
        self.check(slices)
        batch, n_rows = self._batch.fill(slices), sum(part.n_rows for part in slices)
        if interruptible:  # a Python callback costs 7% of a short pass: only where a pass is long
            llama_cpp.llama_set_abort_callback(self._context, self._abort, None)
        started_s = time.perf_counter()
        code = llama_cpp.llama_decode(self._context, batch)
        if n_rows and code == 0:
            self._map_rows(llama_cpp.llama_get_logits(self._context))  # waits for the device
        else:
            llama_cpp.llama_synchronize(self._context)
        self.busy_s += time.perf_counter() - started_s
        if interruptible:
            llama_cpp.llama_set_abort_callback(self._context, self._no_abort, None)
        if code != 0:
            self._fail(code, slices)
        self.advance(slices)
        return Evaluation(self._split_rows(slices))

    def rollback(self, sequence: int, n_past: int) -> None:
        """See ``Engine.rollback``."""
        self._require_open()
        self.cut(sequence, n_past)
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, n_past, -1):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self.cut(sequence, 0)
            raise RollbackUnsupported(
                f"the memory of {self.model.options.label} cannot drop its last tokens; use --spec-type none"
            )
        if not self.model.n_swa or n_past == 0:
            return
        lowest = llama_cpp.llama_memory_seq_pos_min(self._memory, sequence)
        if not 0 <= lowest <= max(0, n_past - self.model.n_swa):  # -1: nothing is left
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
            self.cut(sequence, 0)
            raise RollbackUnsupported(
                f"the sliding-window cache of {self.model.options.label} no longer holds what position {n_past} needs; "
                "the sequence was cleared and must be evaluated again"
            )

    def close(self) -> None:
        """Free the context; the weights stay."""
        if self._context:
            llama_cpp.llama_free(self._context)
            self._context = None

    def _require_open(self) -> None:
        if self._context is None:  # llama.cpp would follow the freed pointer
            raise EngineError("the engine was closed")

    def _apply_adapters(self, wanted: Sequence[Lora]) -> None:
        """Use the model's adapters; a draft over the target's weights wants none."""
        if not wanted:
            return
        pointers = (llama_cpp.llama_adapter_lora_p_ctypes * len(wanted))(*self.model.adapters)
        scales = (ctypes.c_float * len(wanted))(*(lora.scale for lora in wanted))
        if llama_cpp.llama_set_adapters_lora(self._context, pointers, len(wanted), scales) != 0:
            raise EngineError(f"llama.cpp refuses the LoRA adapters: {LOG.last_error() or 'it gave no reason'}")

    def _probe_rollback(self) -> bool:
        """Evaluate two tokens and drop one, as llama.cpp's ``common_context_can_seq_rm`` does; also a warm-up."""
        token = self.model.bos if 0 <= self.model.bos < self.n_vocab else 0
        n_tokens = min(2, self.n_ctx, self.n_batch)
        self.evaluate([Slice(0, [token] * n_tokens, 0, 1)], interruptible=True)
        removed = bool(llama_cpp.llama_memory_seq_rm(self._memory, 0, n_tokens - 1, -1))
        llama_cpp.llama_memory_clear(self._memory, True)
        self.cut(0, 0)
        self.busy_s = 0.0
        return removed

    def _map_rows(self, pointer: ctypes._Pointer[ctypes.c_float]) -> None:
        """Make ``self._rows`` a view of the logits buffer; its address seldom changes."""
        address = ctypes.addressof(pointer.contents)
        if self._rows is None or self._rows_address != address:
            self._rows = np.ctypeslib.as_array(pointer, (self.n_rows_max, self.n_vocab))
            self._rows_address = address

    def _split_rows(self, slices: Sequence[Slice]) -> list[Rows]:
        """Cut the contiguous rows, which are in batch order, into one view per slice."""
        if self._rows is None:
            return [np.empty((0, self.n_vocab), np.float32) for _ in slices]
        rows, first = [], 0
        for part in slices:
            rows.append(self._rows[first : first + part.n_rows])
            first += part.n_rows
        return rows

    def _fail(self, code: int, slices: Sequence[Slice]) -> None:
        """Drop what a failed batch left in the caches and raise."""
        for part in slices:
            if not llama_cpp.llama_memory_seq_rm(self._memory, part.sequence, part.start, -1):
                llama_cpp.llama_memory_seq_rm(self._memory, part.sequence, -1, -1)
                self.cut(part.sequence, 0)
        if code == _ABORTED and self._cancelled():
            raise Cancelled("stopped during evaluation")
        if code == _NO_SLOT:
            n_tokens = sum(len(part.tokens) for part in slices)
            raise EngineError(f"llama.cpp found no free cache cells for {n_tokens} more tokens; raise -c")
        raise EngineError(f"llama.cpp failed to evaluate (code {code}): {LOG.last_error() or 'it gave no reason'}")


class _Batch:
    """One ``llama_batch`` kept for good, its arrays owned by numpy and written through views.

    Written one number at a time: a round has few, and numpy's calls cost more than that behind a pass that has emptied
    the CPU's caches.
    """

    def __init__(self, n_tokens_max: int) -> None:
        self._token: NDArray[np.int32] = np.zeros(n_tokens_max, np.int32)
        self._position: NDArray[np.int32] = np.zeros(n_tokens_max, np.int32)
        self._n_seq_id: NDArray[np.int32] = np.ones(n_tokens_max, np.int32)
        self._sequence: NDArray[np.int32] = np.zeros(n_tokens_max, np.int32)
        self._wants_row: NDArray[np.int8] = np.zeros(n_tokens_max, np.int8)
        addresses = self._sequence.ctypes.data + 4 * np.arange(n_tokens_max, dtype=np.uintp)
        self._sequence_pointers: NDArray[np.uintp] = addresses  # llama.cpp wants a pointer per token
        arrays = self._token, self._position, self._sequence, self._wants_row
        self._views = tuple(memoryview(array) for array in arrays)  # type: ignore[arg-type]
        self._batch = llama_cpp.llama_batch(
            token=_pointer(self._token, llama_cpp.llama_token),
            pos=_pointer(self._position, llama_cpp.llama_pos),
            n_seq_id=_pointer(self._n_seq_id, ctypes.c_int32),
            seq_id=_pointer(self._sequence_pointers, ctypes.POINTER(llama_cpp.llama_seq_id)),
            logits=_pointer(self._wants_row, ctypes.c_int8),
        )

    def fill(self, slices: Sequence[Slice]) -> llama_cpp.llama_batch:
        """Write ``slices`` one behind the other."""
        tokens, positions, sequences, wants_row = self._views
        i = 0
        for part in slices:
            n_rowless, sequence = len(part.tokens) - part.n_rows, part.sequence
            for offset, token in enumerate(part.tokens):
                tokens[i] = token
                positions[i] = part.start + offset
                sequences[i] = sequence
                wants_row[i] = offset >= n_rowless
                i += 1
        self._batch.n_tokens = i
        return self._batch


def _pointer(array: NDArray[np.generic], kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


def _suppressed(vocab: object) -> frozenset[int]:
    n = ctypes.c_int32(0)
    ids = llama_cpp.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(n))
    return frozenset(ids[i] for i in range(n.value))


def library_build() -> str:
    """Version and CPU or GPU features of the library in use, as one line."""
    features: bytes = llama_cpp.llama_print_system_info()
    return f"{llama_cpp.__version__} {features.decode('utf-8', 'replace')}"


def supports_gpu_offload() -> bool:
    """Whether this build of llama.cpp can put layers on a GPU."""
    return bool(llama_cpp.llama_supports_gpu_offload())
