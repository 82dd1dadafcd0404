"""Groups of options that commands share: each a dataclass that declares names, environment, help and defaults.

A command takes a group as one parameter; ``flattened`` turns it into the group's options for Typer. Names, variables
and defaults are those of llama.cpp's ``common/arg.cpp``, present names first; what they mean is in ``values``.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from specli.cli import values
from specli.cli.options import HARDWARE, PROMPT
from specli.cli.prompt import read_text_file
from specli.config import ModelOptions, PlacementOptions, ProcessOptions, RopeOptions, TemplateOptions
from specli.errors import ConfigError

if TYPE_CHECKING:
    from specli.render.choose import ColorMode

DEVICES, ROPE, TEMPLATE = "Devices and loading", "Positions (RoPE)", "Chat template"
_Command = TypeVar("_Command", bound=Callable[..., None])


def flattened(command: _Command) -> _Command:
    """``command`` with each parameter that is a group replaced by the group's fields, for Typer to read."""
    signature = inspect.signature(command, eval_str=True)
    annotations = {parameter.name: parameter.annotation for parameter in signature.parameters.values()}
    groups: dict[str, Any] = {name: group for name, group in annotations.items() if is_dataclass(group)}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(parameter.annotation, include_extras=True)
        for field in fields(parameter.annotation):
            kind, hint = inspect.Parameter.KEYWORD_ONLY, hints[field.name]
            parameters.append(inspect.Parameter(field.name, kind, default=field.default, annotation=hint))

    @functools.wraps(command)
    def gather(**given: Any) -> None:  # noqa: ANN401 - whatever Typer parsed
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    del gather.__wrapped__  # or Typer would read the annotations of what is inside
    gather.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    gather.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return gather  # type: ignore[return-value]


def make_option(*names: str, panel: str, help: str, env: str | None = None, metavar: str | None = None) -> Any:  # noqa: ANN401
    """One option of a group."""
    is_switch = any("/" in name for name in names)  # whose default Typer shows as one of the names
    return typer.Option(
        *names, envvar=env, rich_help_panel=panel, help=help, metavar=metavar, show_default=not is_switch
    )


def _list_devices(asked: bool) -> None:
    if asked:
        from specli.engine.devices import describe_devices

        typer.echo("\n".join(["Available devices:", *(f"  {line}" for line in describe_devices() or ["(none)"])]))
        raise typer.Exit


_Devices = functools.partial(make_option, panel=DEVICES)
_Rope = functools.partial(make_option, panel=ROPE)


