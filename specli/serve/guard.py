"""Before anything is read: who may ask, and how much."""

from __future__ import annotations

import hmac

from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specli.config import ServeOptions
from specli.serve.metrics import Metrics
from specli.serve.replies import problem

_PUBLIC = ("/health", "/v1/health")
_OWN_NAMES = (b"localhost", b"127.0.0.1", b"[::1]", b"::1")


class Guard:
    """Lets through requests with a key and a body that is not too long; ``app`` gets the body in one piece.

    Without a key a loopback server answers only to names of this machine: a web page whose name was made to point here
    (DNS rebinding) sends its own; and to no other page in a browser here, which may send what it may not read.
    """

    def __init__(self, app: ASGIApp, options: ServeOptions, metrics: Metrics) -> None:
        self._app, self._metrics, self._limit = app, metrics, options.max_body_bytes
        self._keys = [key.encode("ascii") for key in options.api_keys]
        self._origins = frozenset(options.cors_origins)
        self._names = (*_OWN_NAMES, options.host.encode("utf-8")) if options.is_loopback and not self._keys else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._keys and scope["path"] not in _PUBLIC and not self._is_known(scope):
            self._metrics.refuse("unauthorized")
            body = problem("a key is needed: Authorization: Bearer KEY", 401, code="invalid_api_key")
            await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        if self._names and (stranger := self._stranger(scope)):
            self._metrics.refuse("unauthorized")
            await JSONResponse(problem(f"{stranger}; others need --api-key", 403), 403)(scope, receive, send)
            return
        try:
            read = await _read(receive, _header(scope, b"content-length"), self._limit)
        except _TooLarge:
            self._metrics.refuse("too_large")
            body = problem(f"the body is longer than {self._limit} bytes", 413)
            await JSONResponse(body, 413)(scope, receive, send)
            return
        if read is not None:
            await self._app(scope, _Replay(read, receive), send)

    def _stranger(self, scope: Scope) -> str | None:
        """Why a request without a key is not one of this machine's own, or None."""
        if _name(_header(scope, b"host") or _OWN_NAMES[0]) not in self._names:
            return "this server answers to names of its own machine only"
        origin = _header(scope, b"origin")
        if origin is None or origin.decode("latin-1") in self._origins or "*" in self._origins:
            return None
        is_own = _name(origin.partition(b"://")[2]) in self._names
        return None if is_own else "this server answers to web pages of its own machine, and of --cors-origins, only"

    def _is_known(self, scope: Scope) -> bool:
        given = _header(scope, b"authorization") or b""
        scheme, _, key = given.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        known = False
        for one in self._keys:  # all of them, so that the time tells nothing
            known |= hmac.compare_digest(one, key)
        return known


class _TooLarge(Exception):
    pass


async def _read(receive: Receive, declared: bytes | None, limit: int) -> bytes | None:
    """The whole body; None where the client went away in the middle. Raises ``_TooLarge``."""
    if declared is not None and declared.isdigit() and (len(declared) > 20 or int(declared) > limit):
        raise _TooLarge
    parts, n_bytes = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        n_bytes += len(parts[-1])
        if n_bytes > limit:
            raise _TooLarge
        if not message.get("more_body", False):
            return b"".join(parts)


class _Replay:
    """``receive`` for the application behind the guard: the body in one piece, then what else comes."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


def _name(host: bytes) -> bytes:
    """A host without its port, in small letters."""
    host = host.lower()
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() and (host.count(b":") == 1 or name.endswith(b"]")) else host


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
