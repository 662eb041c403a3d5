"""Questions with verifiable answers from reasoning-gym, answered freely and judged by the package's own verifiers.

The evaluation's seeds start at `SEED`; tuning data is drawn from seeds counted up from 1, so the two never share a
generator state. Small generators repeat themselves all the same: training text is searched for what `questions` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.corpus.contamination import Question
from lmworks.corpus.generated import create
from lmworks.evaluate.extraction import extract
from lmworks.evaluate.statistics import Score
from lmworks.recipe.schema.evaluate import Generator

SEED = 10_000_019
# Verifiers give part marks (for length, for form, for single letters). Solved is the full mark to the last bit: a right answer
# gets exactly 1.0, while sums of part marks (a right word with more behind it, in spell_backward) come out at 1.0 +- 2e-16.
FULL_MARK = 1.0


@dataclass(frozen=True)
class Task:
    """One generated question; `entry` is what the package's verifier wants back."""

    generator: Generator
    id: str
    question: str
    answer: str  # one right answer; empty where the package only knows how to check
    entry: dict[str, Any]

    @property
    def name(self) -> str:
        return self.generator.name


@dataclass(frozen=True)
class Judged:
    task: Task
    reply: str
    extracted: str
    mark: float  # 0 to 1, by the package's verifier

    @property
    def solved(self) -> bool:
        return self.mark == FULL_MARK

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task.name, "id": self.task.id, "question": self.task.question, "answer": self.task.answer,
                "reply": self.reply, "extracted": self.extracted, "mark": self.mark, "solved": self.solved}


def generate_tasks(generator: Generator, count: int, seed: int = SEED) -> list[Task]:
    """`count` different questions of the generator (fewer where it repeats itself), always the same ones."""
    seen: dict[str, Task] = {}
    for index, entry in enumerate(create(generator, seed, count)):
        task = Task(generator, f"{generator.name}/{seed + index}", entry["question"], str(entry["answer"] or ""), entry)
        seen.setdefault(task.question, task)
    return list(seen.values())


def questions(generators: Iterable[Generator], count: int) -> Iterator[Question]:
    """The evaluation's questions with their answers, which no text that is trained on may hold."""
    for generator in generators:
        yield from map(question, generate_tasks(generator, count))


def question(task: Task) -> Question:
    """A task as it is kept out of the training text."""
    return Question(task.id, task.question, task.answer)


def judge(tasks: Sequence[Task], replies: Sequence[str]) -> list[Judged]:
    """Mark every reply. The marks come from the verifier of the generator that made the question."""
    verifiers = {name: create(generator, SEED, 1) for name, generator in {task.name: task.generator for task in tasks}.items()}
    judged = []
    for task, reply in zip(tasks, replies, strict=True):
        extracted = extract(reply)
        # a full stop may close the reply's sentence or belong to the answer: either reading counts
        marks = [_mark(verifiers[task.name], reading, task) for reading in {extracted, extracted.removesuffix(".")}]
        judged.append(Judged(task, reply, extracted, FULL_MARK if FULL_MARK in marks else max(marks)))
    return judged


def _mark(verifier: Any, answer: str, task: Task) -> float:
    try:
        return float(verifier.score_answer(answer, task.entry))
    except Exception:  # some verifiers raise on an answer that they cannot parse, and a model may write anything
        return 0.0


def score(judged: Sequence[Judged]) -> Score:
    """Share solved. Free answers have no chance level, so it is 0; the baseline is what the commonest right answer of
    these very questions would get, which no model can know beforehand: a strict mark to beat."""
    common = Counter(j.task.answer for j in judged if j.task.answer).most_common(1)
    constant = common[0][1] / len(judged) if common and common[0][1] > 1 else 0.0
    return Score(sum(j.solved for j in judged), len(judged), 0.0, constant)
