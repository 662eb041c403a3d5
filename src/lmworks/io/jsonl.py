"""Append-only files with one JSON object per line. A kill can damage only the last line, which is then removed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from lmworks.errors import UserError
from lmworks.io.files import open_regular

_BLOCK = 1 << 12


def line(record: dict[str, Any]) -> bytes:
    """One record as a line. Numbers that are not finite become null, because JSON cannot represent them."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if hasattr(value, "item") and not isinstance(value, (int, str)) else value


def append(fd: int, record: dict[str, Any]) -> None:
    """Append one record to a descriptor opened with O_APPEND. After this returns, the record survives a kill of the process.

    If it fails, as on a full disk, an incomplete line is removed.
    """
    data, begin, written = memoryview(line(record)), os.fstat(fd).st_size, 0
    try:
        while data[written:]:
            written += os.write(fd, data[written:])
    except OSError:
        if written and os.fstat(fd).st_size == begin + written:  # no other process has written meanwhile
            os.ftruncate(fd, begin)
        raise


def open_append(path: Path) -> int:
    """A descriptor at the end of `path`; an incomplete last line is removed first."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.ftruncate(fd, _last_newline(fd, size) + 1)
    return fd


class ClosesAtEnd:
    """A context manager that closes at the end of the block. A failure to close is raised, but not over an error that ended the block."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except (UserError, OSError):
            if error is None:
                raise


class Waiting:
    """Records that could not be appended, as on a full disk; they wait in memory, in their order, and are written before later ones."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def append(self, fd: int, record: dict[str, Any]) -> None:
        """Append a record behind those that wait. If that fails, it waits too."""
        self.records.append(record)
        with suppress(OSError):
            self.drain(fd)

    def drain(self, fd: int) -> None:
        """Append all that wait. Raises `OSError` if some are left."""
        while self.records:
            append(fd, self.records[0])
            del self.records[0]


def _last_newline(fd: int, end: int) -> int:
    """Position of the last newline before `end`; -1 if there is none."""
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found
        end = start
    return -1


def cut_tail(fd: int, drop: Callable[[dict[str, Any]], bool]) -> int:
    """Remove the longest run of last records for which `drop` is true; returns how many. Reads only these records and one more."""
    end, dropped = os.fstat(fd).st_size, 0
    while end:
        start = _last_newline(fd, end - 1) + 1
        if not drop(json.loads(os.pread(fd, end - start, start))):
            break
        end, dropped = start, dropped + 1
    if dropped:
        os.ftruncate(fd, end)
        os.fsync(fd)
    return dropped


def last(path: Path) -> dict[str, Any]:
    """The last whole record; empty if there is none, or if it is damaged. Reads nothing else."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    try:
        end = _last_newline(fd, os.fstat(fd).st_size) + 1
        start = _last_newline(fd, end - 1) + 1
        found = json.loads(os.pread(fd, end - start, start)) if end else {}
        return found if isinstance(found, dict) else {}
    except ValueError:
        return {}
    finally:
        os.close(fd)


def read(path: Path) -> list[dict[str, Any]]:
    """All records; empty if the file does not exist. An incomplete last line is ignored; an invalid line before it is a `UserError`, and so
    is a pipe or a device."""
    try:
        with open_regular(Path(path)) as handle:
            data = handle.read()
    except FileNotFoundError:
        return []
    records = []
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            raise UserError(f"{path}: line {number} is not JSON; delete that line") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}: line {number} is not a JSON object; delete that line")
        records.append(record)
    return records
