"""The default target at the cost of a larger one: same words, more arithmetic.

Every matrix is padded with zero blocks to a wider shape, and the norms are rescaled so that the padded RMSNorm equals
the original: the same function up to rounding, which reads and multiplies as many weights as a dense model of the new
shape. So acceptance is real at any cost of the target.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFReader, GGUFValueType, GGUFWriter


def inflate(source: Path, destination: Path, *, embd: int = 1536, kv_heads: int = 8, ffn: int = 8960) -> None:
    """Write ``source``, a llama-architecture GGUF without biases, in the given shape (default: about 1.5B)."""
    reader = GGUFReader(str(source))
    old = {
        key: reader.fields[f"llama.{key}"].contents()
        for key in (
            "embedding_length",
            "attention.head_count",
            "attention.head_count_kv",
            "attention.layer_norm_rms_epsilon",
        )
    }
    head = old["embedding_length"] // old["attention.head_count"]
    heads = kv_heads * old["attention.head_count"] // old["attention.head_count_kv"]
    changed = {
        "llama.embedding_length": embd,
        "llama.attention.head_count": heads,
        "llama.attention.head_count_kv": kv_heads,
        "llama.feed_forward_length": ffn,
        "llama.attention.layer_norm_rms_epsilon": old["attention.layer_norm_rms_epsilon"]
        * old["embedding_length"]
        / embd,
    }
    writer = GGUFWriter(str(destination), "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, changed.get(key, field.contents()), field.types[0], sub_type=sub_type)
    if "llama.attention.key_length" not in reader.fields:
        for name in ("key_length", "value_length"):
            writer.add_key_value(f"llama.attention.{name}", head, GGUFValueType.UINT32)
    width = {"attn_output": heads * head, "ffn_down": ffn}
    rows = {"attn_q": heads * head, "attn_k": kv_heads * head, "attn_v": kv_heads * head, "attn_output": embd}
    rows |= {"ffn_gate": ffn, "ffn_up": ffn, "ffn_down": embd}
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        if "norm" in tensor.name:
            norm = np.zeros(embd, np.float32)
            norm[: old["embedding_length"]] = np.asarray(tensor.data, np.float32).reshape(-1)
            writer.add_tensor(tensor.name, norm * np.float32(np.sqrt(old["embedding_length"] / embd)))
        else:
            data = _padded(tensor, width.get(part, embd), rows.get(part))
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _padded(tensor, n_columns: int, n_rows: int | None) -> np.ndarray:
    """Raw bytes of a quantized matrix with zero blocks and zero rows appended, uint8 ``(n_rows, bytes per row)``."""
    block, size = GGML_QUANT_SIZES[tensor.tensor_type]
    raw = np.asarray(tensor.data).view(np.uint8).reshape(int(tensor.shape[1]), -1)
    padded = np.zeros((n_rows or raw.shape[0], n_columns // block * size), np.uint8)
    padded[: raw.shape[0], : raw.shape[1]] = raw
    return padded
