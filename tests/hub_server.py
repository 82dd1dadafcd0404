"""A stand-in of the hub: the part of its HTTP interface that ``huggingface_hub`` uses for downloads, in two threads.

The hub answers ``/api/models/...`` and ``/USER/MODEL/resolve/REVISION/FILE``; large files are redirected, as the real
one does, to another origin, which serves ranges.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

PIECE = 1 << 16
TOKEN = "hf_right"


@dataclass
class Repo:
    """Files by name, and who may read them."""

    files: dict[str, bytes]
    gated: bool = False

    @property
    def commit(self) -> str:
        names = "".join(sorted(self.files)) + "".join(sha256(data) for data in self.files.values())
        return hashlib.sha1(names.encode()).hexdigest()


@dataclass
class FakeHub:
    """What the servers serve, how they misbehave, and what they were asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # each transfer takes one: bytes after which the connection breaks
    arrived: threading.Event | None = None  # cut connections wait for it, and are reset, not closed
    stall_at: int | None = None  # bytes after which transfers wait for ``go_on``
    has_ranges: bool = True
    status: int | None = None  # answer everything with this
    url: str = ""
    cdn_url: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    stalled: threading.Event = field(default_factory=threading.Event)

    def transfers(self) -> list[dict[str, str]]:
        """The headers of each request for a file's content."""
        return [headers for method, path, headers in self.requests if method == "GET" and path.startswith("/cdn/")]

    def ranges(self) -> list[str | None]:
        """What each transfer asked for."""
        return [headers.get("range") for headers in self.transfers()]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@contextmanager
def serve() -> Iterator[FakeHub]:
    """Both servers, on free ports of this machine."""
    hub = FakeHub()
    handlers = [type(name, (_Handler,), {"hub": hub}) for name in ("Hub", "Cdn")]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        for server in servers:
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.hub.requests.append((self.command, path, headers))
        parts = path.strip("/").split("/")
        if self.hub.status is not None:
            self.send(self.hub.status)
        elif parts[0] == "cdn":
            self.send_content("/".join(parts[1:3]), "/".join(parts[3:]))
        elif parts[:2] == ["api", "models"]:
            self.send_info("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
        elif parts[2:3] == ["resolve"]:
            self.send_location("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.send(404)

    def send_info(self, name: str, revision: str) -> None:
        """What ``HfApi.model_info`` reads."""
        repo = self.allowed(name, revision)
        if repo is None:
            return
        siblings = [
            {"rfilename": file, "size": len(data), "blobId": "0" * 40}
            | {"lfs": {"sha256": sha256(data), "size": len(data), "pointerSize": 134}}
            for file, data in sorted(repo.files.items())
        ]
        info = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "tags": [], "private": False}
        self.send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def send_location(self, name: str, revision: str, file: str) -> None:
        """The redirect of a large file, with its metadata."""
        repo = self.allowed(name, revision)
        if repo is None:
            return
        headers = {"X-Repo-Commit": repo.commit}
        if file not in repo.files:
            self.send(404, headers={**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        data = repo.files[file]
        headers |= {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data)), "ETag": '"redirect"'}
        self.send(302, headers={**headers, "Location": f"{self.hub.cdn_url}/cdn/{name}/{file}"})

    def allowed(self, name: str, revision: str) -> Repo | None:
        """The repository, or None after an error was sent."""
        repo = self.hub.repos.get(name)
        is_known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None:
            code, status = "RepoNotFound", 404 if is_known else 401
        elif repo.gated and not is_known:
            code, status = "GatedRepo", 401
        elif revision not in ("main", repo.commit):
            code, status = "RevisionNotFound", 404
        else:
            return repo
        self.send(status, headers={"X-Error-Code": code, "X-Error-Message": f"no access to {name}"})
        return None

    def send_content(self, name: str, file: str) -> None:
        """The bytes, from where the request wants them."""
        data = self.hub.repos[name].files[file]
        start, asked = 0, self.headers.get("Range")
        if asked and self.hub.has_ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("ETag", f'"{sha256(data)}"')
        self.end_headers()
        cut = self.hub.cuts.pop(0) if self.hub.cuts else None
        body = data[start:][:cut]
        for at in range(0, len(body), PIECE):
            if self.hub.stall_at is not None and at >= self.hub.stall_at:
                self.hub.stalled.set()
                self.hub.go_on.wait()
            try:
                self.wfile.write(body[at : at + PIECE])
            except OSError:  # the client has gone
                break
        if cut is not None:
            time.sleep(0.05)  # let what was sent arrive before the connection breaks
            self.close_connection = True
        if cut is not None and self.hub.arrived is not None:
            self.hub.arrived.wait()  # a reset makes the client's system forget what the client has not read yet
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            os.close(self.connection.detach())

    def send(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
