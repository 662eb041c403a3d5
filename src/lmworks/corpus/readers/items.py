"""The items that readers yield: documents, and rows that are not documents with the reason."""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmworks.corpus.document import Fact

EXCERPT = 400


@dataclass(frozen=True, slots=True)
class Item:
    """One row of a source: `text`, or the `reason` why it is not a document, with an excerpt in `text`.

    `origin` is the file or archive member and the row; `consumed` is the number of input bytes read since the previous item, for progress
    only. `facts` are given by the source (`url`, `path`, `repository`, `date`), and so is `language`.
    """

    text: str
    origin: str
    consumed: int = 0
    reason: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    language: str | None = None


def quarantined(reason: str, origin: str, sample: str | bytes, consumed: int = 0) -> Item:
    """A quarantined item, with an excerpt."""
    excerpt = sample[:EXCERPT]
    text = excerpt.decode("utf-8", "replace") if isinstance(excerpt, bytes) else excerpt.encode("utf-8", "replace").decode()
    return Item(text, origin, consumed, reason)


def printable(path: str) -> str:
    """A path as valid Unicode; other bytes of a file name are escaped."""
    return path.encode("utf-8", "backslashreplace").decode()


def decode_document(data: bytes, origin: str, limit: int, consumed: int) -> Item:
    """Bytes as a document, or a quarantined item: `enormous` (over `limit` bytes), `binary` (null bytes) or `bad_utf8`.
    UTF-16 is read if it has a byte order mark."""
    if len(data) > limit:
        return quarantined("enormous", origin, data, consumed)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        try:
            return Item(data.decode("utf-16"), origin, consumed)
        except UnicodeDecodeError as error:
            return quarantined("bad_utf8", origin, data[max(0, error.start - 60) :], consumed)
    if b"\0" in data[:8192]:
        return quarantined("binary", origin, data, consumed)
    try:
        return Item(data.decode("utf-8-sig"), origin, consumed)
    except UnicodeDecodeError as error:
        return quarantined("bad_utf8", origin, data[max(0, error.start - 60) :], consumed)
