"""What a source says, read whole and read part by part."""

from __future__ import annotations

import json
from typing import Any

from lmworks.corpus.read import Part, parts, read
from lmworks.corpus.read.part import Item
from lmworks.recipe.schema.corpus import Source

LIMIT = 10_000


def source(kind: str, **more: Any) -> Source:
    return Source(name="mine", kind=kind, license="test", **more)  # type: ignore[arg-type]


def items(kind: str, limit: int = LIMIT, part_bytes: int = 1 << 40, **more: Any) -> list[Item]:
    """All items of a source that is read as a whole. Reading it again per part, with parts restored from JSON, must give the same items."""
    given = source(kind, **more)
    listed = [item for part in parts(given, part_bytes) for item in read(given, part, limit)]
    again = [Part.from_json(json.loads(json.dumps(part.as_json()))) for part in parts(given, part_bytes)]
    assert listed == [item for part in again for item in read(given, part, limit)]
    for part in again:
        assert sum(item.consumed for item in read(given, part, limit)) <= (part.size or float("inf"))
    return listed


def texts(found: list[Item]) -> list[str]:
    return [item.text for item in found if item.reason is None]


def reasons(found: list[Item]) -> list[str]:
    return [item.reason for item in found if item.reason is not None]


def rows(*documents: str) -> bytes:
    return b"".join(json.dumps({"text": text, "url": "x"}, ensure_ascii=False).encode() + b"\n" for text in documents)
