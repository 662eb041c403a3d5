"""AI2 Reasoning Challenge: questions of school science (Clark et al. 2018, arXiv:1803.05457)."""

from __future__ import annotations

from lmworks.evaluate.sets.choice_set import ChoiceSet, arrow, labelled, prompts
from lmworks.evaluate.sources.data import Data


def _arc(name: str, config: str, task: str) -> ChoiceSet:
    def data(split: str, package: str | None) -> Data:
        return Data(split, package, "allenai/ai2_arc", config)

    return ChoiceSet(
        name, "school science", data("validation", arrow(f"ai2_arc/{config}/validation")), labelled("question"),
        examples=data("train", None), prepared=prompts(f"{task}/val_mc_5shot"),
    )  # fmt: skip


SETS = (_arc("arc-easy", "ARC-Easy", "arc_easy"), _arc("arc-challenge", "ARC-Challenge", "arc_challenge"))
