"""The interface: routes, limits, and what becomes of errors.

Errors before the first token are HTTP errors, also of a stream, which is only opened when its first token is there;
later ones are ``data: {"error": ...}``. A client that goes away cancels its own answers and nobody else's.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specli.config import SamplingOptions, ServeOptions
from specli.errors import ConfigError, ContextOverflow, SpecError
from specli.events import Event, Failed
from specli.serve.job import Deliver, Job, Mailbox, QueueFull, TimedOut, Unavailable
from specli.serve.metrics import CONTENT_TYPE, Metrics
from specli.serve.protocol import (
    ApplyTemplateRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refusal,
    Sampling,
    TokenizeRequest,
    parse,
)
from specli.serve.replies import Choice, Envelope, Json, problem
from specli.serve.scheduler import Scheduler
from specli.session import Session, seed_of
from specli.verify import Verifier

LOGGER = logging.getLogger("specli.serve")
N_VERIFIERS = 64  # sampling settings whose verifiers are kept


class Service:
    """What the routes share."""

    def __init__(self, session: Session, scheduler: Scheduler, metrics: Metrics, options: ServeOptions) -> None:
        self.session, self.scheduler, self.metrics, self.options = session, scheduler, metrics, options
        self.model = options.alias or session.settings.target.label
        self.created = int(time.time())
        self._verifier = functools.lru_cache(N_VERIFIERS)(session.verifier_for)

    def verifier(self, sampling: SamplingOptions) -> Verifier:
        """Who draws under ``sampling``. Raises ``ConfigError``."""
        return self._verifier(replace(sampling, seed=None if sampling.seed is None else 0))  # a job has its own seed

    async def answer(self, request: Request, asked: ChatRequest | CompletionRequest) -> Response:
        """Queue what was asked, and reply."""
        arrived_s, options = time.perf_counter(), self.options
        asked.check_limits(options)
        if asked.model not in (None, self.model):
            found = f"the model {asked.model!r} is not here; this server has {self.model!r}"
            raise Refusal(found, "model", 404, "model_not_found")
        prompts = await run_in_threadpool(self._prompts, asked)
        sampling = asked.sampling(self.session.settings.sampling)
        verifier = await run_in_threadpool(self.verifier, sampling)
        answer = _Answer(self, request, asked, prompts)
        for prompt in prompts:
            for attempt in range(asked.n or 1):
                mailbox = Mailbox()
                job = self._job(asked, sampling, verifier, prompt, attempt, arrived_s, mailbox.deliver)
                answer.add(job, mailbox)
        self.scheduler.submit([part.job for part in answer.parts])
        return await answer.reply()

    def _prompts(self, asked: ChatRequest | CompletionRequest) -> list[list[int]]:
        """Token ids of each prompt. Raises ``Refusal`` for what does not fit."""
        session = self.session
        if isinstance(asked, ChatRequest):
            prompts = [session.chat_ids([message.message() for message in asked.messages])]
        else:
            prompts = [
                session.text_ids(prompt) if isinstance(prompt, str) else list(prompt) for prompt in asked.prompts
            ]
        n_ctx, n_vocab = session.engine.n_ctx, session.engine.n_vocab
        for prompt in prompts:
            if not prompt:
                raise Refusal("the prompt is empty (0 tokens), at least one token was expected", "prompt")
            if max(prompt) >= n_vocab:
                raise Refusal(f"the prompt has the token {max(prompt)}, the model has 0 to {n_vocab - 1}", "prompt")
            if len(prompt) > n_ctx:
                self.metrics.refuse("too_long")
                param = "messages" if isinstance(asked, ChatRequest) else "prompt"
                found = f"the prompt has {len(prompt)} tokens, the context of an answer holds {n_ctx}"
                raise Refusal(found, param, code="context_length_exceeded")
        return prompts

    def _job(
        self,
        asked: Sampling,
        sampling: SamplingOptions,
        verifier: Verifier,
        prompt: Sequence[int],
        attempt: int,
        arrived_s: float,
        deliver: Deliver,
    ) -> Job:
        session, seed = self.session, seed_of(sampling.seed, attempt)
        is_kept = (seed is None) if asked.cache_prompt is None else asked.cache_prompt
        return Job(
            id=uuid.uuid4().hex,
            prompt=prompt,
            verifier=verifier,
            seed=seed,
            max_tokens=asked.limit(self.options),
            stops=asked.stops,
            end_ids=frozenset() if sampling.ignore_eos else session.model.end_ids,
            n_logprobs=asked.n_logprobs,
            reuse=is_kept and not session.settings.exact,
            arrived_s=arrived_s,
            deadline_s=arrived_s + self.options.timeout_s,
            deliver=deliver,
        )


@dataclass(slots=True)
class _Part:
    """One choice, its job and its events on the way."""

    job: Job
    choice: Choice
    mailbox: Mailbox


_Events = AsyncGenerator[tuple[_Part, Sequence[Event]], None]


class _Answer:
    """A reply under way: one job per choice, whole or as a stream."""

    def __init__(
        self, service: Service, request: Request, asked: ChatRequest | CompletionRequest, prompts: Sequence[list[int]]
    ) -> None:
        self._service, self._request, self._asked = service, request, asked
        is_chat = isinstance(asked, ChatRequest)
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._envelope = Envelope(name, int(time.time()), service.model, is_chat)
        self._n_prompt = sum(map(len, prompts))
        self.parts: list[_Part] = []

    def add(self, job: Job, mailbox: Mailbox) -> None:
        """One more choice."""
        self.parts.append(_Part(job, Choice(len(self.parts), self._service.session.model.piece), mailbox))

    async def reply(self) -> Response:
        """Wait as the client asked."""
        merged = _merge(self.parts)
        try:
            if not self._asked.stream:
                await self._unless_gone(self._collect(merged))
                return JSONResponse(self._envelope.whole([part.choice for part in self.parts], self._n_prompt))
            first = await self._unless_gone(anext(merged))
            self._raise_failure(first[1])
        except BaseException:
            await self._leave(merged)
            raise
        return StreamingResponse(self._stream(first, merged), media_type="text/event-stream", headers=_STREAM_HEADERS)

    async def _collect(self, merged: _Events) -> None:
        async for part, events in merged:
            self._raise_failure(events)
            part.choice.take(events)
        self._log()

    async def _stream(
        self,
        first: tuple[_Part, Sequence[Event]],
        merged: _Events,
    ) -> AsyncGenerator[bytes, None]:
        envelope = self._envelope
        try:
            if envelope.is_chat:
                for part in self.parts:
                    yield _sse(envelope.role(part.choice))
            async for part, events in _chained(first, merged):
                if failure := _failure(events):
                    yield _sse(problem(str(failure), _status(failure)))
                    return
                news = part.choice.take(events)
                if news.text or news.logprobs:
                    yield _sse(envelope.chunk(part.choice, type(news)(news.text, news.logprobs)))
                if news.finish_reason is not None:
                    yield _sse(envelope.chunk(part.choice, type(news)(finish_reason=news.finish_reason)))
            if self._asked.includes_usage:
                yield _sse(envelope.counts([part.choice for part in self.parts], self._n_prompt))
            yield b"data: [DONE]\n\n"
            self._log()
        finally:
            await self._leave(merged)

    async def _unless_gone(self, work: Awaitable[Any]) -> Any:  # noqa: ANN401
        """The result of ``work``, unless the client goes away before."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(self._request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            for one in (task, gone):
                one.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)

    def _raise_failure(self, events: Sequence[Event]) -> None:
        if failure := _failure(events):
            raise failure

    async def _leave(self, merged: _Events) -> None:
        """Nobody reads any more: what is not finished ends."""
        for part in self.parts:
            if part.choice.finish_reason is None:
                part.job.cancel()
        self._service.scheduler.wake()
        await merged.aclose()

    def _log(self) -> None:
        for part in self.parts:
            stats = part.choice.stats
            ttft = "-" if stats.ttft_s is None else f"{stats.ttft_s:.3f} s"
            rate = "-" if stats.decode_tok_s is None else f"{stats.decode_tok_s:.1f} tok/s"
            acceptance = "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.2f}"
            LOGGER.info(
                "%s: %s prompt tokens (%s from the cache), %s tokens, TTFT %s, %s, acceptance %s, %s",
                *(self._envelope.id, stats.n_prompt, stats.n_reused, part.choice.n_tokens),
                *(ttft, rate, acceptance, part.choice.finish_reason),
            )
            if self._service.options.log_prompts:
                LOGGER.info("%s: prompt %r, answer %r", self._envelope.id, self._asked_text(), part.choice.text)

    def _asked_text(self) -> object:
        asked = self._asked
        return [m.message().content for m in asked.messages] if isinstance(asked, ChatRequest) else asked.prompt


