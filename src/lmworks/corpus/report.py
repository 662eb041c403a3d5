"""The report of the corpus stage: the funnel of each source, step by step, and the table that is printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lmworks.corpus.engine.step_runner import Count, Counts, StepCounts, merge
from lmworks.recipe.schema.corpus import Source

if TYPE_CHECKING:
    from rich.table import Table

_MOST_SOURCES = 12
_MOST_REASONS = 3
_MOST_LEAKS, _PASSAGE = 8, 80


@dataclass
class SourceReport:
    """One source: documents read, quarantined, not drawn because of `max_bytes`, and the counts of each step after that.

    Documents and bytes add up: came + added as variants = quarantined + not drawn + dropped by steps + validation + train. For bytes, the
    changes by steps are added.
    """

    name: str
    domain: str
    language: str
    license: str
    parts: int = 0
    came: Count = field(default_factory=Count)
    quarantined: Counts = field(default_factory=dict)
    not_drawn: Count = field(default_factory=Count)
    steps: list[StepCounts] = field(default_factory=list)
    outputs: dict[str, dict[str, Count]] = field(default_factory=lambda: {"train": {}, "validation": {}})

    @classmethod
    def of(cls, source: Source, parts: int = 0) -> SourceReport:
        return cls(source.name, source.domain, source.language, source.license, parts)

    def add_read(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of the pass `read` for a part."""
        self.came.merge(counts["came"])
        merge(self.quarantined, counts["quarantined"])
        self.not_drawn.merge(counts["not_drawn"])
        self._add_steps(counts["steps"], 0)

    def add_written(self, counts: Mapping[str, Any]) -> None:
        """Add the counts of the pass `write` for a part, after those of `read` for all parts."""
        own = [step.step for step in self.steps].index("dedup") if any(one.step == "dedup" for one in self.steps) else len(self.steps)
        self._add_steps(counts["steps"], own)
        for split, found in self.outputs.items():
            merge(found, counts[split])

    def _add_steps(self, steps: Iterable[Mapping[str, Any]], first: int) -> None:
        for place, step in enumerate(steps, start=first):
            if place == len(self.steps):
                self.steps.append(StepCounts(step["step"]))
            self.steps[place].merge(step)

    @property
    def dropped(self) -> Counts:
        """Dropped documents by reason, over all steps."""
        found: Counts = {}
        for step in self.steps:
            for reason, one in step.dropped.items():
                found.setdefault(reason, Count()).add(one.bytes, one.documents)
        return found

    @property
    def train(self) -> Count:
        return total(self.outputs["train"].values())

    @property
    def validation(self) -> Count:
        return total(self.outputs["validation"].values())

    def as_json(self) -> dict[str, Any]:
        steps = [{**asdict(step), "left": asdict(step.left)} for step in self.steps]
        return {**asdict(self), "steps": steps, "train": asdict(self.train), "validation": asdict(self.validation)}


@dataclass
class Report:
    """The report of the corpus stage. `missing` maps optional sources that were not available to the reason; the mixture leaves them out.

    `passed_over` says of sources which files in their folders are not read because of their endings.
    `statistics` are distributions by SOURCE/FACT over documents read and training documents; `bytes_per_document` is the memory of
    comparing all documents, per document. `protected` has, for each evaluation set and for the held-out documents, the number of `items`
    searched for, of items too `trivial` to be searched for, of items `found`, and of `documents` that contain one. `widespread` are
    passages in more than ten documents: all of evaluation sets, and the most frequent of the `exempt` ones of held-out text. `shared` is
    the wording that items of an evaluation set share and that is not searched for; `unread` maps evaluation sets that could not be read,
    and are not protected, to the reason. `advice` is about the settings of deduplication.
    """

    sources: list[SourceReport] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    passed_over: dict[str, str] = field(default_factory=dict)
    bytes_per_document: float = 0.0
    statistics: dict[str, Any] = field(default_factory=dict)
    contamination: list[dict[str, Any]] = field(default_factory=list)
    widespread: list[dict[str, Any]] = field(default_factory=list)
    exempt: int = 0
    shared: list[dict[str, Any]] = field(default_factory=list)
    protected: dict[str, dict[str, int]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    advice: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "sources": [source.as_json() for source in self.sources]}


def total(counts: Iterable[Count]) -> Count:
    """The sum of counts."""
    found = Count()
    for one in counts:
        found.add(one.bytes, one.documents)
    return found


def _numbers(came: Count, left: Count) -> tuple[str, str, str, str]:
    return f"{came.documents:,}", f"{came.bytes / 1e6:,.2f}", f"{left.documents:,}", f"{left.bytes / 1e6:,.2f}"


def _most(counts: Counts) -> str:
    ranked = sorted(counts.items(), key=lambda pair: (-pair[1].documents, pair[0]))
    more = f", {len(ranked) - _MOST_REASONS} more" if len(ranked) > _MOST_REASONS else ""
    return ", ".join(f"{reason.replace('_', ' ')} {one.documents:,}" for reason, one in ranked[:_MOST_REASONS]) + more


