"""ASGI middleware that checks each request (host, API key, body) before it reaches the routes. Streams pass through unchanged."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmworks.serve.openai.errors import error_body

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
