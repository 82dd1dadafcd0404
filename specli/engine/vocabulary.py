"""A vocabulary in llama.cpp without its weights, to see how it encodes text."""

from __future__ import annotations

import os
from types import TracebackType

import llama_cpp

from specli import gguf_file
from specli.engine.log import LOG
from specli.errors import EngineError, ModelLoadError
from specli.vocab import VocabInfo


def tokenize(vocab: object, text: str, add_special: bool, parse_special: bool) -> list[int]:
    """Token ids of ``text`` by llama.cpp's ``vocab`` pointer; the flags are ``llama_tokenize``'s."""
    data = text.encode("utf-8")
    size = len(data) + 8
    while True:
        ids = (llama_cpp.llama_token * size)()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), ids, size, add_special, parse_special)
        if n >= 0:
            return list(ids[:n])
        size = -n


class Vocabulary:
    """The tokenizer of one GGUF file (the first shard of a split one). Use it as a context manager."""

    def __init__(self, header: gguf_file.GgufHeader, vocab: VocabInfo) -> None:
        """Load the vocabulary of ``header``; 0.4 s for 150k tokens. Raises ``ModelLoadError`` with llama.cpp's reason.

        What would end the process in ``encode`` is refused first. Two tokens with one text end it here: the header must
        have passed ``gguf_file``'s checks.
        """
        self._handle: int | None = None
        _check_encoding(vocab)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        LOG.clear()
        self._handle = llama_cpp.llama_model_load_from_file(os.fsencode(header.path), params)
        if not self._handle:
            reason = LOG.last_error() or "it gave no reason"
            raise ModelLoadError(f"llama.cpp could not load the vocabulary of {header.path}: {reason}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._handle)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` alone: nothing is added, and control text in it stays text."""
        if self._handle is None:
            raise EngineError("the vocabulary was closed")
        return tokenize(self._vocab, text, False, False)

    def close(self) -> None:
        """Free it. Calling it twice is fine."""
        if self._handle:
            llama_cpp.llama_model_free(self._handle)
            self._handle = None

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_encoding(vocab: VocabInfo) -> None:
    """Bytes without a token of their own: ``byte_to_token`` throws through the C interface, which ends the process."""
    if vocab.kind == "SPM":
        texts = set(vocab.tokens[:])
        missing = [byte for byte in range(256) if not texts & {b"<0x%02X>" % byte, bytes([byte])}]
        if missing:
            found = f"{len(missing)} of 256 bytes have no token (the first is <0x{missing[0]:02X}>)"
            raise gguf_file.fault(vocab.path, found, "one for each byte", "convert the model again")
    elif vocab.kind == "RWKV" and b"\n" not in vocab.tokens[:]:
        raise gguf_file.fault(vocab.path, "there is no token for a line break", "one", "convert the model again")
