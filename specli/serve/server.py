"""uvicorn around the application: sockets, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from specli.config import ServeOptions
from specli.errors import ConfigError
from specli.serve.app import Service, make_app
from specli.serve.metrics import Metrics
from specli.serve.pace import Pace, Sla
from specli.serve.scheduler import Scheduler
from specli.session import Session

LOGGER = logging.getLogger("specli.serve")
_KEEP_ALIVE_S = 75
_N_AHEAD = 1 << 16  # bytes that may be sent ahead of an answer
DRAIN_S = 15.0  # beside --timeout: to deliver what was answered in time (the systemd unit waits a little longer)


class Protocol(H11Protocol):
    """A connection. Who takes too long to send a request, or stops reading an answer, is cut off."""

    arrival_s, stall_s = 60.0, 60.0

    _arriving: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.Protocol``."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # whatever is unread is told to ``pause_writing``
        self._arriving = self.loop.call_later(self.arrival_s, transport.abort)

    def handle_events(self) -> None:
        """See uvicorn: of what came, and of what was sent ahead once its turn comes."""
        super().handle_events()
        state = self.conn.their_state
        if state is h11.DONE and len(self.conn.trailing_data[0]) < _N_AHEAD:
            self.flow.resume_reading()  # uvicorn stops at a request sent ahead, and would not see its client leave
        if state is h11.SEND_BODY or (state is h11.IDLE and self.timeout_keep_alive_task is None):
            self._arriving = self._arriving or self.loop.call_later(self.arrival_s, self.transport.abort)
        elif self._arriving is not None:
            self._arriving.cancel()
            self._arriving = None

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        super().pause_writing()
        self._await_reader()

    def _await_reader(self) -> None:
        """Look again in a while: whoever has read nothing by then is cut off."""
        n_unread = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() < n_unread:
                self._await_reader()
            else:
                self.transport.abort()

        self._stalled = self.loop.call_later(self.stall_s, look)

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        for timer in (self._arriving, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)


def _is_news(entry: logging.LogRecord) -> bool:
    """All but a request that was cancelled because the server was told to stop at once."""
    return not (entry.exc_info and isinstance(entry.exc_info[1], asyncio.CancelledError))


class Server(uvicorn.Server):
    """The first signal drains, for ``drain_s`` at most; the second stops at once (SIGTERM as well as SIGINT)."""

    was_forced = False

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None], drain_s: float) -> None:
        super().__init__(config)
        self._ready, self._drain_s = ready, drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn; then tell that clients may come, and signals are understood. Raises ``ConfigError``."""
        try:
            await super().startup(sockets)
        except OSError as error:  # two may bind to one port, as long as neither listens
            raise ConfigError(f"the port cannot be listened at: {error.strerror or error}; give another") from error
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn, which would wait for ever for a client that keeps its connection."""
        deadline = asyncio.get_running_loop().call_later(self._drain_s, self._give_up)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()

    def _give_up(self) -> None:
        LOGGER.warning("not everything was finished in %.0f s: stopping at once", self._drain_s)
        self._stop_now()

    def _stop_now(self) -> None:
        self.force_exit = self.was_forced = True
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        for connection in list(self.server_state.connections):  # or their answers would be waited for
            connection.loop.call_soon_threadsafe(connection.transport.abort)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn."""
        if self.should_exit:
            self._stop_now()
        else:
            LOGGER.warning("stopping: answers under way are finished first; once more stops at once")
        self.should_exit = True


def bind(options: ServeOptions) -> socket.socket:
    """A socket to listen with, once there is something to answer. Raises ``ConfigError``."""
    is_v6 = ":" in options.host
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host, options.port))
    except OSError as error:
        made.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"--host {options.host} --port {options.port} cannot be listened at: {reason}; give others"
        ) from error
    return made


def address(listener: socket.socket) -> str:
    """Where clients find it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def assemble(
    session: Session, options: ServeOptions, ready: Callable[[], None] = lambda: None
) -> tuple[Server, Scheduler]:
    """What answers, neither started yet."""
    sla = Sla(options.sla_ttft_ms, options.sla_tpot_ms)
    metrics = Metrics(session.speculation.k, session.engine.n_sequences)
    metrics.set_bounds(sla.ttft_ms, sla.tpot_ms)
    pace = Pace(sla, is_chunked=options.chunked_prefill)
    scheduler = Scheduler(session, metrics, pace, options.n_queue)
    config = uvicorn.Config(
        make_app(Service(session, scheduler, metrics, options)),
        http=Protocol,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        headers=[("Server", "specli")],
    )
    return Server(config, ready, options.timeout_s + DRAIN_S), scheduler


def serve(
    session: Session, options: ServeOptions, listener: socket.socket, ready: Callable[[], None] = lambda: None
) -> bool:
    """Answer until a signal; whether what was under way was finished. ``ready`` is called when clients may come."""
    server, scheduler = assemble(session, options, ready)
    scheduler.start()
    try:
        server.run(sockets=[listener])
    finally:
        logging.getLogger("uvicorn.error").removeFilter(_is_news)
        scheduler.stop(now=server.was_forced)
    return not server.was_forced
