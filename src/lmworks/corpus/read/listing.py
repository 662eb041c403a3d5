"""Lists the files of a source: a file, a directory, a glob or an fsspec URL. Only names, sizes and times are read."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lmworks.corpus.read.opening import COMPRESSED
from lmworks.errors import Unavailable, UserError
from lmworks.io.masking import mask
from lmworks.io.urls import explain_storage_errors, filesystem, hide
from lmworks.recipe.schema.corpus import Source

LEADS_OUT = "a link that leads out of its source"
UNLISTED = "a folder that cannot be listed"
_MOST_ENDINGS, _MOST_SUFFIXES = 5, 8  # that a line names
SKIPPED_DIRECTORIES = {"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"}


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source: its path (or URL, or name inside a wheel), its bytes, and a string that changes with its contents (time or
    hash).
    """

    path: str
    size: int
    changed: str = ""

    @property
    def leads_out(self) -> bool:
        """Whether it is a link to a target outside its source, which is not followed."""
        return self.changed == LEADS_OUT

    @property
    def unread(self) -> str:
        """The reason why it is not read: `leads_out`, or `unlisted_folder` for a folder whose files are not known; empty for a file."""
        return "leads_out" if self.leads_out else "unlisted_folder" if self.changed.startswith(UNLISTED) else ""


def find_files(source: Source, suffixes: tuple[str, ...] = (), archives: tuple[str, ...] = ()) -> list[File]:
    """Files of a source at its `path` (file, directory, glob or fsspec URL), sorted by path.

    Inside a directory only names with one of `suffixes` are included, compressed or not (all names if empty), and likewise for a glob that
    ends in `*`, which names no ending; hidden and tool directories are skipped. `include` names members of files that end in `archives`, so
    that these are listed whatever it is, unless it ends so itself. A link inside it to a target outside, and a folder inside it that
    cannot be listed, are files that are `unread`. Raises Unavailable if there are no files.
    """
    assert source.path is not None, "checked by the recipe"
    files = _list(source, lambda name: has_extension(name, suffixes), () if ends_in(source.include, archives) else archives)
    if not files:
        matching = f" matching {source.include}" if source.include else f" ending in {', '.join(suffixes[:6])}" if suffixes else ""
        others = passed_over(source, suffixes)
        if not others and not os.path.isdir(os.path.expanduser(source.path)):  # there is nothing that could have an ending
            matching = ""
        raise Unavailable(f"no files at {source.path}{matching}; {others or f'check the path{working_directory_hint(source.path)}'}")
    return files


def passed_over(source: Source, suffixes: tuple[str, ...]) -> str:
    """The files of a folder that `find_files` leaves out for their names, counted by ending, and what to do; empty if there are none."""
    if not suffixes or not _names_no_ending(_plain(source)):
        return ""
    files = [file for file in _list(source, lambda name: not has_extension(name, suffixes)) if not file.unread]
    if not files:
        return ""
    endings = Counter(os.path.splitext(file.path)[1].lower() or "no ending" for file in files)
    counts = ", ".join(f"{count:,} {ending}" for ending, count in endings.most_common(_MOST_ENDINGS))
    more = f", {len(endings) - _MOST_ENDINGS} other endings" if len(endings) > _MOST_ENDINGS else ""
    what = f"{len(files):,} {'files' if len(files) > 1 else 'file'} with other endings not read"
    reads = ", ".join(suffixes[:_MOST_SUFFIXES]) + (", ..." if len(suffixes) > _MOST_SUFFIXES else "")
    return (
        f"{what} ({counts}{more}; such as {mask(files[0].path)}): in a folder kind {source.kind} reads {reads}; name others with include, "
        "or make them a source of their own kind"
    )


def _list(source: Source, by_ending: Callable[[str], bool], archives: tuple[str, ...] = ()) -> list[File]:
    path = _plain(source)
    ending = by_ending if _names_no_ending(path) else lambda name: True

    def included(name: str) -> bool:
        return ending(name) and (matches(name, source.include) or ends_in(name, archives))

    found = filter(lambda file: included(file.path), _list_remote(path)) if "://" in path else _list_local(path, included)
    return sorted(found, key=lambda file: file.path)


def matches(name: str, pattern: str | None) -> bool:
    """Whether `include` names a file or member, by its path or its name; it names all if it is None."""
    return pattern is None or fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(os.path.basename(name), pattern)


def ends_in(name: str | None, suffixes: tuple[str, ...]) -> bool:
    """Whether a name or pattern ends in one of these, in small or capital letters."""
    return name is not None and name.lower().endswith(suffixes)


def _plain(source: Source) -> str:
    """The path; without file://, since fsspec follows all links of a local folder, and lists linked folders as files."""
    assert source.path is not None
    return re.sub("^(?:file|local)://", "", source.path)


def _names_no_ending(path: str) -> bool:
    """Whether a path stands for whatever lies in a folder: it is none of a file, and no glob with an ending."""
    last = path.rstrip("/").rpartition("/")[2]
    if "://" in path and not re.search(r"[*?[]", path):
        system, inner = filesystem(path, "path")
        with explain_storage_errors(path, "path"):
            return bool(system.isdir(inner))
    return os.path.isdir(path) or (bool(last) and set(last) <= {"*"})


def working_directory_hint(path: str) -> str:
    """A hint for errors about a relative path: the directory where it starts. Empty for other paths."""
    return "" if "://" in path or os.path.isabs(path) else f", which starts at the working directory {os.getcwd()}"


