"""The files of a run as a diagnosis reads them: from the run's folder, or from the archive that `lmworks bundle` writes.

Any of them may be missing, truncated, foreign or enormous. Nothing is unpickled, executed or extracted, and memory is bounded: of a long
file of lines, the beginning, the end and samples in between are read.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lmworks.errors import UserError
from lmworks.io.files import open_regular, read_at_most

Json = dict[str, Any]

PREFLIGHT = "preflight.json"  # the results of the last `lmworks preflight`
INDEX = "bundle.json"  # in an archive: what it contains, and the sizes of all files of the run

_HEAD, _TAIL, _WINDOW, _WINDOWS = 8 << 20, 24 << 20, 1 << 16, 256
"""Bytes of a file of lines that are read whole at its two ends, and the samples between them: 48 MiB in all, a second of parsing. A run of
90 days that writes 3 kB every 10 s has 2.3 GB."""
LONGEST_LINE = 4 << 20
_LARGEST_DOCUMENT = 64 << 20
_MOST_NAMES = 200_000
_LARGEST_ARCHIVE = 1 << 30  # bytes of all members


class RunFiles(Protocol):
    """Files by their path relative to the run's folder."""

    @property
    def label(self) -> str:
        """The path that the user gave."""

    @property
    def folder(self) -> Path | None:
        """The run's folder; None for an archive."""

    def names(self) -> Sequence[str]:
        """All paths, sorted."""

    def size(self, name: str) -> int:
        """Bytes of a file as it can be read here; -1 if there is none."""

    def size_in_run(self, name: str) -> int:
        """Bytes of a file in the run; -1 if there is none. A bundle knows it of files that it does not have."""

    def sha256(self, name: str) -> str:
        """What identifies the bytes of a file in the run: equal for equal bytes of this run, empty if it is not known or the file is too
        large. In a bundle it is a pseudonym, as is every other hash there."""

    def open(self, name: str) -> BinaryIO:
        """A seekable file. Raises `OSError` if there is none."""


def open_run(path: Path) -> RunFiles:
    """The files of a run's folder or of a bundle. Raises `UserError` if it is neither."""
    if path.is_dir():
        return FolderFiles(path)
    if not path.exists():
        raise UserError(f"{path} does not exist; give the folder of a run, such as runs/NAME, or a bundle that lmworks bundle has written")
    return BundleFiles(path)


class FolderFiles:
    """The files of a folder. Symbolic links that lead out of it are not followed."""

    def __init__(self, path: Path) -> None:
        self.label, self.folder = str(path), path
        self._root = Path(os.path.realpath(path))

    def names(self) -> Sequence[str]:
        found: list[str] = []
        for place, folders, files in os.walk(self._root):
            folders.sort()
            found += [os.path.relpath(os.path.join(place, name), self._root) for name in files]
            if len(found) > _MOST_NAMES:
                break
        return sorted(found[:_MOST_NAMES])

    def size(self, name: str) -> int:
        try:
            return self._path(name).stat().st_size
        except OSError:
            return -1

    def size_in_run(self, name: str) -> int:
        return self.size(name)

    def sha256(self, name: str) -> str:
        try:
            with self.open(name) as handle:
                return hashlib.sha256(handle.read()).hexdigest() if self.size(name) <= _LARGEST_DOCUMENT else ""
        except OSError:
            return ""

    def open(self, name: str) -> BinaryIO:
        return open_regular(self._path(name))

    def _path(self, name: str) -> Path:
        path = Path(os.path.realpath(self._root / name))  # of a loop, a path that cannot be opened
        if not path.is_relative_to(self._root):
            raise FileNotFoundError(name)
        return path


class BundleFiles:
    """The members of an archive of `lmworks bundle`, read in memory."""

    def __init__(self, path: Path) -> None:
        self.label, self.folder = str(path), None
        try:
            self._archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
            raise UserError(f"{path} is neither the folder of a run nor a bundle that lmworks bundle has written") from None
        members = self._archive.infolist()
        if len(members) > _MOST_NAMES or sum(member.file_size for member in members) > _LARGEST_ARCHIVE:
            raise UserError(f"{path} is larger than any bundle that lmworks writes, and was not opened")
        self._members = {member.filename: member for member in members if not member.is_dir()}
        self._listed: dict[str, int] = {}
        index = read_document(self, INDEX)
        listed, hashes = index.get("files"), index.get("sha256")
        self._hashes = hashes if isinstance(hashes, dict) else {}
        listed = listed if isinstance(listed, dict) else {}
        self._listed = {name: size for name, size in listed.items() if isinstance(size, int) and 0 <= size < 1 << 60}

    def names(self) -> Sequence[str]:
        """The files of the run, of which the archive has some."""
        return sorted(self._listed.keys() | self._members.keys())

    def size(self, name: str) -> int:
        return self._members[name].file_size if name in self._members else -1

    def size_in_run(self, name: str) -> int:
        return self._listed.get(name, -1)

    def sha256(self, name: str) -> str:
        return str(self._hashes.get(name, ""))

    def open(self, name: str) -> BinaryIO:
        if name not in self._members:
            raise FileNotFoundError(name)
        try:
            return self._archive.open(self._members[name])  # type: ignore[return-value]
        except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:  # damaged, encrypted, another compression
            raise OSError(f"{self.label}: {name} cannot be read: {error}") from error


def read_document(files: RunFiles, name: str) -> Json:
    """A JSON object; empty if the file is missing, damaged, too large or something else."""
    try:
        if files.size(name) > _LARGEST_DOCUMENT:
            return {}
        with files.open(name) as handle:
            found = json.loads(read_at_most(handle, _LARGEST_DOCUMENT))
    except (OSError, ValueError, RecursionError, zipfile.BadZipFile, EOFError):
        return {}
    return found if isinstance(found, dict) else {}


def read_lines(files: RunFiles, name: str) -> tuple[list[Json], int]:
    """The JSON objects of a file of lines in their order, and the number of lines that are none. An incomplete last line does not count.
    Of a file above `_HEAD + _TAIL + _WINDOWS * _WINDOW` bytes, the two ends and samples."""
    found: list[Json] = []
    unreadable = 0
    try:
        with files.open(name) as handle:
            for text in _sampled(handle, files.size(name)):
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict):
                    found.append(record)
                else:
                    unreadable += 1
    except (OSError, zipfile.BadZipFile, EOFError):
        pass
    return found, unreadable


def _sampled(handle: BinaryIO, size: int) -> Iterator[bytes]:
    if size <= _HEAD + _TAIL + _WINDOWS * _WINDOW:
        yield from _complete(handle, 0, size)
        return
    yield from _complete(handle, 0, _HEAD)
    span = (size - _HEAD - _TAIL) // _WINDOWS
    for number in range(_WINDOWS):
        yield from _complete(handle, _HEAD + number * span, _WINDOW)
    yield from _complete(handle, size - _TAIL, _TAIL)


def _complete(handle: BinaryIO, start: int, length: int) -> Iterator[bytes]:
    """The complete lines that begin in a range, except one that began before it."""
    handle.seek(max(start - 1, 0))
    if start:
        handle.readline(LONGEST_LINE)
    left = length
    while left > 0:
        text = handle.readline(LONGEST_LINE)
        if not text.endswith(b"\n"):
            return
        left -= len(text)
        if text.strip():
            yield text
