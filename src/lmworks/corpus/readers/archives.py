"""Archives (zip, tar), read member by member in a process with limits. Nothing is unpacked to disk."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from typing import Any

from lmworks.corpus.readers import unpacking
from lmworks.corpus.readers.document_formats import Member
from lmworks.corpus.readers.items import Item, printable, quarantined
from lmworks.corpus.readers.listing import File
from lmworks.corpus.readers.opening import DamagedFile, DecompressionBomb
from lmworks.errors import UserError
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

_TARS = (".tar", ".tgz", ".tbz2", ".txz", ".tzst", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
ARCHIVES = (".zip", *_TARS)
_SECONDS, _MEMORY = 60.0, 2 << 30
_CHUNK = 1 << 20
_ERRORS: dict[bytes, type[Exception]] = {
    unpacking.BOMB: DecompressionBomb,
    unpacking.DAMAGED: DamagedFile,
    unpacking.LOST: ConnectionError,
    unpacking.REFUSED: UserError,
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
    unpacker = _idle.pop() if _idle else LimitedProcess("lmworks.corpus.readers.unpacking:Unpacker", _SECONDS, _MEMORY)
    try:
        path = file.path if "://" in file.path else os.path.abspath(file.path)
        _request(unpacker, unpacking.OPEN, b"%d %s" % (file.size, os.fsencode(path)))
        while answer := _request(unpacker, unpacking.NEXT):
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
        data = _request(self._unpacker, unpacking.READ, b"%d" % len(buffer))
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
    if answer.startswith(unpacking.GIVEN):
        return answer.removeprefix(unpacking.GIVEN)
    kind, _, text = answer.partition(b" ")
    raise _ERRORS[kind + b" "](text.decode("utf-8", "replace"))
