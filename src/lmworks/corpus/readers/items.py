"""The items that readers yield: documents, and rows that are none, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmworks.corpus.document import Fact
from lmworks.errors import UserError

EXCERPT = 400


class Unavailable(UserError):
    """A source that is not available here (no network, no package). Fatal unless the source is `optional`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One row of a source: `text`, or the `reason` why it is no document together with an excerpt in `text`.

    `origin` is the file or member and row it came from; `consumed` the input bytes read since the item before, for progress only.
    `facts` is what the source says about the document (`url`, `path`, `repository`, `date`), `language` the one that it gives itself.
    """

    text: str
    origin: str
    consumed: int = 0
    reason: str | None = None
    facts: Mapping[str, Fact] = field(default_factory=dict)
    language: str | None = None


def broken(reason: str, origin: str, sample: str | bytes, consumed: int = 0) -> Item:
    """An item for quarantine, with an excerpt."""
    excerpt = sample[:EXCERPT]
    text = excerpt.decode("utf-8", "replace") if isinstance(excerpt, bytes) else excerpt.encode("utf-8", "replace").decode()
    return Item(text, origin, consumed, reason)


def shown(path: str) -> str:
    """A path as Unicode: bytes of a file name that are none are escaped."""
    return path.encode("utf-8", "backslashreplace").decode()


def decoded(data: bytes, origin: str, limit: int, consumed: int) -> Item:
    """Bytes to a document, or to quarantine as `enormous` (over `limit` bytes), `binary` (null bytes) or `bad_utf8`."""
    if len(data) > limit:
        return broken("enormous", origin, data, consumed)
    if b"\0" in data[:8192]:
        return broken("binary", origin, data, consumed)
    try:
        return Item(data.decode("utf-8-sig"), origin, consumed)
    except UnicodeDecodeError as error:
        return broken("bad_utf8", origin, data[max(0, error.start - 60) :], consumed)
