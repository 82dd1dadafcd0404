"""Asks an OpenAI-compatible server and takes the time: one connection per request, as users have.

httpx is imported when a server is asked (the extra ``serve``).
"""

from __future__ import annotations

import html
import json
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from specli.config import LoadOptions
from specli.errors import ConfigError, ServerError
from specli.loadtest.prompts import Ask
from specli.loadtest.records import Burst, Record
from specli.loadtest.sse import EventParser, EventTooLong

if TYPE_CHECKING:
    import httpx

CONNECT_S = 10.0
FACTS_S = 30.0  # for an answer that needs no model
_MESSAGE = 200  # characters of what a server said
_PAGE = re.compile(r"(?is)\s*<(?:!doctype html|html|head|body)\b(?:.*?<title[^>]*>(.*?)</title>)?")


class RequestFailed(Exception):
    """A request that failed. ``kind``: what is counted; ``message``: what was said."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, " ".join(message.split())[:_MESSAGE]


@dataclass(frozen=True, slots=True)
class Facts:
    """Who answers. ``server``: what its headers and lists call it; None where it does not say."""

    model: str
    server: str | None = None
    version: str | None = None


@dataclass(slots=True)
class _Answer:
    """An answer while it arrives."""

    bursts: list[Burst] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    proposed: int | None = None
    accepted: int | None = None
    is_finished: bool = False  # a reason was given
    is_done: bool = False  # [DONE]

    def take(self, events: list[str], at_s: float) -> None:
        """What arrived at ``at_s``. Raises ``RequestFailed``."""
        n_chars, n_events = 0, 0
        for data in events:
            if data.strip() == "[DONE]":
                self.is_done = True
                break
            text = self._take_one(data)
            n_chars += len(text)
            n_events += bool(text)
        if n_chars:
            self.bursts.append(Burst(at_s, n_chars, n_events))

    def _take_one(self, data: str) -> str:
        """The text of one event."""
        try:
            found = json.loads(data)
        except ValueError as error:
            raise RequestFailed("bad json", f"{error} in {data[:80]!r}") from error
        if not isinstance(found, dict):
            raise RequestFailed("bad json", f"an event that is no object: {data[:80]!r}")
        if found.get("error") is not None:
            raise RequestFailed("error event", _said(found) or data)
        self._count(found)
        choices = found.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return ""
        self.is_finished = self.is_finished or choice.get("finish_reason") is not None
        delta = choice.get("delta")
        parts = delta if isinstance(delta, dict) else {}
        texts = [choice.get("text"), *(parts.get(name) for name in ("content", "reasoning_content", "reasoning"))]
        return "".join(text for text in texts if isinstance(text, str))

    def _count(self, found: Mapping[str, object]) -> None:
        usage, timings = found.get("usage"), found.get("timings")
        if isinstance(usage, dict):
            self.prompt_tokens = _count_of(usage, "prompt_tokens", self.prompt_tokens)
            self.output_tokens = _count_of(usage, "completion_tokens", self.output_tokens)
        if isinstance(timings, dict):
            self.proposed = _count_of(timings, "draft_n", self.proposed)
            self.accepted = _count_of(timings, "draft_n_accepted", self.accepted)


class Client:
    """A server and how to reach it. Enter it to open, leave it to close. Raises ``ConfigError`` without httpx."""

    def __init__(self, options: LoadOptions) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ConfigError("--url needs httpx, which is not installed; pip install httpx") from error
        self._httpx, self._options = httpx, options
        self.base, user = split_url(options.url)
        headers = {"Accept-Encoding": "identity", "User-Agent": "specli"}
        if options.api_key is not None:
            headers["Authorization"] = f"Bearer {options.api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            auth=user if options.api_key is None and user is not None else None,
            timeout=httpx.Timeout(options.timeout_s, connect=min(CONNECT_S, options.timeout_s), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            verify=ssl.create_default_context() if self.base.startswith("https:") else False,
            trust_env=False,  # a proxy would be measured in the server's place
        )
        self._model = options.model_name or ""

    async def __aenter__(self) -> Client:
        """Itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close connections that are left."""
        await self._http.aclose()

    # -- facts

    async def find_facts(self) -> Facts:
        """Who answers, and the model that is asked from now on. Raises ``ServerError``."""
        asked = self._options.model_name
        try:
            response = await self._get("/v1/models")
            if response.status_code != 200:
                raise RequestFailed(f"http {response.status_code}", _told(response.text))
            model, owner = _first_model(response.text)
        except RequestFailed as failed:
            if asked is None or failed.kind not in ("http 404", "http 405", "http 501", "no model"):
                raise ServerError(self._words(failed, "/v1/models")) from failed
            return Facts(asked)
        self._model = asked or model
        server = response.headers.get("server")
        names = [name for name in (server, owner) if name]
        return Facts(self._model, ", ".join(dict.fromkeys(names)) or None, await self._version())

    async def _version(self) -> str | None:
        """What vLLM or llama-server calls itself, where it does."""
        for path, name in (("/version", "version"), ("/props", "build_info")):
            found = await self._json(path)
            value = found.get(name) if found is not None else None
            if isinstance(value, str) and value:
                return value[:_MESSAGE]
        return None

    async def tokenize(self, text: str) -> int | None:
        """Tokens of ``text`` by the server's ``/tokenize``; None where it has none.

        llama-server and specli want it as content, vLLM as prompt, and some refuse a field that they do not know.
        """
        for body in ({"content": text}, {"model": self._model, "prompt": text}):
            try:
                response = await self._http.post(f"{self.base}/tokenize", json=body, timeout=FACTS_S)
                found = response.json() if response.status_code == 200 else None
            except (self._httpx.HTTPError, ValueError):
                return None
            tokens = found.get("tokens") if isinstance(found, dict) else None
            if isinstance(tokens, list) and tokens:
                return len(tokens)
        return None

    async def metrics(self) -> str | None:
        """What ``/metrics`` says; None where there is nothing."""
        try:
            response = await self._get("/metrics")
        except RequestFailed:
            return None
        return response.text if response.status_code == 200 else None

    async def _json(self, path: str) -> dict[str, object] | None:
        try:
            response = await self._get(path)
            found = response.json() if response.status_code == 200 else None
        except (RequestFailed, ValueError):
            return None
        return found if isinstance(found, dict) else None

    async def _get(self, path: str) -> httpx.Response:
        """Raises ``RequestFailed``."""
        try:
            return await self._http.get(self.base + path, timeout=min(FACTS_S, self._options.timeout_s))
        except self._httpx.HTTPError as error:
            raise self._failure(error) from error

    # -- requests

    async def ask(self, ask: Ask, due_s: float | None, is_measured: bool) -> Record:
        """Send ``ask`` and read its answer to the end; failures are in the record. ``due_s`` None: it is due now."""
        answer, sent_s = _Answer(), time.monotonic()
        failed: RequestFailed | None = None
        try:
            await self._read(ask, answer)
        except RequestFailed as error:
            failed = error
        except self._httpx.HTTPError as error:
            failed = self._failure(error)
        return Record(
            index=ask.index,
            is_measured=is_measured,
            due_s=sent_s if due_s is None else due_s,
            sent_s=sent_s,
            ended_s=time.monotonic(),
            bursts=tuple(answer.bursts),
            asked_input=ask.input_tokens,
            asked_output=ask.max_tokens,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            proposed=answer.proposed,
            accepted=answer.accepted,
            error=None if failed is None else failed.kind,
            message="" if failed is None else failed.message,
        )

    async def _read(self, ask: Ask, answer: _Answer) -> None:
        path = "/v1/chat/completions" if self._options.endpoint == "chat" else "/v1/completions"
        parser = EventParser()
        async with self._http.stream("POST", self.base + path, json=self._body(ask)) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode("utf-8", "replace")
                raise RequestFailed(f"http {response.status_code}", _told(said))
            kind = response.headers.get("content-type", "text/event-stream")
            if not kind.startswith("text/event-stream"):
                raise RequestFailed("not streamed", f"the answer is {kind}, expected text/event-stream")
            async for data in response.aiter_bytes():
                at_s = time.monotonic()
                try:
                    answer.take(parser.feed(data), at_s)
                except EventTooLong as error:
                    raise RequestFailed("bad json", str(error)) from error
                if answer.is_done:
                    break
            else:
                answer.take(parser.close(), time.monotonic())
        if not (answer.is_done or answer.is_finished):
            raise RequestFailed("cut", "the stream ended without [DONE] and without a reason")
        if not answer.bursts:
            raise RequestFailed("empty", "no text came")

    def _body(self, ask: Ask) -> dict[str, object]:
        options = self._options
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": ask.max_tokens,
            "temperature": options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if options.ignore_eos:
            body["ignore_eos"] = True
        if options.endpoint == "completions":
            return {**body, "prompt": f"{ask.system}\n\n{ask.text}" if ask.system else ask.text}
        system = [{"role": "system", "content": ask.system}] if ask.system else []
        return {**body, "messages": [*system, {"role": "user", "content": ask.text}]}

    # -- failures

    def _failure(self, error: Exception) -> RequestFailed:
        """What httpx raised, by kind."""
        httpx = self._httpx
        message = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectTimeout):
            return RequestFailed(
                "connect timeout", f"no connection within {min(CONNECT_S, self._options.timeout_s):g} s"
            )
        if isinstance(error, httpx.TimeoutException):
            return RequestFailed("timeout", f"nothing came for {self._options.timeout_s:g} s")
        if isinstance(error, httpx.ConnectError):
            kinds = {ConnectionRefusedError: "refused", socket.gaierror: "unknown host", ssl.SSLError: "tls"}
            for cause in _causes(error):
                for kind, name in kinds.items():
                    if isinstance(cause, kind):
                        return RequestFailed(name, str(cause))
            return RequestFailed("no connection", message)
        if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
            return RequestFailed("cut", message)
        return RequestFailed("bad http", message)

    def _words(self, failed: RequestFailed, path: str) -> str:
        """One line on why nothing can be measured."""
        where = shown_url(self.base)
        advice = {
            "refused": "start the server, or see whether host and port are right",
            "connect timeout": "see whether host and port are right",
            "unknown host": "see whether the name is right",
            "tls": "https was asked for: see whether it is right, and the certificate trusted (SSL_CERT_FILE)",
            "http 401": "give --api-key or SPECLI_API_KEY",
            "http 403": "give --api-key or SPECLI_API_KEY",
            "http 404": f"expected an OpenAI-compatible server; see whether the path is right, {where} without /v1",
            "no model": "expected an OpenAI-compatible server; --model-name NAME goes on without the list",
        }.get(failed.kind, "expected an OpenAI-compatible server")
        said = f" ({failed.message})" if failed.message else ""
        return f"--url {where}: {path} gave {failed.kind}{said}; {advice}"


def split_url(url: str) -> tuple[str, tuple[str, str] | None]:
    """The address without /v1 and without credentials, and the credentials."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    path = parts.path.rstrip("/").removesuffix("/v1")
    user = (unquote(parts.username or ""), unquote(parts.password or "")) if parts.username is not None else None
    return urlunsplit((parts.scheme, host, path.rstrip("/"), "", "")), user


