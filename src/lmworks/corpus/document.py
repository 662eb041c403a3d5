"""Documents, batches of documents that steps process, what a step is made for, and the outcomes of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lmworks.errors import UserError

if TYPE_CHECKING:
    from lmworks.corpus.units import Units
    from lmworks.recipe.schema.corpus import Source

Fact = str | int | float | bool
MOST_VARIANTS = 255  # of one document


@dataclass(slots=True)
class Document:
    """A text with its id, its origin, and facts that readers and steps add. Immutable by convention.

    `id` is SOURCE/PART/NUMBER, followed by .VARIANT for a variant; `origin` is the file (or archive member) and row. `facts` by name: from
    a reader (`url`, `path`, `repository`, `date`) or measured by a step (`language_score`, `quality`).
    """

    id: str
    text: str
    origin: str
    source: str
    domain: str
    language: str
    facts: Mapping[str, Fact] = field(default_factory=dict)

    def with_text(self, text: str) -> Document:
        """The same document with another text; the document itself if the text is equal."""
        same = text == self.text
        return self if same else Document(self.id, text, self.origin, self.source, self.domain, self.language, self.facts)

    def with_facts(self, language: str | None = None, **facts: Fact) -> Document:
        """The same document with further facts."""
        return Document(
            self.id, self.text, self.origin, self.source, self.domain, language or self.language, {**self.facts, **facts}
        )


@dataclass(frozen=True, slots=True)
class Drop:
    """The document is dropped. `reason` is a short name that is counted; `detail` is shown beside a sample.

    `facts` are the measurements of the step, so that the distribution of a statistic includes the documents that the step dropped.
    """

    reason: str
    detail: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Variants:
    """The document is kept, and variants are added: other texts of the same document, or the reason why one could not be made.

    Each variant becomes a document whose id is that of its original, a dot and a number, with the facts `variant_of` and `variant_by` (the
    step). It is dropped or held out with its original, and not compared with it (`dedup.variants`).
    """

    document: Document
    made: Sequence[Document | Drop]


Outcome = Document | Drop | Variants
"""The outcome of a step for one document."""


def split_id(identity: str) -> tuple[str, int, int, int]:
    """(source, part, number, variant) of a document id, variant 0 for a document that was read; `UserError` if it is not an id."""
    source, _, rest = identity.partition("/")
    part, _, place = rest.partition("/")
    number, dot, variant = place.partition(".")
    if not source or not part.isdecimal() or not number.isdecimal() or bool(dot) != variant.isdecimal():
        raise UserError(f"{identity!r} is not a document id, which is SOURCE/PART/NUMBER, such as web/0/17 (the column id of the corpus)")
    return source, int(part), int(number), int(variant or 0)


def variant_id(original: str, variant: int) -> str:
    """The id of a variant of the document `original`."""
    return f"{original}.{variant}" if variant else original


class Batch:
    """Documents of one source that a step processes together; data that several steps need of their texts is computed once."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents

    @cached_property
    def units(self) -> Units:
        """The words of all texts as hashes."""
        from lmworks.corpus.units import units

        return units([document.text for document in self.documents])

    @cached_property
    def compared(self) -> Units:
        """Like `units`, with the symbols of lines that consist of symbols: used to compare documents."""
        from lmworks.corpus.units import units

        return units([document.text for document in self.documents], "lines")

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True)
class Context:
    """The source that a step is made for, the seed of the recipe, and the folder that relative paths in the recipe start from."""

    source: Source
    seed: int
    folder: Path


class Step(Protocol):
    """A pure function on documents: the same batch gives the same outcomes, in the same order, on any machine.

    `needs` names facts that a reader or an earlier step must provide (otherwise the recipe is rejected), `makes` facts that the step adds,
    `statistics` the numeric facts whose distribution is part of the report.
    """

    @property
    def name(self) -> str: ...
    @property
    def needs(self) -> tuple[str, ...]: ...
    @property
    def makes(self) -> tuple[str, ...]: ...
    @property
    def statistics(self) -> tuple[str, ...]: ...

    def __call__(self, batch: Batch) -> Sequence[Outcome]: ...


@dataclass(frozen=True)
class PerDocument:
    """A step made from a function of one document."""

    name: str
    function: Callable[[Document], Outcome]
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        return [self.function(document) for document in batch.documents]


def step(
    *, needs: Sequence[str] = (), makes: Sequence[str] = (), statistics: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Declare a function of one document as a step: the facts that it needs and makes, and those for the report."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        function.declared = {"needs": tuple(needs), "makes": tuple(makes), "statistics": tuple(statistics)}  # type: ignore[attr-defined]
        return function

    return declare
