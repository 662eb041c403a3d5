"""CommonsenseQA: five choices from a graph of common-sense knowledge (Talmor et al. 2019, arXiv:1811.00937)."""

from __future__ import annotations

from lmworks.evaluate.sets.choice_set import ChoiceSet, arrow, labelled, prompts
from lmworks.evaluate.sources.data import Data

SETS = (
    ChoiceSet(
        "commonsenseqa", "common sense",
        Data("validation", arrow("tau/commonsense_qa/none/validation"), "tau/commonsense_qa"), labelled("question"),
        examples=Data("train", None, "tau/commonsense_qa"), prepared=prompts("csqa/val_mc_5shot"),
    ),
)  # fmt: skip
