"""Decontamination of conversations, preference pairs and prompts: one search for all stages after pretraining."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from lmworks.corpus.contamination import Decontaminator
from lmworks.corpus.transform.cleaning import clean
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.data.masks import strings
from lmworks.ui.terminal import console

Protect = Callable[[], tuple[Collection[str], Decontaminator | None]]
"""Returns the questions of the evaluation, and the decontaminator that holds its items."""

_AT_ONCE = 256
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Contents:
    """The texts of a row: where it was read, its messages, and everything else that belongs to it."""

    origin: str
    messages: Any
    others: Any = None


class Decontamination:
    """Finds the rows of one data set in which a user turn is one of `questions`, or `decontaminator` finds an item.

    `where` is its recipe key. `corpus.decontaminate.action` has the same meaning as for the corpus: drop the rows, fail, or report and
    keep them; if `corpus.decontaminate` is null, nothing is searched. Questions that are `generated` resemble those of the evaluation by
    design: of these only the equal ones are dropped, whatever the action is.
    """

    def __init__(
        self, where: str, recipe: Recipe, questions: Collection[str], decontaminator: Decontaminator | None, *, generated: bool
    ) -> None:
        options = recipe.corpus.decontaminate
        self._where, self._action = where, "drop" if generated else options.action if options else None
        self._questions = {question.strip() for question in questions} if self._action else set()
        self._decontaminator = decontaminator if self._action and not generated else None
        self._found, self._first = 0, ""

    def search(self, rows: Iterable[_Row], contents: Callable[[_Row], Contents | None]) -> Iterator[tuple[_Row, str]]:
        """Each row with the reason for which it is left out, and after a colon the item; empty if it stays. Rows without contents pass.

        Raises `UserError` at the first contaminated row if the action is to fail.
        """
        rows = iter(rows)
        while some := list(islice(rows, _AT_ONCE if self._decontaminator else 1)):
            read = [contents(row) for row in some]
            for row, one, item in zip(some, read, self._items(read), strict=True):
                if one is not None and not self._questions.isdisjoint(_asked(one.messages)):
                    yield row, self._decide(one.origin, "is asked by the evaluation", "asked by the evaluation")
                elif one is not None and item:
                    yield row, self._decide(one.origin, f"holds the evaluation item {item}", f"holds an evaluation item: {item}")
                else:
                    yield row, ""

    def _items(self, read: Sequence[Contents | None]) -> Iterator[str]:
        """The item that the decontaminator finds in each of some rows; empty if there is none."""
        if self._decontaminator is None:
            yield from ("" for _ in read)
            return
        document_counts = self._decontaminator.count_documents([])
        texts = ["" if one is None else clean("\n".join(strings((one.messages, one.others)))) for one in read]
        suspects = set(self._decontaminator.suspect_documents(self._decontaminator.scan(texts), document_counts))
        for number, text in enumerate(texts):
            matches = self._decontaminator.find_matches(text, document_counts) if number in suspects else []
            yield matches[0].against if matches else ""

    def _decide(self, origin: str, finding: str, reason: str) -> str:
        if self._action == "fail":
            raise UserError(f"{self._where}: {origin} {finding}; take it out, or set corpus.decontaminate.action to drop")
        self._found, self._first = self._found + 1, self._first or f"{origin} {finding}"
        return "" if self._action == "report" else reason

    def report(self) -> int:
        """The number of contaminated rows so far. They are printed if they are kept."""
        if self._action == "report" and self._found:
            rows = "1 contaminated row is" if self._found == 1 else f"{self._found:,} contaminated rows are"
            text = f"{self._where}: {rows} kept (corpus.decontaminate.action: report); first: {self._first}"
            console.print(text, style="yellow", markup=False, highlight=False)
        return self._found


def _asked(messages: Any) -> Iterator[str]:
    """The texts of the user's turns."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user":
            yield from (text.strip() for text in strings(message.get("content")))
