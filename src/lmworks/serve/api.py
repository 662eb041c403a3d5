"""The routes: OpenAI's API, the chat page, health and metrics. Needs starlette, so only `server.build_app` imports this module."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lmworks.errors import UserError
from lmworks.serve.engine import Engine
from lmworks.serve.models import Busy, Models
from lmworks.serve.parameters import BadRequest, error_body
from lmworks.serve.parsing import parse, require_known
from lmworks.serve.protocol import ChatRequest, CompletionRequest
from lmworks.serve.requests import Delta, Job, PromptTooLong, Scores
from lmworks.serve.requests import Request as Generation
from lmworks.serve.responses import Chat, Completion
from lmworks.serve.server import RequestGuard, RequestStats, ServerOptions, page, render_metrics

log = logging.getLogger(__name__)
_CHAT, _COMPLETIONS, _MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
_API = f"{_CHAT}, {_COMPLETIONS} and {_MODELS}"
_CLIENT_GONE = 499  # nginx's status for a client that closed the connection; it appears only in the metrics


class Api:
    """The request handlers of the models that are served."""

    def __init__(self, models: Models, options: ServerOptions) -> None:
        self._models, self._options = models, options
        self._requests = RequestStats()
        self._created = int(time.time())
        self._grammars, self._compiling = ThreadPoolExecutor(1, "lmworks-grammars"), 0

    def app(self) -> Starlette:
        routes = [
            Route("/", self.home),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route(_MODELS, self.models),
            Route(f"{_MODELS}/{{name:path}}", self.model),
            Route(_COMPLETIONS, self.completions, methods=["POST"]),
            Route(_CHAT, self.chat, methods=["POST"]),
        ]
        guard = Middleware(RequestGuard, options=self._options, record=self._requests.count, paths={route.path for route in routes})
        handlers: Any = dict.fromkeys((BadRequest, UserError, HTTPException, Exception), error_response)
        return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self._grammars.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._models.close)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, Completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, Chat)

    async def _answer(
        self, request: Request, schema: type[CompletionRequest] | type[ChatRequest], kind: type[Completion] | type[Chat]
    ) -> Response:
        # In a thread, because parsing, rendering and encoding a long request would block the streams of others.
        body: Any = await asyncio.to_thread(parse, schema, await request.body(), self._models.known)
        max_waiting = self._options.max_waiting
        self._models.require_capacity(max_waiting, body.n)  # early, to save the work of rendering and encoding
        engine = await self._models.engine(body.model)
        generation = replace(await self._prepare(body, engine), whole=not body.stream)
        self._models.require_capacity(max_waiting, len(generation.prompts))
        job, events = engine.open(generation)
        reply = kind(engine, body, generation)
        if body.stream:
            return _EventStream(_server_sent(reply, events), job)
        if not await _collect(request, reply, events, job):
            return Response(status_code=_CLIENT_GONE)
        return JSONResponse(reply.body())

    async def _prepare(self, body: Any, engine: Engine) -> Generation:
        """The request for the engine, in a thread. Grammars have a thread of their own: one that takes its limit of time delays others."""
        if not body.restricted:
            return await asyncio.to_thread(_generation, body, engine)
        if self._compiling >= self._options.max_waiting:
            raise Busy(self._compiling, body.n, self._options.max_waiting)
        self._compiling += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._grammars, _generation, body, engine)
        finally:
            self._compiling -= 1

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._description(name) for name in self._models.known]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        require_known(name, self._models.known)
        return JSONResponse(self._description(name))

    def _description(self, name: str) -> dict[str, Any]:
        context = self._models.known[name].context
        return {"id": name, "object": "model", "created": self._created, "owned_by": "lmworks", "max_model_len": context}

    async def health(self, request: Request) -> Response:
        if not self._models.alive:
            return JSONResponse(error_body("the generation worker has stopped; restart the server", 503), 503)
        return JSONResponse({"status": "ok", "model": self._models.first.name})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(render_metrics(self._models.stats(), self._requests), media_type="text/plain; version=0.0.4")

    async def home(self, request: Request) -> Response:
        html, policy = page(self._models, request.query_params.get("model"))
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


async def error_response(request: Request, error: Exception) -> Response:
    """The response for an exception, in OpenAI's format."""
    if isinstance(error, BadRequest):
        return JSONResponse(error_body(error.message, error.status, error.param, error.code), error.status)
    if isinstance(error, PromptTooLong):
        param = "messages" if request.url.path.endswith("chat/completions") else "prompt"
        return JSONResponse(error_body(str(error), 400, param, "context_length_exceeded"), 400)
    if isinstance(error, Busy):
        return JSONResponse(error_body(str(error), 429), 429)
    if isinstance(error, UserError):
        return JSONResponse(error_body(str(error), 400), 400)
    if isinstance(error, HTTPException):
        detail = _missing(request.url.path) if error.status_code == 404 else error.detail
        return JSONResponse(error_body(detail, error.status_code), error.status_code, headers=error.headers)
    return JSONResponse(error_body(_failure(error), 500), 500)


def _generation(body: Any, engine: Engine) -> Generation:
    """The request for the engine. Raises `BadRequest` also for texts of JSON (arguments of tool calls) that are nested too deep to be
    read or rendered."""
    try:
        generation: Generation = body.request(engine)
        return generation
    except RecursionError:
        raise BadRequest("the request contains JSON that is nested too deep; make it flatter") from None


def _missing(path: str) -> str:
    if path == "/v1" or path.startswith("/v1/"):
        return f"this server has no {path[:200]}; it has {_API}"
    return f"there is no {path} here"


def _failure(error: Exception) -> str:
    """What a client learns about a failure of the server: not its text, which is in the log under the same number."""
    number = secrets.token_hex(4)
    log.error("failure %s", number, exc_info=error)
    return f"the server failed (failure {number} in its log)"


class _EventStream(StreamingResponse):
    """Server-sent events of one job, which is canceled when the client disconnects."""

    def __init__(self, content: AsyncIterator[str], job: Job) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._job = job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


async def _server_sent(reply: Completion | Chat, events: AsyncIterator[Delta | Scores]) -> AsyncIterator[str]:
    for chunk in reply.opening():
        yield _event(chunk)
    try:
        async for event in events:
            for chunk in reply.chunks(event):
                yield _event(chunk)
    except Exception as error:  # the status line has been sent, so the error can only be reported in the stream
        yield _event(error_body(str(error), 400) if isinstance(error, UserError) else error_body(_failure(error), 500))
        return
    for chunk in reply.closing():
        yield _event(chunk)
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"


async def _collect(request: Request, reply: Completion | Chat, events: AsyncIterator[Delta | Scores], job: Job) -> bool:
    """Collect all events in `reply`; returns False if the client disconnected first."""

    async def fill() -> None:
        async for event in events:
            reply.add(event)

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collection, disconnect = asyncio.create_task(fill()), asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({collection, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not collection.done():
            return False
        collection.result()
        return True
    finally:
        job.cancel()
        for task in (collection, disconnect):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
