"""What an option's text means: lists, pairs, masks and escapes, as llama.cpp's ``common/arg.cpp`` reads them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from specli.config import KV_OVERRIDE_TYPES, SAMPLERS, KvOverride, Lora
from specli.errors import ConfigError

MAX_CPUS = 512  # GGML_MAX_N_THREADS
MAX_LAYERS = 1024  # twice LLAMA_MAX_LAYERS: -ncmoe 999 means all
_KV_VALUES: dict[str, Callable[[str], bool | int | float | str]] = {
    "int": int,
    "float": float,
    "bool": {"true": True, "false": False}.__getitem__,
    "str": str,
}
_SWITCH = {"enabled": "on", "true": "on", "1": "on", "disabled": "off", "false": "off", "0": "off", "-1": "auto"}
_EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # LLM_FFN_EXPS_REGEX of common.h
_DENSE = r"\.ffn_(up|down|gate)\."  # LLM_FFN_DENSE_REGEX
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"'": b"'", b'"': b'"', b"\\": b"\\"}
_ESCAPE = re.compile(rb"\\(x[0-9A-Fa-f]{2}|.)", re.DOTALL)


def seconds(text: str, flag: str = "--time-budget") -> float | None:
    """A time such as 90s, 15m, 1h30m or 600 (seconds); None for 0, no limit. Raises ``ConfigError``."""
    found = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not text.strip() or found is None:
        limit = ", or 0 for no limit" if flag == "--time-budget" else ""
        raise ConfigError(f"{flag} got {text!r}, expected a time, such as 90s, 15m or 1h30m{limit}")
    hours, minutes, rest = (float(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + rest or None


def switch(value: str) -> str:
    """on, off or auto, by llama.cpp's other words for them; anything else as it is."""
    return _SWITCH.get(value, value)


def split_row(text: str) -> list[str]:
    """Fields between commas; one in double quotes may hold commas, and a quote written twice."""
    fields, field, in_quotes, waiting = list[str](), "", False, list(text[::-1])
    while waiting:
        character = waiting.pop()
        if in_quotes and character == '"' and waiting[-1:] == ['"']:
            field += waiting.pop()
        elif character == '"' and (in_quotes or not field):
            in_quotes = not in_quotes
        elif character == "," and not in_quotes:
            fields.append(field)
            field = ""
        else:
            field += character
    return [*fields, field]


def devices(text: str | None) -> tuple[str, ...] | None:
    """``-dev``: names in their order, () for none, None where it was not given."""
    if text is None:
        return None
    return () if text == "none" else tuple(text.split(","))


_SAMPLER_WORDS = {  # common_sampler_types_from_names, and its other words
    **{name: name for name in SAMPLERS},
    **dict.fromkeys(("top-k",), "top_k"),
    **dict.fromkeys(("top-p", "nucleus"), "top_p"),
    **dict.fromkeys(("top-n-sigma",), "top_n_sigma"),
    **dict.fromkeys(("typical-p", "typical", "typ-p", "typ"), "typ_p"),
    **dict.fromkeys(("min-p",), "min_p"),
    **dict.fromkeys(("temp",), "temperature"),
}
_SAMPLER_LETTERS = dict(zip("edskypmxt", SAMPLERS, strict=True))  # common_sampler_types_from_chars
_BIAS = re.compile(r"(\d+)([+-].+)")


def sampler_names(text: str) -> tuple[str, ...]:
    """``--samplers``: names between semicolons; none of them for an empty text."""
    names = [name.strip() for name in text.split(";") if name.strip()]
    for name in names:
        if name not in _SAMPLER_WORDS:
            raise ConfigError(f"--samplers got {name!r}, expected some of {', '.join(SAMPLERS)}")
    return tuple(_SAMPLER_WORDS[name] for name in names)


def sampler_letters(text: str) -> tuple[str, ...]:
    """``--sampler-seq``: one letter for each."""
    for letter in text:
        if letter not in _SAMPLER_LETTERS:
            known = ", ".join(f"{letter} ({name})" for letter, name in _SAMPLER_LETTERS.items())
            raise ConfigError(f"--sampler-seq got {letter!r}, expected some of {known}")
    return tuple(_SAMPLER_LETTERS[letter] for letter in text)


def logit_biases(texts: Sequence[str] | None) -> tuple[tuple[int, float], ...]:
    """``-l``: a token id and what is added to its logit, with its sign between them."""
    found = []
    for text in texts or ():
        parts = _BIAS.fullmatch(text.strip())
        try:
            bias = float(parts[2]) if parts is not None else math.nan
        except ValueError:
            bias = math.nan
        if parts is None or math.isnan(bias):
            raise ConfigError(
                f"-l/--logit-bias got {text!r}, expected a token id, a sign and a number (15043+1, 15043-inf)"
            )
        found.append((int(parts[1]), bias))
    return tuple(found)


def proportions(text: str | None) -> tuple[float, ...]:
    """``-ts``: numbers between commas or slashes."""
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in re.split("[,/]+", text))
    except ValueError:
        raise ConfigError(f"-ts/--tensor-split got {text!r}, expected numbers between commas, as in 3,1") from None


