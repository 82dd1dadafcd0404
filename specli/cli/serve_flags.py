"""The options that only ``specli serve`` has; names and variables are llama-server's where it has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import specli as package
from specli.cli.option_groups import make_option
from specli.cli.prompt import read_text_file
from specli.cli.values import seconds
from specli.config import ServeOptions
from specli.errors import ConfigError

SERVER, LIMITS, PROMISES = "Server", "Limits", "Latency"
_API_KEY = "LLAMA_API_KEY"
OPERATIONS = Path(package.__file__).parent / "data" / "serve"


def _option(panel: str, *names: str, help: str, env: str | None = None, metavar: str | None = None) -> Any:  # noqa: ANN401
    return make_option(*names, panel=panel, help=help, env=env, metavar=metavar)


def _print_operations_file(name: str | None) -> None:
    if name is None:
        return
    files = {path.name: path for path in sorted(OPERATIONS.iterdir())}
    if name not in files:
        raise ConfigError(f"--operations-file got {name!r}, expected one of {', '.join(files)}")
    typer.echo(files[name].read_text("utf-8"), nl=False)
    raise typer.Exit


@dataclass(frozen=True)
class ServeFlags:
    """Where to listen, whom to let in, what to promise."""

    host: Annotated[
        str, _option(SERVER, "--host", env="LLAMA_ARG_HOST", help="Address to listen at; 0.0.0.0 is every network.")
    ] = ServeOptions.host
    port: Annotated[int, _option(SERVER, "--port", env="LLAMA_ARG_PORT", help="0 is any that is free.")] = (
        ServeOptions.port
    )
    alias: Annotated[
        str | None, _option(SERVER, "-a", "--alias", env="LLAMA_ARG_ALIAS", help="The model's name in the interface.")
    ] = None
    api_key: Annotated[
        list[str] | None,
        _option(SERVER, "--api-key", metavar="KEY", help=f"Key that clients must send; may be repeated. [{_API_KEY}]"),
    ] = None
    api_key_file: Annotated[
        Path | None,
        _option(SERVER, "--api-key-file", env="LLAMA_ARG_API_KEY_FILE", metavar="FILE", help="Keys, one per line."),
    ] = None
    cors_origins: Annotated[
        str | None,
        _option(SERVER, "--cors-origins", metavar="URL,...", help="Web pages that browsers may call from; * is all."),
    ] = None
    log_prompts: Annotated[
        bool, _option(SERVER, "--log-prompts", help="Prompts and answers in the log, which has none otherwise.")
    ] = ServeOptions.log_prompts
    operations_file: Annotated[
        str | None,
        typer.Option(
            "--operations-file",
            callback=_print_operations_file,
            is_eager=True,
            rich_help_panel=SERVER,
            metavar="NAME",
            help="Print alerts.yml, grafana.json, prometheus.yml, specli.service or Containerfile, and exit.",
        ),
    ] = None
    parallel: Annotated[
        int,
        _option(
            SERVER,
            *("-np", "--parallel"),
            env="LLAMA_ARG_N_PARALLEL",
            help="Answers at a time; each has a context of -c tokens.",
        ),
    ] = 4
    n_predict: Annotated[
        int, _option(LIMITS, "-n", "--predict", "--n-predict", help="Most tokens of an answer; -1 = the context's.")
    ] = ServeOptions.n_predict
    n_queue: Annotated[int, _option(LIMITS, "--queue", help="Requests that may wait; more get 429.")] = (
        ServeOptions.n_queue
    )
    timeout: Annotated[
        str,
        _option(LIMITS, "-to", "--timeout", env="LLAMA_ARG_TIMEOUT", metavar="TIME", help="Most time of a request."),
    ] = f"{ServeOptions.timeout_s:.0f}s"
    max_body: Annotated[int, _option(LIMITS, "--max-body", metavar="BYTES", help="Longest body of a request.")] = (
        ServeOptions.max_body_bytes
    )
    max_messages: Annotated[int, _option(LIMITS, "--max-messages", help="Most messages of a request.")] = (
        ServeOptions.max_messages
    )
    max_stops: Annotated[int, _option(LIMITS, "--max-stops", help="Most stop strings of a request.")] = (
        ServeOptions.max_stops
    )
    max_choices: Annotated[int, _option(LIMITS, "--max-choices", help="Most choices (n) of a request.")] = (
        ServeOptions.max_choices
    )
    sla_ttft: Annotated[
        float | None, _option(PROMISES, "--sla-ttft", metavar="MS", help="TTFT that 95% of answers should stay within.")
    ] = None
    sla_tpot: Annotated[
        float | None, _option(PROMISES, "--sla-tpot", metavar="MS", help="The same for TPOT; answers wait to keep it.")
    ] = None
    chunked_prefill: Annotated[
        bool,
        _option(
            PROMISES,
            "--chunked-prefill/--no-chunked-prefill",
            help="Long prompts take turns with answers under way (default), or go first.",
        ),
    ] = ServeOptions.chunked_prefill

    def options(self) -> ServeOptions:
        """Checked. Raises ``ConfigError``."""
        return ServeOptions(
            host=self.host,
            port=self.port,
            alias=self.alias,
            api_keys=tuple(dict.fromkeys(self._keys())),
            cors_origins=_origins(self.cors_origins or ""),
            n_queue=self.n_queue,
            timeout_s=seconds(self.timeout, "-to/--timeout") or 0.0,
            n_predict=self.n_predict,
            max_body_bytes=self.max_body,
            max_messages=self.max_messages,
            max_stops=self.max_stops,
            max_choices=self.max_choices,
            chunked_prefill=self.chunked_prefill,
            sla_ttft_ms=self.sla_ttft,
            sla_tpot_ms=self.sla_tpot,
            log_prompts=self.log_prompts,
        )

    def _keys(self) -> list[str]:
        keys = [*(self.api_key or [])]
        if (key := os.environ.get(_API_KEY)) and not keys:
            keys.append(key)
        if self.api_key_file is not None:
            found = [line.strip() for line in read_text_file(self.api_key_file, "key").splitlines()]
            found = [line for line in found if line]
            if not found:
                raise ConfigError(f"--api-key-file {self.api_key_file} has no key in it; expected one per line")
            keys += found
        return keys


def require_packages() -> None:
    """Raise ``ConfigError`` where what a server is made of is not installed."""
    from importlib.util import find_spec

    names = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}
    lacking = [package for name, package in names.items() if find_spec(name) is None]
    if lacking:
        raise ConfigError(f"a server needs what is not installed; pip install {' '.join(lacking)}")


def _origins(given: str) -> tuple[str, ...]:
    """Origins between commas. Raises ``ConfigError`` for what no browser calls itself."""
    origins = tuple(part.strip() for part in given.split(",") if part.strip())
    for origin in origins:
        scheme, mark, host = origin.partition("://")
        if origin != "*" and not (scheme and mark and host and "/" not in host):
            raise ConfigError(f"--cors-origins got {origin!r}, expected * or origins such as https://example.com")
    return origins
