"""Finding and opening input files: local or by fsspec URL, plain or compressed, and lines of bounded length."""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import io
import lzma
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from lmworks.corpus.items import Unavailable
from lmworks.errors import UserError
from lmworks.recipe.corpus import Source

COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zstd")
_CHUNK = 1 << 20
_SKIPPED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"}
# no text shrinks 200 times; up to a gigabyte it does no harm
_HARMLESS = 1 << 30
_MOST_EXPANSION = 200


class Bomb(OSError):
    """A file that expands without end."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source: its path (or URL, or name inside a wheel), bytes, and what changes when it does (time or hash)."""

    path: str
    size: int
    changed: str = ""


def find(source: Source, suffixes: tuple[str, ...] = ()) -> list[File]:
    """Files of a source at its `path` (file, directory, glob or fsspec URL), sorted by path.

    Inside a directory only names ending in one of `suffixes`, compressed or not, count (all if empty); hidden and tool directories are
    passed over. Raises Unavailable if there are none.
    """
    assert source.path is not None, "the recipe checks it"
    files = _list_remote(source.path, suffixes) if "://" in source.path else _list_local(source.path, suffixes)
    if source.include:
        pattern = source.include
        files = [file for file in files if fnmatch.fnmatch(file.path, pattern) or fnmatch.fnmatch(os.path.basename(file.path), pattern)]
    if not files:
        matching = f" matching {source.include}" if source.include else f" ending in {', '.join(suffixes[:6])}" if suffixes else ""
        raise Unavailable(f"no files at {source.path}{matching}; check the path")
    return sorted(files, key=lambda file: file.path)


def _fits(name: str, suffixes: tuple[str, ...]) -> bool:
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(suffixes or "")


def _list_local(path: str, suffixes: tuple[str, ...]) -> list[File]:
    if os.path.isdir(path):
        found = [name for name in _walk(path) if _fits(name, suffixes)]
    elif os.path.isfile(path):
        found = [path]
    elif any(mark in path for mark in "*?["):
        base = path[: re.search(r"[*?[]", path).start()].rpartition("/")[0]  # type: ignore[union-attr]
        pattern = _pattern(path)
        found = [name for name in _walk(base or ("/" if path.startswith("/") else ".")) if pattern.fullmatch(os.path.normpath(name))]
    else:
        found = []
    return [_local(name) for name in found]


def _local(path: str) -> File:
    try:
        status = os.stat(path)
    except OSError:  # a link to nowhere: quarantined when it is read
        return File(path, 0)
    return File(path, status.st_size, str(status.st_mtime_ns))


def _walk(path: str) -> Iterator[str]:
    """Files below a directory. Links to directories are followed, and each directory is entered once, however many links lead to it."""
    seen = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_DIRECTORIES)
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _pattern(glob: str) -> re.Pattern[str]:
    """`*` and `?` stay within a directory, `**` crosses them, as in a shell."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^]/]+\])", os.path.normpath(glob))
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = [known.get(piece) or (f"[{'^' if piece[1] == '!' else ''}{piece[1:-1].lstrip('!')}]" if number % 2 else re.escape(piece))
            for number, piece in enumerate(pieces)]  # fmt: skip
    return re.compile("".join(made), re.DOTALL)


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError:
        raise UserError("reading a URL needs fsspec: pip install 'lmworks[data]'") from None
    return fsspec


def _list_remote(path: str, suffixes: tuple[str, ...]) -> list[File]:
    try:
        system, inner = _fsspec().core.url_to_fs(path)
        if any(mark in inner for mark in "*?["):
            found = system.glob(inner, detail=True)
        elif system.isdir(inner):
            found = {name: info for name, info in system.find(inner, detail=True).items() if _fits(name, suffixes)}
        else:
            found = {inner: system.info(inner)}
    except FileNotFoundError:
        return []
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    return [
        File(system.unstrip_protocol(name), int(info.get("size") or 0), str(_version(info)))
        for name, info in found.items()
        if info.get("type") != "directory"
    ]


def _version(info: dict[str, Any]) -> Any:
    """What a file system says that changes with a file; each has its own name for it."""
    return next((info[key] for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "created") if info.get(key)), "")


def can_seek(path: str) -> bool:
    """Whether reading may begin in the middle. Web servers need not allow it."""
    return not path.startswith(("http://", "https://"))


@contextmanager
def open_binary(path: str, seek: bool = False) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open for reading: (the decompressed stream, the raw stream whose `tell` says how far the input is read).

    A file that must be sought in and cannot is copied first.
    """
    with _fsspec().open(path, "rb") if "://" in path else open(path, "rb") as raw:
        if seek and not can_seek(path):
            with tempfile.TemporaryFile() as copy:
                while chunk := raw.read(_CHUNK):
                    copy.write(chunk)
                copy.seek(0)
                yield decompress(copy, path), copy
        else:
            yield decompress(raw, path), raw


def decompress(raw: Any, name: str) -> Any:
    """The stream behind a .gz, .bz2, .xz or .zst name, which raises Bomb if it has no end; `raw` itself for any other."""
    if name.endswith(".gz"):
        opened: Any = gzip.GzipFile(fileobj=raw)
    elif name.endswith(".bz2"):
        opened = bz2.BZ2File(raw)
    elif name.endswith(".xz"):
        opened = lzma.LZMAFile(raw)  # noqa: SIM115
    elif name.endswith((".zst", ".zstd")):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{name} needs zstandard: pip install 'lmworks[data]'") from None
        opened = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True)
    else:
        return raw
    return io.BufferedReader(_Watched(opened, raw), _CHUNK)


class _Watched(io.RawIOBase):
    """A decompressed stream that ends with Bomb when it grows out of all proportion."""

    def __init__(self, opened: Any, raw: Any) -> None:
        self._opened, self._raw, self._given = opened, raw, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._opened.read1(len(buffer))  # all that is sound of a file that is cut off
        buffer[: len(data)] = data
        self._given += len(data)
        if self._given > _HARMLESS and self._given > _MOST_EXPANSION * self._raw.tell():
            raise Bomb(f"expands to more than {_MOST_EXPANSION} times its size")
        return len(data)


def bounded_lines(stream: Any, limit: int) -> Iterator[tuple[bytes, bool]]:
    """Lines without their end as (bytes, whole).

    Of a line longer than `limit` only the start is kept and the rest skipped in small reads.
    """
    while line := stream.readline(limit + 2):  # room for its end
        content, ended = line.rstrip(b"\r\n"), line.endswith(b"\n")
        whole = len(content) <= limit
        yield content if whole else content[:4096], whole
        del line, content
        while not ended:
            rest = stream.readline(_CHUNK)
            ended = not rest or rest.endswith(b"\n")


def skip_line(stream: Any, until: int | None) -> None:
    """Read to the end of the line, or past `until`."""
    while (chunk := stream.readline(_CHUNK)) and not chunk.endswith(b"\n") and (until is None or stream.tell() < until):
        pass