class ClientGone(Exception):
    """Nobody is there to reply to."""


_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def _merge(parts: Sequence[_Part]) -> _Events:
    """The events of all ``parts`` as they come, until each has ended."""
    waiting = {asyncio.ensure_future(part.mailbox.get()): part for part in parts}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                part, events = waiting.pop(task), task.result()
                yield part, events
                if part.choice.finish_reason is None and _failure(events) is None:
                    waiting[asyncio.ensure_future(part.mailbox.get())] = part
    finally:
        for task in waiting:
            task.cancel()


async def _chained(first: tuple[_Part, Sequence[Event]], rest: _Events) -> _Events:
    yield first
    async for one in rest:
        yield one


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _failure(events: Sequence[Event]) -> Exception | None:
    return next((event.error for event in events if isinstance(event, Failed)), None)


def _sse(content: Json) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n\n"


def _status(error: Exception) -> int:
    if isinstance(error, ConfigError | ContextOverflow):
        return 400
    if isinstance(error, QueueFull):
        return 429
    if isinstance(error, Unavailable):
        return 503
    return 504 if isinstance(error, TimedOut) else 500


# -- routes


def make_app(service: Service) -> ASGIApp:
    """The application over a started scheduler."""
    app = FastAPI(title="specli", docs_url=None, redoc_url=None, openapi_url=None)
    _add_errors(app, service)
    _add_answers(app, service)
    _add_helpers(app, service)
    _add_state(app, service)
    guarded: ASGIApp = _Guard(app, service)
    if service.options.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(service.options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    return guarded


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    @app.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(request, parse(ChatRequest, await request.body()))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await service.answer(request, parse(CompletionRequest, await request.body()))


def _add_helpers(app: FastAPI, service: Service) -> None:
    """llama-server's tokenizing routes."""
    session = service.session

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(request: Request) -> Json:
        asked = parse(TokenizeRequest, await request.body())
        ids = await run_in_threadpool(
            session.model.tokenize, _scalar(asked.content), asked.add_special, asked.parse_special
        )
        if not asked.with_pieces:
            return {"tokens": ids}
        return {"tokens": [{"id": token, "piece": _piece(session.model.special_piece(token))} for token in ids]}

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(request: Request) -> Json:
        tokens = parse(DetokenizeRequest, await request.body()).tokens
        if tokens and max(tokens) >= session.engine.n_vocab:
            raise Refusal(
                f"token {max(tokens)} is none of the model, it has 0 to {session.engine.n_vocab - 1}", "tokens"
            )
        return {"content": b"".join(map(session.model.special_piece, tokens)).decode("utf-8", "replace")}

    @app.post("/apply-template")
    async def apply_template(request: Request) -> Json:
        asked = parse(ApplyTemplateRequest, await request.body())
        if session.template is None:
            raise Refusal("the model has no chat template")
        parts = await run_in_threadpool(session.template.parts, [message.message() for message in asked.messages])
        return {"prompt": "".join(parts)}


def _add_state(app: FastAPI, service: Service) -> None:
    session, scheduler = service.session, service.scheduler

    @app.get("/health")
    @app.get("/v1/health")
    async def health() -> Response:
        if scheduler.failure is not None:
            return JSONResponse(problem(f"the engine has failed: {scheduler.failure}", 503), 503)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    @app.get("/models")
    async def models() -> Json:
        meta = {
            "n_ctx": session.engine.n_ctx,
            "n_ctx_train": session.model.n_ctx_train,
            "n_vocab": session.engine.n_vocab,
        }
        model = {"id": service.model, "object": "model", "created": service.created, "owned_by": "specli", "meta": meta}
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        if name != service.model:
            raise Refusal(f"the model {name!r} is not here; this server has {service.model!r}", "model", 404)
        return {"id": service.model, "object": "model", "created": service.created, "owned_by": "specli"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(scheduler.exposition(), media_type=CONTENT_TYPE)

    @app.get("/props")
    async def props() -> Json:
        state = session.speculation
        return {
            "model": service.model,
            "total_slots": session.engine.n_sequences,
            "n_ctx": session.engine.n_ctx,
            "running": scheduler.n_running,
            "waiting": scheduler.n_waiting,
            "speculation": {
                "active": state.active,
                "reason": state.reason,
                "drafter": state.drafter,
                "k": state.k,
                "verify": state.verify,
                "controller": None if session.controller is None else session.controller.report(),
            },
        }


def _scalar(text: str) -> str:
    """Without lone surrogates, which JSON can escape and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _piece(raw: bytes) -> str | list[int]:
    """As llama-server: text, or the bytes where they are none."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)


# -- errors


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(Refusal)
    async def refused(_request: Request, error: Refusal) -> Response:
        if error.code != "context_length_exceeded":
            service.metrics.refuse("invalid")
        return _error(error.message, error.status, error.param, error.code)

    @app.exception_handler(SpecError)
    async def failed(_request: Request, error: SpecError) -> Response:
        status = _status(error)
        headers = None
        if isinstance(error, QueueFull):
            service.metrics.refuse("queue_full")
            headers = {"Retry-After": str(error.retry_after_s)}
        elif status == 400:
            service.metrics.refuse("invalid")
        elif status == 503:
            service.metrics.refuse("unavailable")
        return _error(str(error), status, headers=headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if error.status_code == 404:
            text = (
                f"there is no {request.url.path} here; see /v1/models, /v1/chat/completions, /v1/completions, /metrics"
            )
        elif error.status_code == 405:
            text = f"{request.method} is not what {request.url.path} takes"
        return _error(text, error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=499)  # nginx's number; nobody reads it

    @app.exception_handler(Exception)
    async def fault(_request: Request, error: Exception) -> Response:
        LOGGER.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
        return _error("the server failed to answer; its log says why", 500)


def _error(
    message: str, status: int, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    return JSONResponse(problem(message, status, param, code), status, headers)


class _Guard:
    """Before anything is read: who may ask, and how much."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._keys = [key.encode("ascii") for key in service.options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._keys and scope["path"] not in _PUBLIC and not self._is_known(scope):
            self._service.metrics.refuse("unauthorized")
            message = "a key is needed: Authorization: Bearer KEY"
            await _error(message, 401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})(
                scope, receive, send
            )
            return
        limit = self._service.options.max_body_bytes
        try:
            body = await _read(receive, _header(scope, b"content-length"), limit)
        except _TooLarge:
            self._service.metrics.refuse("too_large")
            await _error(f"the body is longer than {limit} bytes", 413)(scope, receive, send)
            return
        if body is None:
            return
        await self._app(scope, _Replay(body, receive), send)

    def _is_known(self, scope: Scope) -> bool:
        given = _header(scope, b"authorization") or b""
        scheme, _, key = given.partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else b""
        known = False
        for one in self._keys:  # all of them, so that the time tells nothing
            known |= hmac.compare_digest(one, key)
        return known


_PUBLIC = ("/health", "/v1/health")


class _TooLarge(Exception):
    pass


async def _read(receive: Receive, declared: bytes | None, limit: int) -> bytes | None:
    """The whole body; None where the client went away in the middle. Raises ``_TooLarge``."""
    if declared is not None and declared.isdigit() and int(declared) > limit:
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


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
