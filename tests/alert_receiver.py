"""What tests of alerts send to: an HTTP server of this machine, and a command that appends to a file."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from patience import PATIENCE


@dataclass
class Receiver:
    """The requests so far. `answers`: status, headers and delay of the next ones; then 200."""

    url: str
    requests: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], float]] = field(default_factory=list)

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return [json.loads(content) for _, content in self.requests]

    @property
    def kinds(self) -> list[str]:
        return [one["kind"] for one in self.alerts]

    def wait_for(self, kind: str) -> dict[str, Any]:
        """The first alert of this kind."""
        until = time.monotonic() + PATIENCE
        while kind not in self.kinds:
            assert time.monotonic() < until, self.kinds
            time.sleep(0.02)
        return next(one for one in self.alerts if one["kind"] == kind)


@contextmanager
def receiver() -> Iterator[Receiver]:
    """A server on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            found.requests.append(({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}}, content))
            status, headers, delay = found.answers.pop(0) if found.answers else (200, {}, 0.0)
            time.sleep(delay)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    found = Receiver(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


def appending(file: Path) -> list[str]:
    """A command that appends its standard input to a file."""
    return [sys.executable, "-S", "-c", "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())", str(file)]


def lines(file: Path) -> list[dict[str, Any]]:
    """What the command has appended."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
