"""A rule: a measure of a document with bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Rule(Generic[Seen]):
    """A document is rejected as `name` when its measure lies below `low` or above `high`. `source` says where the bounds come from."""

    name: str
    measure: Callable[[Seen], float]
    source: str
    low: float = float("-inf")
    high: float = float("inf")

    def reason(self, doc: Seen) -> str | None:
        """The rule's name if the document breaks it."""
        return None if self.low <= self.measure(doc) <= self.high else self.name


def first_broken(doc: Seen, rules: Sequence[Rule[Seen]]) -> str | None:
    """The name of the first rule that the document breaks, None if it is good."""
    return next((reason for rule in rules if (reason := rule.reason(doc))), None)
