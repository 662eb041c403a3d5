"""Counts of documents and bytes by reason, and the first few documents of each reason for inspection. Computed per part and added up.

Applies the steps of a recipe to documents and counts the outcomes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from lmworks.corpus.document import MOST_VARIANTS, Batch, Document, Drop, Outcome, Step, Variants, split_id, variant_id
from lmworks.corpus.engine.decisions import DecisionRows
from lmworks.corpus.read.part import EXCERPT
from lmworks.errors import UserError

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


class StepRunner:
    """Applies the steps to the documents of one part, and counts the documents that each received and dropped."""

    def __init__(self, steps: Sequence[Step], decisions: DecisionRows, rejected: Samples) -> None:
        self._steps, self._decisions, self._rejected = steps, decisions, rejected
        self.counts = [StepCounts(step.name) for step in steps]
        self._numbers: dict[str, int] = {}  # number of variants made so far, by the id of the original

    def run(self, batch: Batch) -> tuple[Batch, list[int]]:
        """(the batch after all steps, the sizes of its texts in bytes)."""
        self._numbers = {}
        sizes = [_size(document.text) for document in batch.documents]
        for step, step_counts in zip(self._steps, self.counts, strict=True):
            if len(batch):
                batch, sizes = self._apply_step(step, step_counts, batch, sizes)
        for document in batch.documents:
            self._decisions.keep(document.id, document.language)
        return batch, sizes

    def _apply_step(self, step: Step, step_counts: StepCounts, batch: Batch, before: list[int]) -> tuple[Batch, list[int]]:
        left: list[tuple[Document, int]] = []
        gone: dict[str, Drop] = {}
        for document, found, size in zip(batch.documents, _outcomes(step, batch), before, strict=True):
            step_counts.came.add(size)
            made = found.made if isinstance(found, Variants) else ()
            outcome = found.document if isinstance(found, Variants) else found
            same = outcome is document or (isinstance(outcome, Document) and outcome.text is document.text)
            after = size if same else 0
            if not same and isinstance(outcome, Document):
                outcome, after = _checked(outcome)
            self._decisions.measure(document.id, outcome.facts, step.statistics)
            original = str(document.facts.get("variant_of", ""))
            if isinstance(outcome, Document) and original in gone:
                outcome = drop_with_original(gone[original])
            if isinstance(outcome, Drop):
                gone[document.id] = outcome
                self._drop(step, step_counts, document, outcome, size)
                continue
            left.append((outcome, after))
            step_counts.edited += after - size
            for variant, one in make_variants(self._numbers, step, outcome, made):
                left += self._add(step, step_counts, variant, one)
        if step_counts.added.documents:
            left.sort(key=lambda pair: split_id(pair[0].id))
        unchanged = len(left) == len(batch) and all(new is old for (new, _), old in zip(left, batch.documents, strict=True))
        return batch if unchanged else Batch([document for document, _ in left]), [size for _, size in left]

    def _drop(self, step: Step, step_counts: StepCounts, document: Document, drop: Drop, size: int) -> None:
        count(step_counts.dropped, drop.reason, size)
        self._decisions.drop(document.id, step.name, drop.reason, drop.detail)
        more = {"step": step.name, "detail": drop.detail}
        self._rejected.add(document.source, drop.reason, document.id, document.origin, document.text, **more)

    def _add(self, step: Step, step_counts: StepCounts, variant: Document, outcome: Document | Drop) -> list[tuple[Document, int]]:
        """The variant with its size; empty if it could not be made."""
        sound, size = outcome, 0
        if isinstance(outcome, Document):
            sound, size = _checked(outcome)
        step_counts.added.add(size)
        self._decisions.add_variant(variant.id, str(variant.facts["variant_of"]), size)
        if isinstance(sound, Document):
            return [(sound, size)]
        self._drop(step, step_counts, variant, sound, size)
        return []


def make_variants(
    numbers: dict[str, int], step: Step, original: Document, made: Sequence[Document | Drop]
) -> Iterator[tuple[Document, Document | Drop]]:
    """(document, outcome) of each variant that a step made; the outcome is the document, or the reason why it could not be made. `numbers`
    counts the variants made so far.
    """
    for one in made if "variant_of" not in original.facts else ():  # a variant has no variants
        numbers[original.id] = number = numbers.get(original.id, 0) + 1
        if number > MOST_VARIANTS:
            raise UserError(f"step {step.name} makes more than {MOST_VARIANTS} variants of {original.id}; make fewer")
        facts = {**(one.facts if isinstance(one, Document) else {}), "variant_of": original.id, "variant_by": step.name}
        text = one.text if isinstance(one, Document) else ""
        variant = Document(
            variant_id(original.id, number), text, original.origin, original.source, original.domain, original.language, facts
        )
        yield variant, variant if isinstance(one, Document) else one


def drop_with_original(drop: Drop) -> Drop:
    """The drop of a variant whose original was dropped."""
    return Drop(drop.reason, "as its original" + (f": {drop.detail}" if drop.detail else ""))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _checked(document: Document) -> tuple[Document | Drop, int]:
    """A document whose text a step changed, with its size; or a drop if the text is empty or not valid Unicode."""
    try:
        size = _size(document.text)
    except UnicodeEncodeError:
        return Drop("bad_utf8", "half of a surrogate pair"), 0
    return (document, size) if document.text and not document.text.isspace() else (Drop("empty_text"), 0)


def _outcomes(step: Step, batch: Batch) -> Sequence[Outcome]:
    try:
        outcomes = step(batch)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        _raise_for_document(step, batch, error)
    if len(outcomes) != len(batch):
        raise UserError(f"step {step.name} gave {len(outcomes)} outcomes for {len(batch)} documents; it must give one for each")
    return outcomes


def _raise_for_document(step: Step, batch: Batch, error: Exception) -> NoReturn:
    """Raise a `UserError` that names the document on which the step failed."""
    name = f"documents {batch.documents[0].id} to {batch.documents[-1].id}"
    for document in batch.documents:
        try:
            step(Batch([document]))
        except Exception as alone:
            name, error = f"document {document.id} ({document.origin})", alone
            break
    what = " ".join(f"{type(error).__name__}: {error}".split())
    raise UserError(f"step {step.name} failed on {name}: {what}; fix the step or remove it from corpus.steps") from error
