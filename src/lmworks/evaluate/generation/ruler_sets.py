"""RULER's thirteen tasks (Hsieh et al. 2024, arXiv:2404.06654), made by our own code for any length and any tokenizer.

An item of length N has at most N tokens together with its reply, and as many as the task's smallest unit of haystack allows: a word of
running text, a short sentence of noise, a needle, an entry of a list, a sentence of a document. The same seed gives the same needles and
answers for every tokenizer; only the amount of haystack differs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from lmworks.corpus.contamination import Question
from lmworks.corpus.readers.items import Unavailable
from lmworks.evaluate.generation.declared import Declared
from lmworks.evaluate.generation.interface import GenerationSet, Judged, Lengths, Prompt, Reply, ask
from lmworks.evaluate.generation.ruler.answering import Answering
from lmworks.evaluate.generation.ruler.counting import common_words, frequent_words
from lmworks.evaluate.generation.ruler.documents import squad, two_hops
from lmworks.evaluate.generation.ruler.drafts import Draft, largest
from lmworks.evaluate.generation.ruler.needles import Needles
from lmworks.evaluate.generation.ruler.tracing import variable_tracking

Make = Callable[[Random, int, str | None], tuple[Draft, ...]]
DEFAULT_LENGTH = 4096
ITEMS = 500  # of a task and length, as in the paper
_SEED = 42


@dataclass(frozen=True)
class Task:
    """One of the thirteen. match: the share of the answers that must be in the reply for its mark is counted (all), or one is enough
    (any)."""

    make: Make
    max_new_tokens: int
    match: Literal["all", "any"] = "all"


TASKS: dict[str, Task] = {
    "niah-single-1": Task(Needles("noise"), 128),
    "niah-single-2": Task(Needles("essay"), 128),
    "niah-single-3": Task(Needles("essay", value="uuids"), 128),
    "niah-multikey-1": Task(Needles("essay", keys=4), 128),
    "niah-multikey-2": Task(Needles("needle"), 128),
    "niah-multikey-3": Task(Needles("needle", key="uuids", value="uuids"), 128),
    "niah-multivalue": Task(Needles("essay", values=4), 128),
    "niah-multiquery": Task(Needles("essay", keys=4, queries=4), 128),
    "vt": Task(variable_tracking, 30),
    "cwe": Task(common_words, 120),
    "fwe": Task(frequent_words, 50),
    "qa-1": Task(Answering(squad), 32, "any"),
    "qa-2": Task(Answering(two_hops), 32, "any"),
}
_LIBRARIES = {"qa-1": squad, "qa-2": two_hops}


@dataclass(frozen=True)
class Hidden:
    """What an item asks for, and its length."""

    answers: tuple[str, ...]
    length: int


class Ruler(GenerationSet):
    """One task at some lengths, each of which is a score. `folder` holds RULER's own texts; without it others take their place."""

    def __init__(self, task: str, lengths: Sequence[int] = (), folder: str | None = None) -> None:
        self.name, self.task, self.key, self.lengths, self.folder = f"ruler-{task}", TASKS[task], task, tuple(lengths), folder

    def prompts(self, count: int | None, shots: int, lengths: Lengths) -> list[Prompt]:
        wanted = self.lengths or (min(DEFAULT_LENGTH, lengths.context or DEFAULT_LENGTH),)
        if lengths.context and max(wanted) > lengths.context:
            raise Unavailable(
                f"{self.name}: {max(wanted):,} tokens are more than the model's context of {lengths.context:,}; "
                f"set `lengths` to at most {lengths.context:,}"
            )
        return [self.prompt(length, number, lengths) for length in wanted for number in range(count or ITEMS)]

    def prompt(self, length: int, number: int, lengths: Lengths) -> Prompt:
        """Item `number` of a length, as long as possible. Raises `Unavailable` if the length does not hold the smallest one."""
        drafts = self.task.make(Random(f"{_SEED}/{self.key}/{length}/{number}"), length, self.folder)
        limit = length - self.task.max_new_tokens
        for draft in drafts:
            size = largest(self._measure(draft, length, number, lengths), limit, draft.least, draft.most)
            if size is not None:
                return self._prompt(draft, size, length, number)
        least = lengths.length(self._prompt(drafts[-1], drafts[-1].least, length, number)) + self.task.max_new_tokens
        raise Unavailable(
            f"{self.name}: {length:,} tokens do not hold item {number}, which has {least:,} with its reply; set `lengths` to larger ones"
        )

    def _measure(self, draft: Draft, length: int, number: int, lengths: Lengths) -> Callable[[int], int]:
        return lambda size: lengths.length(self._prompt(draft, size, length, number))

    def _prompt(self, draft: Draft, size: int, length: int, number: int) -> Prompt:
        text = draft.render(size)
        return Prompt(
            self.name, f"{length}/{number}", text + draft.prefix, ask(text), Hidden(draft.answers, length), self.task.max_new_tokens,
            prefix=draft.prefix.strip(), answer=", ".join(draft.answers),
        )  # fmt: skip

    def judge(self, prompt: Prompt, replies: Sequence[Reply]) -> list[Judged]:
        """As RULER does: answers are looked for in the reply without regard to case. Reaching the limit of tokens is no failure of its own:
        RULER's limits are small, and models go on after the answer."""
        return [match(reply.text, prompt.reference.answers, self.task.match) for reply in replies]

    def values(self, judged: Sequence[tuple[Prompt, list[Judged]]]) -> dict[str, dict[str, float]]:
        by_length: dict[str, dict[str, float]] = defaultdict(dict)
        for prompt, (one, *_) in judged:
            by_length[str(prompt.reference.length)][prompt.id] = one.mark
        return dict(by_length)

    def questions(self) -> Iterator[Question]:
        """The questions of qa-1 and qa-2 come from published sets. The other tasks have nothing to protect: their items are drawn at random
        when they are asked."""
        if library := _LIBRARIES.get(self.key):
            for one in library(self.folder).questions:
                yield Question(f"{self.name}/{one.id}", one.question, one.answers[0])


def match(reply: str, answers: Sequence[str], how: Literal["all", "any"]) -> Judged:
    """RULER's string_match_all (the share of the answers that are in the reply) and string_match_part (1 if any is)."""
    plain = re.sub(r"[\x00-\x1f]", "\n", reply).strip().lower()
    if not plain:
        return Judged.failed("no answer")
    found = [answer for answer in answers if answer.lower() in plain]
    mark = len(found) / len(answers) if how == "all" else float(bool(found))
    return replace(Judged.right(", ".join(found)) if mark == 1 else Judged.failed("wrong", ", ".join(found) or None), mark=mark)


def _declared(task: str, about: str, options: frozenset[str]) -> Declared:
    return Declared(f"ruler-{task}", about, lambda one: Ruler(task, one.lengths, one.path), TASKS[task].max_new_tokens, options)


_ABOUT = {"niah": "find values by their keys in a haystack", "vt": "follow a chain of assignments", "cwe": "find the ten most common words",
          "fwe": "find the three most frequent coded words", "qa": "answer a question from documents"}
_READ = ("niah-single-2", "niah-single-3", "niah-multikey-1", "niah-multivalue", "niah-multiquery", "qa-1", "qa-2")  # texts of a folder

SETS = tuple(
    _declared(task, _ABOUT[task.split("-")[0]], frozenset({"lengths", "path"} if task in _READ else {"lengths"})) for task in TASKS
)
