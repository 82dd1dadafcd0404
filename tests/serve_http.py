"""A server of this process: in a thread, on a free port, over a session that is loaded already."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from specli.config import ServeOptions
from specli.serve.scheduler import Scheduler
from specli.serve.server import Protocol, Server, assemble, bind
from specli.session import Session

HANG_S = 120  # nothing takes this long; a busy machine may be slow


@dataclass
class Serving:
    """``http`` asks it; ``connect`` gives a bare socket."""

    session: Session
    server: Server
    scheduler: Scheduler
    address: tuple[str, int]
    http: httpx.Client

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def chat(self, content: str = "Say hello.", **asked: object) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": [user(content)], "max_tokens": 8, **asked})

    def complete(self, prompt: object = "Once upon a time", **asked: object) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8, "temperature": 0, **asked})

    def connect(self) -> socket.socket:
        made = socket.create_connection(self.address, timeout=HANG_S)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def ask(self, path: str = "/v1/completions", **asked: object) -> socket.socket:
        """A request on a connection of its own, whose answer is not read."""
        made = self.connect()
        made.sendall(request(path, json.dumps({"prompt": "Once upon a time", "temperature": 0, **asked}).encode()))
        return made

    def counter(self, name: str) -> float:
        """A sample of ``/metrics``, by name and labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name + " ")).rpartition(" ")[2])

    def wait_idle(self) -> None:
        until(lambda: self.scheduler.n_running == 0 and self.scheduler.n_waiting == 0)


def user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


def request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    head = (f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*head, "\r\n")).encode() + body


def read_response(made: socket.socket, buffer: bytearray | None = None) -> tuple[int, dict[str, str], bytes]:
    """One answer with a Content-Length; bytes of the next one are left in ``buffer``."""
    buffer = bytearray() if buffer is None else buffer
    while b"\r\n\r\n" not in buffer:
        buffer += receive(made)
    head, _, rest = bytes(buffer).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    buffer[:] = rest
    while len(buffer) < int(headers["content-length"]):
        buffer += receive(made)
    body = bytes(buffer[: int(headers["content-length"])])
    del buffer[: int(headers["content-length"])]
    return int(first.split()[1]), headers, body


def receive(made: socket.socket) -> bytes:
    data = made.recv(65536)
    if not data:
        raise EOFError
    return data


def is_closed(made: socket.socket) -> bool:
    """Whether the other side hangs up, reading what it still says."""
    with contextlib.suppress(ConnectionError):
        while made.recv(65536):
            pass
    return True


def until(done: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not done():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.005)


def events(response: httpx.Response) -> list[dict]:
    """What a stream said, without its last line, which must be [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert lines.pop() == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: "), parse_constant=lambda name: 1 / 0) for line in lines]


@contextmanager
def serving(session: Session, **options: object) -> Iterator[Serving]:
    """A server with these options (``ServeOptions``)."""
    chosen = ServeOptions(port=0, **options)
    is_ready = threading.Event()
    server, scheduler = assemble(session, chosen, is_ready.set)
    listener = bind(chosen)
    address = listener.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    scheduler.start()
    thread.start()
    try:
        assert is_ready.wait(HANG_S)
        with httpx.Client(base_url="http://{}:{}".format(*address), timeout=HANG_S) as http:
            yield Serving(session, server, scheduler, address, http)
    finally:
        server.should_exit = True
        thread.join(HANG_S)
        scheduler.stop(now=True)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def limits(arrival_s: float = 60.0, stall_s: float = 60.0) -> Iterator[None]:
    """Shorter patience with clients, for connections made now."""
    before = Protocol.arrival_s, Protocol.stall_s
    Protocol.arrival_s, Protocol.stall_s = arrival_s, stall_s
    try:
        yield
    finally:
        Protocol.arrival_s, Protocol.stall_s = before
