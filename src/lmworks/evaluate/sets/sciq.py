"""SciQ: exam questions of science (Welbl et al. 2017, arXiv:1707.06209), without the support passage, so that they ask for knowledge."""

from __future__ import annotations

from lmworks.evaluate.items import Row, digest
from lmworks.evaluate.sets.choice_set import Asked, ChoiceSet, arrow
from lmworks.evaluate.sources.data import Data


def _read(row: Row, number: str) -> Asked:
    choices = [row["distractor1"], row["distractor2"], row["distractor3"]]
    answer = digest("sciq", number)[0] % 4  # the file has no order of choices; a fixed place would win or lose every tie
    choices.insert(answer, row["correct_answer"])
    return Asked(number, row["question"], tuple(choices), answer)


SETS = (
    ChoiceSet(  # no `prepared` examples: those of the package have lost their choices
        "sciq", "science exams", Data("validation", arrow("sciq/none/validation"), "allenai/sciq"), _read,
        examples=Data("train", None, "allenai/sciq"),
    ),
)  # fmt: skip
