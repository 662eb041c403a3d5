"""BoolQ: yes-no questions about a passage (Clark et al. 2019, arXiv:1905.10044)."""

from __future__ import annotations

from dataclasses import replace

from lmworks.evaluate.items import ChoiceItem, Row, digest
from lmworks.evaluate.sets.choice_set import ANSWER, Asked, ChoiceSet, arrow, item, prompts
from lmworks.evaluate.sources.data import Data

_ASK = "\nQuestion: "


def _read(row: Row, number: str) -> Asked:
    return Asked(number, f"{row['passage']}{_ASK}{row['question']}?", ("yes", "no"), 0 if row["answer"] else 1)


def _build(name: str, asked: Asked) -> ChoiceItem:
    """In a contaminated document stand question and answer: the passage alone is an encyclopedia's, and gives nothing away."""
    bare = asked.question.rpartition(_ASK)[2].removesuffix("?")
    made = item(name, asked, asked.question, asked.question + ANSWER, bare)
    return replace(made, passage=digest(asked.question.rpartition(_ASK)[0]).hex()[:12])


SETS = (
    ChoiceSet(
        "boolq", "reading: yes or no",
        Data("validation", arrow("boolq/none/validation"), "google/boolq"), _read, _build,
        examples=Data("train", None, "google/boolq"), prepared=prompts("boolq/val_mc_5shot"), shown=r"(.*)",
    ),
)  # fmt: skip
