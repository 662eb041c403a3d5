"""The step `clean`: see `lmworks.corpus.cleaning`."""

from __future__ import annotations

from lmworks.corpus.cleaning import clean
from lmworks.corpus.document import Document, PerDocument, Step
from lmworks.corpus.steps import Context
from lmworks.recipe.schema.text_steps import Clean


def make(node: Clean, context: Context) -> Step:
    """Mend each text."""

    def mend(document: Document) -> Document:
        if node.exact_code and document.domain == "code":
            return document
        return document.with_text(clean(document.text, node.mojibake))

    return PerDocument("clean", mend)
