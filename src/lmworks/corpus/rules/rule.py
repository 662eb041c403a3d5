"""A rule: a measure of a document with bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lmworks.corpus.document import Drop

View = TypeVar("View")


@dataclass(frozen=True)
class Rule(Generic[View]):
    """A document is dropped with the reason `name` if its measure is below `low` or above `high`. `source` names the origin of the
    bounds.
    """

    name: str
    measure: Callable[[View], float]
    source: str
    low: float = float("-inf")
    high: float = float("inf")

    def drop(self, doc: View) -> Drop | None:
        """The drop by this rule, with value and limit as its detail; None if the document complies."""
        value = self.measure(doc)
        if self.low <= value <= self.high:
            return None
        return Drop(self.name, f"{value:.4g}, {f'at least {self.low:g}' if value < self.low else f'at most {self.high:g}'}")


def first_broken(doc: View, rules: Sequence[Rule[View]]) -> Drop | None:
    """The drop by the first rule that the document breaks; None if it complies with all."""
    return next((drop for rule in rules if (drop := rule.drop(doc))), None)
