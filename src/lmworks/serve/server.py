"""The HTTP server. It listens on loopback by default, and requires an API key if one is set."""

from __future__ import annotations

import asyncio
import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lmworks.errors import UserError
from lmworks.serve.middleware import ServerOptions
from lmworks.serve.models import Models

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette


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
