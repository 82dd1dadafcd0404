"""A stand-in of an OpenAI-compatible server, in a thread: answers as scripted, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

METRICS = """\
# HELP {prefix}spec_decode_num_draft_tokens_total Draft tokens.
# TYPE {prefix}spec_decode_num_draft_tokens_total counter
{prefix}spec_decode_num_draft_tokens_total{{engine="0"}} {proposed}
{prefix}spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
"""


@dataclass(frozen=True)
class Script:
    """How one request is answered. ``pieces``: (seconds before it, text); one event and one write each."""

    pieces: tuple[tuple[float, str], ...] = ((0.0, "one two"), (0.005, " three four"), (0.005, " five six"))
    n_tokens: int | None = 6  # in the usage; None: no usage
    status: int = 200
    said: str = '{"error": {"message": "no"}}'  # with another status
    content_type: str = "text/event-stream; charset=utf-8"
    event: str | None = None  # in place of the second piece
    cut_after: int | None = None  # pieces, after which the connection breaks
    has_done: bool = True


@dataclass
class ChatServer:
    """``behave`` says how request ``i`` (from 0) with this body is answered."""

    behave: Callable[[int, dict], Script] = lambda _i, _body: Script()
    models: str = '{"object": "list", "data": [{"id": "stand-in", "owned_by": "nobody"}]}'
    models_status: int = 200
    key: str | None = None
    prefix: str | None = "vllm:"  # of the draft counters; None: no /metrics
    chars_per_token: float | None = None  # None: no /tokenize
    tokenize_fields: set[str] = field(default_factory=lambda: {"content"})  # which it wants, and no other
    url: str = ""
    asked: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0  # since /metrics was read last
    proposed: int = 1000
    accepted: int = 500

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self.serve_one(reader, writer)
        finally:
            writer.close()

    async def serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            first = await reader.readexactly(1)
            if first == b"\x16":  # a TLS handshake
                return send(writer, 400, "no TLS here")
            head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self.answer(head[0].split()[1], headers, body, writer)
            await writer.drain()
        return None

    async def answer(self, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> None:
        self.paths.append(path)
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return send(writer, 401, '{"error": {"message": "no such key"}}')
        if path == "/v1/models":
            return send(writer, self.models_status, self.models)
        if path == "/metrics" and self.prefix is not None:
            self.most_in_flight = self.in_flight
            counts = {"prefix": self.prefix, "proposed": float(self.proposed), "accepted": self.accepted}
            return send(writer, 200, METRICS.format(**counts), "text/plain; version=0.0.4")
        if path == "/tokenize" and self.chars_per_token is not None:
            asked = json.loads(body)
            if set(asked) != self.tokenize_fields:
                return send(writer, 400, '{"error": {"message": "unknown field"}}')
            n = round(len(asked.get("content", asked.get("prompt"))) / self.chars_per_token)
            return send(writer, 200, json.dumps({"tokens": list(range(n))}))
        if path in ("/v1/chat/completions", "/v1/completions"):
            return await self.complete(json.loads(body), writer)
        return send(writer, 404, '{"detail": "Not Found"}')

    async def complete(self, body: dict, writer: asyncio.StreamWriter) -> None:
        self.asked.append(body)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self.stream(self.behave(len(self.asked) - 1, body), body, writer)
        finally:
            self.in_flight -= 1

    async def stream(self, script: Script, body: dict, writer: asyncio.StreamWriter) -> None:
        if script.status != 200:
            return send(writer, script.status, script.said)
        head = f"HTTP/1.1 200 OK\r\nServer: stand-in/1\r\nContent-Type: {script.content_type}\r\n"
        writer.write(f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode())
        is_chat = "messages" in body
        write_event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i, (wait_s, text) in enumerate(script.pieces):
            await writer.drain()
            await asyncio.sleep(wait_s)
            if i == script.cut_after:
                return None
            if i == 1 and script.event is not None:
                write_event(writer, script.event)
                continue
            write_event(writer, {"choices": [{"delta": {"content": text}} if is_chat else {"text": text}]})
        self.proposed, self.accepted = self.proposed + 10, self.accepted + 7
        write_event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        if script.n_tokens is not None:
            n_in = len(json.dumps(body.get("messages", body.get("prompt")))) // 4
            write_event(writer, {"choices": [], "usage": {"prompt_tokens": n_in, "completion_tokens": script.n_tokens}})
        if script.has_done:
            write_event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        return None


def write_event(writer: asyncio.StreamWriter, data: dict | str) -> None:
    event = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


def send(writer: asyncio.StreamWriter, status: int, said: str, kind: str = "application/json") -> None:
    body = said.encode()
    head = f"HTTP/1.1 {status} X\r\nServer: stand-in/1\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)


@contextmanager
def running(**options: object) -> Iterator[ChatServer]:
    """A server on a free port of this machine."""
    server, ready = ChatServer(**options), threading.Event()
    loop, over = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with await asyncio.start_server(server.on_connection, "127.0.0.1", 0) as listening:
            server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
            ready.set()
            await over.wait()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())
            loop.run_until_complete(asyncio.sleep(0.01))  # transports close in the rounds after

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(30)
