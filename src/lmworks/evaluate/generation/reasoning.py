"""Questions with verifiable answers from reasoning-gym, judged by the package's own verifiers.

The evaluation's seeds start at `SEED`; tuning data is drawn from seeds counted up from 1, so the two never share a
generator state. Small generators repeat themselves all the same: training text is searched for what `questions` lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmworks.corpus.contamination import Question
from lmworks.corpus.generated_questions import create
from lmworks.evaluate.generation.interface import Failure, GenerationSet, Judged, Lengths, Prompt, Reply, ask, commonest
from lmworks.recipe.schema.evaluate import Generator
from lmworks.verify.marks import stated

SEED = 10_000_019
_MOST_TOKENS = 64
_MOST_JUDGED = 10_000  # characters of an answer; longer ones are not given to the verifiers, of which some take quadratic time
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
        yield from Reasoning(generator, count).questions()


class Reasoning(GenerationSet):
    """`items` questions of one generator. An answer is solved by full marks only."""

    def __init__(self, generator: Generator, items: int) -> None:
        self.name, self._generator, self._items = generator.name, generator, items

    def prompts(self, count: int | None, shots: int, lengths: Lengths) -> list[Prompt]:
        return [
            Prompt(
                self.name, task.id, f"Question: {task.question.strip()}\nAnswer:", ask(task.question), task, _MOST_TOKENS,
                ("\nQuestion:", "\n\n"), answer=task.answer,
            )
            for task in generate_tasks(self._generator, self._items)[:count]
        ]  # fmt: skip

    def judge(self, prompt: Prompt, replies: Sequence[Reply]) -> list[Judged]:
        verifier = create(self._generator, SEED, 1)
        return [judge(verifier, prompt.reference, reply) for reply in replies]

    def values(self, judged: Sequence[tuple[Prompt, list[Judged]]]) -> dict[str, dict[str, float]]:
        return {"": {prompt.id: float(one.correct) for prompt, (one, *_) in judged}}

    def baseline(self, prompts: Sequence[Prompt]) -> float:
        return commonest(prompt.answer for prompt in prompts) if all(prompt.answer for prompt in prompts) else 0.0

    def questions(self) -> Iterator[Question]:
        for task in generate_tasks(self._generator, self._items):
            yield Question(task.id, task.question, task.answer)


def judge(verifier: Any, task: Task, reply: Reply) -> Judged:
    """Mark a reply by the verifier of the generator that made the question. A verifier reads any text, so no reply has a wrong form."""
    extracted = stated(reply.text)
    if len(extracted) > _MOST_JUDGED:
        return Judged.failed("truncated" if reply.truncated else "format")
    # a full stop may close the reply's sentence or belong to the answer: either reading counts
    marks = [_mark(verifier, reading, task) for reading in {extracted, extracted.removesuffix(".")}]
    if FULL_MARK in marks:
        return Judged.right(extracted)
    failure: Failure = "truncated" if reply.truncated else "wrong" if extracted else "no answer"
    return Judged.failed(failure, extracted or None, max(marks))


def _mark(verifier: Any, answer: str, task: Task) -> float:
    try:
        return float(verifier.score_answer(answer, task.entry))
    except Exception:  # some verifiers raise on an answer that they cannot parse, and a model may write anything
        return 0.0
