"""The routes: OpenAI's API, the chat page, health and figures. Needs starlette, so only `server.build_app` imports this file."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lmworks.errors import UserError
from lmworks.serve.engine import Delta, Job, PromptTooLong, Scores
from lmworks.serve.middleware import RequestGuard, ServerOptions
from lmworks.serve.models import Busy, Models
from lmworks.serve.page import page
from lmworks.serve.prometheus import RequestStats, render_metrics
from lmworks.serve.protocol import BadRequest, ChatRequest, CompletionRequest, error_body, parse, require_known
from lmworks.serve.responses import Chat, Completion

_CLIENT_GONE = 499  # nginx's number for a client that did not wait; nobody reads it but the figures


class Api:
    """The handlers, around the models that are served."""

    def __init__(self, models: Models, options: ServerOptions) -> None:
        self._models, self._options = models, options
        self._requests = RequestStats()
        self._created = int(time.time())

    def app(self) -> Starlette:
        routes = [
            Route("/", self.home),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        guard = Middleware(RequestGuard, options=self._options, record=self._requests.count, paths={route.path for route in routes})
        handlers: Any = dict.fromkeys((BadRequest, UserError, HTTPException, Exception), refused)
        return Starlette(routes=routes, middleware=[guard], exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(self._models.close)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, Completion)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, Chat)

    async def _answer(
        self, request: Request, form: type[CompletionRequest] | type[ChatRequest], kind: type[Completion] | type[Chat]
    ) -> Response:
        # Reading, rendering and encoding a long request must not hold up the streams of others.
        asked: Any = await asyncio.to_thread(parse, form, await request.body(), self._models.known)
        most = self._options.max_waiting
        self._models.refuse_over(most, asked.n)  # which saves the work of what comes next
        engine = await self._models.engine(asked.model)
        wanted = await asyncio.to_thread(asked.request, engine)
        self._models.refuse_over(most, len(wanted.prompts))
        job, events = engine.open(wanted)
        reply = kind(engine, asked, wanted)
        if asked.stream:
            return _EventStream(_server_sent(reply, events), job)
        if not await _collect(request, reply, events, job):
            return Response(status_code=_CLIENT_GONE)
        return JSONResponse(reply.body())

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described(name) for name in self._models.known]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        require_known(name, self._models.known)
        return JSONResponse(self._described(name))

    def _described(self, name: str) -> dict[str, Any]:
        context = self._models.known[name].context
        return {"id": name, "object": "model", "created": self._created, "owned_by": "lmworks", "max_model_len": context}

    async def health(self, request: Request) -> Response:
        if not self._models.alive:
            return JSONResponse(error_body("the generation worker has ended; start the server again", 503), 503)
        return JSONResponse({"status": "ok", "model": self._models.first.name})

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(render_metrics(self._models.stats(), self._requests), media_type="text/plain; version=0.0.4")

    async def home(self, request: Request) -> Response:
        html, policy = page(self._models, request.query_params.get("model"))
        return Response(html, media_type="text/html", headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


async def refused(request: Request, error: Exception) -> Response:
    """Any failure, in OpenAI's form."""
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
        detail = f"there is no {request.url.path} here" if error.status_code == 404 else error.detail
        return JSONResponse(error_body(detail, error.status_code), error.status_code, headers=error.headers)
    return JSONResponse(error_body(f"the server failed: {error}", 500), 500)


class _EventStream(StreamingResponse):
    """Server-sent events of one job, which ends when the client goes away."""

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
    except Exception as error:  # the status line is sent: the error can only be told inside the stream
        yield _event(error_body(f"the server failed: {error}", 500))
        return
    for chunk in reply.closing():
        yield _event(chunk)
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, allow_nan=False)}\n\n"


async def _collect(request: Request, reply: Completion | Chat, events: AsyncIterator[Delta | Scores], job: Job) -> bool:
    """Put all events into `reply`; False if the client went away first."""

    async def fill() -> None:
        async for event in events:
            reply.add(event)

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    filling, leaving = asyncio.create_task(fill()), asyncio.create_task(gone())
    try:
        await asyncio.wait({filling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not filling.done():
            return False
        filling.result()
        return True
    finally:
        job.cancel()
        for task in (filling, leaving):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
