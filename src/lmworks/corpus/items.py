"""What a reader hands over: a document, or something that is none and is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmworks.errors import UserError

EXCERPT = 400


class Unavailable(UserError):
    """A source that cannot be had here (no network, no package). Fatal unless the source is `optional`."""


@dataclass(frozen=True, slots=True)
class Item:
    """One row of a source: `text`, or the `reason` why it is no document together with an excerpt in `text`.

    `origin` is the file or member and row it came from; `consumed` the input bytes read since the item before, for progress only.
    """

    text: str
    origin: str
    consumed: int = 0
    reason: str | None = None


def broken(reason: str, origin: str, sample: str | bytes, consumed: int = 0) -> Item:
    """An item for quarantine, with what can be shown of it."""
    shown = sample[:EXCERPT]
    return Item(shown.decode("utf-8", "replace") if isinstance(shown, bytes) else shown, origin, consumed, reason)


def decoded(data: bytes, origin: str, limit: int, consumed: int) -> Item:
    """Bytes to a document, or to quarantine as `enormous` (over `limit` bytes), `binary` or `bad_utf8`."""
    if len(data) > limit:
        return broken("enormous", origin, data, consumed)
    if b"\0" in data[:8192]:
        return broken("binary", origin, data, consumed)
    try:
        return Item(data.decode("utf-8-sig"), origin, consumed)
    except UnicodeDecodeError as error:
        return broken("bad_utf8", origin, data[max(0, error.start - 60) :], consumed)


@dataclass(frozen=True)
class Reading:
    """A source ready to be read, any number of times, in the same order each time.

    `total` is its size in `consumed` units, None if unknown.
    """

    total: int | None
    open: Callable[[], Iterator[Item]]
