"""Counts of documents and bytes by reason, and the first few documents of each reason for inspection. Computed per part and added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmworks.corpus.readers.items import EXCERPT

SAMPLES = 10


@dataclass
class Count:
    """Documents and their UTF-8 bytes."""

    documents: int = 0
    bytes: int = 0

    def add(self, size: int, documents: int = 1) -> None:
        self.documents += documents
        self.bytes += size

    def merge(self, other: Mapping[str, int]) -> None:
        self.add(other["bytes"], other["documents"])


Counts = dict[str, Count]
"""By reason."""


def count(counts: Counts, reason: str, size: int) -> None:
    """Count one document for this reason."""
    counts.setdefault(reason, Count()).add(size)


def merge(counts: Counts, others: Mapping[str, Mapping[str, int]]) -> None:
    """Add counts, by reason."""
    for reason, other in others.items():
        counts.setdefault(reason, Count()).merge(other)


@dataclass
class StepCounts:
    """Counts of one step: documents received, added as variants, and dropped by reason, and the change in bytes of the others
    (`edited`).
    """

    step: str
    came: Count = field(default_factory=Count)
    dropped: Counts = field(default_factory=dict)
    edited: int = 0
    added: Count = field(default_factory=Count)

    @property
    def left(self) -> Count:
        """The documents after the step."""
        gone = [one.documents for one in self.dropped.values()], [one.bytes for one in self.dropped.values()]
        came = Count(self.came.documents + self.added.documents, self.came.bytes + self.added.bytes)
        return Count(came.documents - sum(gone[0]), came.bytes - sum(gone[1]) + self.edited)

    def merge(self, other: Mapping[str, Any]) -> None:
        self.came.merge(other["came"])
        merge(self.dropped, other["dropped"])
        self.edited += other["edited"]
        self.added.merge(other["added"])


@dataclass
class ContaminatedItems:
    """Contamination by one protected set: the number of training documents, and the items found in them."""

    documents: int = 0
    items: set[str] = field(default_factory=set)

    def add(self, documents: int, items: Iterable[str]) -> None:
        self.documents += documents
        self.items.update(items)

    def as_json(self) -> dict[str, Any]:
        return {"documents": self.documents, "items": sorted(self.items)}


class Samples:
    """The first few documents of each (source, reason)."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[str, str]] = Counter()
        self.rows: list[dict[str, Any]] = []

    def add(self, source: str, reason: str, identity: str, origin: str, text: str, **more: Any) -> None:
        """Add a document if it is among the first."""
        if self._taken[source, reason] < SAMPLES:
            excerpt = text[:EXCERPT].encode("utf-8", "replace").decode("utf-8")
            shown = {name: value for name, value in more.items() if value}
            self._keep({"source": source, "reason": reason, "id": identity, "origin": origin, **shown, "text": excerpt})

    def merge(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add the samples of later documents."""
        for row in rows:
            if self._taken[row["source"], row["reason"]] < SAMPLES:
                self._keep(row)

    def _keep(self, row: dict[str, Any]) -> None:
        self._taken[row["source"], row["reason"]] += 1
        self.rows.append(row)
