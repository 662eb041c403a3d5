"""Archives of files (zip, tar), read member by member where they lie, by a process with limits. Nothing is ever unpacked to disk."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from typing import Any

from lmworks.corpus.readers import unpacking
from lmworks.corpus.readers.document_formats import Member
from lmworks.corpus.readers.items import Item, broken, shown
from lmworks.corpus.readers.listing import File
from lmworks.corpus.readers.opening import Bomb, Damaged
from lmworks.errors import UserError
from lmworks.untrusted.limited_process import CallFailed, LimitedProcess, ProcessDied

_TARS = (".tar", ".tgz", ".tbz2", ".txz", ".tzst", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
ARCHIVES = (".zip", *_TARS)
_SECONDS, _MEMORY = 60.0, 2 << 30
_CHUNK = 1 << 20
_ERRORS: dict[bytes, type[Exception]] = {
    unpacking.BOMB: Bomb,
    unpacking.DAMAGED: Damaged,
    unpacking.LOST: ConnectionError,
    unpacking.REFUSED: UserError,
}

_idle: list[LimitedProcess] = []  # processes that have no archive open


def is_archive(path: str) -> bool:
    """By its name."""
    return path.endswith(ARCHIVES)


def members(file: File) -> Iterator[Member | Item]:
    """The files in an archive, each open until the next is asked for; what cannot be opened is an item with its reason.

    A name that leads out of the archive, one that was there before, and an encrypted or damaged member cost that member only. Links and
    devices are passed over. Raises Bomb, Damaged, ConnectionError and UserError, and so do the streams of the members.
    """
    unpacker = _idle.pop() if _idle else LimitedProcess("lmworks.corpus.readers.unpacking:Unpacker", _SECONDS, _MEMORY)
    try:
        path = file.path if "://" in file.path else os.path.abspath(file.path)
        _ask(unpacker, unpacking.OPEN, b"%d %s" % (file.size, os.fsencode(path)))
        while answer := _ask(unpacker, unpacking.NEXT):
            if found := json.loads(answer):
                name, size, reason, text = found
                if reason:
                    yield broken(reason, f"{shown(file.path)}/{shown(name)}", text, size)
                else:
                    yield Member(name, size, io.BufferedReader(_Content(unpacker), _CHUNK))
    finally:
        _idle.append(unpacker)


class _Content(io.RawIOBase):
    """The content of the member that the process has open."""

    def __init__(self, unpacker: LimitedProcess) -> None:
        self._unpacker = unpacker

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = _ask(self._unpacker, unpacking.READ, b"%d" % len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _ask(unpacker: LimitedProcess, verb: bytes, what: bytes = b"") -> bytes:
    try:
        answer = unpacker(verb + b" " + what)
    except ProcessDied as ended:
        raise Bomb(f"unpacking it {ended}") from None
    except CallFailed as failed:
        raise Damaged(str(failed)) from None
    if answer.startswith(unpacking.GIVEN):
        return answer.removeprefix(unpacking.GIVEN)
    kind, _, text = answer.partition(b" ")
    raise _ERRORS[kind + b" "](text.decode("utf-8", "replace"))
