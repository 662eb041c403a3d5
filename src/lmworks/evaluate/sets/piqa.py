"""PIQA: which of two ways reaches a goal (Bisk et al. 2019, arXiv:1911.11641)."""

from __future__ import annotations

from functools import partial

from lmworks.evaluate.items import Row
from lmworks.evaluate.sets.choice_set import Asked, ChoiceSet, arrow, build, prompts
from lmworks.evaluate.sources.data import Data


def _read(row: Row, number: str) -> Asked:
    return Asked(number, row["goal"], (row["sol1"], row["sol2"]), int(row["label"]))


SETS = (
    ChoiceSet(
        "piqa", "everyday physics",
        Data("validation", arrow("piqa/plain_text/validation"), "ybisk/piqa", "plain_text"), _read, partial(build, prefix="Goal: "),
        examples=Data("train", None, "ybisk/piqa", "plain_text"), prepared=prompts("piqa/val_mc_5shot"), shown=r"Goal: (.*)",
    ),
)  # fmt: skip
