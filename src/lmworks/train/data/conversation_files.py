"""Rows of conversation files and datasets, one at a time: JSON lines, JSON arrays and parquet, compressed or not, folders of them, and
Hugging Face datasets. Memory does not grow with the file."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.corpus.readers.listing import LEADS_OUT, folder_of_glob, lies_outside, working_directory_hint
from lmworks.corpus.readers.opening import COMPRESSED, DecompressionBomb, bounded_lines, open_binary
from lmworks.errors import UserError

_JSON_LINES, _JSON, _PARQUET = ".jsonl", ".json", ".parquet"
_LONGEST_ROW = 1 << 26  # bytes of a line or of an element of an array
_ROWS_AT_ONCE = 256
_PIECE = 1 << 20
_SAVED_DATASETS = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class Row:
    """One conversation as read, or the `fault` that makes it none: a reason, and its detail after a colon."""

    origin: str
    messages: Any = None
    tools: Any = None
    fault: str | None = None
    form: str = ""


@dataclass(frozen=True)
class RawRow:
    """A row before it is a conversation, or its `fault`."""

    origin: str
    value: Any = None
    fault: str | None = None


def read_files(where: str, given: str | None, split: str = "train") -> Iterator[RawRow]:
    """The rows of all files of a set of kind `files`, in the order of their paths; `where` is its recipe key, `given` its path.

    Raises `UserError` if there are none.
    """
    if not given:
        raise UserError(f"{where}: kind files needs path, a file, a folder or a pattern")
    path = Path(given)
    if any((path / name).is_file() for name in _SAVED_DATASETS):
        yield from read_dataset(where, given, split)
        return
    files, outside = _list_files(where, path)
    for file in outside:
        yield RawRow(str(file), fault=f"leads out: {LEADS_OUT}; to read its target, make that a set")
    for file in files:
        kind = _kind(file)
        if kind == _PARQUET:
            yield from _parquet(file)
        else:
            yield from _text(file, array=kind == _JSON)


def read_dataset(where: str, given: str | None, split: str) -> Iterator[RawRow]:
    """The rows of a Hugging Face dataset, on disk or streamed from the hub. Raises `UserError`, or `Unavailable` without a network."""
    from lmworks.corpus.readers.huggingface import open_dataset

    if not given:
        raise UserError(f"{where}: kind huggingface needs path, NAME[:CONFIG] or a directory")
    for number, row in enumerate(open_dataset(given, split)):
        yield RawRow(f"{given}/{split}:{number}", _without_nulls(row))


def files_of(where: str, path: Path) -> list[Path]:
    """The files of a set of kind `files`, sorted: the file itself, those in a folder, or those of a pattern; `where` is its recipe key.

    Links to targets outside the folder are left out. Raises `UserError` if there are no files.
    """
    return _list_files(where, path)[0]


def _list_files(where: str, path: Path) -> tuple[list[Path], list[Path]]:
    """The files of a set, and those that are not read because a link leads out of its folder: its author may point links anywhere."""
    if path.is_file():
        if not _kind(path):
            known = ".jsonl, .json (both also .gz, .zst, .bz2 or .xz) or .parquet"
            raise UserError(f"{where}.path: {path} is no such file; its name must end in {known}")
        return [path], []
    folder = path
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and _kind(file)]
    else:
        mark = re.search(r"[*?[]", str(path))
        folder = Path(folder_of_glob(str(path), mark.start() if mark else 0))
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file() and _kind(Path(name))]
    if not files:
        hint = working_directory_hint(str(path))
        raise UserError(f"{where}.path: {path} is no file and no folder with .jsonl, .json or .parquet files{hint}")
    root = os.path.realpath(folder)
    outside = {file for file in files if lies_outside(str(file), root)}
    return sorted(set(files) - outside), sorted(outside)


def _kind(path: Path) -> str:
    """The suffix that says how a file is read, without that of its compression; empty for other files."""
    name = path.name.lower()
    plain = next((name.removesuffix(ending) for ending in COMPRESSED if name.endswith(ending)), name)
    if plain.endswith(".ndjson"):
        return _JSON_LINES
    found = Path(plain).suffix
    return found if found in (_JSON_LINES, _JSON) or (found == _PARQUET and plain == name) else ""


def _text(file: Path, array: bool) -> Iterator[RawRow]:
    """The rows of a file of JSON lines, or of one JSON array if the file holds one."""
    try:
        with open_binary(str(file)) as (stream, _):
            if array and _begins_array(stream):
                yield from _elements(stream, str(file))
                return
            for number, (line, whole) in enumerate(bounded_lines(stream, _LONGEST_ROW), 1):
                origin = f"{file}:{number}"
                if not whole:
                    yield RawRow(origin, fault=f"too long: more than {_LONGEST_ROW:,} bytes")
                elif line.strip():
                    yield _parsed(line, origin)
    except (DecompressionBomb, EOFError, OSError) as error:
        yield RawRow(str(file), fault=f"damaged file: {error}")
    except Exception as error:  # decompressors raise errors of their own
        if not type(error).__module__.startswith(("zlib", "zstandard", "_lzma", "backports")) and type(error).__name__ != "ZstdError":
            raise
        yield RawRow(str(file), fault=f"damaged file: {error}")


def _parsed(line: bytes, origin: str) -> RawRow:
    try:
        return RawRow(origin, json.loads(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        return RawRow(origin, fault=f"bad UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return RawRow(origin, fault=f"broken JSON: {error}")


def _begins_array(stream: Any) -> bool:
    """Whether the first character that is not white space is a bracket; nothing is consumed."""
    start: bytes = stream.peek(64) if hasattr(stream, "peek") else b""
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def _elements(stream: Any, origin: str) -> Iterator[RawRow]:
    """The elements of a JSON array, of which only one at a time is in memory."""
    import codecs

    decoder, decode = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")("replace").decode
    text, number, wanted, ended = "", 0, _PIECE, False
    text = decode(stream.read(_PIECE)).lstrip()[1:]
    while True:
        text = text.lstrip(" \t\r\n,")
        if text.startswith("]"):
            return
        try:
            value, end = decoder.raw_decode(text)
            if end == len(text) and not ended:  # a number or word may go on
                raise ValueError("cut")
        except (ValueError, RecursionError) as error:
            if not ended and len(text) <= _LONGEST_ROW and not isinstance(error, RecursionError):
                piece = stream.read(wanted)
                wanted, ended = min(2 * wanted, _LONGEST_ROW), not piece  # doubled, so that a long element is parsed few times
                text += decode(piece, final=ended)
                continue
            if text.strip():  # what follows a broken element cannot be told apart
                yield RawRow(f"{origin}:{number + 1}", fault=f"broken JSON: {error}; the rest of the file is not read")
            return
        number, wanted = number + 1, _PIECE
        text = text[end:]
        yield RawRow(f"{origin}:{number}", value)


def _parquet(file: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{file}:{number}", _without_nulls(row))
    except (pa.ArrowException, OSError) as error:
        yield RawRow(f"{file}:{number + 1}", fault=f"damaged file: {error}")


def _without_nulls(value: Any) -> Any:
    """A row of a table without its nulls: a column of objects has the keys of all rows, null where a row lacks one."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]
    return value
