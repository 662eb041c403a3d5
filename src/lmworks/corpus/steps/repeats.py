"""The step `repeats`: cuts passages that occurred earlier in the same document. Comparisons between documents do not find these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from lmworks.corpus.document import Batch, Drop, Outcome, Step
from lmworks.corpus.steps.base import Context, StepOptions


class Repeats(StepOptions):
    """Cut passages that occurred earlier in the same document, such as a whole file; `dedup.substring` compares across documents."""

    renamed: ClassVar = {"length": "min_length", "largest": "max_fraction"}

    step: Literal["repeats"] = Field("repeats", description="which step this is")
    min_length: int = Field(50, ge=16, description="shortest passage to cut, in words (characters where a language has no spaces)")
    max_fraction: float = Field(1.0, gt=0, le=1, description="drop a document of which a larger fraction is repeated")

    def make(self, context: Context) -> Step:
        return _Repeats(self)


class _Repeats:
    name = "repeats"
    needs: tuple[str, ...] = ()
    makes: tuple[str, ...] = ("repeated",)
    statistics: tuple[str, ...] = ("repeated",)

    def __init__(self, node: Repeats) -> None:
        self._node = node

    def __call__(self, batch: Batch) -> Sequence[Outcome]:
        from lmworks.corpus.dedup.substring import cut_runs, repeats_within

        outcomes: list[Outcome] = []
        for number, document in enumerate(batch.documents):
            places = repeats_within(batch.compared, number, self._node.min_length)
            if not len(places):
                outcomes.append(document.with_facts(repeated=0.0))
                continue
            starts = batch.compared.starts[batch.compared.bounds[number] : batch.compared.bounds[number + 1]]
            text, left = cut_runs(document.text, starts, places, self._node.min_length)
            if 1 - left > self._node.max_fraction:
                outcomes.append(Drop("repeated", f"{1 - left:.0%} of its words occurred earlier in it", {"repeated": 1 - left}))
            else:
                outcomes.append(document.with_text(text).with_facts(repeated=float(1 - left)))
        return outcomes
