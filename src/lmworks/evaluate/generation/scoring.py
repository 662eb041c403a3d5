"""Scores of a model on generation sets: values between 0 and 1, one per item.

Questions with verifiable answers from reasoning-gym, judged by the package's own verifiers.

The evaluation's seeds start at `SEED`; tuning data is drawn from seeds counted up from 1, so the two never share a
generator state. Small generators repeat themselves all the same: training text is searched for what `questions` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmworks.corpus.contamination import Question
from lmworks.corpus.read.conversations import create
from lmworks.errors import Unavailable
from lmworks.evaluate.generation.interface import Failure, GenerationSet, Judged, Lengths, Prompt, Reply, ask, commonest
from lmworks.evaluate.generation.replies import Answerer
from lmworks.evaluate.records import EvaluationResults
from lmworks.evaluate.sets.items import score_name, short_digest
from lmworks.evaluate.statistics import Score
from lmworks.host import machine
from lmworks.recipe.schema.evaluate import Generator
from lmworks.ui.terminal import bar
from lmworks.verify.marks import stated


def bootstrap(values: Sequence[float], resamples: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95% percentile interval of the mean over items (Efron 1979)."""
    distinct, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=resamples)
    low, high = np.quantile(draws @ distinct / len(values), [0.025, 0.975])
    return float(low), float(high)


def score_of(values: Sequence[float], baseline: float = 0.0) -> dict[str, Any]:
    """The mean with its 95% interval and verdict: Wilson's where every item is right or wrong, else a bootstrap over the items."""
    correct = sum(value == 1 for value in values)
    score = Score(correct, len(values), 0.0, baseline)
    entry: dict[str, Any] = score.to_json()
    if all(value in (0, 1) for value in values):
        return entry
    low, high = bootstrap(values)
    verdict = "above baseline" if low > baseline else "not above baseline"
    return entry | {"score": sum(values) / len(values), "interval": [low, high], "verdict": verdict}


FORM = "generate"
_NOTABLE = 10  # items per score and side
_SHOWN = 2000  # characters of a prompt in the notable items, at each end


def measure(chosen: GenerationSet, answerer: Answerer, count: int | None, shots: int | None, label: str, found: EvaluationResults) -> None:
    """Add the scores of a set to `found`, or the reason why it cannot be measured here."""
    shots = chosen.shots if shots is None else shots
    try:
        with bar(f"{label}: {chosen.name}") as progress:
            progress.note("making prompts")
            prompts = chosen.prompts(count, shots, answerer)
        with bar(f"{label}: {chosen.name}", sum(prompt.samples for prompt in prompts)) as progress:
            replies = answerer(prompts, chosen.temperature, chosen.top_p, progress.advance)
        judged = _judge(chosen, prompts, replies, label)
    except Unavailable as reason:
        found.unavailable[chosen.name] = str(reason)
        return
    found.asked[chosen.name] = list(chosen.questions())
    questions = {one.name: one.text for one in found.asked[chosen.name]}
    by_id = {prompt.id: (prompt, of_item, written) for prompt, of_item, written in zip(prompts, judged, replies, strict=True)}
    scores = chosen.values(list(zip(prompts, judged, strict=True)))
    shown: set[str] = set()
    for ending, values in scores.items():
        parts = [by_id[key] for key in values]
        entry = score_of(list(values.values()), chosen.baseline([prompt for prompt, _, _ in parts]))
        entry |= {"set": chosen.name, "form": FORM, "shots": shots, "norm": None, "chosen": False, "reason": "the only form of this set"}
        entry |= _details(parts, chosen) | _by_subject(parts, values)
        outcomes = [_outcome(prompt, of_item, written, values[prompt.id]) for prompt, of_item, written in parts]
        for one, (prompt, _, _) in zip(outcomes, parts, strict=True):  # items that are drawn at random have no question, but an answer
            question = questions.get(f"{prompt.set}/{prompt.id.removeprefix(f'{prompt.set}/')}", "")
            one["asked"] = short_digest(question, prompt.answer)
        name = score_name(chosen.name, FORM, shots, *([ending] if ending else []))
        found.add(name, entry, outcomes, _notable([part for part in parts if part[0].id not in shown]))
        shown |= values.keys()


_Parts = Sequence[tuple[Prompt, list[Judged], list[Reply]]]


def _judge(chosen: GenerationSet, prompts: Sequence[Prompt], replies: Sequence[list[Reply]], label: str) -> list[list[Judged]]:
    with bar(f"{label}: judging {chosen.name}", len(prompts)) as progress:

        def one(prompt: Prompt, written: list[Reply]) -> list[Judged]:
            judged = chosen.judge(prompt, written)
            progress.advance(1)
            return judged

        if not chosen.concurrent:
            return list(map(one, prompts, replies))
        executor = ThreadPoolExecutor(machine.cores())
        try:
            return list(executor.map(one, prompts, replies))
        finally:  # after Ctrl-C, programs that have not started are not run
            executor.shutdown(cancel_futures=True)


def _details(parts: _Parts, chosen: GenerationSet) -> dict[str, Any]:
    judged = [one for _, of_item, _ in parts for one in of_item]
    written = [reply for _, _, replies in parts for reply in replies]
    details: dict[str, Any] = {
        "mean_mark": sum(one.mark for one in judged) / len(judged),
        "empty_replies": sum(not reply.text.strip() for reply in written),
        "truncated": sum(reply.truncated for reply in written),
        "failures": dict(Counter(one.failure for one in judged if one.failure)),
        "prompt_tokens": sum(reply.prompt_tokens for reply in written) / len(written),
        "reply_tokens": sum(reply.tokens for reply in written) / len(written),
    }
    if chosen.temperature:
        details |= {"samples": len(judged) // len(parts), "temperature": chosen.temperature, "top_p": chosen.top_p}
    return details


def _by_subject(parts: _Parts, values: dict[str, float]) -> dict[str, Any]:
    subjects: dict[str, list[float]] = {}
    for prompt, _, _ in parts:
        subjects.setdefault(prompt.subject, []).append(values[prompt.id])
    if len(subjects) < 2:
        return {}
    return {"by_subject": {name: {"correct": sum(of), "n": len(of)} for name, of in sorted(subjects.items())}}


def _outcome(prompt: Prompt, judged: Sequence[Judged], written: Sequence[Reply], value: float) -> dict[str, Any]:
    failure = next((one.failure for one in judged if one.failure), None) if value < 1 else None
    return {"set": prompt.set, "id": prompt.id, "subject": prompt.subject, "correct": value == 1, "value": value, "failure": failure,
            "tokens": written[0].prompt_tokens, "answer": written[0].text}  # fmt: skip


def _notable(parts: _Parts) -> list[dict[str, Any]]:
    """Some items that failed and some that did not, with the first reply to each."""
    failed = [part for part in parts if not part[1][0].correct][:_NOTABLE]
    solved = [part for part in parts if part[1][0].correct][:_NOTABLE]
    return [
        {"set": prompt.set, "id": prompt.id, "question": _clipped(prompt.messages[-1]["content"]), "answer": prompt.answer,
         "reply": written[0].text, "extracted": judged[0].extracted, "mark": judged[0].mark, "correct": judged[0].correct,
         "failure": judged[0].failure}
        for prompt, judged, written in (*failed, *solved)
    ]  # fmt: skip


def _clipped(text: str) -> str:
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]} [...] {text[-_SHOWN:]}"


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
