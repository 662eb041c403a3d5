"""Atomic files: written to a temporary name, synced, and renamed (promise 4)."""

from __future__ import annotations

import csv
import errno
import fcntl
import glob
import gzip
import hashlib
import json
import os
import re
import shlex
import shutil
import stat
import struct
import tempfile
import time
import tokenize
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from io import BufferedIOBase, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from blake3 import blake3

from lmworks.errors import UserError
from lmworks.host import machine

_HELD = ".held"  # in a temporary folder; its process holds the lock of it
_POLL = 1.0  # seconds between two looks at a lock
_FRESH = 60.0  # seconds in which a temporary folder gets its lock, on the slowest file system
_MOST_JSON = 1 << 29  # bytes; a tokenizer.json has 35 MB
_PIECE = 1 << 18
# Raised by file parsers for unexpected contents.
_CONFUSED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")  # the whole message of numpy
_ASIDE = re.compile(r"/\.([^/]+)\.\d+\.part(?![\w.])")  # of `atomic_path` and `whole_directory`
_DAMAGE = (*_CONFUSED, EOFError, struct.error, zlib.error, csv.Error, gzip.BadGzipFile, tokenize.TokenError)  # the last by np.load


def sync_directory(path: Path) -> None:
    """Make renames inside `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_full_disk(error: BaseException | str) -> bool:
    """Whether an error, or its text, says that a disk is full or that its quota is used up.

    Libraries lose the number of the error: safetensors, `shutil.copytree` and programs of other environments keep its text, and
    `numpy.ndarray.tofile` keeps only how much was written.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    text = str(error)
    return any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT)) or (
        isinstance(error, OSError) and _SHORT_WRITE.fullmatch(text) is not None
    )


def final_name(path: Path | str) -> str:
    """A path, or a text with paths, with the names that directories get when they are finished."""
    return _ASIDE.sub(r"/\1", str(path))


def full_disk(path: Path) -> UserError:
    """The error for a full disk, when what was unfinished in `path` has been removed."""
    there = next(one for one in (path, *path.absolute().parents) if one.exists())
    kind, free = machine.file_system(there), machine.free_disk(there) / 1e6
    return UserError(
        f"the disk of {final_name(path)} is full ({kind}, {free:,.1f} MB free without the unfinished file): free some space and run the "
        "same command again; nothing finished was lost"
    )


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Convert an error about a full disk to a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_full_disk(error):
            raise full_disk(path) from error
        raise


@contextmanager
def explain_os_errors(path: Path) -> Iterator[None]:
    """Convert errors about a full disk or missing permissions to a `UserError`."""
    try:
        with explain_full_disk(path):
            yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot write {path}: {error.strerror}; make its folder writable, or write it elsewhere") from error
        if isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError) and (blocked := _in_the_way(error, path)):
            raise UserError(f"cannot write {path}: {blocked}: {error.strerror}; remove that, or write elsewhere") from error
        raise


def _in_the_way(error: OSError, path: Path) -> str:
    """The one of `path` and the folders above it that an error is about; empty if it is about something else."""
    own = {str(one) for one in (path, *path.parents)}
    return next((str(name) for name in (error.filename2, error.filename) if str(name) in own), "")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; on success the file is synced and renamed to `path`.

    On failure the temporary file is removed and `path` is unchanged.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield aside
            with open(aside, "rb") as handle:
                os.fsync(handle.fileno())
            os.replace(aside, path)
            sync_directory(path.parent)
        finally:
            aside.unlink(missing_ok=True)


@contextmanager
def whole_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory beside `path` to write to and to verify; on success it takes the place of `path`, which may be a directory.

    On failure it is removed and `path` is unchanged, and so it is if the caller has moved the new directory elsewhere. The former directory
    is removed only when the new one is in place. What processes that are gone have left beside `path` is removed.
    """
    path = Path(path).resolve()
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with explain_os_errors(path):
        aside.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path)
        try:
            aside.mkdir()
            yield aside
            if aside.is_dir():
                replace_directory(aside, path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def replace_directory(new: Path, path: Path) -> None:
    """Rename the directory `new` to `path` on the same file system. A directory that is there is removed after that, and keeps its name if
    it fails."""
    former = path.with_name(f".{path.name}.{os.getpid()}.former")
    shutil.rmtree(former, ignore_errors=True)
    if not path.is_dir():
        os.rename(new, path)
    else:
        try:
            os.rename(path, former)
            os.rename(new, path)
        except BaseException:
            if former.exists() and not path.exists():
                os.rename(former, path)
            raise
    sync_directory(path.parent)
    shutil.rmtree(former, ignore_errors=True)


def _tidy(path: Path) -> None:
    """Remove what killed processes have left of `path`: unfinished directories and former ones. A former one whose successor is not in
    place gets its name back."""
    ours = re.compile(rf"\.{re.escape(path.name)}\.(\d+)\.(part|former)")
    for left in path.parent.iterdir():
        found = ours.fullmatch(left.name)
        # what has our own id is of an earlier process
        if not found or not left.is_dir() or (int(found[1]) != os.getpid() and machine.is_running(int(found[1]))):
            continue
        if found[2] == "former" and not path.exists():
            os.rename(left, path)
        else:
            shutil.rmtree(left, ignore_errors=True)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name of a file that is never changed, or a copy where the file system has no such links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def link_tree(source: Path, target: Path) -> None:
    """Make `target` a tree of hard links to the files of `source`, in place of what was there. It appears whole or not at all."""
    with whole_directory(target) as aside:
        for folder, _, names in os.walk(source):
            place = aside / Path(folder).relative_to(source)
            place.mkdir(exist_ok=True)
            for name in names:
                link_or_copy(Path(folder) / name, place / name)


def write_bytes(path: Path, data: bytes, private: bool = False) -> None:
    """Replace `path` with `data`, atomically. A `private` file is readable by its owner only, from the start."""
    with atomic_path(path) as aside:
        aside.unlink(missing_ok=True)  # left by a killed process with the same id
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666), "wb") as handle:
            handle.write(data)


def write_text(path: Path, text: str, private: bool = False) -> None:
    """Replace `path` with `text` in UTF-8, atomically."""
    write_bytes(path, text.encode("utf-8"), private)


def rendered(package: str, template: str, **values: Any) -> str:
    """A file from a template of a package (Jinja). The filter `word` makes any text one word of a POSIX shell."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters["word"] = lambda text: shlex.quote(text or "")
    return environment.from_string(resources.files(package).joinpath(template).read_text(encoding="utf-8")).render(values)


