"""The step `pii`: personal data and keys are masked and counted per kind; see `lmworks.corpus.pii`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lmworks.corpus.document import Document, PerDocument, Step
from lmworks.corpus.steps.base import Context, StepOptions

PiiKind = Literal["email", "ip", "phone", "card", "iban", "secret", "street"]


class Pii(StepOptions):
    """Mask personal data and keys. Documentation examples (example.com, 127.0.0.1, 555-0100) are kept."""

    step: Literal["pii"] = Field("pii", description="which step this is")
    kinds: tuple[PiiKind, ...] = Field(
        ("email", "ip", "phone", "card", "iban", "secret"), description="kinds to mask; street addresses on request, in English only"
    )
    replace: Literal["tag", "made_up"] = Field("tag", description="tag: <EMAIL>; made_up: a value of the same form, equal for equal input")

    def make(self, context: Context) -> Step:
        """A step that masks personal data; the facts are `pii` and `pii_KIND`."""
        from lmworks.corpus.pii.masking import mask

        names = ("pii", *(f"pii_{kind}" for kind in self.kinds))

        def masked(document: Document) -> Document:
            text, counts = mask(document.text, self.kinds, self.replace == "made_up")
            facts: dict[str, Any] = {"pii": sum(counts.values()), **{f"pii_{kind}": count for kind, count in counts.items()}}
            return document.with_text(text).with_facts(**facts)

        return PerDocument("pii", masked, makes=names, statistics=names)