def tensor_overrides(
    texts: Sequence[str] | None, cpu_experts: bool, n_cpu_experts: int | None, n_cpu_dense: int | None, suffix: str = ""
) -> tuple[tuple[str, str], ...]:
    """``-ot``, ``-cmoe``, ``-ncmoe`` and ``-ncffn`` as patterns and buffer types, in that order.

    ``suffix``: "d" for the draft's flags.
    """
    if cpu_experts and n_cpu_experts is not None:
        both = f"-cmoe{suffix} (all experts) and -ncmoe{suffix} {n_cpu_experts} were both given"
        raise ConfigError(f"{both}, one was expected; leave one out")
    found = [_override(item, suffix) for text in texts or () for item in text.split(",")]
    found += [(_EXPERTS, "CPU")] if cpu_experts else []
    for flag, n, tensors in (("-ncmoe", n_cpu_experts, _EXPERTS), ("-ncffn", n_cpu_dense, _DENSE)):
        if n is not None and n < 0:
            raise ConfigError(f"{flag}{suffix} got {n}, expected 0 or more layers")
        found += [(rf"blk\.{layer}{tensors}", "CPU") for layer in range(min(n or 0, MAX_LAYERS))]
    return tuple(found)


def _override(text: str, suffix: str) -> tuple[str, str]:
    pattern, equals, buffer_type = text.partition("=")
    if not (pattern and equals and buffer_type):
        raise ConfigError(f"-ot{suffix} got {text!r}, expected PATTERN=BUFFER_TYPE, as in exps=CPU")
    return pattern, buffer_type


def kv_overrides(texts: Iterable[str] | None) -> tuple[KvOverride, ...]:
    """``--override-kv KEY=TYPE:VALUE,...``."""
    return tuple(_kv_override(item) for text in texts or () for item in split_row(text))


def _kv_override(text: str) -> KvOverride:
    key, _, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if not key or not colon or kind not in KV_OVERRIDE_TYPES:
        expected = f"KEY=TYPE:VALUE with a type of {', '.join(KV_OVERRIDE_TYPES)}"
        raise ConfigError(f"--override-kv got {text!r}, expected {expected}")
    try:
        return KvOverride(key, _KV_VALUES[kind](value))
    except (ValueError, KeyError):
        what = {"int": "an integer", "float": "a number", "bool": "true or false"}[kind]
        raise ConfigError(f"--override-kv got {text!r}, expected {what} behind {kind}:") from None


def loras(plain: Iterable[str] | None, scaled: Iterable[str] | None) -> tuple[Lora, ...]:
    """``--lora FNAME,...`` and ``--lora-scaled FNAME:SCALE,...``."""
    found = [Lora(Path(name)) for text in plain or () for name in split_row(text)]
    for item in (item for text in scaled or () for item in split_row(text)):
        name, colon, scale = item.rpartition(":")
        try:
            found.append(Lora(Path(name), float(scale)))
        except ValueError:
            colon = ""
        if not (name and colon):
            raise ConfigError(f"--lora-scaled got {item!r}, expected FNAME:SCALE, as in adapter.gguf:0.5")
    return tuple(found)


def cpus(mask: str | None, span: str | None) -> frozenset[int] | None:
    """``-C`` and ``-Cr`` together, as llama.cpp joins them; None where neither was given."""
    if mask is None and span is None:
        return None
    return frozenset([*(_masked(mask) if mask is not None else ()), *(_spanned(span) if span is not None else ())])


def _masked(mask: str) -> Iterator[int]:
    digits = mask.removeprefix("0x")
    if not re.fullmatch("[0-9A-Fa-f]{1,128}", digits):
        raise ConfigError(f"-C/--cpu-mask got {mask!r}, expected up to 128 hexadecimal digits, as in f0")
    bits = int(digits, 16)
    return (cpu for cpu in range(MAX_CPUS) if bits >> cpu & 1)


def _spanned(span: str) -> range:
    match = re.fullmatch("([0-9]{0,9})-([0-9]{0,9})", span)
    low, high = (match[1] or "0", match[2] or str(MAX_CPUS - 1)) if match else ("1", "0")
    if not int(low) <= int(high) < MAX_CPUS:
        raise ConfigError(f"-Cr/--cpu-range got {span!r}, expected LO-HI with CPUs from 0 to {MAX_CPUS - 1}, as in 0-3")
    return range(int(low), int(high) + 1)


def json_object(text: str | None) -> dict[str, object]:
    """``--chat-template-kwargs``."""
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(
            f'--chat-template-kwargs got {text}, expected a JSON object, as in {{"enable_thinking": false}}'
        )
    return value


def unescape(text: str, flag: str) -> str:
    r"""``--escape``: \n, \r, \t, \', \", \\ and \xHH (a byte) as what they stand for; other backslashes stay."""

    def meaning(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code[1:], 16)]) if len(code) == 3 else _ESCAPES.get(code, match[0])

    if "\\" not in text:
        return text
    data = _ESCAPE.sub(meaning, text.encode("utf-8"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"{flag} has escapes that give bytes which are not UTF-8: {data[error.start]:#04x}"
        raise ConfigError(f"{found} at offset {error.start}; use --no-escape to keep backslashes") from None
