"""The HTTP server: how it listens, the checks before the routes (`api`), the chat page, and metrics in the Prometheus text format.

It listens on loopback by default, and requires an API key if one is set. ASGI middleware checks each request (host, API key, body) before
it reaches the routes; streams pass through unchanged. The chat page is one file without external resources, with a
Content-Security-Policy that allows nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import html
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.serve.models import Models
from lmworks.serve.parameters import error_body
from lmworks.serve.requests import EngineStats

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette


LOOPBACK = ("127.0.0.1", "localhost", "::1")
_OPEN = ("/", "/health")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::\d{1,5})?")


@dataclass(frozen=True)
class ServerOptions:
    """Address and limits of the server. `max_body` is in bytes, `max_waiting` in queued answers. A client has `head_seconds` to send the
    headers of a request, and `body_seconds` to send its body."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body: int = 4 * 2**20
    max_waiting: int = 256
    head_seconds: float = 10.0
    body_seconds: float = 30.0


class _BadBody(Exception):
    """A rejected body: message and status."""


class RequestGuard:
    """Checks host, key, content type and body size, and records each answer's status and duration.

    A server on loopback answers only requests for loopback names: otherwise any web page could reach it with a host name that resolves to
    127.0.0.1 (DNS rebinding). JSON is required because browsers send only forms to other origins without a preflight request.
    """

    def __init__(self, app: Any, options: ServerOptions, record: Callable[[str, int, float], None], paths: set[str]) -> None:
        self._app, self._options, self._record, self._paths = app, options, record, paths

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-content-type-options", b"nosniff")]}
            await send(message)

        try:
            await self._guarded(scope, receive, watched)
        finally:
            # Only known paths become labels, so that a scanner cannot grow the table without limit.
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._record(path, status, time.monotonic() - start)

    async def _guarded(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name: value.decode("latin-1") for name, value in reversed(scope["headers"])}  # the first of several counts
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await _refuse(send, *refusal)
            return
        seen, whole, started = 0, False, False
        deadline = asyncio.get_running_loop().time() + self._options.body_seconds

        async def limited() -> Any:
            nonlocal seen, whole
            try:
                async with asyncio.timeout_at(None if whole else deadline):  # after the body only the disconnect follows
                    message = await receive()
            except TimeoutError:
                raise _BadBody(f"the body was not received within {self._options.body_seconds:g} s", 408) from None
            seen, whole = seen + len(message.get("body", b"")), not message.get("more_body", False)
            if seen > self._options.max_body:
                raise _BadBody(*self._too_large())
            return message

        async def noted(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, limited, noted)
        except _BadBody as refusal_of_body:
            if started:
                raise
            await _refuse(send, *refusal_of_body.args)

    def _refusal(self, scope: Any, headers: dict[bytes, str]) -> tuple[str, int] | None:
        if self._options.host in LOOPBACK and _name(headers.get(b"host", "")) not in LOOPBACK:
            return "this server answers only to localhost; start it with --host to serve others", 403
        key = self._options.api_key
        if key and scope["path"] not in _OPEN:
            given = headers.get(b"authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode("latin-1"), key.encode()):
                return "the API key is missing or wrong; send it as `Authorization: Bearer KEY`", 401
        if scope["method"] == "POST":
            if not headers.get(b"content-type", "").startswith("application/json"):
                return "send JSON with the header `Content-Type: application/json`", 415
            length = headers.get(b"content-length", "0")
            if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > self._options.max_body:
                return self._too_large()
        return None

    def _too_large(self) -> tuple[str, int]:
        return f"the body is larger than {self._options.max_body:,} bytes", 413


def _name(host: str) -> str | None:
    """The host name in a Host header, without its port; None if the header is invalid."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower() if found else None


async def _refuse(send: Any, message: str, status: int) -> None:
    body = json.dumps(error_body(message, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status in (408, 413):
        headers.append((b"connection", b"close"))  # the rest of the body is not read
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def build_app(models: Models, options: ServerOptions | None = None) -> Starlette:
    """The ASGI application around `models`, which it closes at shutdown. Raises `UserError` without the extra `serve`."""
    require_extra()
    from lmworks.serve.api import Api

    return Api(models, options or ServerOptions()).app()


def require_extra() -> None:
    """Raise `UserError` unless the packages of the extra `serve` are installed."""
    if not (find_spec("starlette") and find_spec("uvicorn")):
        raise UserError("serving needs starlette and uvicorn: pip install 'lmworks[serve]'")


def listen(options: ServerOptions) -> socket.socket:
    """Open the socket to serve on. Raises `UserError` if the address is in use or does not belong to this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UserError(f"cannot listen on {options.host}:{options.port} ({error.strerror}); choose another --host or --port") from None
    return listener


def serve(models: Models, listener: socket.socket, options: ServerOptions) -> None:
    """Serve on `listener` until interrupted."""
    import uvicorn

    try:
        uvicorn.Server(configuration(models, options)).run(sockets=[listener])
    finally:
        listener.close()


def configuration(models: Models, options: ServerOptions) -> uvicorn.Config:
    """The configuration of uvicorn for serving the models."""
    app = build_app(models, options)
    import uvicorn

    return uvicorn.Config(
        app, http=_protocol_with_timeout(options.head_seconds), log_level="warning", timeout_graceful_shutdown=2, server_header=False
    )


def _protocol_with_timeout(seconds: float) -> Any:
    """uvicorn's protocol with a timeout for the headers of a request. uvicorn has one only between two requests of a connection, so idle
    connections could use up the file descriptors of the process."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class HeaderTimeoutProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._update_timer()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._update_timer()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            self._stop_timer()

        def _update_timer(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:  # the headers have been received
                self._stop_timer()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self.transport.close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return HeaderTimeoutProtocol


@cache
def _source() -> str:
    return files("lmworks.serve").joinpath("page.html").read_text(encoding="utf-8")


def page(models: Models, chosen: str | None = None) -> tuple[str, str]:
    """The page for the `chosen` model (the first one if there is no model of that name), and its Content-Security-Policy."""
    name = chosen if chosen in models.known else models.first.name
    model = models.known[name]
    about = {"model": name, "context": model.context, "tuned": model.tuned, "models": list(models.known), "sampling": dict(model.sampling)}
    text = _source().replace("{{ABOUT}}", html.escape(json.dumps(about))).replace("{{MODEL}}", html.escape(name))
    policy = [
        "default-src 'none'", f"script-src {_hash(text, 'script')}", f"style-src {_hash(text, 'style')}", "connect-src 'self'",
        "img-src data:", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
    ]  # fmt: skip
    return text, "; ".join(policy)


def _hash(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in found)


@dataclass
class RequestStats:
    """Number of answered requests by path and status, and their total duration in seconds."""

    answered: dict[tuple[str, int], int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, path: str, status: int, seconds: float) -> None:
        self.answered[path, status] = self.answered.get((path, status), 0) + 1
        self.seconds += seconds


def render_metrics(stats: EngineStats, requests: RequestStats) -> str:
    """Render the text of `/metrics`."""
    single = [
        ("lmworks_answers_running", "gauge", "requests being generated", stats.running),
        ("lmworks_answers_waiting", "gauge", "requests waiting for a slot", stats.waiting),
        ("lmworks_prompt_tokens_total", "counter", "prompt tokens processed", stats.prompt_tokens),
        ("lmworks_prefix_hit_tokens_total", "counter", "prompt tokens that were found in the prefix cache", stats.hit_tokens),
        ("lmworks_generated_tokens_total", "counter", "tokens generated", stats.generated_tokens),
        ("lmworks_request_seconds_total", "counter", "total duration of requests", round(requests.seconds, 3)),
    ]
    lines = []
    for name, kind, what, value in single:
        lines += [f"# HELP {name} {what}", f"# TYPE {name} {kind}", f"{name} {value}"]
    lines += ["# HELP lmworks_requests_total requests answered", "# TYPE lmworks_requests_total counter"]
    for (path, status), count in sorted(requests.answered.items()):
        lines.append(f'lmworks_requests_total{{path="{path}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