def shown_url(url: str) -> str:
    """For people and files: without credentials."""
    return split_url(url)[0]


def _first_model(said: str) -> tuple[str, str | None]:
    """Name and owner of the first model. Raises ``RequestFailed``."""
    try:
        found = json.loads(said)
        first = found["data"][0]
        name, owner = first["id"], first.get("owned_by")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestFailed("no model", f"no list of models: {_told(said)[:80]}") from error
    if not isinstance(name, str) or not name:
        raise RequestFailed("no model", f"a model without a name: {said[:80]}")
    return name, owner if isinstance(owner, str) and owner else None


def _told(said: str) -> str:
    """The message of an error's body."""
    try:
        found = json.loads(said)
    except ValueError:
        page = _PAGE.match(said)
        return said if page is None else f"a page of HTML, {html.unescape(page[1] or '').strip() or 'without a title'}"
    return _said(found) or said


def _said(found: object) -> str | None:
    """``{"error": {"message": ...}}``, ``{"error": "..."}``, or FastAPI's ``{"detail": ...}``."""
    if not isinstance(found, dict):
        return None
    error = found.get("error", found.get("detail", found.get("message")))
    if isinstance(error, dict):
        error = error.get("message", json.dumps(error))
    return None if error is None else str(error)


def _count_of(found: Mapping[str, object], name: str, before: int | None) -> int | None:
    value = found.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else before


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and everything behind it, groups included."""
    waiting, seen = [error], set[int]()
    while waiting:
        found = waiting.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        waiting += [cause for cause in (found.__cause__, found.__context__) if cause is not None]
        waiting += [part for part in getattr(found, "exceptions", ()) if isinstance(part, BaseException)]
