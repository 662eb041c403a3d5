"""The step `quality`: the score of a trained classifier as a fact, and a threshold per source. See `lmworks.corpus.quality`."""

from __future__ import annotations

from collections.abc import Sequence

from lmworks.corpus.document import Batch, Drop, Outcome, PerDocument, Step
from lmworks.corpus.quality.classifier import Classifier
from lmworks.corpus.steps import Context
from lmworks.recipe.schema.corpus_steps import Quality


class _Score:
    needs: tuple[str, ...] = ()

    def __init__(self, node: Quality, context: Context) -> None:
        self.name = node.fact
        self.makes = self.statistics = (node.fact,)
        self._classifier = Classifier.load(context.folder / node.model)
        own = context.source.quality_threshold
        self._threshold = node.threshold if own is None else own

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for document, found in zip(batch.documents, self._classifier.scores(batch.units).tolist(), strict=True):
            score = round(found, 6)  # so that a score written down is the score that was judged
            facts = {self.name: score}
            kept = score >= self._threshold
            outcomes.append(document.with_facts(**facts) if kept else Drop(self.name, f"{score:.3f} < {self._threshold:g}", facts))
        return outcomes


def make(node: Quality, context: Context) -> Step:
    """The classifier of the node with the threshold of the source. Raises `UserError` for a file that is no classifier."""
    if node.sources and context.source.name not in node.sources:
        return PerDocument(node.fact, lambda document: document)
    return _Score(node, context)