@dataclass(frozen=True)
class LoadingFlags:
    """How weights and caches are placed and loaded; ``target`` and ``draft`` turn them into ``ModelOptions``."""

    device: Annotated[
        str | None,
        _Devices(
            "-dev", "--device", env="LLAMA_ARG_DEVICE", metavar="DEV,...", help="Devices to use (unset: all), or none."
        ),
    ] = None
    device_draft: Annotated[
        str | None,
        _Devices(
            *("-devd", "--spec-draft-device", "--device-draft"),
            metavar="DEV,...",
            help="The draft's -dev (unset: -dev).",
        ),
    ] = None
    list_devices: Annotated[
        bool,
        typer.Option(
            "--list-devices", callback=_list_devices, is_eager=True, rich_help_panel=DEVICES, help="List them and exit."
        ),
    ] = False
    split_mode: Annotated[
        str, _Devices("-sm", "--split-mode", env="LLAMA_ARG_SPLIT_MODE", help="none, layer, row or tensor.")
    ] = PlacementOptions.split_mode
    tensor_split: Annotated[
        str | None,
        _Devices(
            "-ts", "--tensor-split", env="LLAMA_ARG_TENSOR_SPLIT", metavar="N,N,...", help="Parts for each device."
        ),
    ] = None
    main_gpu: Annotated[
        int, _Devices("-mg", "--main-gpu", env="LLAMA_ARG_MAIN_GPU", help="Device of -sm none, number from 0.")
    ] = PlacementOptions.main_gpu
    kv_offload: Annotated[
        bool | None,
        _Devices(
            *("-kvo/-nkvo", "--kv-offload/--no-kv-offload"),
            env="LLAMA_ARG_KV_OFFLOAD",
            help="Caches on the device of their layer (default), or in RAM.",
        ),
    ] = None
    override_tensor: Annotated[
        list[str] | None,
        _Devices(
            *("-ot", "--override-tensor"),
            env="LLAMA_ARG_OVERRIDE_TENSOR",
            metavar="PATTERN=TYPE,...",
            help="Buffer type of the tensors that match; goes before -cmoe, -ncmoe and -ncffn.",
        ),
    ] = None
    cpu_moe: Annotated[
        bool, _Devices("-cmoe", "--cpu-moe", env="LLAMA_ARG_CPU_MOE", help="All experts' weights on the CPU.")
    ] = False
    n_cpu_moe: Annotated[
        int | None,
        _Devices(
            "-ncmoe",
            "--n-cpu-moe",
            env="LLAMA_ARG_N_CPU_MOE",
            help="Experts' weights of the first N layers on the CPU.",
        ),
    ] = None
    n_cpu_ffn: Annotated[
        int | None,
        _Devices(
            "-ncffn", "--n-cpu-ffn", env="LLAMA_ARG_N_CPU_FFN", help="Dense FFN weights of the first N layers there."
        ),
    ] = None
    override_tensor_draft: Annotated[
        list[str] | None,
        _Devices(
            *("-otd", "--spec-draft-override-tensor", "--override-tensor-draft"),
            metavar="PATTERN=TYPE,...",
            help="The draft's -ot.",
        ),
    ] = None
    cpu_moe_draft: Annotated[
        bool,
        _Devices(
            *("-cmoed", "--spec-draft-cpu-moe", "--cpu-moe-draft"),
            env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE",
            help="The draft's -cmoe.",
        ),
    ] = False
    n_cpu_moe_draft: Annotated[
        int | None,
        _Devices(
            *("-ncmoed", "--spec-draft-n-cpu-moe", "--spec-draft-ncmoe", "--n-cpu-moe-draft"),
            env="LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
            help="The draft's -ncmoe.",
        ),
    ] = None
    load_mode: Annotated[
        str | None,
        _Devices(
            *("-lm", "--load-mode"),
            env="LLAMA_ARG_LOAD_MODE",
            metavar="MODE",
            help="auto, none, mmap, mlock, mmap+mlock or dio (unset: auto).",
        ),
    ] = None
    mmap: Annotated[bool | None, _Devices("--mmap/--no-mmap", help="Former name of -lm mmap, none.")] = None
    mlock: Annotated[bool, _Devices("--mlock", help="Former name of -lm mmap+mlock (mlock with --no-mmap).")] = False
    direct_io: Annotated[
        bool | None, _Devices("-dio/-ndio", "--direct-io/--no-direct-io", help="Former name of -lm dio, auto.")
    ] = None
    warmup: Annotated[bool, _Devices("--warmup/--no-warmup", help="A short pass at loading.")] = ModelOptions.warmup
    swa_full: Annotated[
        bool,
        _Devices("--swa-full", env="LLAMA_ARG_SWA_FULL", help="Sliding windows keep all of the context."),
    ] = ModelOptions.swa_full
    lora: Annotated[
        list[str] | None, _Devices("--lora", metavar="FNAME,...", help="LoRA adapter over the target; repeatable.")
    ] = None
    lora_scaled: Annotated[
        list[str] | None, _Devices("--lora-scaled", metavar="FNAME:SCALE,...", help="The same, scaled.")
    ] = None
    override_kv: Annotated[
        list[str] | None,
        _Devices("--override-kv", metavar="KEY=TYPE:VALUE,...", help="Other metadata; types int, float, bool, str."),
    ] = None
    rope_scaling: Annotated[
        str | None, _Rope("--rope-scaling", env="LLAMA_ARG_ROPE_SCALING_TYPE", help="none, linear or yarn.")
    ] = RopeOptions.scaling
    rope_scale: Annotated[
        float | None, _Rope("--rope-scale", env="LLAMA_ARG_ROPE_SCALE", help="The context becomes N times as long.")
    ] = None
    rope_freq_base: Annotated[
        float, _Rope("--rope-freq-base", env="LLAMA_ARG_ROPE_FREQ_BASE", help="Base frequency; 0 = the model's.")
    ] = RopeOptions.freq_base
    rope_freq_scale: Annotated[
        float | None,
        _Rope("--rope-freq-scale", env="LLAMA_ARG_ROPE_FREQ_SCALE", help="1/N of --rope-scale; 0 = the model's."),
    ] = None
    yarn_orig_ctx: Annotated[
        int, _Rope("--yarn-orig-ctx", env="LLAMA_ARG_YARN_ORIG_CTX", help="Context before scaling; 0 = as trained.")
    ] = RopeOptions.yarn_orig_ctx
    yarn_ext_factor: Annotated[
        float, _Rope("--yarn-ext-factor", env="LLAMA_ARG_YARN_EXT_FACTOR", help="Mix; 0 = interpolation; -1 = model's.")
    ] = RopeOptions.yarn_ext_factor
    yarn_attn_factor: Annotated[
        float, _Rope("--yarn-attn-factor", env="LLAMA_ARG_YARN_ATTN_FACTOR", help="Magnitude; -1 = the model's.")
    ] = RopeOptions.yarn_attn_factor
    yarn_beta_slow: Annotated[
        float, _Rope("--yarn-beta-slow", env="LLAMA_ARG_YARN_BETA_SLOW", help="High correction; -1 = the model's.")
    ] = RopeOptions.yarn_beta_slow
    yarn_beta_fast: Annotated[
        float, _Rope("--yarn-beta-fast", env="LLAMA_ARG_YARN_BETA_FAST", help="Low correction; -1 = the model's.")
    ] = RopeOptions.yarn_beta_fast

    def target(self, options: ModelOptions) -> ModelOptions:
        """``options`` with these flags. Raises ``ConfigError``."""
        return replace(
            options,
            placement=PlacementOptions(
                devices=values.devices(self.device),
                split_mode=self.split_mode,
                tensor_split=values.proportions(self.tensor_split),
                main_gpu=self.main_gpu,
                kv_offload=self._kv_offload(),
                tensor_overrides=values.tensor_overrides(
                    self.override_tensor, self.cpu_moe, self.n_cpu_moe, self.n_cpu_ffn
                ),
            ),
            rope=self._rope(),
            kv_overrides=values.kv_overrides(self.override_kv),
            loras=values.loras(self.lora, self.lora_scaled),
            swa_full=self.swa_full,
            load_mode=self._load_mode(),
            warmup=self.warmup,
        )

    def draft(self, options: ModelOptions) -> ModelOptions:
        """``options``, made from the target's, with the draft's own flags; adapters are the target's alone.

        As llama.cpp's ``common_base_params_to_speculative``: one device of its own needs no ``-sm tensor``.
        """
        overrides = values.tensor_overrides(
            self.override_tensor_draft, self.cpu_moe_draft, self.n_cpu_moe_draft, None, suffix="d"
        )
        placement = replace(options.placement, tensor_overrides=overrides)
        if self.device_draft is not None:
            devices = values.devices(self.device_draft)
            is_one = devices is not None and len(devices) == 1
            mode = PlacementOptions.split_mode if is_one else placement.split_mode
            placement = replace(placement, devices=devices, split_mode=mode)
        return replace(options, placement=placement, loras=())

    def _kv_offload(self) -> bool:
        if self.kv_offload is None:
            return "LLAMA_ARG_NO_KV_OFFLOAD" not in os.environ  # llama.cpp: whatever its value
        return self.kv_offload

    def _rope(self) -> RopeOptions:
        scale = 0.0 if self.rope_freq_scale is None else self.rope_freq_scale
        if self.rope_scale is not None:
            if self.rope_freq_scale is not None:
                raise ConfigError(
                    "--rope-scale and --rope-freq-scale were both given, one is 1 / the other; leave one out"
                )
            if not 0 < self.rope_scale < float("inf"):
                raise ConfigError(f"--rope-scale got {self.rope_scale}, expected a number above 0")
            scale = 1 / self.rope_scale
        return RopeOptions(
            self.rope_scaling,
            self.rope_freq_base,
            scale,
            self.yarn_orig_ctx,
            self.yarn_ext_factor,
            self.yarn_attn_factor,
            self.yarn_beta_slow,
            self.yarn_beta_fast,
        )

    def _load_mode(self) -> str:
        """``-lm``, or what its former names say together."""
        former = {"--mmap": self.mmap, "--mlock": self.mlock or None, "-dio": self.direct_io}
        given = [name for name, value in former.items() if value is not None]
        if self.load_mode is not None and given:
            raise ConfigError(f"-lm {self.load_mode} was given with {given[0]}, a former name of it; leave one out")
        if self.direct_io and (self.mlock or self.mmap):
            raise ConfigError(f"-dio was given with {given[0]}, which reads the file in another way; leave one out")
        if self.load_mode is not None:
            return self.load_mode
        if self.direct_io:
            return "dio"
        if self.mlock:
            return "mlock" if self.mmap is False else "mmap+mlock"
        return {None: ModelOptions.load_mode, True: "mmap", False: "none"}[self.mmap]


