"""From the recipe's `corpus.steps` to functions on documents. Each kind lives in a file of its own and is imported when it is used."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lmworks.corpus.document import Step
from lmworks.recipe.schema import corpus_steps as nodes
from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.corpus import Source

_MAKERS = {
    "clean": "lmworks.corpus.steps.clean",
    "language": "lmworks.corpus.steps.language",
    "rules": "lmworks.corpus.steps.rules",
    "pii": "lmworks.corpus.steps.pii",
    "lines": "lmworks.corpus.steps.lines",
    "repeats": "lmworks.corpus.steps.repeats",
    "code": "lmworks.corpus.steps.code",
    "math": "lmworks.corpus.steps.math",
    "quality": "lmworks.corpus.steps.quality",
    "rewrite": "lmworks.corpus.steps.rewrite",
    "python": "lmworks.corpus.steps.python",
}
"""`step` to the module whose `make(node, context)` returns the `Step`."""


@dataclass(frozen=True)
class Context:
    """What a step is made for: one source of a recipe, and the folder that the recipe's relative paths start from."""

    source: Source
    seed: int
    folder: Path


def make(node: nodes.Step | Node, context: Context) -> Step:
    """The step of one entry of `corpus.steps`, ready for the documents of one source. Raises `UserError` for what it cannot do."""
    made: Step = import_module(_MAKERS[node.step]).make(node, context)  # type: ignore[union-attr]
    return made
