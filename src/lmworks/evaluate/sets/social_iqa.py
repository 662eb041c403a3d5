"""Social IQa: motives and feelings in everyday situations (Sap et al. 2019, arXiv:1904.09728)."""

from __future__ import annotations

from lmworks.evaluate.items import Row
from lmworks.evaluate.sets.choice_set import Asked, ChoiceSet, arrow, prompts
from lmworks.evaluate.sources.data import Data


def _read(row: Row, number: str) -> Asked:
    return Asked(number, f"{row['context']} {row['question']}", (row["answerA"], row["answerB"], row["answerC"]), int(row["label"]) - 1)


SETS = (
    ChoiceSet(
        "social-iqa", "social situations", Data("validation", arrow("social_i_qa/none/validation"), "allenai/social_i_qa"), _read,
        examples=Data("train", None, "allenai/social_i_qa"), prepared=prompts("socialiqa/val_mc_5shot"),
    ),
)  # fmt: skip
