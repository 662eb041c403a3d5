"""COPA: the likelier cause or effect (Roemmele et al. 2011), as in SuperGLUE."""

from __future__ import annotations

from lmworks.evaluate.items import ChoiceItem, Row
from lmworks.evaluate.sets.choice_set import Asked, ChoiceSet, arrow, item
from lmworks.evaluate.sources.data import Data

_WORDS = {"cause": " because", "effect": " therefore"}
_QUESTIONS = {"cause": "What was the cause?", "effect": "What happened as a result?"}


def _read(row: Row, number: str) -> Asked:
    choices = tuple(choice[0].lower() + choice[1:] for choice in (row["choice1"], row["choice2"]))
    return Asked(number, f"{row['question']}: {row['premise'].strip()}", choices, int(row["label"]))


def _build(name: str, asked: Asked) -> ChoiceItem:
    kind, _, premise = asked.question.partition(": ")
    return item(name, asked, f"{premise}\nQuestion: {_QUESTIONS[kind]}", premise.removesuffix(".") + _WORDS[kind], premise)


SETS = (
    ChoiceSet(
        "copa", "causes and effects", Data("validation", arrow("super_glue/copa/validation"), "aps/super_glue", "copa"), _read, _build,
        examples=Data("train", None, "aps/super_glue", "copa"),
    ),
)  # fmt: skip
