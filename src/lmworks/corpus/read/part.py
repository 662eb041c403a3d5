"""Parts of a source: the unit that one process reads independently. Parts are found by listing files, without reading them.

The items that readers yield: documents, and rows that are not documents with the reason.

Errors while a file is read: a damaged file loses its remaining rows; a lost connection stops the run.
"""

from __future__ import annotations

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lmworks.corpus.document import Fact
from lmworks.corpus.read.listing import File
from lmworks.corpus.read.opening import DecompressionBomb, encodings, marked_encoding
from lmworks.errors import UserError
from lmworks.io.masking import mask
from lmworks.io.urls import connection_errors

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


EXCERPT = 400


@dataclass(frozen=True, slots=True)
class Item:
    """One row of a source: `text`, or the `reason` why it is not a document, with an excerpt in `text`.

    `origin` is the file or archive member and the row; `consumed` is the number of input bytes read since the previous item, for progress
    only. `facts` are given by the source (`url`, `path`, `repository`, `date`), and so is `language`.
    """

    text: str
    origin: str
    consumed: int = 0
    reason: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    language: str | None = None


def quarantined(reason: str, origin: str, sample: str | bytes, consumed: int = 0) -> Item:
    """A quarantined item, with an excerpt."""
    excerpt = sample[:EXCERPT]
    text = excerpt.decode("utf-8", "replace") if isinstance(excerpt, bytes) else excerpt.encode("utf-8", "replace").decode()
    return Item(text, origin, consumed, reason)


def printable(path: str) -> str:
    """A path as valid Unicode; other bytes of a file name are escaped."""
    return path.encode("utf-8", "backslashreplace").decode()


def decode_document(data: bytes, origin: str, limit: int, consumed: int, declared: str = "") -> Item:
    """Bytes as a document, or a quarantined item: `enormous` (over `limit` bytes), `binary` (null bytes) or `bad_utf8`.

    UTF-16 and UTF-32 are read if they have a byte order mark, and another encoding if it is `declared`.
    """
    if len(data) > limit:
        return quarantined("enormous", origin, data, consumed)
    marked = marked_encoding(data[:4])
    if marked is None and b"\0" in data[:8192]:
        return quarantined("binary", origin, data, consumed)
    begin = 0  # of what is not in the encoding
    for encoding in [marked] if marked else encodings(declared):
        try:
            return Item(data.decode(encoding), origin, consumed)
        except (UnicodeError, LookupError) as error:  # a codec such as hex is none of text
            begin = error.start if isinstance(error, UnicodeDecodeError) else 0
    return quarantined("bad_utf8", origin, data[max(0, begin - 60) :], consumed)


@lru_cache(maxsize=1)
def damage_errors() -> tuple[type[Exception], ...]:
    """What a damaged file raises where it is read."""
    import pyarrow as pa

    known: tuple[type[Exception], ...]
    # raised by zipfile and tarfile for unknown compression, invalid offsets and numbers
    known = (EOFError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError, NotImplementedError, pa.ArrowException)
    try:
        import zstandard
    except ImportError:
        return known
    return (*known, zstandard.ZstdError)


def quarantine_errors(rows: Iterator[Item], path: str) -> Iterator[Item]:
    """Yield rows; if the file is damaged, yield a quarantined item and stop. Raises UserError if a remote file cannot be read."""
    try:
        yield from rows
    except DecompressionBomb as error:
        yield quarantined("bomb", printable(path), str(error))
    except (*damage_errors(), *connection_errors()) as error:
        if "://" in path and (isinstance(error, connection_errors()) or getattr(error, "errno", None) is not None):
            raise UserError(f"cannot continue reading {path}: {str(error) or type(error).__name__}; run the same command again") from None
        yield quarantined("damaged_file", printable(path), mask(str(error)))
