"""Connections that misbehave, and a drain that ends whatever they do: uvicorn with our protocol, no model."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from serve_http import HANG_S, is_closed, limits, read_response, request, until
from uvicorn.server import ServerState

from specli.serve.server import Protocol, Server

N_UNREAD = 60_000  # bytes: under the 64 KiB at which asyncio tells a protocol that nobody reads
HALF = b"POST /second HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


class App:
    """Replies with ``n_bytes``; to ``/wait`` not before its client has left. ``left``: whether one has."""

    def __init__(self, n_bytes: int = 2) -> None:
        self.n_bytes, self.left = n_bytes, threading.Event()
        self.n_waiting = 0

    async def __call__(self, scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] == "/wait":
            self.n_waiting += 1
            await receive()
            self.left.set()
            return
        headers = [(b"content-length", str(self.n_bytes).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * self.n_bytes})


@contextmanager
def standing(app: App, drain_s: float = HANG_S) -> Iterator[SimpleNamespace]:
    """``connect()`` to it, ``end()`` it, whether it was forced then; kernel buffers are as small as they can be."""
    config = uvicorn.Config(app, http=Protocol, ws="none", log_config=None, lifespan="off", timeout_keep_alive=75)
    is_ready = threading.Event()
    server = Server(config, is_ready.set, drain_s)
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        address = listener.getsockname()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        assert is_ready.wait(HANG_S)

        def connect() -> socket.socket:
            made = sockets.enter_context(socket.socket())
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.settimeout(HANG_S)
            made.connect(address)
            return made

        def end() -> bool:
            server.should_exit = True
            thread.join(HANG_S)
            assert not thread.is_alive()
            return server.was_forced

        yield SimpleNamespace(server=server, connect=connect, end=end)
        server.force_exit = True
        end()


def connections(server: Server) -> list[Protocol]:
    return list(server.server_state.connections)


def get(path: str = "/") -> bytes:
    return request(path, b"", method="GET")


def unread(there: SimpleNamespace) -> socket.socket:
    """A client whose answer lies in the server's buffer, which is below the mark that asyncio tells by default."""
    made = there.connect()
    made.sendall(get())
    until(lambda: [one for one in connections(there.server) if one.cycle and one.cycle.response_complete])
    assert 0 < connections(there.server)[0].transport.get_write_buffer_size() < 1 << 16
    return made


def test_who_leaves_little_unread_is_cut_off_too() -> None:
    with limits(stall_s=2.0), standing(App(N_UNREAD)) as there:
        unread(there)
        until(lambda: not connections(there.server))
        assert not there.end()


def test_who_reads_slowly_is_not_cut_off() -> None:
    """The time begins anew with every byte."""
    timers: list[tuple[float, Callable[[], None]]] = []
    loop = SimpleNamespace(call_later=lambda s, then: timers.append((s, then)) or SimpleNamespace(cancel=lambda: None))
    calls: list[str] = []
    transport = SimpleNamespace(
        get_extra_info=lambda _name, default=None: default,
        set_write_buffer_limits=lambda _high: None,
        abort=lambda: calls.append("abort"),
    )
    made = Protocol(uvicorn.Config(App(), http=Protocol, log_config=None), ServerState(), {}, loop)
    made.connection_made(transport)
    sizes = iter([1000, 900, 900, 899, 899, 899, 899])  # at first, then at each look, and again when it begins anew
    transport.get_write_buffer_size = lambda: next(sizes)
    made.pause_writing()
    for _ in range(2):
        timers[-1][1]()
        assert calls == []
    timers[-1][1]()
    assert calls == ["abort"]


def test_half_a_request_behind_a_whole_one_is_timed() -> None:
    """It begins once the one before it is answered, when nothing comes in."""
    with limits(arrival_s=2.0), standing(App()) as there:
        made = there.connect()
        made.sendall(get() + HALF)
        assert read_response(made)[0] == 200
        assert is_closed(made)
        assert not there.end()


def test_a_connection_at_rest_is_not_timed() -> None:
    with standing(App()) as there:
        made = there.connect()
        for _ in range(2):
            made.sendall(get())
            assert read_response(made)[0] == 200
            until(lambda: connections(there.server)[0].timeout_keep_alive_task is not None)
            assert connections(there.server)[0]._arriving is None


@pytest.mark.parametrize("kind", ["unread", "half", "waits"])
def test_a_drain_ends_whatever_clients_do(kind: str, caplog) -> None:
    with standing(app := App(N_UNREAD if kind == "unread" else 2), drain_s=0.3) as there:
        if kind == "unread":
            unread(there)
        else:
            made = there.connect()
            made.sendall(get() + HALF if kind == "half" else get("/wait"))
            if kind == "half":
                assert read_response(made)[0] == 200
            else:
                until(lambda: app.n_waiting)
        assert there.end()
    assert "not everything was finished in 0 s: stopping at once" in caplog.text
    assert "Traceback" not in caplog.text


def test_who_leaves_behind_a_request_sent_ahead_is_seen() -> None:
    with standing(app := App()) as there:
        made = there.connect()
        made.sendall(get("/wait"))
        until(lambda: app.n_waiting)
        made.sendall(get("/wait"))
        until(lambda: connections(there.server)[0].conn.trailing_data[0])
        made.close()
        assert app.left.wait(HANG_S)


def test_what_is_sent_ahead_is_bounded() -> None:
    with standing(app := App()) as there:
        made = there.connect()
        made.sendall(get("/wait"))
        until(lambda: app.n_waiting)

        def send() -> None:
            with contextlib.suppress(OSError):
                made.sendall(b"x" * 5_000_000)

        sender = threading.Thread(target=send)
        sender.start()
        (connection,) = connections(there.server)
        until(lambda: connection.flow.read_paused and len(connection.conn.trailing_data[0]) >= 1 << 16)
        assert len(connection.conn.trailing_data[0]) < 1 << 19  # and what one read gave
        made.shutdown(socket.SHUT_RDWR)
        sender.join(HANG_S)
        there.server.handle_exit(signal.SIGTERM, None)
        there.server.handle_exit(signal.SIGTERM, None)
        assert there.end(), "nobody reads, so its end is not seen: a second signal ends it"
