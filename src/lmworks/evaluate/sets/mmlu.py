"""MMLU: exams in 57 subjects (Hendrycks et al. 2020, arXiv:2009.03300). Its worked examples are the five of each subject's dev split."""

from __future__ import annotations

from lmworks.evaluate.items import Row
from lmworks.evaluate.sets.choice_set import Asked, ChoiceSet, arrow
from lmworks.evaluate.sources.data import Data


def _read(row: Row, number: str) -> Asked:
    subject = row["subject"]
    return Asked(f"{subject}/{number}", row["question"].strip(), tuple(map(str, row["choices"])), int(row["answer"]), subject)


SETS = (
    ChoiceSet(
        "mmlu", "exams in 57 subjects", Data("test", arrow("hails/mmlu_no_train/*/test"), "cais/mmlu", "all"), _read,
        examples=Data("dev", arrow("hails/mmlu_no_train/*/dev"), "cais/mmlu", "all"), per_subject=True,
        preamble="The following are multiple choice questions (with answers) about {subject}.",
    ),
)  # fmt: skip