def _rows(source: SourceReport) -> Iterable[tuple[str, Count, Count, str]]:
    """(step, in, out, most frequent reasons) of the funnel."""
    left = Count(source.came.documents, source.came.bytes)
    if source.quarantined:
        gone = total(source.quarantined.values())
        before, left = left, Count(left.documents - gone.documents, left.bytes - gone.bytes)
        yield "quarantine", before, left, _most(source.quarantined)
    if source.not_drawn.documents:
        before, left = left, Count(left.documents - source.not_drawn.documents, left.bytes - source.not_drawn.bytes)
        yield "max_bytes", before, left, "not drawn"
    for step in source.steps:
        added = f"{step.added.documents:,} variants added; " if step.added.documents else ""
        yield step.step, step.came, step.left, added + _most(step.dropped)


def _contamination_rows(report: Report) -> Iterator[tuple[str, str, str]]:
    """Frequent leaks, exempted boilerplate, and shared wording: (protected text, documents, remark)."""
    yield from widespread_rows(report.widespread, report.exempt, "report.json")
    for one in report.shared:
        yield one["set"], "", f"{one['runs']:,} runs that its items share are not searched for: {_quoted(one['passage'])}"


def widespread_rows(widespread: Sequence[dict[str, Any]], exempt: int, file: str) -> Iterator[tuple[str, str, str]]:
    """Frequent leaks and exempted boilerplate: (protected text, documents, remark). `file` has them under `widespread`."""
    leaks = [one for one in widespread if not one["let_pass"]]
    for one in leaks[:_MOST_LEAKS]:
        yield one["against"], f"{one['documents']:,}", f"a leak, however frequent: {_quoted(one['passage'])}"
    if len(leaks) > _MOST_LEAKS:
        yield "more passages", "", f"{len(leaks) - _MOST_LEAKS} in {file} under widespread"
    if passed := [one for one in widespread if one["let_pass"]]:
        most = max(passed, key=lambda one: one["documents"])
        what = f"{exempt:,} passages of held-out text were exempt as boilerplate ({file}, widespread); the most frequent: "
        yield most["against"], f"{most['documents']:,}", what + _quoted(most["passage"])


def _rows_of_strict_rules(report: Report) -> Iterator[tuple[str, str, str]]:
    """Rules that dropped more than half of a source's documents: (source, documents, advice)."""
    for source in report.sources:
        for step in (one for one in source.steps if one.step == "rules"):
            for reason, one in step.dropped.items():
                if 2 * one.documents > step.came.documents:
                    what = f"of {step.came.documents:,} dropped by the rule {reason}: see samples (corpus sample --reason {reason}); "
                    yield source.name, f"{one.documents:,}", what + "if they are good, choose another domain or rules (docs/rules.md)"


def _quoted(passage: str) -> str:
    words = " ".join(passage.split())
    return f'"{words[:_PASSAGE]}{"..." if len(words) > _PASSAGE else ""}"'


def table(report: Report) -> Table:
    """The funnel as a table. If there are many sources, each has one line."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(title="Corpus", title_justify="left", header_style="bold")
    shown.add_column("source")
    for name in ("documents in", "MB in", "out", "MB out"):
        shown.add_column(name, justify="right")
    shown.add_column("dropped for")
    for source in report.sources:
        head = f"{source.domain} {source.language}, {source.license}"
        kept = total((source.train, source.validation))
        shown.add_row(Text(source.name, "bold"), *_numbers(source.came, kept), head)
        if len(report.sources) <= _MOST_SOURCES:
            for step, came, left, reasons in _rows(source):
                if came == left:
                    continue  # report.json also has the steps that dropped nothing
                shown.add_row(f"  {step}", *_numbers(came, left), reasons, style="dim")
        shown.add_row("  held out", "", "", *_numbers(source.validation, source.validation)[:2], "", style="dim")
    came, kept = total(one.came for one in report.sources), total(one.train for one in report.sources)
    shown.add_section()
    shown.add_row(Text("all, to train on", "bold"), *_numbers(came, kept), "")
    for name, why in report.missing.items():
        shown.add_row(Text(name, "yellow"), Text("missing", "yellow"), "", "", "", why)
    for name, what in report.passed_over.items():
        shown.add_row(Text(name, "yellow"), Text("passed over", "yellow"), "", "", "", what)
    for name, why in report.unread.items():
        shown.add_row(Text(name, "yellow"), Text("not protected", "yellow"), "", "", "", why)
    for against, documents, what in (*_rows_of_strict_rules(report), *_contamination_rows(report)):
        shown.add_row(Text(against, "yellow"), documents, "", "", "", what)
    memory = f"comparing all documents held {report.bytes_per_document:.0f} bytes of memory for each"
    shown.caption = "\n".join([memory, *report.advice])
    return shown
