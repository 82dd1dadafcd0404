"""The interface: routes, and what becomes of errors.

Errors before the first token are HTTP errors, also of a stream, which is only opened when its first token is there;
later ones are ``data: {"error": ...}``. A client that goes away cancels its own answers and nobody else's.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from specli.chain import unenforced_keywords
from specli.config import SamplingOptions, ServeOptions
from specli.errors import ConfigError, ContextOverflow, DeadEnd, QueueFull, SpecError, TimedOut, Unavailable
from specli.events import Event, Failed, Finished
from specli.serve.guard import Guard
from specli.serve.job import Deliver, Job, Mailbox
from specli.serve.metrics import CONTENT_TYPE, Metrics
from specli.serve.prompts import Prompts
from specli.serve.protocol import (
    ApplyTemplateRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Refusal,
    Sampling,
    TokenizeRequest,
    parse,
    scalar,
    shortened,
)
from specli.serve.replies import Choice, Envelope, Json, problem
from specli.serve.scheduler import Scheduler
from specli.session import Session, seed_of
from specli.verify import Verifier

Route = TypeVar("Route", bound=Callable[..., Awaitable[object]])
Asked = TypeVar("Asked", bound=BaseModel)
LOGGER = logging.getLogger("specli.serve")
N_VERIFIERS = 64  # sampling settings whose verifiers are kept
N_HELPING = 2  # answers of the tokenizing routes that are worked out at once; the others wait


class Service:
    """What the routes share."""

    def __init__(self, session: Session, scheduler: Scheduler, metrics: Metrics, options: ServeOptions) -> None:
        self.session, self.scheduler, self.metrics, self.options = session, scheduler, metrics, options
        self.model = scalar(options.alias or session.settings.target.label.removesuffix(".gguf"))
        self.prompts = Prompts(session)
        self.created = int(time.time())
        self._verifier = functools.lru_cache(N_VERIFIERS)(session.verifier_for)

    def verifier(self, sampling: SamplingOptions) -> Verifier:
        """Who draws under ``sampling``. Raises ``ConfigError``."""
        return self._verifier(replace(sampling, seed=None if sampling.seed is None else 0))  # a job has its own seed

    async def answer(self, request: Request, asked: ChatRequest | CompletionRequest) -> Response:
        """Queue what was asked, and reply."""
        arrived_s = time.perf_counter()
        asked.check_limits(self.options)
        if asked.model not in (None, self.model):
            found = f"the model {shortened(asked.model or '')!r} is not here; this server has {self.model!r}"
            raise Refusal(found, "model", 404, "model_not_found")
        if asked.cache_prompt and self.session.settings.exact:
            raise Refusal("cache_prompt is true, but under --exact every prompt is evaluated whole", "cache_prompt")
        prompts = await run_in_threadpool(self.prompts.ids, asked)
        n_choices, n_most = len(prompts) * (asked.n or 1), self.options.n_queue + self.session.engine.n_sequences
        if n_choices > n_most:  # however long the client waits
            raise Refusal(f"the request asks for {n_choices} choices, this server holds {n_most} at once", "n")
        sampling, verifier, unenforced = await run_in_threadpool(self._drawing, asked)
        answer = _Answer(self, request, asked, prompts)
        if unenforced:
            answer.headers["Specli-Unenforced"] = ", ".join(unenforced)
        for prompt in prompts:
            for attempt in range(asked.n or 1):
                mailbox = Mailbox()
                job = self._job(asked, sampling, verifier, prompt, attempt, arrived_s, mailbox.deliver)
                answer.add(job, mailbox)
        self._submit([part.job for part in answer.parts])
        return await answer.reply()

    def _submit(self, jobs: Sequence[Job]) -> None:
        try:
            self.scheduler.submit(jobs)
        except (QueueFull, Unavailable) as error:
            self.metrics.refuse("queue_full" if isinstance(error, QueueFull) else "unavailable")
            raise

    def _drawing(self, asked: Sampling) -> tuple[SamplingOptions, Verifier, list[str]]:
        """How to draw, who draws, and what of a schema cannot be enforced. Raises ``Refusal``."""
        sampling = asked.sampling(self.session.settings.sampling)
        n_vocab, named = self.session.engine.n_vocab, asked.logit_bias or {}
        if (most := max(map(int, named), default=0)) >= n_vocab:
            raise Refusal(f"logit_bias names the token {most}, the model has 0 to {n_vocab - 1}", "logit_bias")
        try:
            verifier = self.verifier(sampling)
        except ConfigError as error:
            raise Refusal(str(error), "response_format" if asked.is_constrained else None) from error
        unenforced = unenforced_keywords(sampling) if asked.is_constrained else []
        if unenforced and asked.is_strict:
            found = f"the schema has {', '.join(unenforced)}, not enforced here; leave that out, or leave out strict"
            raise Refusal(found, "response_format")
        return sampling, verifier, unenforced

    def _job(
        self,
        asked: ChatRequest | CompletionRequest,
        sampling: SamplingOptions,
        verifier: Verifier,
        prompt: Sequence[int],
        attempt: int,
        arrived_s: float,
        deliver: Deliver,
    ) -> Job:
        session, seed = self.session, seed_of(sampling.seed, attempt)
        is_exact = session.settings.exact
        is_kept = seed is None and not is_exact if asked.cache_prompt is None else asked.cache_prompt
        return Job(
            prompt=prompt,
            verifier=verifier,
            seed=seed,
            max_tokens=asked.limit(self.options),
            stops=asked.stops,
            end_ids=frozenset() if sampling.ignore_eos else session.model.end_ids,
            n_logprobs=asked.n_logprobs,
            reuse=is_kept,
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
        self._envelope = Envelope(name, int(time.time()), service.model, is_chat, asked.n or 1)
        self._n_prompt = sum(map(len, prompts))
        self.parts: list[_Part] = []
        self._has_failed = False
        self.headers: dict[str, str] = {}

    def add(self, job: Job, mailbox: Mailbox) -> None:
        """One more choice."""
        choice = Choice(len(self.parts), self._service.session.model.piece, job.n_logprobs is not None)
        self.parts.append(_Part(job, choice, mailbox))

    async def reply(self) -> Response:
        """Wait as the client asked."""
        merged = _merge(self.parts)
        try:
            if not self._asked.stream:
                await self._unless_gone(self._collect(merged))
                whole = self._envelope.whole([part.choice for part in self.parts], self._n_prompt)
                return JSONResponse(whole, headers=self.headers)
            first = await self._unless_gone(anext(merged))
            self._raise_failure(first[1])
        except BaseException as error:
            self._has_failed = not isinstance(error, ClientGone)
            await self._leave(merged)
            if isinstance(error, DeadEnd):
                return JSONResponse(self._told(error), _status(error))  # counted by the scheduler
            raise
        headers = {**_STREAM_HEADERS, **self.headers}
        return _EventStream(self._stream(first, merged), lambda: self._leave(merged), headers)

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
        envelope, choices = self._envelope, [part.choice for part in self.parts]
        more: Json = {"usage": None} if self._asked.includes_usage else {}  # the last chunk has it
        try:
            if envelope.is_chat:
                for choice in choices:
                    yield _sse({**envelope.role(choice), **more})
            async for part, events in _chained(first, merged):
                self._raise_failure(events)
                for news in part.choice.take(events).parted():
                    yield _sse({**envelope.chunk(part.choice, news), **more})
            if self._asked.includes_usage:
                yield _sse(envelope.counts(choices, self._n_prompt))
            yield b"data: [DONE]\n\n"
            self._log()
        except SpecError as error:
            self._has_failed = True
            yield _sse(self._told(error))
        except Exception as error:  # a fault of ours: the status is sent already
            self._has_failed = True
            LOGGER.error("%s: %s: %s", envelope.id, type(error).__name__, error, exc_info=error)
            self._service.metrics.refuse("internal")
            yield _sse(problem(_FAULT, 500))

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

    def _told(self, error: SpecError) -> Json:
        """What the client is told of a failed answer."""
        fields = self._asked.bans if isinstance(error, DeadEnd) else []
        message = f"{' with '.join(fields)}: {error}" if fields else str(error)
        return problem(scalar(message), _status(error), fields[0] if fields else None)

    async def _leave(self, merged: _Events) -> None:
        """Nobody reads any more: what is not finished ends."""
        for part in self.parts:
            if part.choice.finish_reason is None:
                part.job.cancel(has_left=not self._has_failed)
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
                *(self._envelope.id, len(part.job.prompt), stats.n_reused, part.choice.n_tokens),
                *(ttft, rate, acceptance, part.choice.finish_reason),
            )
            if self._service.options.log_prompts:
                LOGGER.info("%s: prompt %r, answer %r", self._envelope.id, self._asked_text(), part.choice.text)

    def _asked_text(self) -> object:
        asked = self._asked
        return [m.message().content for m in asked.messages] if isinstance(asked, ChatRequest) else asked.prompt


class _EventStream(StreamingResponse):
    """Server-sent events; ``leave`` is called at their end, also where the client goes away before the first."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], leave: Callable[[], Awaitable[None]], headers: dict[str, str]
    ) -> None:
        super().__init__(events, headers=headers)
        self._events, self._leave = events, leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._leave()  # by itself: a generator that was not begun has no end


