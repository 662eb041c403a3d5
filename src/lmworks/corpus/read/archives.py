"""Archives (zip, tar), read member by member in a process with limits. Nothing is unpacked to disk.

Reads archives (zip, tar) for `lmworks.corpus.read.archives`, in a process with limits. It imports little, so that it starts
quickly.
"""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from tarfile import EmptyHeaderError, EOFHeaderError, InvalidHeaderError  # type: ignore[attr-defined]  # not in its stubs
from typing import Any, NamedTuple, Self

from lmworks.corpus.read.formats import Member
from lmworks.corpus.read.listing import File
from lmworks.corpus.read.opening import (
    ALWAYS_ALLOWED,
    MAX_EXPANSION,
    DamagedFile,
    DecompressionBomb,
    ExpansionLimit,
    decompress,
    open_binary,
)
from lmworks.corpus.read.part import Item, printable, quarantined
from lmworks.errors import UserError
from lmworks.io.urls import connection_errors
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

OPEN, NEXT, READ = b"open", b"next", b"read"
GIVEN, BOMB, DAMAGED, LOST, REFUSED = b"+", b"bomb ", b"damaged ", b"lost ", b"refused "
_PIECE = 1 << 24  # bytes of an unread member that are skipped in one call
_LARGEST_HEADER = 1 << 20  # of a tar member; the largest in practice hold extended attributes
# raised by zipfile and tarfile for invalid numbers and names
_CONFUSED = (ValueError, LookupError, ArithmeticError, RuntimeError, TypeError, AttributeError, struct.error)


class _MemberEntry(NamedTuple):
    """A member with the stream of its content, or the `reason` why it has none."""

    name: str
    size: int
    stream: Any = None
    reason: str = ""
    text: str = ""


