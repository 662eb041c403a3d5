"""Archives of files (zip, tar), read member by member where they lie. Nothing is ever unpacked to disk."""

from __future__ import annotations

import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

from lmworks.corpus.items import Item, broken, shown
from lmworks.corpus.layouts import Member
from lmworks.corpus.opening import HARMLESS, MOST_EXPANSION, Bomb, Damaged, decompress, open_binary
from lmworks.corpus.readers.listing import File
from lmworks.errors import UserError

_TARS = (".tar", ".tgz", ".tbz2", ".txz", ".tzst", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
ARCHIVES = (".zip", *_TARS)
# what zipfile and tarfile make of numbers and names that cannot be
_CONFUSED = (ValueError, LookupError, ArithmeticError, RuntimeError, TypeError, AttributeError, struct.error)


def is_archive(path: str) -> bool:
    """By its name."""
    return path.endswith(ARCHIVES)


def members(file: File) -> Iterator[Member | Item]:
    """The files in an archive, each open until the next is asked for; what cannot be opened is an item with its reason.

    A name that leads out of the archive, one that was there before, and an encrypted or damaged member cost that member only. Links and
    devices are passed over.
    """
    try:
        yield from _members(file)
    except UserError:
        raise
    except _CONFUSED as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None


def _members(file: File) -> Iterator[Member | Item]:
    seen: set[str] = set()
    with open_binary(file.path, seek=file.path.endswith(".zip")) as (stream, _):
        for member in _zip(stream, file) if file.path.endswith(".zip") else _tar(stream):
            if isinstance(member, Item):
                yield member
                continue
            origin = f"{shown(file.path)}/{shown(member.name)}"
            if not member.name or member.name.startswith(("/", "\\")) or ".." in member.name.replace("\\", "/").split("/"):
                yield broken("unsafe_name", origin, member.name, 0)
            elif member.name in seen:
                yield broken("duplicate_member", origin, "", 0)
            else:
                seen.add(member.name)
                yield member


def _zip(stream: Any, file: File) -> Iterator[Member | Item]:
    with zipfile.ZipFile(stream) as archive:
        infos = [info for info in archive.infolist() if not info.filename.endswith("/")]
        whole = sum(info.file_size for info in infos)
        if whole > HARMLESS and whole > MOST_EXPANSION * (file.size or stream.seek(0, 2)):
            raise Bomb(f"would expand to {whole:,} bytes")
        for info in infos:
            origin = f"{shown(file.path)}/{shown(info.filename)}"
            if info.flag_bits & 1:
                yield broken("encrypted", origin, "", info.compress_size)
                continue
            try:
                with archive.open(info) as opened:
                    yield Member(info.filename, info.compress_size, decompress(opened, info.filename))
            except (zipfile.BadZipFile, zlib.error, EOFError, *_CONFUSED) as error:
                yield broken("damaged_member", origin, str(error), info.compress_size)


def _tar(stream: Any) -> Iterator[Member]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for info in archive:
            if info.isreg() and (opened := archive.extractfile(info)):
                yield Member(info.name, info.size, decompress(opened, info.name))
