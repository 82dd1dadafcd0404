"""``specli serve`` as a process: what it says, how it ends, what it refuses to start with."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from serve_http import HANG_S, is_closed, request, until
from support import CommandLine, settings

from specli.cli.serve_flags import ServeFlags, require_packages
from specli.config import ServeOptions
from specli.errors import ConfigError
from specli.serve.server import address, assemble, bind

LONG = {"prompt": "Once upon a time", "ignore_eos": True, "max_tokens": 100, "stream": True}


@dataclass
class Started:
    """A server that answers. ``lines``: of stderr so far."""

    process: subprocess.Popen
    url: str = ""
    lines: list[str] = field(default_factory=list)

    def read(self) -> None:
        """All of stderr, in a thread of its own."""
        for line in self.process.stderr:
            self.lines.append(line.decode("utf-8").rstrip("\n"))

    def end(self, *signals: int) -> int:
        """The exit code behind ``signals``; nothing may be on stdout."""
        for number in signals:
            self.process.send_signal(number)
        code = self.process.wait(HANG_S)
        assert self.process.stdout.read() == b""
        return code

    @property
    def where(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)


@pytest.fixture(scope="module")
def start(specli: CommandLine, q4_0_path, draft_path) -> Callable:
    """``with start("--alias", "x") as started``: the default pair, ready."""
    pair = ("-m", q4_0_path, "-md", draft_path, "-t", "1", "-c", "256", "-np", "2")

    @contextmanager
    def run(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Started]:
        with specli.start("serve", *pair, "--port", "0", *arguments, env=env) as process:
            started = Started(process)
            reader = threading.Thread(target=started.read, daemon=True)
            reader.start()
            until(lambda: process.poll() is not None or any("listening at" in line for line in started.lines))
            assert process.poll() is None, started.lines
            started.url = started.lines[-1].split()[2].replace("0.0.0.0", "127.0.0.1")
            yield started
            process.kill()
            reader.join(HANG_S)

    return run


@contextmanager
def streaming(url: str) -> Iterator[httpx.Response]:
    """An answer under way."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=HANG_S) as response:
        yield response


