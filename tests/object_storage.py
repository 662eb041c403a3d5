"""A server that speaks S3's protocol on this machine (moto's), with faults on request; what connects to it is the real client."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from werkzeug.serving import make_server

KEY = {"AWS_ACCESS_KEY_ID": "lmworks-test", "AWS_SECRET_ACCESS_KEY": "hush-Hush-hush0", "AWS_DEFAULT_REGION": "us-east-1"}
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Server:
    """`busy(method, path)` is asked before each request: where it is true the answer is 503."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

        self._app: Any = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.busy: Callable[[str, str], bool] = lambda method, path: False
        self.environment = {**KEY, "AWS_ENDPOINT_URL": self.url}
        self._ask("reset")  # moto keeps its buckets in the process, beyond a server: each server begins without any

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self.busy(environ["REQUEST_METHOD"], environ["PATH_INFO"]):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(_BUSY)))])
            return [_BUSY]
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def check_keys(self, unchecked: float) -> None:
        """Refuse keys that nobody was given after so many requests."""
        self._ask("reset-auth", str(unchecked))

    def _ask(self, what: str, body: str = "") -> None:
        request = urllib.request.Request(f"{self.url}/moto-api/{what}", body.encode(), {"Content-Type": "text/plain"})
        urllib.request.urlopen(request).close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def served(patch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server, with its address and a key in the environment."""
    import s3fs

    server = Server()
    for name, value in server.environment.items():
        patch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        yield server
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.close()


def client() -> Any:
    """The bucket's other user: nothing of it is kept from one call to the next."""
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)