class ClientGone(Exception):
    """Nobody is there to reply to."""


_FAULT = "the server failed to answer; its log says why"
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
    """Why there will be no (more) answer, if so."""
    for event in events:
        if isinstance(event, Failed):
            return event.error
        if isinstance(event, Finished) and event.reason == "cancelled":  # not by the client, who would not read it
            return Unavailable("the server was stopped")
    return None


def _sse(content: Json) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace") + b"\n\n"


def _status(error: Exception) -> int:
    if isinstance(error, ConfigError | ContextOverflow | DeadEnd):
        return 400
    if isinstance(error, QueueFull):
        return 429
    if isinstance(error, Unavailable):
        return 503
    return 504 if isinstance(error, TimedOut) else 500


# -- routes


def make_app(service: Service) -> ASGIApp:
    """The application over a started scheduler."""
    app = FastAPI(title="specli", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    _add_errors(app, service)
    _add_answers(app, service)
    _add_helpers(app, service)
    _add_models(app, service)
    _add_state(app, service)
    guarded: ASGIApp = Guard(app, service.options, service.metrics)
    if service.options.cors_origins:
        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(service.options.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # OpenAI's client sends many of its own
            expose_headers=["Retry-After", "Specli-Unenforced"],
        )
    return guarded


async def _asked(kind: type[Asked], request: Request) -> Asked:
    """The body, read beside the event loop: a long one takes a while."""
    return await run_in_threadpool(parse, kind, await request.body())


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    @app.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(request, await _asked(ChatRequest, request))

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        return await service.answer(request, await _asked(CompletionRequest, request))


def _add_helpers(app: FastAPI, service: Service) -> None:
    """llama-server's tokenizing routes."""
    session, helping = service.session, asyncio.Semaphore(N_HELPING)

    @asynccontextmanager
    async def one_of_few(request: Request) -> AsyncGenerator[None, None]:
        """From the parsing on; a body that comes slowly keeps nobody waiting."""
        await request.body()
        async with helping:
            yield

    @app.post("/tokenize")
    @app.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        def reply(asked: TokenizeRequest) -> Response:
            ids = service.prompts.plain(asked.content, asked.add_special, asked.parse_special)
            if not asked.with_pieces:
                return JSONResponse({"tokens": ids})
            pieces = [{"id": token, "piece": _piece(session.model.special_piece(token))} for token in ids]
            return JSONResponse({"tokens": pieces})

        async with one_of_few(request):
            return await run_in_threadpool(reply, await _asked(TokenizeRequest, request))

    @app.post("/detokenize")
    @app.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        def reply(tokens: Sequence[int]) -> Response:
            if tokens and (most := max(tokens)) >= session.engine.n_vocab:
                raise Refusal(f"token {most} is none of the model, it has 0 to {session.engine.n_vocab - 1}", "tokens")
            text = b"".join(map(session.model.special_piece, tokens)).decode("utf-8", "replace")
            return JSONResponse({"content": text})

        async with one_of_few(request):
            return await run_in_threadpool(reply, (await _asked(DetokenizeRequest, request)).tokens)

    @app.post("/apply-template")
    async def apply_template(request: Request) -> Json:
        async with one_of_few(request):
            asked = await _asked(ApplyTemplateRequest, request)
            asked.check_limits(service.options)
            return {"prompt": await run_in_threadpool(service.prompts.text, asked)}


def _getting(app: FastAPI) -> Callable[[str], Callable[[Route], Route]]:
    return lambda path: app.api_route(path, methods=["GET", "HEAD"])


def _add_models(app: FastAPI, service: Service) -> None:
    session, get = service.session, _getting(app)

    @get("/v1/models")
    @get("/models")
    async def models() -> Json:
        meta = {
            "n_ctx": session.engine.n_ctx,
            "n_ctx_train": session.model.n_ctx_train,
            "n_vocab": session.engine.n_vocab,
        }
        model = {"id": service.model, "object": "model", "created": service.created, "owned_by": "specli", "meta": meta}
        return {"object": "list", "data": [model]}

    @get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        if name != service.model:
            found = f"the model {shortened(name)!r} is not here; this server has {service.model!r}"
            raise Refusal(found, "model", 404, "model_not_found")
        return {"id": service.model, "object": "model", "created": service.created, "owned_by": "specli"}


def _add_state(app: FastAPI, service: Service) -> None:
    session, scheduler, get = service.session, service.scheduler, _getting(app)

    @get("/health")
    @get("/v1/health")
    async def health() -> Response:
        if scheduler.failure is not None:
            return JSONResponse(problem(f"the engine has failed: {scheduler.failure}", 503), 503)
        return JSONResponse({"status": "ok"})

    @get("/metrics")
    async def metrics() -> Response:
        return Response(scheduler.exposition(), media_type=CONTENT_TYPE)

    @get("/props")
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
        service.metrics.refuse("too_long" if error.code == "context_length_exceeded" else "invalid")
        return _error(error.message, error.status, error.param, error.code)

    @app.exception_handler(SpecError)
    async def failed(_request: Request, error: SpecError) -> Response:
        status = _status(error)
        headers = None
        if isinstance(error, QueueFull):
            headers = {"Retry-After": str(error.retry_after_s)}
        elif status == 400:
            service.metrics.refuse("invalid")
        return _error(str(error), status, headers=headers)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        text = str(error.detail)
        if error.status_code == 404:
            known = "/v1/models, /v1/chat/completions, /v1/completions, /metrics"
            text = f"there is no {shortened(request.url.path)} here; see {known}"
        elif error.status_code == 405:
            text = f"{shortened(request.method)} is not what {shortened(request.url.path)} takes"
        return _error(text, error.status_code, headers=dict(error.headers or {}))

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=499)  # nginx's number; nobody reads it

    @app.exception_handler(Exception)
    async def fault(_request: Request, error: Exception) -> Response:
        LOGGER.error("a request failed: %s: %s", type(error).__name__, error, exc_info=error)
        service.metrics.refuse("internal")
        return _error(_FAULT, 500)


def _error(
    message: str, status: int, param: str | None = None, code: str | None = None, headers: dict[str, str] | None = None
) -> Response:
    return JSONResponse(problem(scalar(message), status, param, code), status, headers)
