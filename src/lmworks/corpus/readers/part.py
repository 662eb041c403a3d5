"""Parts of a source: the unit that one process reads independently. Parts are found by listing files, without reading them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lmworks.corpus.readers.listing import File

_MOST_FILES = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """Whole files, or a `span` [first, last) of one file: bytes, row groups, members, rows or shards, depending on the kind.

    `size` is in input bytes, 0 if unknown; the items of the part have `consumed` at most this in all.
    """

    files: tuple[File, ...]
    size: int
    span: tuple[int, int] | None = None

    def as_json(self) -> dict[str, Any]:
        """A JSON value that identifies the part; parts with equal values have the same documents."""
        files = [[_name(file.path), file.size, file.changed] for file in self.files]
        return {"files": files, "size": self.size, "span": list(self.span) if self.span else None}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Part:
        """The inverse of `as_json`."""
        files = tuple(File(_path(name), size, changed) for name, size, changed in value["files"])
        return cls(files, value["size"], tuple(value["span"]) if value["span"] else None)


def _name(path: str) -> str | dict[str, str]:
    """A file name as JSON, also if it is not valid Unicode."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return {"bytes": path.encode("utf-8", "surrogateescape").hex()}
    return path


def _path(name: str | dict[str, str]) -> str:
    return name if isinstance(name, str) else bytes.fromhex(name["bytes"]).decode("utf-8", "surrogateescape")


def pack_files(files: Iterable[File], part_bytes: int) -> Iterator[Part]:
    """Group successive files into parts of up to `part_bytes`."""
    group: list[File] = []
    size = 0
    for file in files:
        if group and (size + file.size > part_bytes or len(group) == _MOST_FILES):
            yield Part(tuple(group), size)
            group, size = [], 0
        group.append(file)
        size += file.size
    if group:
        yield Part(tuple(group), size)


def pack_spans(sizes: Iterable[int], part_bytes: int) -> Iterator[tuple[int, int, int]]:
    """(first, last, size): group successive pieces with these sizes into spans of up to `part_bytes`."""
    first = last = size = 0
    for last, piece in enumerate(sizes, start=1):
        if last - 1 > first and size + piece > part_bytes:
            yield first, last - 1, size
            first, size = last - 1, 0
        size += piece
    if last > first:
        yield first, last, size
