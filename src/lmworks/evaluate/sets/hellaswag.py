"""HellaSwag: what happens next (Zellers et al. 2019, arXiv:1905.07830)."""

from __future__ import annotations

import re

from lmworks.evaluate.items import ChoiceItem, Row
from lmworks.evaluate.sets.choice_set import Asked, ChoiceSet, arrow, item, prompts
from lmworks.evaluate.sources.data import Data

_CHOOSE = "Choose the best continuation:"


def _clean(text: str) -> str:
    """The WikiHow half carries markup such as [step]; a [title] ends the sentence before it."""
    return " ".join(re.sub(r"\[.*?\]", "", re.sub(r"\.? \[title\]", ". ", text)).split())


def _read(row: Row, number: str) -> Asked:
    context = _clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return Asked(number, context, tuple(map(_clean, row["endings"])), int(row["label"]))


def _build(name: str, asked: Asked) -> ChoiceItem:
    context = asked.question.rstrip()
    bare = context.partition(": ")[2]  # training text has the scene, hardly the label before it
    return item(name, asked, f"{context}\n{_CHOOSE}", context, bare)


SETS = (
    ChoiceSet(
        "hellaswag", "everyday scenes and how they go on",
        Data("validation", arrow("hellaswag/none/validation"), "Rowan/hellaswag"), _read, _build,
        examples=Data("train", None, "Rowan/hellaswag"), prepared=prompts("hellaswag/val_mc_5shot"), shown=rf"(.*)\n{_CHOOSE}",
    ),
)  # fmt: skip