@dataclass(frozen=True)
class ProcessFlags:
    """What holds for the whole process."""

    cpu_mask: Annotated[
        str | None,
        make_option("-C", "--cpu-mask", panel=HARDWARE, metavar="HEX", help="CPUs to run on, target and draft alike."),
    ] = None
    cpu_range: Annotated[
        str | None,
        make_option("-Cr", "--cpu-range", panel=HARDWARE, metavar="LO-HI", help="The same as a range; both add up."),
    ] = None
    prio: Annotated[
        int, make_option("--prio", panel=HARDWARE, help="Priority: -1 low, 0 normal, 1 medium, 2 high, 3 realtime.")
    ] = ProcessOptions.priority
    numa: Annotated[
        str | None,
        make_option(
            "--numa", panel=HARDWARE, env="LLAMA_ARG_NUMA", metavar="TYPE", help="distribute, isolate or numactl."
        ),
    ] = ProcessOptions.numa

    def options(self) -> ProcessOptions:
        """Raises ``ConfigError``."""
        numa = "distribute" if self.numa == "" else self.numa  # as llama.cpp
        return ProcessOptions(values.cpus(self.cpu_mask, self.cpu_range), self.prio, numa)


@dataclass(frozen=True)
class TemplateFlags:
    """The chat template."""

    chat_template: Annotated[
        str | None,
        make_option(
            "--chat-template",
            panel=TEMPLATE,
            env="LLAMA_ARG_CHAT_TEMPLATE",
            metavar="NAME|JINJA",
            help="In place of the model's: jinja text, or the name of one that llama.cpp has built in.",
        ),
    ] = None
    chat_template_file: Annotated[
        str | None,
        make_option(
            "--chat-template-file",
            panel=TEMPLATE,
            env="LLAMA_ARG_CHAT_TEMPLATE_FILE",
            metavar="FILE",
            help="The same from a file.",
        ),
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        make_option(
            "--chat-template-kwargs",
            panel=TEMPLATE,
            env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
            metavar="JSON",
            help="Variables for the template, as in '{\"enable_thinking\": false}'.",
        ),
    ] = None

    def options(self) -> TemplateOptions:
        """Raises ``ConfigError``."""
        if self.chat_template is not None and self.chat_template_file is not None:
            raise ConfigError("both --chat-template and --chat-template-file were given; leave one out")
        source = self.chat_template
        if self.chat_template_file is not None:
            source = read_text_file(Path(self.chat_template_file), "chat template")
        return TemplateOptions(source, values.json_object(self.chat_template_kwargs))

    def refuse_with_raw(self) -> None:
        """``--raw`` uses no template. Raises ``ConfigError``."""
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise ConfigError(f"{flag} was given with --raw, which uses no chat template; leave one out")


