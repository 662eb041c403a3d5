"""Rows of the user's files and datasets for tuning, preferences and rewards, one at a time: JSON and parquet, compressed or not, folders of
them, and Hugging Face datasets. Memory does not grow with the file.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from lmworks.corpus.read import parquet
from lmworks.corpus.read.json_rows import SUFFIXES, rows_of
from lmworks.corpus.read.listing import (
    LEADS_OUT,
    File,
    folder_of_glob,
    has_extension,
    lies_outside,
    unlisted_folders,
    working_directory_hint,
)
from lmworks.corpus.read.opening import COMPRESSED, DamagedFile, open_binary
from lmworks.corpus.read.part import damage_errors
from lmworks.errors import UserError
from lmworks.tokenizer.messages import DEEPEST, too_deep

_READ = ".jsonl, .json, .ndjson or .parquet, each also .gz, .zst, .bz2 or .xz"
_LONGEST_ROW = 1 << 26  # bytes of a row of JSON
_ROWS_AT_ONCE = 256
SAVED_DATASETS = ("state.json", "dataset_dict.json")
TOO_LONG = "too long"  # the reason of the fault of a row that is longer
_REASONS = {"enormous": TOO_LONG, "bad_utf8": "bad UTF-8", "broken_json": "broken JSON"}
_SHOWN = 5


@dataclass(frozen=True)
class RawRow:
    """A row before it is a conversation, or its `fault`: a reason, and its detail after a colon."""

    origin: str
    value: Any = None
    fault: str | None = None


def read_files(where: str, given: str | None, split: str = "train") -> Iterator[RawRow]:
    """The rows of all files of a set of kind `files`, in the order of their paths; `where` is its recipe key, `given` its path. `split` is
    for the folder of a saved dataset.

    Raises `UserError` if there are none, and for the split of files.
    """
    if not given:
        raise UserError(f"{where}: kind files needs path, a file, a folder or a pattern")
    path = Path(given)
    if any((path / name).is_file() for name in SAVED_DATASETS):
        yield from read_dataset(where, given, split)
        return
    if split != "train":
        raise UserError(f"{where}.split: kind files reads all files of path, whatever split their names say; let path name those of "
                        f"{split}, as in {path / split}*, or use kind huggingface")  # fmt: skip
    listed = _list_files(where, path)
    for file in listed.outside:
        yield RawRow(str(file), fault=f"leads out: {LEADS_OUT}; to read its target, make that a set")
    for folder in listed.unlisted:
        yield RawRow(folder.path, fault=f"unlisted folder: {folder.changed}")
    for file in listed.files:
        yield from _parquet(file) if has_extension(file.name, parquet.SUFFIXES) else _json(file)


def read_dataset(where: str, given: str | None, split: str) -> Iterator[RawRow]:
    """The rows of a Hugging Face dataset, on disk or streamed from the hub. Raises `UserError`, or `Unavailable` without a network."""
    from lmworks.corpus.read.huggingface import open_dataset, until_damage

    if not given:
        raise UserError(f"{where}: kind huggingface needs path, NAME[:CONFIG] or a directory")
    try:
        for number, row in until_damage(enumerate(open_dataset(given, split))):
            yield RawRow(f"{given}/{split}:{number}", _plain(row))
    except DamagedFile as error:
        yield RawRow(f"{given}/{split}:", fault=f"damaged file: {error}")


def files_of(where: str, path: Path) -> list[Path]:
    """The files of a set of kind `files`, sorted: the file itself, those in a folder, or those of a pattern; `where` is its recipe key.

    Links to targets outside the folder are left out. Raises `UserError` if there are no files.
    """
    return _list_files(where, path).files


def skipped_files(where: str, given: str | None) -> str:
    """The files of a folder or pattern that are not read, in words; empty if all are."""
    path = Path(given or "")
    if given is None or any((path / name).is_file() for name in SAVED_DATASETS):
        return ""
    found = _list_files(where, path).skipped
    names = ", ".join(file.name for file in found[:_SHOWN]) + (f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else "")
    return f"{len(found):,} {'files' if len(found) > 1 else 'file'} of other kinds not read: {names}" if found else ""


@dataclass(frozen=True)
class _Listed:
    """The files of a set, those that are not read because a link leads out of its folder (its author may point links anywhere), those
    whose names have another suffix, and the folders that cannot be listed."""

    files: list[Path]
    outside: list[Path]
    skipped: list[Path]
    unlisted: Sequence[File] = ()


def _list_files(where: str, path: Path) -> _Listed:
    known = (*SUFFIXES, *parquet.SUFFIXES)
    if path.is_file():
        if not has_extension(path.name, known):
            raise UserError(f"{where}.path: {path} is no such file; its name must end in {_READ}")
        return _Listed([path], [], [])
    folder = path
    try:
        unlisted = unlisted_folders(str(path))
    except OSError as error:
        raise UserError(f"{where}.path: cannot read {path}: {error.strerror or error}") from None
    if path.is_dir():
        below = (Path(at, name) for at, _, names in os.walk(path) for name in names)
        every = [file for file in below if file.is_file() and not _hidden(file.relative_to(path))]
    else:
        mark = re.search(r"[*?[]", str(path))
        folder = Path(folder_of_glob(str(path), mark.start() if mark else 0))
        every = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    files = {file for file in every if has_extension(file.name, known)}
    if not files:
        hint = working_directory_hint(str(path))
        raise UserError(f"{where}.path: {path} is no file and no folder with files whose names end in {_READ}{hint}")
    root = os.path.realpath(folder)
    outside = {file for file in files if lies_outside(str(file), root)}
    found = {os.path.realpath(file) for file in files if not file.is_symlink()}
    files -= {file for file in files if file.is_symlink() and os.path.realpath(file) in found}  # the rows are read where they lie
    return _Listed(sorted(files - outside), sorted(outside), sorted(set(every) - files), unlisted)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _json(path: Path) -> Iterator[RawRow]:
    try:
        for row in rows_of(File(str(path), 0), None, _LONGEST_ROW):
            fault = f"{_REASONS[row.reason]}: {row.detail}" if row.reason is not None else None
            if too_deep(row.value):
                yield RawRow(row.origin, fault=f"nested too deep: more than {DEEPEST} lists and objects lie inside each other")
            else:
                yield RawRow(row.origin, row.value, fault)
    except damage_errors() as error:
        yield RawRow(str(path), fault=f"damaged file: {error}; what follows in it is not read")


def _parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow.parquet as pq

    number = 0
    try:
        with ExitStack() as stack:
            opened: Any = path
            if path.name.lower().endswith(COMPRESSED):
                opened = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stack.enter_context(open_binary(str(path)))[0], opened)
                opened.seek(0)
            with pq.ParquetFile(opened) as table:
                for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE):
                    for row in _rows_of_batch(batch):
                        number += 1
                        if isinstance(row, parquet.VALUE_ERRORS):
                            yield RawRow(f"{path}:{number}", fault=_fault_of_value(row))
                        else:
                            yield RawRow(f"{path}:{number}", _plain(row))
    except damage_errors() + (UnicodeDecodeError,) as error:  # noqa: RUF005
        yield RawRow(f"{path}:{number + 1}", fault=f"damaged file: {error}; what follows in it is not read")


def _rows_of_batch(batch: Any) -> list[Any]:
    """The rows of a batch; the error for one with a value that Python cannot hold, as a text that is not UTF-8 or a year beyond 9999."""
    try:
        return list(batch.to_pylist())
    except parquet.VALUE_ERRORS as error:
        if batch.num_rows == 1:
            return [error]
        return [row for number in range(batch.num_rows) for row in _rows_of_batch(batch.slice(number, 1))]


def _fault_of_value(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "bad UTF-8: a text of this row is not UTF-8"
    return f"bad value: a value of this row cannot be read ({error or type(error).__name__})"


def _plain(value: Any) -> Any:
    """A row of a table as a row of JSON: without its nulls, since a column of objects has the keys of all rows, null where a row lacks one;
    and with times, decimals and identifiers as texts. Bytes stay what they are."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, timedelta | Decimal | UUID) else value
