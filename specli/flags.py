"""Options back as command-line flags, to be repeated in commands that are suggested. Defaults are left out."""

from __future__ import annotations

from collections.abc import Iterator

from specli.config import KvOverride, ModelOptions, PlacementOptions, RopeOptions

_ROPE_FLAGS = {
    "scaling": "--rope-scaling",
    "freq_base": "--rope-freq-base",
    "freq_scale": "--rope-freq-scale",
    "yarn_orig_ctx": "--yarn-orig-ctx",
    "yarn_ext_factor": "--yarn-ext-factor",
    "yarn_attn_factor": "--yarn-attn-factor",
    "yarn_beta_slow": "--yarn-beta-slow",
    "yarn_beta_fast": "--yarn-beta-fast",
}
_KINDS = {bool: "bool", int: "int", float: "float", str: "str"}


def loading_flags(options: ModelOptions) -> Iterator[str]:
    """What says how the target is placed and loaded (``cli.option_groups``)."""
    placement, plain = options.placement, PlacementOptions()
    if placement.devices is not None:
        yield from ("-dev", _devices(placement))
    if placement.split_mode != plain.split_mode:
        yield from ("-sm", placement.split_mode)
    if placement.tensor_split:
        yield from ("-ts", ",".join(f"{part:g}" for part in placement.tensor_split))
    if placement.main_gpu != plain.main_gpu:
        yield from ("-mg", str(placement.main_gpu))
    if not placement.kv_offload:
        yield "-nkvo"
    yield from _overrides("-ot", placement)
    for name, flag in _ROPE_FLAGS.items():
        if getattr(options.rope, name) != getattr(RopeOptions, name):
            yield from (flag, str(getattr(options.rope, name)))
    for override in options.kv_overrides:
        yield from ("--override-kv", _kv_override(override))
    for lora in options.loras:
        yield from ("--lora-scaled", _quoted(f"{lora.path}:{lora.scale:g}"))
    if options.swa_full:
        yield "--swa-full"
    if options.load_mode != ModelOptions.load_mode:
        yield from ("-lm", options.load_mode)


def draft_loading_flags(draft: ModelOptions, target: ModelOptions) -> Iterator[str]:
    """What a draft has of its own."""
    if draft.placement.devices is not None and draft.placement.devices != target.placement.devices:
        yield from ("-devd", _devices(draft.placement))
    yield from _overrides("-otd", draft.placement)


def _devices(placement: PlacementOptions) -> str:
    return ",".join(placement.devices or ()) or "none"


def _overrides(flag: str, placement: PlacementOptions) -> Iterator[str]:
    if placement.tensor_overrides:
        yield from (flag, ",".join(f"{pattern}={buffer_type}" for pattern, buffer_type in placement.tensor_overrides))


def _kv_override(override: KvOverride) -> str:
    value = str(override.value).lower() if isinstance(override.value, bool) else str(override.value)
    return _quoted(f"{override.key}={_KINDS[type(override.value)]}:{value}")


def _quoted(field: str) -> str:
    """One field of a row between commas (``cli.values.split_row``)."""
    return '"' + field.replace('"', '""') + '"' if "," in field or '"' in field else field