@dataclass(frozen=True)
class TextFlags:
    """How texts are read and shown."""

    system_file: Annotated[
        str | None,
        make_option("-sysf", "--system-prompt-file", panel=PROMPT, metavar="FILE", help="System message from a file."),
    ] = None
    escape: Annotated[
        bool,
        make_option(
            *("-e", "--escape/--no-escape"),
            panel=PROMPT,
            help=r"\n, \t, \xHH and the like in -p, -f FILE and -r mean what they stand for.",
        ),
    ] = True
    special: Annotated[
        bool, make_option("-sp", "--special", panel=PROMPT, help="Show control tokens in the answer.")
    ] = False
    color: Annotated[
        str, make_option("-co", "--color", panel=PROMPT, metavar="on|off|auto", help="Tints on a terminal.")
    ] = "auto"

    def system(self, text: str | None) -> str | None:
        """The system message of ``-sys`` or ``-sysf``. Raises ``ConfigError``."""
        if self.system_file is None:
            return text
        if text is not None:
            raise ConfigError("both -sys and -sysf were given, one system message was expected; leave one out")
        return read_text_file(Path(self.system_file), "system prompt")

    def stops(self, texts: list[str] | None) -> tuple[str, ...]:
        """The stop strings of ``-r``. Raises ``ConfigError``."""
        return tuple(values.unescape(text, "-r") if self.escape else text for text in texts or ())

    @property
    def color_mode(self) -> ColorMode:
        """``--color``. Raises ``ConfigError``."""
        modes: dict[str, ColorMode] = {"on": "on", "off": "off", "auto": "auto"}
        found = modes.get(values.switch(self.color))
        if found is None:
            raise ConfigError(f"-co/--color got {self.color!r}, expected one of {', '.join(modes)}")
        return found
