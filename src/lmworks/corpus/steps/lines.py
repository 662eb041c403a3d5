"""The step `lines`: removes lines or paragraphs that occurred earlier, in the document or in earlier documents of the same part."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from lmworks.corpus.document import Batch, Document, Drop, Outcome, Step, split_id
from lmworks.corpus.steps.base import Context, StepOptions

if TYPE_CHECKING:
    import numpy as np

    from lmworks.recipe.schema.corpus import Source

_PARAGRAPH = re.compile(r"(\n{2,})")
_CELLS = 1 << 23


class Lines(StepOptions):
    """Drop lines or paragraphs that occurred earlier in the document and, on request, in earlier documents. Code passes."""

    renamed: ClassVar = {"shortest": "min_length"}

    step: Literal["lines"] = Field("lines", description="which step this is")
    unit: Literal["line", "paragraph"] = Field("line", description="unit of comparison; white space and case are ignored")
    within: bool = Field(True, description="drop a unit that occurred earlier in the document")
    across: int | None = Field(
        None, ge=1, description="drop a unit that occurs in this many earlier documents of the same part of the source: boilerplate"
    )
    min_length: int = Field(20, ge=1, description="shorter units, in characters, are kept")
    sources: tuple[str, ...] = Field((), description="sources to apply the step to; all when empty")

    def make(self, context: Context) -> Step:
        return _Lines(self, context.source)


class Counters:
    """The number of documents in which a hash occurred, in 16 MB: a count-min sketch (Cormode and Muthukrishnan 2005) with two rows.

    Counts may be too high, never too low; with a million distinct lines about one in seventy shares both its cells.
    """

    def __init__(self) -> None:
        import numpy as np

        self._cells = np.zeros((2, _CELLS), dtype=np.uint8)

    def add(self, hashes: Sequence[int]) -> np.ndarray:
        """Add distinct hashes; returns how often each was added before: (N,) at most 255."""
        import numpy as np

        values = np.array(hashes, dtype=np.uint64)
        places = np.stack([values % _CELLS, (values >> np.uint64(32)) % _CELLS])
        seen = np.minimum(self._cells[0, places[0]], self._cells[1, places[1]])
        for row, own in enumerate(places):
            self._cells[row, own] = np.minimum(self._cells[row, own], 254) + 1
        return seen


class _Lines:
    """Pure within a part: the outcome of a document depends on the document and, with `across`, on earlier documents of its part."""

    name = "lines"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("lines_dropped",)
    statistics: tuple[str, ...] = ("lines_dropped",)

    def __init__(self, node: Lines, source: Source) -> None:
        self._node = node
        self._idle = source.domain == "code" or bool(node.sources and source.name not in node.sources)
        self._part, self._last = ("", -1), [-1]
        self._counters: Counters | None = None

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        return list(batch.documents) if self._idle else [self._one(document) for document in batch.documents]

    def _one(self, document: Document) -> Outcome:
        if self._node.across:
            self._enter(document.id)
        pieces = _PARAGRAPH.split(document.text) if self._node.unit == "paragraph" else document.text.split("\n")
        step = 2 if self._node.unit == "paragraph" else 1
        hashes = [self._hash(piece) for piece in pieces[::step]]
        boilerplate = self._boilerplate(hashes)
        kept: list[str] = []
        seen: set[int] = set()
        total = 0
        for place, value in enumerate(hashes):
            if value is not None and (value in boilerplate or (self._node.within and value in seen)):
                total += len(pieces[place * step])
                continue
            if value is not None:
                seen.add(value)
            kept += pieces[place * step : (place + 1) * step]
        share = total / max(len(document.text), 1)
        if not total:
            return document.with_facts(lines_dropped=0.0)
        text = "".join(kept).rstrip("\n") if step == 2 else "\n".join(kept)
        if not text.strip():
            return Drop("only_repeated_lines", f"all {len(hashes)} {self._node.unit}s", {"lines_dropped": share})
        return document.with_text(text).with_facts(lines_dropped=share)

    def _hash(self, piece: str) -> int | None:
        form = " ".join(piece.lower().split())
        if len(form) < self._node.min_length:
            return None
        return int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), "little")

    def _boilerplate(self, hashes: Sequence[int | None]) -> frozenset[int]:
        if self._counters is None or self._node.across is None:
            return frozenset()
        own = [value for value in dict.fromkeys(hashes) if value is not None]
        seen = self._counters.add(own).tolist() if own else []
        return frozenset(value for value, count in zip(own, seen, strict=True) if count >= self._node.across)

    def _enter(self, identity: str) -> None:
        """Reset the counts where another part begins, or the same part from its start."""
        source, part, *place = split_id(identity)
        if (source, part) != self._part or place <= self._last or self._counters is None:
            self._part, self._counters = (source, part), Counters()
        self._last = place
