"""Documents and steps for the tests of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmworks.corpus.document import Batch, Context, Document, Outcome, Step
from lmworks.corpus.transform.steps import make_step
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.steps import StepOptions


def step_of(node: StepOptions, folder: Path = Path(), **source: Any) -> Step:
    """The step of a node for a source of English web pages; `source` overrides fields."""
    given = {"name": "web", "kind": "text", "path": "texts", "license": "none", "domain": "web", **source}
    return make_step(node, Context(Source(**given), 0, folder))


def documents(texts: Sequence[str], part: int = 0, **fields: Any) -> list[Document]:
    """One document per text, in a part of its own."""
    given = {"origin": "file.txt", "source": "web", "domain": "web", "language": "en", **fields}
    return [Document(id=f"web/{part}/{number}", text=text, **given) for number, text in enumerate(texts)]


def outcomes_of(step: Step, texts: Sequence[str], **fields: Any) -> list[Outcome]:
    return list(step(Batch(documents(texts, **fields))))