@pytest.mark.model
def test_from_start_to_an_orderly_end(start, tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\n\n second \n")
    with start("-a", "the-model", "--api-key-file", str(keys), "--host", "0.0.0.0", "-n", "5") as started:
        assert started.lines[-1].startswith("listening at http://0.0.0.0:")
        assert not any("warning" in line for line in started.lines)  # there are keys
        assert httpx.get(f"{started.url}/v1/models").status_code == 401
        with httpx.Client(headers={"Authorization": "Bearer second"}, base_url=started.url, timeout=HANG_S) as http:
            assert http.get("/v1/models").json()["data"][0]["id"] == "the-model"
            body = {"messages": [{"role": "user", "content": "Xylophone"}], "ignore_eos": True}
            assert http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 5
            schema = {"type": "json_schema", "json_schema": {"schema": {"type": "frob"}}}
            assert http.post("/v1/chat/completions", json={**body, "response_format": schema}).status_code == 400
        assert started.end(signal.SIGTERM) == 0
    log = "\n".join(started.lines)
    assert "TTFT" in log
    assert "Xylophone" not in log
    assert "second" not in log
    assert "Traceback" not in log


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(start, number: int) -> None:
    with start() as started:
        with streaming(started.url) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            started.process.send_signal(number)
            until(lambda: any("stopping" in line for line in started.lines))
            said = [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        assert json.loads(said[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert started.end() == 0
        with pytest.raises(ConnectionError):
            socket.create_connection(started.where, timeout=HANG_S)
    assert not any("Traceback" in line for line in started.lines)


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(start, number: int) -> None:
    with start() as started, socket.create_connection(started.where, timeout=HANG_S) as made:
        made.sendall(request("/v1/completions", json.dumps({**LONG, "max_tokens": 250}).encode()))
        assert made.recv(1)
        started.process.send_signal(number)
        until(lambda: any("stopping" in line for line in started.lines))
        assert started.end(number) == 130
        assert is_closed(made)
    assert not any("Traceback" in line for line in started.lines)


@pytest.mark.model
def test_an_idle_connection_does_not_keep_it(start) -> None:
    with start("--log-prompts") as started, socket.create_connection(started.where, timeout=HANG_S) as idle:
        with httpx.Client(base_url=started.url, timeout=HANG_S) as http:
            http.post("/v1/completions", json={"prompt": "Xylophone", "max_tokens": 1})
            assert started.end(signal.SIGTERM) == 0
        assert is_closed(idle)
    assert any("Xylophone" in line for line in started.lines)


@pytest.mark.model
def test_a_network_without_a_key_is_warned_of(start) -> None:
    with start("--host", "0.0.0.0", env={"LLAMA_ARG_ALIAS": "x"}) as started:
        assert sum("warning: anybody who can reach" in line for line in started.lines) == 1
        assert httpx.get(f"{started.url}/v1/models").json()["data"][0]["id"] == "x"
        assert started.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "70000"), "--port got 70000, expected 0 (any) to 65535"),
        (("--host", "192.0.2.1"), "--host 192.0.2.1"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("-to", "soon"), "--timeout"),
        (("--logprobs", "3"), "--logprobs"),
    ],
)
def test_a_bad_value_is_one_line(specli: CommandLine, tiny_model, arguments: Sequence[str], words: str) -> None:
    ended = specli("serve", "-m", tiny_model(), "--spec-type", "none", "--port", "0", *arguments)
    assert ended.code == 2
    assert words in ended.error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"host": ""}, "--host"),
        ({"port": -1}, "--port"),
        ({"alias": " "}, "--alias"),
        ({"api_key": [""]}, "--api-key"),
        ({"api_key": ["two words"]}, "--api-key"),
        ({"api_key": ["\u00e9"]}, "--api-key"),
        ({"api_key_file": Path("/dev/null")}, "no key in it"),
        ({"n_queue": 0}, "--queue"),
        ({"timeout": "0"}, "--timeout"),
        ({"n_predict": 0}, "--predict"),
        ({"max_body": 0}, "--max-body"),
        ({"max_choices": 1000}, "--max-choices"),
        ({"max_stops": 0}, "--max-stops"),
        ({"max_messages": 0}, "--max-messages"),
        ({"sla_ttft": 0.0}, "--sla-ttft"),
        ({"sla_tpot": math.nan}, "--sla-tpot"),
    ],
)
def test_bad_values(flags: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        ServeFlags(**flags).options()
    assert "\n" not in str(raised.value)
    assert "two words" not in str(raised.value)


def test_a_port_that_is_taken_is_one_line(specli: CommandLine, tiny_model) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        ended = specli("serve", "-m", tiny_model(), "--spec-type", "none", "--port", port)
    assert ended.code == 2
    assert f"--port {port} cannot be listened at: Address already in use" in ended.error


@pytest.mark.model
def test_a_port_that_is_taken_meanwhile_is_no_traceback(q4_0_path) -> None:
    """Two servers may bind to one port before either listens."""
    from specli.session import Session

    with Session(settings(q4_0_path, model={"n_ctx": 64}, type="none")) as session, bind(ServeOptions(port=0)) as first:
        options = ServeOptions(port=first.getsockname()[1])
        with bind(options) as second:
            first.listen()
            server, _ = assemble(session, options)
            with pytest.raises(ConfigError, match="Address already in use"):
                server.run(sockets=[second])


def test_addresses() -> None:
    with bind(ServeOptions(port=0)) as listener:
        assert address(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        try:
            listener = bind(ServeOptions(host="::1", port=0))
        except ConfigError:
            pytest.skip("no IPv6 here")
        with listener:
            assert address(listener) == f"http://[::1]:{listener.getsockname()[1]}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_this_machine_alone(host: str) -> None:
    assert ServeOptions(host=host).is_loopback
    assert not ServeOptions(host="0.0.0.0").is_loopback


def test_packages_that_are_missing_are_named(monkeypatch) -> None:
    require_packages()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name != "uvicorn" else object())
    with pytest.raises(ConfigError) as raised:
        require_packages()
    assert str(raised.value) == "a server needs what is not installed; pip install fastapi prometheus-client"


def test_keys_come_from_everywhere_once(tmp_path, monkeypatch) -> None:
    keys = tmp_path / "keys"
    keys.write_text("b\n\nc\n")
    monkeypatch.setenv("LLAMA_API_KEY", "d")
    assert ServeFlags(api_key=["a", "b"], api_key_file=keys).options().api_keys == ("a", "b", "c")
    assert ServeFlags().options().api_keys == ("d",)
    assert "secret" not in repr(ServeOptions(api_keys=("secret",)))
    assert ServeFlags(cors_origins=" https://a.example , ,*").options().cors_origins == ("https://a.example", "*")
    for origin in ("example.com", "https://", "https://a.example/path"):
        with pytest.raises(ConfigError, match="expected \\* or origins"):
            ServeFlags(cors_origins=origin).options()


WHILE_CAUGHT = """
import logging
from specli.cli.serve import _log_to_stderr
from specli.engine.grammar import _stderr_of_library
_log_to_stderr()
with _stderr_of_library() as written:
    logging.getLogger("specli.serve").info("an answer to somebody else")
assert written() == "", written()
"""


def test_what_is_logged_while_a_grammar_is_parsed_is_not_caught(specli: CommandLine) -> None:
    """llama.cpp's parser prints to stderr, which is caught meanwhile, for the client that sent the grammar."""
    argv = [sys.executable, "-c", WHILE_CAUGHT]
    done = subprocess.run(argv, capture_output=True, env=specli.environment(), timeout=HANG_S, check=True)
    assert b"an answer to somebody else" in done.stderr
