"""WinoGrande: which of two nouns fills the blank (Sakaguchi et al. 2019, arXiv:1907.10641)."""

from __future__ import annotations

from lmworks.evaluate.items import ChoiceItem, Row
from lmworks.evaluate.sets.choice_set import Asked, ChoiceSet, arrow, prompts
from lmworks.evaluate.sources.data import Data


def _read(row: Row, number: str) -> Asked:
    return Asked(number, row["sentence"], (row["option1"], row["option2"]), int(row["answer"]) - 1)


def _build(name: str, asked: Asked) -> ChoiceItem:
    before, after = asked.question.replace("___", "_").split("_")
    contexts, rest = tuple(before + choice for choice in asked.choices), " " + after.strip()
    question = f"Fill in the blank: {before}___{after}"
    return ChoiceItem(
        name, asked.id, asked.subject, question, asked.choices, asked.answer, contexts, (rest,) * len(contexts),
        contexts[asked.answer] + rest,
    )  # fmt: skip


SETS = (
    ChoiceSet(
        "winogrande", "pronouns that need common sense",
        Data("validation", arrow("winogrande/winogrande_xl/validation"), "allenai/winogrande", "winogrande_xl"), _read, _build,
        examples=Data("train", None, "allenai/winogrande", "winogrande_xl"), prepared=prompts("winogrande/val_mc_5shot"),
        shown=r"Fill in the blank: (.*)",
    ),
)  # fmt: skip
