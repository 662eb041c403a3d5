"""The step `repeats`: passages that stood earlier in the same document, which comparing documents with each other never sees."""

from __future__ import annotations

from collections.abc import Sequence

from lmworks.corpus.dedup.substring import cut, within
from lmworks.corpus.document import Batch, Drop, Outcome, Step
from lmworks.corpus.steps import Context
from lmworks.recipe.schema.text_steps import Repeats


class _Repeats:
    name = "repeats"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("repeated",)
    statistics: tuple[str, ...] = ("repeated",)

    def __init__(self, node: Repeats) -> None:
        self._node = node

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for number, document in enumerate(batch.documents):
            places = within(batch.compared, number, self._node.min_length)
            if not len(places):
                outcomes.append(document.with_facts(repeated=0.0))
                continue
            starts = batch.compared.starts[batch.compared.bounds[number] : batch.compared.bounds[number + 1]]
            text, left = cut(document.text, starts, places, self._node.min_length)
            if 1 - left > self._node.max_fraction:
                outcomes.append(Drop("repeated", f"{1 - left:.0%} of its words stood in it before", {"repeated": 1 - left}))
            else:
                outcomes.append(document.with_text(text).with_facts(repeated=float(1 - left)))
        return outcomes


def make(node: Repeats, context: Context) -> Step:
    """Cut repeated passages."""
    return _Repeats(node)
