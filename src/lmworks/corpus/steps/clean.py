"""The step `clean`: see `lmworks.corpus.cleaning`."""

from __future__ import annotations

from lmworks.corpus.cleaning import clean
from lmworks.corpus.document import PerDocument, Step
from lmworks.corpus.steps import Context
from lmworks.recipe.steps import Clean


def make(node: Clean, context: Context) -> Step:
    """Mend each text."""
    return PerDocument("clean", lambda document: document.with_text(clean(document.text)))
