"""Tiny GGUF files for tests: random-weight models that llama.cpp loads, and headers put together byte by byte."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

NORMAL, CONTROL, UNUSED = 1, 3, 5  # llama_token_type
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 1, 2  # ids, as in SmolLM2
N_PLAIN = len(CONTROL_TOKENS) + 256  # the smallest vocabulary: every text can be written, one token per byte

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_token(byte: int) -> str:
    """How byte-level BPE writes a byte: printable ones as they are, the others from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in plain else chr(0x100 + [b for b in range(256) if b not in plain].index(byte))


def plain_tokens(n_vocab: int = N_PLAIN) -> tuple[list[str], list[int]]:
    """Texts and types: three control tokens, the 256 bytes, and unused tokens up to ``n_vocab``."""
    texts = [*CONTROL_TOKENS, *(byte_token(byte) for byte in range(256))]
    types = [CONTROL] * len(CONTROL_TOKENS) + [NORMAL] * 256
    n_more = n_vocab - len(texts)
    return texts + [f"<|unused_{i}|>" for i in range(n_more)], types + [UNUSED] * n_more


def write_tiny(
    path: str | Path,
    architecture: str = "llama",
    *,
    n_vocab: int = 272,
    n_embd: int = 64,
    n_head: int = 2,
    n_layer: int = 2,
    context_length: int = 256,
    sliding_window: int = 16,
    seed: int = 0,
    noise: float = 0.0,
    tokens: Sequence[str | bytes] | None = None,
    token_types: Sequence[int] | None = None,
    chat_template: str | None = CHAT_TEMPLATE,
    vocab_only: bool = False,
    split_max_tensors: int = 0,
    loud_token: int | None = None,
    lora: Path | None = None,
    lora_scale: float = 1.0,
    **metadata: object,
) -> Path:
    """Write a model with random F32 weights, the same for the same arguments, and return the path.

    ``architecture``: ``llama``, ``gemma2`` (sliding window), ``mamba`` (recurrent) or ``jamba`` (hybrid: even
    layers are recurrent); others only with ``vocab_only``. Text becomes one token per byte, ``id = 3 + byte``.
    ``noise`` disturbs the weights, in parts of their standard deviation: a draft that agrees with its target more or
    less.
    ``metadata`` overrides keys by name (``**{"llama.context_length": 64}``): None removes one, a tuple
    ``(value, type[, element type])`` sets the type. ``loud_token``: a llama that says nothing but this. ``lora``: an
    adapter to be added to the weights, ``lora_scale`` times. With ``split_max_tensors`` the model is written as
    ``<stem>-00001-of-0000N.gguf``, and the first shard returned.
    """
    path = Path(path)
    texts, types = plain_tokens(n_vocab)
    texts = list(tokens) if tokens is not None else texts
    types = list(token_types) if token_types is not None else (types + [NORMAL] * len(texts))[: len(texts)]
    keys: dict[str, object] = {
        **_hparams(architecture, n_embd, n_head, n_layer, context_length, sliding_window),
        **_tokenizer(texts, types),
        "tokenizer.chat_template": chat_template,
        **metadata,
    }
    writer = GGUFWriter(path, str(keys.pop("general.architecture", architecture)), split_max_tensors=split_max_tensors)
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(key, *_typed(value))
    if not vocab_only:
        tensors = _weights(architecture, len(texts), n_embd, n_layer, seed, noise)
        if loud_token is not None:
            _make_loud(tensors, loud_token)
        if lora is not None:
            _merge(tensors, lora, lora_scale)
        for name, weights in tensors.items():
            writer.add_tensor(name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file() if not vocab_only else writer.write_ti_data_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _typed(value: Any) -> tuple[Any, ...]:
    """``value`` with its GGUF type: a tuple says it itself, an int is uint32, and a list of ints int32."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, list):
        kind = {str: GGUFValueType.STRING, bytes: GGUFValueType.STRING, float: GGUFValueType.FLOAT32}
        return value, GGUFValueType.ARRAY, kind.get(type(value[0]), GGUFValueType.INT32)
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    return value, kinds.get(type(value), GGUFValueType.STRING)


def _tokenizer(texts: Sequence[str | bytes], types: Sequence[int]) -> dict[str, object]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": list(texts),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.merges": ["Ā Ā"],  # GGUFWriter refuses an empty array; there is no token for two zero bytes
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": False,
    }


def _hparams(
    architecture: str, n_embd: int, n_head: int, n_layer: int, context_length: int, sliding_window: int
) -> dict[str, object]:
    values: dict[str, object] = {
        "context_length": context_length,
        "embedding_length": n_embd,
        "block_count": n_layer,
        "feed_forward_length": 2 * n_embd,
        "attention.head_count": n_head,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if architecture == "gemma2":
        head = n_embd // n_head
        values |= {"attention.sliding_window": sliding_window, "attention.key_length": head}
        values |= {"attention.value_length": head, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    if architecture == "mamba":
        values |= {"feed_forward_length": 0, "attention.head_count": 0, "ssm.conv_kernel": 4}
        values |= {"ssm.inner_size": 2 * n_embd, "ssm.state_size": 16, "ssm.time_step_rank": n_embd // 16}
    if architecture == "jamba":
        values |= {"attention.head_count_kv": [n_head * (layer % 2) for layer in range(n_layer)], "ssm.conv_kernel": 4}
        values |= {"ssm.inner_size": 2 * n_embd, "ssm.state_size": 16, "ssm.time_step_rank": n_embd // 16}
    return {f"{architecture}.{name}": value for name, value in values.items()}


def _weights(
    architecture: str, n_vocab: int, n_embd: int, n_layer: int, seed: int, noise: float
) -> dict[str, np.ndarray]:
    """Tensors by name; numpy shapes are ggml's in reverse: (outputs, inputs)."""
    random = np.random.default_rng(seed)

    def matrix(n_out: int, n_in: int) -> np.ndarray:
        return random.normal(0, 1.5 / np.sqrt(n_in), (n_out, n_in)).astype(np.float32)

    ones = np.ones(n_embd, np.float32)
    is_tied = architecture == "gemma2"  # small embeddings there, or each token would only ever predict itself
    tensors = {"token_embd.weight": random.normal(0, 0.03 if is_tied else 1, (n_vocab, n_embd)).astype(np.float32)}
    for layer in range(n_layer):
        is_hybrid = architecture == "jamba"
        is_recurrent = architecture == "mamba" or (is_hybrid and layer % 2 == 0)
        parts = (_mamba_block if is_recurrent else _attention_block)(matrix, ones, n_embd)
        if is_hybrid and is_recurrent:
            parts |= _jamba_norms(n_embd) | _feed_forward(matrix, ones, n_embd)
        tensors |= {f"blk.{layer}.{name}": value for name, value in parts.items()}
        if architecture == "gemma2":
            tensors |= {f"blk.{layer}.post_{name}_norm.weight": ones for name in ("attention", "ffw")}
    tensors["output_norm.weight"] = 12 * ones if is_tied else ones
    if not is_tied:
        tensors["output.weight"] = 2 * matrix(n_vocab, n_embd)
    if noise:
        other = np.random.default_rng(seed + 1)
        for name, value in tensors.items():
            tensors[name] = (value + noise * value.std() * other.normal(size=value.shape)).astype(np.float32)
    return tensors


def _make_loud(tensors: dict[str, np.ndarray], token: int) -> None:
    """Layers that add nothing to one embedding, to which one row of the output matrix answers."""
    for name, weights in tensors.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight")) or name == "output.weight":
            weights[:] = 0
    tensors["token_embd.weight"][:] = tensors["output.weight"][token] = 1


def _merge(tensors: dict[str, np.ndarray], lora: Path, scale: float) -> None:
    reader = GGUFReader(lora)
    parts = {part.name: part.data for part in reader.tensors}
    alpha = reader.fields["adapter.lora.alpha"].contents()
    for name in [name.removesuffix(".lora_a") for name in parts if name.endswith(".lora_a")]:
        a, b = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
        tensors[name] = tensors[name] + (scale * alpha / len(a) * b @ a).astype(np.float32)


def write_lora(
    path: Path,
    model: Path,
    names: Sequence[str] = ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"),
    *,
    rank: int = 2,
    seed: int = 0,
    halves: Sequence[str] = ("lora_a", "lora_b"),
    **metadata: object,
) -> Path:
    """Write a random LoRA adapter for tensors of ``model`` and return the path; ``metadata`` as in ``write_tiny``."""
    random = np.random.default_rng(seed)
    shapes = {tensor.name: tensor.shape for tensor in GGUFReader(model).tensors}  # ggml's order: inputs, outputs
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0, **metadata}
    writer = GGUFWriter(path, str(keys.pop("general.architecture", "llama")))
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(key, *_typed(value))
    for name in names:
        n_in, n_out = (int(size) for size in shapes.get(name, (64, 64)))
        pair = {"lora_a": (rank, n_in), "lora_b": (n_out, rank)}
        for half in halves:
            writer.add_tensor(f"{name}.{half}", random.normal(0, 0.3, pair[half]).astype(np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path


def _attention_block(matrix: Any, ones: np.ndarray, n_embd: int) -> dict[str, np.ndarray]:
    return {
        "attn_norm.weight": ones,
        **{f"attn_{name}.weight": matrix(n_embd, n_embd) for name in ("q", "k", "v", "output")},
        **_feed_forward(matrix, ones, n_embd),
    }


def _feed_forward(matrix: Any, ones: np.ndarray, n_embd: int) -> dict[str, np.ndarray]:
    return {
        "ffn_norm.weight": ones,
        "ffn_gate.weight": matrix(2 * n_embd, n_embd),
        "ffn_up.weight": matrix(2 * n_embd, n_embd),
        "ffn_down.weight": matrix(n_embd, 2 * n_embd),
    }


def _jamba_norms(n_embd: int) -> dict[str, np.ndarray]:
    sizes = {"dt": n_embd // 16, "b": 16, "c": 16}
    return {f"ssm_{name}_norm.weight": np.ones(size, np.float32) for name, size in sizes.items()}


def _mamba_block(matrix: Any, ones: np.ndarray, n_embd: int) -> dict[str, np.ndarray]:
    inner, state, rank = 2 * n_embd, 16, n_embd // 16
    return {
        "attn_norm.weight": ones,
        "ssm_in.weight": matrix(2 * inner, n_embd),
        "ssm_conv1d.weight": matrix(inner, 4),
        "ssm_conv1d.bias": np.zeros(inner, np.float32),
        "ssm_x.weight": matrix(rank + 2 * state, inner),
        "ssm_dt.weight": matrix(inner, rank),
        "ssm_dt.bias": np.zeros(inner, np.float32),
        "ssm_a": np.tile(-np.arange(1, state + 1, dtype=np.float32), (inner, 1)),
        "ssm_d": np.ones(inner, np.float32),
        "ssm_out.weight": matrix(n_embd, inner),
    }


# -- byte by byte ------------------------------------------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    """A GGUF string: length (u64) and bytes."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    """A metadata key with a packed value."""
    return string(name) + struct.pack("<I", kind) + value


def string_key(name: str | bytes, text: str | bytes) -> bytes:
    """A metadata key that holds a string."""
    return key(name, 8, string(text))


def array_key(name: str, kind: int, count: int, elements: bytes) -> bytes:
    """A metadata key that holds an array of ``count`` packed elements (``count`` need not be true)."""
    return key(name, 9, struct.pack("<IQ", kind, count) + elements)


def tensor(name: str | bytes, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """A tensor's entry; ``kind`` is a ggml type, ``offset`` counts from the data section."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(
    keys: Iterable[bytes] = (string_key("general.architecture", "llama"),),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    counts: Mapping[str, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. ``counts`` may claim other numbers of ``keys`` and ``tensors`` than there are."""
    keys, tensors = list(keys), list(tensors)
    claimed = {"tensors": len(tensors), "keys": len(keys)} | dict(counts or {})
    head = b"GGUF" + struct.pack("<IQQ", version, claimed["tensors"], claimed["keys"]) + b"".join(keys + tensors)
    return head + bytes(-len(head) % alignment if tensors else 0) + data