def has_extension(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a file name, compressed or not, has one of these extensions, in small or capital letters; true if there are none."""
    name = plain = name.lower()
    for ending in COMPRESSED:
        plain = plain.removesuffix(ending)
    suffixes = tuple(suffix.lower() for suffix in suffixes)
    return not suffixes or name.endswith(suffixes) or plain.endswith(suffixes)


def _list_local(path: str, included: Callable[[str], bool]) -> Iterator[File]:
    if os.path.isdir(path):
        yield from _walk(path, included)
    elif os.path.isfile(path):
        if included(path):
            yield from filter(None, [local_file(path)])
    elif mark := re.search(r"[*?[]", path):
        pattern = _pattern(path)
        deepest = None if "**" in path else os.path.normpath(path).count("/")
        below = folder_of_glob(path, mark.start())
        found = _walk(below, lambda name: bool(pattern.fullmatch(os.path.normpath(name))) and included(name), deepest)
        yield from (file for file in found if file.unread != "unlisted_folder" or _reaches(path, file.path))


def unlisted_folders(path: str) -> list[File]:
    """The folders that cannot be listed below a directory, or where a glob reaches. Raises `OSError` if the directory itself is one."""
    return [file for file in _list_local(path, lambda name: False) if file.unread == "unlisted_folder"]


def _reaches(glob: str, folder: str) -> bool:
    """Whether a file below a folder may match a glob."""
    folder = os.path.normpath(folder)
    above = os.path.normpath(glob).split("/")[: folder.count("/") + 1]
    return "**" in glob or bool(_pattern("/".join(above)).fullmatch(folder))


def folder_of_glob(path: str, first_mark: int) -> str:
    """The folder in which a glob starts: all before the path component with its first wildcard, which is at `first_mark`."""
    return path[:first_mark].rpartition("/")[0] or ("/" if path.startswith("/") else ".")


def local_file(path: str) -> File | None:
    """A file, or a broken link, which is quarantined when it is read; None for a pipe or a device."""
    try:
        status = os.stat(path)
    except OSError:
        return File(path, 0)
    return File(path, status.st_size, str(status.st_mtime_ns)) if stat.S_ISREG(status.st_mode) else None


def _walk(path: str, wanted: Callable[[str], bool], deepest: int | None = None) -> Iterator[File]:
    """Files below a directory whose names are wanted.

    Links to directories inside it are followed, and each directory is visited once; a link to a file inside it stands for a file only where
    that is not found by its own name. Links to targets outside it are not followed, because the author of the directory may point them
    anywhere. A folder that cannot be listed is a file by itself, unless it is the directory: then its error is raised.
    """
    root = os.path.realpath(path)
    seen: set[tuple[int, int]] = set()
    unlisted: list[File] = []

    def not_listed(error: OSError) -> None:
        if error.filename == path:
            raise error
        unlisted.append(File(error.filename, 0, f"{UNLISTED} ({error.strerror})"))

    def leads_out(name: str) -> bool:
        return os.path.islink(name) and lies_outside(name, root)

    def is_found_itself(link: str) -> bool:
        *above, last = os.path.relpath(os.path.realpath(link), root).split(os.sep)
        passed = last.startswith(".") or any(part.startswith(".") or part in SKIPPED_DIRECTORIES for part in above)
        return not passed and os.path.exists(link) and wanted(os.path.join(path, *above, last))

    for folder, folders, names in os.walk(path, onerror=not_listed, followlinks=True):
        if folder != path and leads_out(folder):
            folders.clear()
            yield File(folder, 0, LEADS_OUT)
            continue
        try:
            status = os.stat(folder)
        except OSError as error:  # removed meanwhile
            folders.clear()
            not_listed(error)
            continue
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        deep = deepest is not None and os.path.normpath(folder).count("/") >= deepest
        folders[:] = () if deep else sorted(name for name in folders if not name.startswith(".") and name not in SKIPPED_DIRECTORIES)
        for name in (os.path.join(folder, name) for name in names if not name.startswith(".")):
            if wanted(name) and not (os.path.islink(name) and not leads_out(name) and is_found_itself(name)):
                file = File(name, 0, LEADS_OUT) if leads_out(name) else local_file(name)
                if file is not None:
                    yield file
    yield from unlisted


def lies_outside(name: str, root: str) -> bool:
    """Whether a file or directory, or the target of a link to it, is not below `root`, a path without links."""
    return os.path.commonpath([root, os.path.realpath(name)]) != root


def _pattern(glob: str) -> re.Pattern[str]:
    """A glob as a regular expression: `*` and `?` match within a directory, `**` across directories, as in a shell."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^]/]+\])", os.path.normpath(glob))
    known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    made = [known.get(piece) or (f"[{'^' if piece[1] == '!' else ''}{piece[1:-1].lstrip('!')}]" if number % 2 else re.escape(piece))
            for number, piece in enumerate(pieces)]  # fmt: skip
    return re.compile("".join(made), re.DOTALL)


def _list_remote(path: str) -> list[File]:
    system, inner = filesystem(path, "path")
    with explain_storage_errors(path, "path"):
        try:
            if any(mark in inner for mark in "*?["):
                found = system.glob(inner, detail=True)
            elif system.isdir(inner):
                found = system.find(inner, detail=True)
            else:
                found = {inner: system.info(inner)}
        except FileNotFoundError:
            return []
        except ValueError as error:
            raise UserError(f"cannot read {mask(path)}: {error}") from None
    return [
        File(hide(system.unstrip_protocol(name)), int(info.get("size") or 0), str(_version(info)))
        for name, info in found.items()
        if info.get("type") != "directory"
    ]


def _version(info: dict[str, Any]) -> Any:
    """The property of a file that changes with its contents; each file system names it differently."""
    return next((info[key] for key in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "updated", "created") if info.get(key)), "")
