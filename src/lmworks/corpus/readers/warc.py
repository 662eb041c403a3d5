"""Web archives: WARC files, plain or compressed, as crawlers write them, and WET files, which hold their text already."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from lmworks.corpus.items import Item, broken, decoded, shown
from lmworks.corpus.opening import open_binary
from lmworks.corpus.readers.extraction import Extractor
from lmworks.corpus.readers.guard import guarded
from lmworks.corpus.readers.listing import File, find
from lmworks.corpus.readers.part import Part, packed
from lmworks.errors import UserError
from lmworks.recipe.corpus import Source

FACTS = ("url", "date")
_PAGES = ("text/html", "application/xhtml+xml")


def parts(source: Source, part_bytes: int) -> list[Part]:
    """Each file is read from its start."""
    if find_spec("fastwarc") is None:
        raise UserError("reading WARC needs fastwarc: pip install 'lmworks[web]'")
    return list(packed(find(source, (".warc", ".wet")), part_bytes))


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    with Extractor("html") as extractor:
        for file in part.files:
            yield from guarded(_records(file, extractor, limit), file.path)


def _records(file: File, extractor: Extractor, limit: int) -> Iterator[Item]:
    """The pages of a file: what was answered (`response`) or turned into text (`conversion`); requests and metadata are no documents."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    kinds = WarcRecordType.response | WarcRecordType.resource | WarcRecordType.conversion
    with open_binary(file.path) as (stream, raw):
        before, number = 0, 0
        for number, record in enumerate(ArchiveIterator(stream, record_types=kinds, parse_http=True, stream_detect=False), start=1):
            data = record.reader.read(4 * limit + 1)
            consumed = raw.tell() - before
            before += consumed
            item = _page(record, data, f"{shown(file.path)}:{number}", consumed, extractor, limit)
            facts = {"url": record.headers.get("WARC-Target-URI"), "date": record.headers.get("WARC-Date")}
            yield replace(item, facts={name: shown(value) for name, value in facts.items() if value}) if item.reason is None else item
        if number == 0 and file.size:
            yield broken("damaged_file", shown(file.path), "it holds no record of a web page")


def _page(record: Any, data: bytes, origin: str, consumed: int, extractor: Extractor, limit: int) -> Item:
    if len(data) > 4 * limit:
        return broken("enormous", origin, data, consumed)
    if record.is_http:
        status, declared = record.http_headers.status_code, record.http_content_type
        if status != 200:
            return broken("http_status", origin, f"{status}", consumed)
    else:
        declared = (record.headers.get("Content-Type") or "").partition(";")[0].strip()
    if declared == "text/plain":
        return decoded(data, origin, limit, consumed)
    if declared in _PAGES or (not declared and b"<html" in data[:1000].lower()):
        return extractor.text(data, origin, consumed)
    return broken("not_a_page", origin, declared or "", consumed)
