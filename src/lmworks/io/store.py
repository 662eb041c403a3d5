"""Verified files in another place: a directory, or a URL that fsspec opens, such as s3://bucket/run.

A file that is sent is read back and compared with its hash, since a storage may lose or change what it was given; a file that is fetched
has a limit on its size and is synced to disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from lmworks.errors import UserError
from lmworks.io.files import blake3_of
from lmworks.io.urls import filesystem, make_directory


class Content(Protocol):
    """What a file contains: its size in bytes and the hex BLAKE3 of its bytes."""

    @property
    def bytes(self) -> int: ...
    @property
    def blake3(self) -> str: ...


class Store:
    """The files below a URL, by their names relative to it. `what` is named in the error for a URL that cannot be used."""

    def __init__(self, url: str, what: str) -> None:
        self.url = url.rstrip("/")
        self._system, self._root = filesystem(self.url, what)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, by default all. Raises FileNotFoundError."""
        data: bytes = self._system.cat_file(self._at(name), start=start, end=stop)
        return data

    def document(self, name: str, most: int) -> bytes | None:
        """A file of at most `most` bytes; None if it does not exist. Raises `UserError` for a larger one, before it is read."""
        try:
            if self._system.size(self._at(name)) > most:
                raise UserError(f"{self.url}/{name} is larger than such a file can be")
            return self.read(name)
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder; empty if it does not exist."""
        try:
            return [Path(path.rstrip("/")).name for path in self._system.ls(self._at(folder), detail=False)]
        except FileNotFoundError:
            return []

    def fetch(self, name: str, path: Path, most: int) -> None:
        """Download a file of at most `most` bytes and sync it to disk. Raises ValueError for a larger one, before it is read."""
        size = self._system.size(self._at(name))
        if size is None or size > most:
            raise ValueError(f"{name} is larger than the {most:,} bytes that it may have")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._system.get_file(self._at(name), str(path))
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())

    def put(self, path: Path, name: str, content: Content) -> None:
        """Upload `path`, unless the file there is already equal. Raises OSError if what arrived differs from `content`."""
        if self._holds(name, content):
            return
        self.upload(path, name)
        if not self._holds(name, content):
            raise OSError(f"the copy of {path} in {self.url} differs from it")

    def _holds(self, name: str, content: Content) -> bool:
        try:
            if self._system.size(self._at(name)) != content.bytes:
                return False
            with self._system.open(self._at(name), "rb") as handle:
                return blake3_of(handle) == content.blake3
        except FileNotFoundError:
            return False

    def upload(self, path: Path, name: str) -> None:
        """Upload `path` without comparing."""
        make_directory(self._system, os.path.dirname(self._at(name)))
        self._system.put_file(str(path), self._at(name))

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        self._system.pipe_file(self._at(name), data)

    def remove(self, name: str) -> None:
        """Delete a file if it exists."""
        if self._system.exists(self._at(name)):
            self._system.rm_file(self._at(name))
