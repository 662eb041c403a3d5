"""The HTTP server for a laptop. It listens on loopback unless told otherwise, and takes a key if one is set."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import TYPE_CHECKING

from lmworks.errors import UserError
from lmworks.serve.engine import Engine
from lmworks.serve.guard import ServerOptions

if TYPE_CHECKING:
    from starlette.applications import Starlette


def build_app(engine: Engine, options: ServerOptions | None = None) -> Starlette:
    """The ASGI application around `engine`, which it closes at shutdown. Raises `UserError` without the extra `serve`."""
    require_extra()
    from lmworks.serve.api import Api

    return Api(engine, options or ServerOptions()).app()


def require_extra() -> None:
    """Raise `UserError` unless the packages of the extra `serve` are there."""
    if not (find_spec("starlette") and find_spec("uvicorn")):
        raise UserError("serving needs starlette and uvicorn: pip install 'lmworks[serve]'")


def listen(options: ServerOptions) -> socket.socket:
    """The socket to serve on. Raises `UserError` if the address is taken or not ours."""
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


def serve(engine: Engine, listener: socket.socket, options: ServerOptions) -> None:
    """Serve on `listener` until interrupted."""
    app = build_app(engine, options)
    import uvicorn

    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, server_header=False)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
