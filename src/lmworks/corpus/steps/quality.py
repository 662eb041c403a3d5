"""The step `quality`: adds the score of a trained classifier as a fact, and applies a threshold per source. See
`lmworks.corpus.quality`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from lmworks.corpus.document import Batch, Drop, Outcome, PerDocument, Step
from lmworks.corpus.steps.base import Context, StepOptions


class Quality(StepOptions):
    """Score each document with a trained classifier (`lmworks corpus classifier`) and drop documents below a threshold."""

    gives_quality: ClassVar = True

    step: Literal["quality"] = Field("quality", description="which step this is")
    model: str = Field(description="the classifier's file, relative to the recipe")
    threshold: float = Field(0.0, ge=0, le=1, description="drop documents below it; a source's quality_threshold takes precedence")
    fact: str = Field("quality", pattern=r"^[a-z][a-z0-9_]*$", description="name of the score, for buckets, reports and later steps")
    sources: tuple[str, ...] = Field((), description="sources to apply the step to; all when empty")

    def make(self, context: Context) -> Step:
        """The classifier with the threshold of the source. Raises `UserError` if the file is not a classifier."""
        if self.sources and context.source.name not in self.sources:
            return PerDocument(self.fact, lambda document: document)
        return _Score(self, context)


class _Score:
    needs: tuple[str, ...] = ()

    def __init__(self, node: Quality, context: Context) -> None:
        from lmworks.corpus.quality.classifier import Classifier

        self.name = node.fact
        self.makes = self.statistics = (node.fact,)
        self._classifier = Classifier.load(context.folder / node.model)
        own = context.source.quality_threshold
        self._threshold = node.threshold if own is None else own

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        outcomes: list[Outcome] = []
        for document, found in zip(batch.documents, self._classifier.scores(batch.units).tolist(), strict=True):
            score = round(found, 6)  # so that the recorded score is the one compared with the threshold
            facts = {self.name: score}
            kept = score >= self._threshold
            outcomes.append(document.with_facts(**facts) if kept else Drop(self.name, f"{score:.3f} < {self._threshold:g}", facts))
        return outcomes
