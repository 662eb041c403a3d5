"""Finding and opening input files: local or by fsspec URL, plain, gzip or zstd, and lines of bounded length."""

from __future__ import annotations

import glob
import gzip
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from lmworks.errors import UserError

_CHUNK = 1 << 20
_SKIPPED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"}


def list_files(path: str, suffixes: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    """Files at `path` (file, directory, glob or fsspec URL) as (path, bytes), sorted.

    Inside a directory only names ending in one of `suffixes` count (all if empty); hidden and tool directories are passed over.
    """
    if "://" in path:
        return _list_remote(path, suffixes)
    if os.path.isdir(path):
        found = [os.path.join(folder, name) for folder, _, names in _walk(path) for name in names if name.endswith(suffixes or "")]
    elif os.path.isfile(path):
        found = [path]
    else:
        found = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)]
    return [(name, os.path.getsize(name)) for name in sorted(found)]


def _walk(path: str) -> Iterator[tuple[str, list[str], list[str]]]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_DIRECTORIES)
        yield folder, folders, [name for name in names if not name.startswith(".")]


def _fsspec() -> Any:
    try:
        import fsspec
    except ImportError:
        raise UserError("reading a URL needs fsspec: pip install 'lmworks[data]'") from None
    return fsspec


def _list_remote(path: str, suffixes: tuple[str, ...]) -> list[tuple[str, int]]:
    try:
        system, inner = _fsspec().core.url_to_fs(path)
        if any(mark in inner for mark in "*?["):
            found = system.glob(inner, detail=True)
        elif system.isdir(inner):
            found = {name: info for name, info in system.find(inner, detail=True).items() if name.endswith(suffixes or "")}
        else:
            found = {inner: system.info(inner)}
    except FileNotFoundError:
        return []
    except (ImportError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    files = [(system.unstrip_protocol(name), int(info.get("size") or 0)) for name, info in found.items() if info.get("type") != "directory"]
    return sorted(files)


@contextmanager
def open_binary(path: str) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open for reading: (the decompressed stream, the raw stream whose `tell` says how far the input is read)."""
    with _fsspec().open(path, "rb") if "://" in path else open(path, "rb") as raw:
        yield decompress(raw, path), raw


def decompress(raw: Any, name: str) -> Any:
    """The stream behind a .gz or .zst name; `raw` itself for any other."""
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if name.endswith((".zst", ".zstd")):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{name} needs zstandard: pip install 'lmworks[data]'") from None
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True))
    return raw


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