def write_json(path: Path, value: Any, private: bool = False) -> None:
    """Replace `path` with `value` as readable JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", private)


@contextmanager
def explain_damage(path: Path, cure: str = "get the file again from its origin") -> Iterator[None]:
    """Convert any error of reading a malformed file to a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except _DAMAGE as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is damaged, or not what its name says ({type(error).__name__}: {why}); {cure}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises `UserError` if it is a directory, a pipe or a device, without blocking on any of them."""
    handle = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(handle.fileno()).st_mode):
        handle.close()
        raise UserError(f"{path} is not a regular file; put the file there, or remove it")
    return handle


def read_regular(path: Path, most: int = _MOST_JSON) -> bytes:
    """The bytes of a file. Raises `UserError` if it is no regular file or longer than `most` bytes."""
    with open_regular(Path(path)) as handle:
        if (size := os.fstat(handle.fileno()).st_size) > most:
            raise UserError(f"{path} has {size:,} bytes, too many for what it should be; get the file again from its origin")
        return handle.read()


def read_at_most(stream: BinaryIO | BufferedIOBase, most: int) -> bytes:
    """What is left of a stream, up to `most` bytes. Memory follows what there is: a buffered `read(most)` reserves all of `most` first."""
    found = BytesIO()
    while (left := most - found.tell()) > 0 and (piece := stream.read(min(left, _PIECE))):
        found.write(piece)
    return found.getvalue()


_DAMAGED = "get a file of yours again from where it came; one that lmworks made can be deleted and is made again"


def read_json(path: Path, most: int = _MOST_JSON) -> Any:
    """Read a JSON file; a `UserError` names the file if it is missing, broken, no file, or longer than `most` bytes."""
    try:
        return json.loads(read_regular(path, most).decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a number with too many digits, too deep nesting
        raise UserError(f"{path} is not readable JSON ({error}); {_DAMAGED}") from None


def cache_directory(kind: str) -> Path:
    """The folder of what can be made again: $LMWORKS_CACHE/KIND, otherwise ~/.cache/lmworks/KIND. Raises `UserError` without a home."""
    if base := os.environ.get("LMWORKS_CACHE"):
        return Path(base) / kind
    try:
        return Path.home() / ".cache" / "lmworks" / kind
    except RuntimeError:  # as in a container that is started with a user ID of its own
        raise UserError(
            f"there is no folder for {kind}: HOME is not set, and user ID {os.geteuid()} has no home folder; set LMWORKS_CACHE to a folder "
            "for files that can be made again, or HOME"
        ) from None


def _private_bases() -> Iterator[Path]:
    """Where `private_folder` looks, best first. Raises OSError at the second if no folder for temporary files is writable."""
    yield Path("/dev/shm")
    yield Path(tempfile.gettempdir())


def private_folder() -> Path:
    """A folder in memory of this machine, or else among its temporary files, that only this user can enter. Raises OSError if there is
    none: anybody can take a name there first."""
    for base in _private_bases():
        path = base / f"lmworks-{os.geteuid()}"
        with suppress(OSError):
            path.mkdir(mode=0o700, exist_ok=True)
            found = path.lstat()  # a link is refused too
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
                return path
    raise PermissionError(errno.EACCES, "no folder of this user alone", f"lmworks-{os.geteuid()}")


def try_lock(fd: int) -> bool:
    """Lock an open file until it is closed, unless a process holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def only_one(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock beside a file or directory, after waiting for another process that holds it."""
    with explain_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    told = False
    try:
        while not try_lock(fd):
            if not told:
                on_wait()
            told = True
            time.sleep(_POLL)
        yield
    finally:
        os.close(fd)


@contextmanager
def temporary_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder PREFIX... in `parent`, which is removed at the end of the block, with those that killed processes have left there."""
    for left in parent.glob(f"{glob.escape(prefix)}*"):
        with suppress(OSError):
            if _is_abandoned(left):
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name, open(Path(name) / _HELD, "wb") as held:
        try_lock(held.fileno())
        yield Path(name)


def _is_abandoned(folder: Path) -> bool:
    """Whether no process holds a temporary folder. One that was made just now is not locked yet."""
    if not (folder / _HELD).exists():
        return time.time() - folder.stat().st_mtime > _FRESH
    with open(folder / _HELD, "rb") as held:
        return try_lock(held.fileno())


def blake3_of(handle: Any, advance: Callable[[int], None] | None = None) -> str:
    """Hex BLAKE3 of the rest of an open binary file."""
    hasher, block = blake3(), memoryview(bytearray(1 << 20))
    while count := handle.readinto(block):
        hasher.update(block[:count])
        if advance is not None:
            advance(count)
    return hasher.hexdigest()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
