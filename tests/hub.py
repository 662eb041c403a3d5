"""A stand-in for the Hugging Face hub on this machine: the requests that `huggingface_hub` makes for a model, answered from a folder."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from ports import free_port


@dataclass
class Hub:
    """Models by name, each with its commits (folders) and its branches; `refused`: status and error code that answer a name."""

    port: int = field(default_factory=free_port)
    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    branches: dict[str, dict[str, str]] = field(default_factory=dict)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def publish(self, name: str, folder: Path, branch: str = "main") -> str:
        """Publish a folder as a commit, to which the branch moves; returns the commit."""
        commit = hashlib.sha1(f"{name} {folder}".encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = folder
        self.branches.setdefault(name, {})[branch] = commit
        return commit

    @contextmanager
    def serving(self) -> Iterator[Hub]:
        """Answer on `port` until the block is left; then nothing listens there."""
        server = ThreadingHTTPServer(("127.0.0.1", self.port), _handler(self))
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def _send(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            for key, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(key.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            if not path.startswith("api/models/") and "/resolve/" not in path:  # what else the library asks of its hub
                return self._send(404, b"{}")
            hub.asked.append(f"{self.command} {path}")
            hub.tokens |= {self.headers.get("authorization", "")} - {""}
            parts = path.removeprefix("api/models/").split("/")
            name, what, revision = "/".join(parts[:2]), parts[2], parts[3]
            if name not in hub.commits:
                return self._send(404, b"{}", X_Error_Code="RepoNotFound")
            commit = hub.branches[name].get(revision, revision)
            if commit not in hub.commits[name]:
                return self._send(404, b"{}", X_Error_Code="RevisionNotFound")
            folder = hub.commits[name][commit]
            if what != "resolve" and hub.refused.get(name, (0, ""))[1] != "everything":
                files = [one for one in sorted(folder.rglob("*")) if one.is_file()]
                about = [{"type": "file", "path": one.relative_to(folder).as_posix(), "size": one.stat().st_size, "oid": _etag(one)}
                         for one in files]  # fmt: skip
                answer = about if what == "tree" else {"id": name, "sha": commit, "siblings": [{"rfilename": one["path"]} for one in about]}
                return self._send(200, json.dumps(answer).encode(), content_type="application/json")
            if name in hub.refused:
                status, code = hub.refused[name]
                return self._send(status, b"{}", X_Error_Code=code)
            file = folder / "/".join(parts[4:])
            return self._send(200, file.read_bytes(), ETag=f'"{_etag(file)}"', X_Repo_Commit=commit, Accept_Ranges="bytes")

    return Handler


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
