"""The right answers of prompts, read before anything is trained, by the reader that judges the replies (`lmworks.verify`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lmworks.errors import UserError
from lmworks.recipe.schema.grpo import RewardTask
from lmworks.verify.answers import Kind, RightAnswer, right_answer
from lmworks.verify.symbolic import check_installed

COLUMNS = ("answer", "solution")  # the first that a row has
MOST_UNREADABLE = 0.05
"""The share of unreadable right answers above which a set is refused. Sets of published tasks have none (all 1,319 of GSM8K and all 500 of
MATH-500 are read), so a larger share is a wrong column or a wrong kind of reward, not a few odd rows."""
_EXAMPLES = 3
_LONGEST_SHOWN = 60
_REMEDY = {
    "exact": "give the answer itself, or mark it in a worked solution by #### or \\boxed{}",
    "numeric": "give a number, or a worked solution that ends in #### and a number; for expressions use reward math, for words exact",
    "math": "give a number, an expression in LaTeX or a few words, or a worked solution with \\boxed{}",
}


def answer_of(row: Mapping[str, Any]) -> Any:
    """What a row gives as its right answer; None if it has none."""
    return next((row[name] for name in COLUMNS if row.get(name) is not None), None)


def right_answer_of(row: Mapping[str, Any], kind: Kind) -> RightAnswer | None:
    """The right answer of a row as it is compared; None if it cannot be read."""
    written = answer_of(row)
    return _read(written, kind) if isinstance(written, (str, int, float)) else None


@lru_cache(maxsize=65_536)
def _read(written: str | int | float, kind: Kind) -> RightAnswer | None:
    return right_answer(written, kind)


def answer_check(task: RewardTask, key: str) -> AnswerCheck | None:
    """The check of the right answers of a set; None if its reward compares with none."""
    match task.reward:
        case "exact" | "numeric" | "math" as kind:
            return AnswerCheck(key, kind)
        case _:
            return None


@dataclass
class AnswerCheck:
    """Counts the rows of a set whose right answer cannot be read. `key` is the set's recipe key."""

    key: str
    kind: Kind
    read: int = 0
    unreadable: int = 0
    examples: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.kind == "math":
            check_installed(f"{self.key}.reward math")

    def readable(self, origin: str, row: Mapping[str, Any]) -> bool:
        """Whether the right answer of a row is readable."""
        self.read += 1
        if right_answer_of(row, self.kind) is not None:
            return True
        self.unreadable += 1
        if len(self.examples) < _EXAMPLES:
            text = " ".join(str(answer_of(row)).split())
            self.examples.append(f"{origin} {text[:_LONGEST_SHOWN]!r}{'...' if len(text) > _LONGEST_SHOWN else ''}")
        return False

    def finish(self) -> None:
        """Raise `UserError` if more than `MOST_UNREADABLE` of the right answers cannot be read: their prompts would earn nothing."""
        if self.unreadable > MOST_UNREADABLE * self.read:
            raise UserError(
                f"{self.key}: reward {self.kind} cannot read {self.unreadable:,} of {self.read:,} right answers, to which every reply "
                f"would be wrong ({'; '.join(self.examples)}); {_REMEDY[self.kind]}"
            )