class Unpacker:
    """Opens archives one after another, and returns the content of their members one after another.

    Requests: `open SIZE PATH` (size 0 if unknown); `next` returns the next member as JSON, `null` if more of the current one must be
    skipped, nothing after the last; `read N` returns at most N bytes of it. A response is GIVEN and the data, or a kind of error and its
    text.
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        self._members: Iterator[_MemberEntry | None] = iter(())
        self._stream: Any = None

    def __call__(self, request: bytes) -> bytes:
        verb, _, what = request.partition(b" ")
        try:
            if verb == OPEN:
                size, _, path = what.partition(b" ")
                return GIVEN + self._open(int(size), os.fsdecode(path))
            return GIVEN + (self._next() if verb == NEXT else self._stream.read1(int(what)))
        except UserError as error:
            return REFUSED + str(error).encode()
        except (DecompressionBomb, MemoryError) as error:
            return BOMB + (str(error) or "needs too much memory").encode("utf-8", "replace")
        except _CONFUSED as error:
            return DAMAGED + f"{type(error).__name__}: {error}".encode("utf-8", "replace")
        except Exception as error:
            lost = isinstance(error, connection_errors()) or getattr(error, "errno", None) is not None
            return (LOST if lost else DAMAGED) + (str(error) or type(error).__name__).encode("utf-8", "replace")

    def _open(self, size: int, path: str) -> bytes:
        self._opened.close()
        stream, raw = self._opened.enter_context(open_binary(path, seek=path.lower().endswith(".zip")))
        self._members = _members(_zip(stream, size) if path.lower().endswith(".zip") else _tar(stream, raw, size))
        return b""

    def _next(self) -> bytes:
        for found in self._members:
            if found is None:
                return b"null"
            self._stream = found.stream
            return json.dumps([found.name, found.size, found.reason, found.text]).encode()
        return b""


def _members(found: Iterator[_MemberEntry | None]) -> Iterator[_MemberEntry | None]:
    """Quarantine names that lead out of the archive and names that occurred before."""
    seen: set[str] = set()
    for member in found:
        if member is None or member.reason:
            yield member
        elif not member.name or member.name.startswith(("/", "\\")) or ".." in member.name.replace("\\", "/").split("/"):
            yield _MemberEntry(member.name, 0, None, "unsafe_name", member.name)
        elif member.name in seen:
            yield _MemberEntry(member.name, 0, None, "duplicate_member")
        else:
            seen.add(member.name)
            yield member


def _zip(stream: Any, size: int) -> Iterator[_MemberEntry]:
    with zipfile.ZipFile(stream) as archive:
        infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
        size = size or stream.seek(0, 2)
        expansion = ExpansionLimit(lambda: size)
        expansion.add(sum(info.file_size for info in infos))
        for info in infos:
            if info.flag_bits & 1:
                yield _MemberEntry(info.filename, info.compress_size, None, "encrypted")
                continue
            try:
                with archive.open(info) as opened:
                    yield _MemberEntry(info.filename, info.compress_size, decompress(opened, info.filename, expansion))
            except (zipfile.BadZipFile, zlib.error, EOFError, *_CONFUSED) as error:
                yield _MemberEntry(info.filename, info.compress_size, None, "damaged_member", str(error))


class _Header(tarfile.TarInfo):
    """A header that is checked before tarfile reads what it declares. Behind the first member tarfile takes one that is damaged, and the
    end of the file, for the end of the archive.
    """

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Self:
        try:
            info = super().fromtarfile(tarfile)
        except EOFHeaderError:
            tarfile.is_whole = True
            raise
        except EmptyHeaderError:
            if tarfile.offset and not tarfile.is_whole:
                raise DamagedFile("it ends without an end mark, so that members may lack") from None
            raise
        tarfile.is_whole = False
        return info

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
        if buf and len(buf) < tarfile.BLOCKSIZE:
            raise DamagedFile("it breaks off in the header of a member")
        try:
            info = super().frombuf(buf, encoding, errors)
        except InvalidHeaderError as error:
            raise DamagedFile(f"the header of a member is damaged ({error}); what follows in it is not read") from None
        if info.size < 0:
            raise DamagedFile("a member of negative size")
        special = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
        if info.type in special and info.size > _LARGEST_HEADER:
            raise DecompressionBomb(f"has a header of {info.size:,} bytes")
        return info


def _tar(stream: Any, raw: Any, size: int) -> Iterator[_MemberEntry | None]:
    expansion = ExpansionLimit(lambda: size or raw.tell())
    # an archive may follow the end mark of another, as after cat
    with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Header, ignore_zeros=True) as archive:
        while info := archive.next():
            archive.members.clear()  # type: ignore[attr-defined]  # otherwise it keeps them all
            if not 0 <= info.size <= max(ALWAYS_ALLOWED, MAX_EXPANSION * size if size else info.size):
                raise DecompressionBomb(f"has a member of {info.size:,} bytes")
            if info.isreg() or info.type not in tarfile.SUPPORTED_TYPES:
                opened = archive.extractfile(info)
                assert opened is not None, "it has content"
                if info.isreg():
                    yield _MemberEntry(info.name, info.size, decompress(opened, info.name, expansion))
                while opened.read(_PIECE):
                    yield None


_TARS = (".tar", ".tgz", ".tbz2", ".txz", ".tzst", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
ARCHIVES = (".zip", *_TARS)
_SECONDS, _MEMORY = 60.0, 2 << 30
_CHUNK = 1 << 20
_ERRORS: dict[bytes, type[Exception]] = {
    BOMB: DecompressionBomb,
    DAMAGED: DamagedFile,
    LOST: ConnectionError,
    REFUSED: UserError,
}

_idle: list[LimitedProcess] = []  # processes without an open archive


def is_archive(path: str) -> bool:
    """Whether the name is that of an archive."""
    return path.lower().endswith(ARCHIVES)


def members(file: File) -> Iterator[Member | Item]:
    """The files in an archive, each open until the next is requested. A member that cannot be opened is an item with the reason.

    A name that leads out of the archive, a repeated name, and an encrypted or damaged member affect that member only. Links and devices are
    skipped. Raises Bomb, Damaged, ConnectionError and UserError, and so do the streams of the members.
    """
    unpacker = _idle.pop() if _idle else LimitedProcess("lmworks.corpus.read.archives:Unpacker", _SECONDS, _MEMORY)
    try:
        path = file.path if "://" in file.path else os.path.abspath(file.path)
        _request(unpacker, OPEN, b"%d %s" % (file.size, os.fsencode(path)))
        while answer := _request(unpacker, NEXT):
            if found := json.loads(answer):
                name, size, reason, text = found
                if reason:
                    yield quarantined(reason, f"{printable(file.path)}/{printable(name)}", text, size)
                else:
                    yield Member(name, size, io.BufferedReader(_Content(unpacker), _CHUNK))
    finally:
        _idle.append(unpacker)


class _Content(io.RawIOBase):
    """The content of the member that is open in the process."""

    def __init__(self, unpacker: LimitedProcess) -> None:
        self._unpacker = unpacker

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = _request(self._unpacker, READ, b"%d" % len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _request(unpacker: LimitedProcess, verb: bytes, what: bytes = b"") -> bytes:
    try:
        answer = unpacker(verb + b" " + what)
    except ProcessDied as ended:
        raise DecompressionBomb(f"unpacking it {ended}") from None
    except CallFailed as failed:
        if str(failed).startswith("MemoryError"):
            raise DecompressionBomb("unpacking it takes too much memory") from None
        raise DamagedFile(str(failed)) from None
    if answer.startswith(GIVEN):
        return answer.removeprefix(GIVEN)
    kind, _, text = answer.partition(b" ")
    raise _ERRORS[kind + b" "](text.decode("utf-8", "replace"))
