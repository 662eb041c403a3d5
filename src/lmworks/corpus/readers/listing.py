"""Finding the files of a source: a file, a directory, a glob or an fsspec URL. Only names, sizes and times are looked at."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmworks.corpus.items import Unavailable
from lmworks.corpus.opening import COMPRESSED, fsspec
from lmworks.errors import UserError
from lmworks.recipe.corpus import Source

_SKIPPED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"}


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


def fits(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file, compressed or not, has one of these endings; any will do if there are none."""
    plain = name
    for ending in COMPRESSED:
        plain = plain.removesuffix(ending)
    return not suffixes or name.endswith(suffixes) or plain.endswith(suffixes)


def _list_local(path: str, suffixes: tuple[str, ...]) -> list[File]:
    found: Iterator[str]
    if os.path.isdir(path):
        found = (name for name in _walk(path) if fits(name, suffixes))
    elif os.path.isfile(path):
        found = iter([path])
    elif mark := re.search(r"[*?[]", path):
        base, pattern = path[: mark.start()].rpartition("/")[0], _pattern(path)
        deepest = None if "**" in path else os.path.normpath(path).count("/")
        walked = _walk(base or ("/" if path.startswith("/") else "."), deepest)
        found = (name for name in walked if pattern.fullmatch(os.path.normpath(name)))
    else:
        found = iter(())
    return [file for file in map(local_file, found) if file is not None]


def local_file(path: str) -> File | None:
    """A file, also a link to nowhere, which is quarantined when it is read; None for a pipe or a device."""
    try:
        status = os.stat(path)
    except OSError:
        return File(path, 0)
    return File(path, status.st_size, str(status.st_mtime_ns)) if stat.S_ISREG(status.st_mode) else None


def _walk(path: str, deepest: int | None = None) -> Iterator[str]:
    """Files below a directory. Links to directories are followed, and each directory is entered once, however many links lead to it."""
    seen = set()
    for folder, folders, names in os.walk(path, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        deep = deepest is not None and os.path.normpath(folder).count("/") >= deepest
        folders[:] = () if deep else sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED_DIRECTORIES)
        yield from (os.path.join(folder, name) for name in names if not name.startswith("."))


def _pattern(glob: str) -> re.Pattern[str]:
    """`*` and `?` stay within a directory, `**` crosses them, as in a shell."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^]/]+\])", os.path.normpath(glob))
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = [known.get(piece) or (f"[{'^' if piece[1] == '!' else ''}{piece[1:-1].lstrip('!')}]" if number % 2 else re.escape(piece))
            for number, piece in enumerate(pieces)]  # fmt: skip
    return re.compile("".join(made), re.DOTALL)


def _list_remote(path: str, suffixes: tuple[str, ...]) -> list[File]:
    try:
        system, inner = fsspec().core.url_to_fs(path)
        if any(mark in inner for mark in "*?["):
            found = system.glob(inner, detail=True)
        elif system.isdir(inner):
            found = {name: info for name, info in system.find(inner, detail=True).items() if fits(name, suffixes)}
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
