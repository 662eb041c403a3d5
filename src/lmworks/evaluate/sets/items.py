"""Items of benchmark sets: a question with choices, or one that is answered freely; and what all sets have in common."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmworks.corpus.contamination import Question

Row = dict[str, Any]
Form = Literal["cloze", "letters", "free"]
Metric = Literal["exact", "number", "contains"]
FORMS: tuple[Form, ...] = ("cloze", "letters", "free")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ANSWER = "\nAnswer:"


def is_null(cell: Any) -> bool:
    """Whether a cell of a row has no value. Programs that write tables make NaN of null in a column of numbers."""
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def text_of(cell: Any, what: str) -> str:
    """The text of a cell of a row. Raises `ValueError` for a cell without one: null, and a list or a map."""
    if is_null(cell):
        raise ValueError(f"{what} is null")
    if isinstance(cell, list | dict):
        raise ValueError(f"{what} is a {'list' if isinstance(cell, list) else 'map'} and no text")
    return str(cell)


@dataclass(frozen=True)
class ChoiceItem:
    """A question with `choices`, of which `answer` is the index of the right one.

    In cloze form, choice i is scored as `continuations[i]` after `contexts[i]`. The contexts are the same for all choices except in
    WinoGrande, which is scored partially (Trinh & Le 2018, arXiv:1806.02847): the blank is filled in the context, and the rest of the
    sentence, the same for both, is the continuation. `question` is what the other forms show above the choices. `text` is question and
    right answer as they would stand in a contaminated document. `subject` is a part of the set (a subject of MMLU), or empty. `cue` stands
    between the listed choices and the answer; where it is empty, `ANSWER` does.
    """

    set: str
    id: str
    subject: str
    question: str
    choices: tuple[str, ...]
    answer: int
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    text: str
    preamble: str = ""  # stands once before the worked examples, in letter and free form
    passage: str = ""  # identifies the passage that the question is about, where several items share one
    cue: str = ANSWER


@dataclass(frozen=True)
class OpenItem:
    """A question without choices. A reply is right if it agrees with one of `answers` under `metric` (`sets/forms.py`). `cue` stands
    between question and answer, except in a chat."""

    set: str
    id: str
    subject: str
    question: str
    answers: tuple[str, ...]
    metric: Metric
    text: str
    preamble: str = ""
    cue: str = ANSWER


Item = ChoiceItem | OpenItem


def score_name(set_: str, form: str, shots: int, *more: str) -> str:
    """The name of a score: SET/FORM/SHOTS-shot, and what else belongs to it, such as pass@1."""
    return "/".join((set_, form, f"{shots}-shot", *more))


def shortened(text: str, most: int) -> str:
    """Text without its middle, if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-(most // 2) :]}"


def digest(*parts: str) -> bytes:
    """16 bytes that depend on the parts only."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


def short_digest(*parts: str) -> str:
    """The beginning of `digest`, for records."""
    return digest(*parts).hex()[:16]


def asked_hash(item: Item) -> str:
    """Identifies what an item asks and what is right, whatever its id is: two outcomes are of one item only if it is the same."""
    asked = (*item.contexts, *item.continuations, str(item.answer)) if isinstance(item, ChoiceItem) else (item.metric, *item.answers)
    asked += (item.cue,) * (item.cue != ANSWER)  # records of earlier versions have the hash without it
    return short_digest(item.preamble, item.question, *asked)


def ranked(items: Sequence[Item]) -> list[Item]:
    """The items in the order in which samples take them: by the hash of (set, id).

    The order depends on nothing else, so that all models and runs are asked the same questions, and a smaller sample is part of a larger
    one.
    """
    return sorted(items, key=lambda item: digest("sample", item.set, item.id))


def protected_question(item: Item) -> Question:
    """An item as it is kept out of the training text."""
    answer = item.answers[0] if isinstance(item, OpenItem) else item.continuations[item.answer].strip()
    bare = item.text.removesuffix(f" {answer}")
    return Question(f"{item.set}/{item.id}", bare, answer if bare != item.text else "")


def chance_level(items: Sequence[ChoiceItem]) -> float:
    """Expected accuracy of a blind guess: the mean of 1 / number of choices."""
    return sum(1 / len(item.continuations) for item in items) / len(items) if items else 0.0


def constant_level(items: Sequence[ChoiceItem]) -> float:
    """Accuracy of the best constant answer where all items offer the same continuations (BoolQ, letters); elsewhere the chance level.

    Items may differ in the number of letters that they offer.
    """
    longest = max((item.continuations for item in items), key=len, default=())
    if any(item.continuations != longest[: len(item.continuations)] for item in items):
        return chance_level(items)
    right = [item.answer for item in items]
    return max((right.count(answer) for answer in set(right)), default=0) / max(1, len(items))
