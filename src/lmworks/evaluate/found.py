"""What an evaluation collects while it measures a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmworks.corpus.contamination import Question

if TYPE_CHECKING:
    from lmworks.evaluate.bits_per_byte import DocumentBits  # imports torch


@dataclass
class Found:
    """What was measured.

    scores: by name, as in results.json. outcomes: one record per item and score. items: notable items, to be read. asked: the items of
    each set, as they are kept out of training text. unavailable: sets without data, with the reason. documents: the bits of held-out text.
    """

    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    outcomes: list[dict[str, Any]] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)
    asked: dict[str, list[Question]] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    documents: list[DocumentBits] = field(default_factory=list)

    def add(self, name: str, score: dict[str, Any], outcomes: Sequence[dict[str, Any]], items: Sequence[dict[str, Any]]) -> None:
        self.scores[name] = score
        self.outcomes += ({"score": name, **one} for one in outcomes)
        self.items += ({"score": name, **one} for one in items)
