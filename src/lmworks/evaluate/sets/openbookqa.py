"""OpenBookQA: elementary science that combines a fact with common knowledge (Mihaylov et al. 2018, arXiv:1809.02789)."""

from __future__ import annotations

from lmworks.evaluate.sets.choice_set import ChoiceSet, arrow, labelled, prompts
from lmworks.evaluate.sources.data import Data

SETS = (
    ChoiceSet(
        "openbookqa", "elementary science",
        Data("validation", arrow("openbookqa/main/validation"), "allenai/openbookqa", "main"), labelled("question_stem"),
        examples=Data("train", None, "allenai/openbookqa", "main"), prepared=prompts("openbookqa/val_mc_5shot"),
    ),
)  # fmt: skip
