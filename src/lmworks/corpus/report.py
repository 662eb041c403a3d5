"""What became of every document: counts per source and reason, samples of what was rejected, and the table that is printed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.corpus.items import EXCERPT
from lmworks.files import write_text
from lmworks.recipe.corpus import Source

if TYPE_CHECKING:
    from rich.table import Table

SAMPLES = 10


@dataclass
class Count:
    """Documents and their UTF-8 bytes."""

    documents: int = 0
    bytes: int = 0

    def add(self, size: int, documents: int = 1) -> None:
        self.documents += documents
        self.bytes += size


@dataclass
class SourceReport:
    """One source: what came in, what was left aside by `max_bytes`, what was dropped by reason, what is in train and validation."""

    name: str
    domain: str
    language: str
    licence: str
    came: Count = field(default_factory=Count)
    quarantined: dict[str, Count] = field(default_factory=dict)
    not_drawn: Count = field(default_factory=Count)
    dropped: dict[str, Count] = field(default_factory=dict)
    train: Count = field(default_factory=Count)
    validation: Count = field(default_factory=Count)

    @classmethod
    def of(cls, source: Source) -> SourceReport:
        return cls(source.name, source.domain, source.language, source.licence)

    def quarantine(self, reason: str, size: int) -> None:
        self.quarantined.setdefault(reason, Count()).add(size)

    def drop(self, reason: str, size: int) -> None:
        self.dropped.setdefault(reason, Count()).add(size)


@dataclass
class Report:
    """The corpus stage's report. `missing` maps optional sources that could not be had to the reason; the mixture must do without them."""

    sources: list[SourceReport] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    contamination: list[dict[str, Any]] = field(default_factory=list)
    boilerplate: list[dict[str, Any]] = field(default_factory=list)
    protected_texts: int = 0
    trivial_evaluation_texts: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Samples:
    """The first few of each (source, reason), as lines of JSON."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[str, str]] = Counter()
        self._lines: list[str] = []

    def add(self, source: str, reason: str, identity: str, origin: str, text: str, **more: Any) -> None:
        if self._taken[source, reason] < SAMPLES:
            self._taken[source, reason] += 1
            excerpt = text[:EXCERPT].encode("utf-8", "replace").decode("utf-8")
            row = {"source": source, "reason": reason, "id": identity, "origin": origin, **more, "text": excerpt}
            self._lines.append(json.dumps(row, ensure_ascii=False))

    def write(self, path: Path) -> None:
        write_text(path, "".join(line + "\n" for line in self._lines))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f}"


def table(report: Report) -> Table:
    """The report to print: a line per source, and below it one per reason for which something of it was dropped."""
    from rich.table import Table

    shown = Table(title="Corpus", title_justify="left", header_style="bold")
    for name in ("source", "kind", "licence"):
        shown.add_column(name)
    for name in ("documents in", "MB in", "dropped", "MB dropped", "train MB", "validation MB"):
        shown.add_column(name, justify="right")
    for source in report.sources:
        lost = sorted([*source.quarantined.items(), *source.dropped.items()], key=lambda pair: -pair[1].bytes)
        dropped, size = sum(count.documents for _, count in lost), sum(count.bytes for _, count in lost)
        counts = (f"{source.came.documents:,}", _megabytes(source.came.bytes), f"{dropped:,}", _megabytes(size))
        kept = (_megabytes(source.train.bytes), _megabytes(source.validation.bytes))
        shown.add_row(f"[bold]{source.name}[/bold]", f"{source.domain} {source.language}", source.licence, *counts, *kept)
        if source.not_drawn.documents:
            left = source.not_drawn
            shown.add_row("  over max_bytes", "", "", f"{left.documents:,}", _megabytes(left.bytes), style="dim")
        for reason, count in lost:
            shown.add_row(f"  {reason.replace('_', ' ')}", "", "", "", "", f"{count.documents:,}", _megabytes(count.bytes), style="dim")
    for name, why in report.missing.items():
        shown.add_row(f"[yellow]{name}[/yellow]", "[yellow]missing[/yellow]", why)
    return shown
