"""The options of ``specli bench --url``, the load test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from specli.cli.option_groups import make_option
from specli.cli.prompt import read_text_file
from specli.cli.values import seconds
from specli.config import FIND_SLA_MOST, LENGTHS, LengthOptions, LoadOptions
from specli.errors import ConfigError

LOAD = "Load test (--url)"
_NAMES = ", ".join(LENGTHS)
_DEFAULT_LOADS = ",".join(str(n) for n in LoadOptions.concurrency)
# Options of the local bench that a load test has too; every other one means nothing to a server.
_SHARED = {
    *("ignore_eos", "seed", "temperature", "time_budget", "output", "details", "save", "plot", "compare", "prompts"),
    *("debug", "help"),
}


@dataclass(frozen=True)
class LoadFlags:
    """What is asked of a server."""

    url: Annotated[
        str | None,
        make_option("--url", panel=LOAD, metavar="URL", help="Load-test this OpenAI-compatible server instead."),
    ] = None
    api_key: Annotated[
        str | None, make_option("--api-key", panel=LOAD, env="SPECLI_API_KEY", metavar="KEY", help="Its key.")
    ] = None
    api_key_file: Annotated[
        Path | None, make_option("--api-key-file", panel=LOAD, metavar="FILE", help="The key, from a file.")
    ] = None
    model_name: Annotated[
        str | None, make_option("--model-name", panel=LOAD, metavar="NAME", help="Unset: the first it lists.")
    ] = None
    endpoint: Annotated[
        str, make_option("--endpoint", panel=LOAD, metavar="chat|completions", help="What is asked.")
    ] = LoadOptions.endpoint
    concurrency: Annotated[
        str | None,
        make_option(
            "--concurrency",
            panel=LOAD,
            metavar="N,...",
            help=f"Requests in flight, step by step (unset: {_DEFAULT_LOADS}; --find-sla: 1,{FIND_SLA_MOST}).",
        ),
    ] = None
    rate: Annotated[
        str | None,
        make_option("--rate", panel=LOAD, metavar="R,...", help="Requests/s at Poisson times, in place of those."),
    ] = None
    input_length: Annotated[
        str | None,
        make_option(
            "--input-length",
            panel=LOAD,
            metavar="DIST",
            help=f"Prompts, tokens: {_NAMES}, uniform:64,256, normal:200,50 or lognormal:120,0.7 (unset: chat).",
        ),
    ] = None
    output_length: Annotated[
        str | None,
        make_option("--output-length", panel=LOAD, metavar="DIST", help="Most tokens of an answer (unset: chat)."),
    ] = None
    shared_prefix: Annotated[
        int, make_option("--shared-prefix", panel=LOAD, metavar="N", help="Tokens that all prompts begin with.")
    ] = LoadOptions.shared_prefix
    requests: Annotated[
        int | None, make_option("--requests", panel=LOAD, metavar="N", help="Requests measured at each step.")
    ] = LoadOptions.n_requests
    duration: Annotated[
        str | None, make_option("--duration", panel=LOAD, metavar="TIME", help="Or its time (unset: 1m).")
    ] = None
    warmup_for: Annotated[
        str | None,
        make_option(
            "--warmup-for",
            panel=LOAD,
            metavar="N|TIME",
            help="Before that, requests, or a time as 30s (unset: one request per connection; --rate: 10s).",
        ),
    ] = None
    sla_ttft: Annotated[
        float | None, make_option("--sla-ttft", panel=LOAD, metavar="MS", help="Bound on the time to the first token.")
    ] = LoadOptions.sla_ttft_ms
    sla_tpot: Annotated[
        float | None, make_option("--sla-tpot", panel=LOAD, metavar="MS", help="Bound on the time per later token.")
    ] = LoadOptions.sla_tpot_ms
    find_sla: Annotated[
        bool,
        make_option("--find-sla", panel=LOAD, help="Search the highest load with 95% of requests inside the bounds."),
    ] = LoadOptions.find_sla
    timeout: Annotated[
        str | None,
        make_option("--timeout", panel=LOAD, metavar="TIME", help="Longest wait for a piece of an answer (unset: 5m)."),
    ] = None

    @property
    def is_asked(self) -> bool:
        """Whether a server is measured, and not a model here."""
        return self.url is not None

    def check(self, given: Sequence[tuple[str, str]]) -> None:
        """Refuse what means nothing beside the rest. ``given``: fields and flags that were written on the command line.

        Raises ``ConfigError`` that names them all.
        """
        own = {field.name for field in fields(self)}
        if self.is_asked:
            odd = [flag for name, flag in given if name not in own | _SHARED]
            if odd:
                them = "it" if len(odd) == 1 else "them"
                raise ConfigError(f"{_listed(odd)} given with --url, where the server decides; leave {them} out")
        else:
            odd = [flag for name, flag in given if name in own]
            if odd:
                raise ConfigError(f"{_listed(odd)} given without --url URL, the server to measure")

    def options(
        self, *, seed: int, temperature: float, time_budget_s: float | None, ignore_eos: bool, has_prompts: bool
    ) -> LoadOptions:
        """Checked. Raises ``ConfigError``."""
        from specli.loadtest.lengths import INPUT, OUTPUT, parse

        if has_prompts and (self.input_length is not None or self.shared_prefix):
            raise ConfigError("--prompts was given with --input-length or --shared-prefix; its prompts are as they are")
        if self.concurrency is not None and self.rate is not None:
            raise ConfigError("--concurrency and --rate were both given, one was expected; leave one out")
        if self.requests is not None and self.duration is not None:
            raise ConfigError("--requests and --duration were both given, one was expected; leave one out")
        chat = LENGTHS["chat"]
        return LoadOptions(
            url=self.url or "",
            api_key=self._key(),
            model_name=self.model_name,
            endpoint=self.endpoint,
            concurrency=self._concurrency(),
            rates=tuple(_numbers("--rate", self.rate)) if self.rate is not None else (),
            input_length=_length("--input-length", self.input_length, INPUT, parse) or chat[INPUT],
            output_length=_length("--output-length", self.output_length, OUTPUT, parse) or chat[OUTPUT],
            shared_prefix=self.shared_prefix,
            n_requests=self.requests,
            duration_s=_time("--duration", self.duration, LoadOptions.duration_s),
            **self._warmup(),
            sla_ttft_ms=self.sla_ttft,
            sla_tpot_ms=self.sla_tpot,
            find_sla=self.find_sla,
            temperature=temperature,
            ignore_eos=ignore_eos,
            seed=seed,
            timeout_s=_time("--timeout", self.timeout, LoadOptions.timeout_s),
            time_budget_s=time_budget_s,
        )

    def _key(self) -> str | None:
        if self.api_key_file is None:
            return self.api_key or None  # a variable that is set to nothing is no key
        return read_text_file(self.api_key_file, "API key").strip()

    def _concurrency(self) -> tuple[int, ...]:
        if self.concurrency is None:
            return (1, FIND_SLA_MOST) if self.find_sla else LoadOptions.concurrency
        found = _numbers("--concurrency", self.concurrency)
        if any(value != int(value) for value in found if value == value and abs(value) < float("inf")):
            raise ConfigError(f"--concurrency got {self.concurrency!r}, expected whole numbers, as in 1,2,4")
        return tuple(int(value) for value in found)

    def _warmup(self) -> dict[str, Any]:
        if self.warmup_for is None:
            return {}
        if self.warmup_for.isdecimal() and self.warmup_for.isascii():
            return {"warmup_requests": int(self.warmup_for)}
        return {"warmup_s": seconds(self.warmup_for, "--warmup-for")}


def _numbers(flag: str, text: str) -> list[float]:
    """Numbers between commas, each once."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or any(value != value or value in (float("inf"), float("-inf")) for value in found):
        raise ConfigError(f"{flag} got {text!r}, expected numbers between commas, as in 1,2,4")
    return list(dict.fromkeys(found))


def _length(flag: str, text: str | None, role: int, parse: Any) -> LengthOptions | None:  # noqa: ANN401 - lazily read
    return None if text is None else parse(flag, text, role)


def _time(flag: str, text: str | None, default: float) -> float:
    return default if text is None else seconds(text, flag) or 0.0


def _listed(flags: Sequence[str]) -> str:
    """Flags as the subject of a sentence."""
    return f"{', '.join(flags)} {'was' if len(flags) == 1 else 'were'}"


def given_options(params: Sequence[Any], source_of: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - the parser's
    """Field and flag of each option written on the command line (not in the environment)."""
    for param in params:
        if getattr(source_of(param.name), "name", "") == "COMMANDLINE":
            yield param.name, param.opts[0]
