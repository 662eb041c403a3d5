"""A rule: a measure of a document with bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lmworks.corpus.document import Drop

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Rule(Generic[Seen]):
    """A document is rejected as `name` when its measure lies below `low` or above `high`. `source` says where the bounds come from."""

    name: str
    measure: Callable[[Seen], float]
    source: str
    low: float = float("-inf")
    high: float = float("inf")

    def drop(self, doc: Seen) -> Drop | None:
        """The drop by this rule, with the value and the limit as its detail, if the document breaks it."""
        value = self.measure(doc)
        if self.low <= value <= self.high:
            return None
        return Drop(self.name, f"{value:.4g}, {f'at least {self.low:g}' if value < self.low else f'at most {self.high:g}'}")


def first_broken(doc: Seen, rules: Sequence[Rule[Seen]]) -> Drop | None:
    """The drop by the first rule that the document breaks, None if it is good."""
    return next((drop for rule in rules if (drop := rule.drop(doc))), None)
