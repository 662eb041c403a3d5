"""The step `pii`: personal data and keys masked, and counted per kind; see `lmworks.corpus.pii`."""

from __future__ import annotations

from typing import Any

from lmworks.corpus.document import Document, PerDocument, Step
from lmworks.corpus.pii.masking import mask
from lmworks.corpus.steps import Context
from lmworks.recipe.schema.text_steps import Pii


def make(node: Pii, context: Context) -> Step:
    """Mask what is found; the facts are `pii` and `pii_KIND`."""
    names = ("pii", *(f"pii_{kind}" for kind in node.kinds))

    def masked(document: Document) -> Document:
        text, counts = mask(document.text, node.kinds, node.replace == "made_up")
        facts: dict[str, Any] = {"pii": sum(counts.values()), **{f"pii_{kind}": count for kind, count in counts.items()}}
        return document.with_text(text).with_facts(**facts)

    return PerDocument("pii", masked, makes=names, statistics=names)
