"""Web archives: WARC files, plain or compressed, as crawlers write them, and WET files, which contain extracted text.

Records are cut out of the stream here, so that none takes more memory than a document may; warcio parses their contents.
"""

from __future__ import annotations

import io
import logging
import re
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from lmworks.corpus.read.listing import File, find_files
from lmworks.corpus.read.markup import Extractor
from lmworks.corpus.read.opening import DamagedFile, decode_text, open_binary
from lmworks.corpus.read.part import Item, Part, decode_document, pack_files, printable, quarantine_errors, quarantined
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source

FACTS = ("url", "date")
SUFFIXES = (".warc", ".wet")
_PAGES = ("text/html", "application/xhtml+xml")
# requests and metadata are not documents
_DOCUMENTS = re.compile(rb"^WARC-Type:[ \t]*(?:response|resource|conversion)[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_LENGTH = re.compile(rb"^Content-Length:[ \t]*(\d{1,18})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([A-Za-z0-9_.:-]{1,40})", re.IGNORECASE)
_MOST_HEADERS = 1000
_LONGEST_LINE = 1 << 16
_CHUNK = 1 << 20


def parts(source: Source, part_bytes: int) -> list[Part]:
    """Parts of whole files."""
    if find_spec("warcio") is None:
        raise UserError("reading WARC needs warcio: pip install 'lmworks[web]'")
    return list(pack_files(find_files(source, SUFFIXES), part_bytes))


def read(source: Source, part: Part, limit: int) -> Iterator[Item]:
    logging.getLogger("warcio").setLevel(logging.CRITICAL)  # malformed records are counted
    with Extractor("html") as extractor:
        for file in part.files:
            yield from quarantine_errors(_items(file, extractor, limit), file.path)


def _items(file: File, extractor: Extractor, limit: int) -> Iterator[Item]:
    with open_binary(file.path) as (stream, raw):
        before = 0
        for number, (head, block) in enumerate(_records(stream, 4 * limit), start=1):
            origin, consumed = f"{printable(file.path)}:{number}", raw.tell() - before
            before += consumed
            if not _DOCUMENTS.search(head):
                continue
            if block is None:
                yield quarantined("enormous", origin, head, consumed)
            else:
                yield _item(head, block, origin, consumed, extractor, limit)


def _records(stream: Any, most: int) -> Iterator[tuple[bytes, bytes | None]]:
    """(headers, content) of each record; content of more than `most` bytes is skipped and None."""
    while line := stream.readline(_CHUNK):
        if not line.strip(b"\r\n"):
            continue
        if not line.startswith(b"WARC/"):
            raise DamagedFile("no record header where one is expected")
        lines = [line]
        while line.strip(b"\r\n"):
            lines.append(line := stream.readline(_LONGEST_LINE))
            if not line.endswith(b"\n") or len(lines) > _MOST_HEADERS:
                raise DamagedFile("the headers of a record do not end")
        head = b"".join(lines)
        length = _LENGTH.search(head)
        if not length:
            raise DamagedFile("a record without Content-Length")
        left = int(length[1])
        block = stream.read(left) if left <= most else None
        left -= len(block) if block is not None else 0
        while left and (skipped := stream.read(min(left, _CHUNK))):
            left -= len(skipped)
        if left:
            raise DamagedFile("truncated in the middle of a record")
        yield head, block


def _item(head: bytes, block: bytes, origin: str, consumed: int, extractor: Extractor, limit: int) -> Item:
    from warcio.archiveiterator import ArchiveIterator
    from warcio.bufferedreaders import ChunkedDataException
    from warcio.exceptions import ArchiveLoadFailed
    from warcio.statusandheaders import StatusAndHeadersParserException

    try:
        record = next(iter(ArchiveIterator(io.BytesIO(head + block + b"\r\n\r\n"))))
        data = record.content_stream().read(4 * limit + 1)
    except (
        *(ArchiveLoadFailed, StatusAndHeadersParserException, ChunkedDataException),
        *(StopIteration, ValueError, IndexError, AttributeError, zlib.error, EOFError),
    ) as error:
        return quarantined("broken_record", origin, f"{type(error).__name__}: {error}", consumed)
    item = _page(record, data, origin, consumed, extractor, limit)
    facts = {"url": record.rec_headers.get_header("WARC-Target-URI"), "date": record.rec_headers.get_header("WARC-Date")}
    known = {name: printable(value.strip("<>")) for name, value in facts.items() if value}
    return Item(item.text, origin, consumed, None, known) if item.reason is None else item


def _page(record: Any, data: bytes, origin: str, consumed: int, extractor: Extractor, limit: int) -> Item:
    if len(data) > 4 * limit:
        return quarantined("enormous", origin, data, consumed)
    if record.http_headers is not None and record.http_headers.get_statuscode() != "200":
        return quarantined("http_status", origin, record.http_headers.statusline, consumed)
    headers = record.http_headers or record.rec_headers
    content_type = headers.get_header("Content-Type") or ""
    declared, charset = content_type.partition(";")[0].strip().lower(), _CHARSET.search(content_type)
    if declared == "text/plain":
        return decode_document(data, origin, limit, consumed, charset[1] if charset else "")
    if declared in _PAGES or (not declared and b"<html" in data[:1000].lower()):
        known = decode_text(data, charset[1]) if charset else None  # which takes precedence over what the page declares
        if known is not None:
            data = known.encode("utf-8", "replace")
        return extractor.text(data, origin, consumed)
    return quarantined("not_a_page", origin, declared, consumed)
