"""RULER: thirteen synthetic tasks that measure how much of its context a model can use (Hsieh et al. 2024, arXiv:2404.06654).

They are made by our own code for any length and any tokenizer. An item of length N has at most N tokens together with its reply, and as
many as the task's smallest unit of haystack allows: a word of running text, a short sentence of noise, a needle, an entry of a list, a few
coded words, a sentence of a document. The same seed gives the same needles and answers for every tokenizer; only the amount of haystack
differs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal

from lmworks.corpus.contamination import Question
from lmworks.errors import Unavailable
from lmworks.evaluate.generation.interface import Declared, GenerationSet, Judged, Lengths, Prompt, Reply, ask
from lmworks.evaluate.generation.ruler_tasks import Answering, Draft, Needles, common_words, frequent_words, largest, variable_tracking
from lmworks.evaluate.generation.ruler_texts import squad, two_hops

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


@dataclass(frozen=True)
class Hidden:
    """What an item asks for, and its length."""

    answers: tuple[str, ...]
    length: int


class Ruler(GenerationSet):
    """One task, or all thirteen as one set whose subjects they are. Each length is a score; over several tasks it is their mean, since each
    has the same number of items.

    `folder` holds RULER's own texts; without it others take their place.
    """

    def __init__(self, task: str | None = None, lengths: Sequence[int] = (), folder: str | None = None) -> None:
        self.name, self.tasks = (f"ruler-{task}", (task,)) if task else ("ruler", tuple(TASKS))
        self.lengths, self.folder = tuple(lengths), folder

    def prompts(self, count: int | None, shots: int, lengths: Lengths) -> list[Prompt]:
        """`count` items of each task and length."""
        wanted = self.lengths or (min(DEFAULT_LENGTH, lengths.context or DEFAULT_LENGTH),)
        if lengths.context and max(wanted) > lengths.context:
            raise Unavailable(
                f"{self.name}: {max(wanted):,} tokens are more than the model's context of {lengths.context:,}; "
                f"set `lengths` to at most {lengths.context:,}"
            )
        numbers = range(count or ITEMS)
        return [self.prompt(task, length, number, lengths) for length in wanted for task in self.tasks for number in numbers]

    def prompt(self, task: str, length: int, number: int, lengths: Lengths) -> Prompt:
        """Item `number` of a task and length, as long as possible. Raises `Unavailable` if the length does not hold the smallest one."""
        drafts = TASKS[task].make(Random(f"{_SEED}/{task}/{length}/{number}"), length, self.folder)
        limit = length - TASKS[task].max_new_tokens
        for draft in drafts:
            make = partial(self._prompt, task, draft, length, number)
            size = largest(lambda size, make=make: lengths.length(make(size)), limit, draft.least, draft.most)  # type: ignore[misc]
            if size is not None:
                return make(size)
        least = lengths.length(self._prompt(task, drafts[-1], length, number, drafts[-1].least)) + TASKS[task].max_new_tokens
        raise Unavailable(
            f"ruler-{task}: {length:,} tokens do not hold item {number}, which has {least:,} with its reply; set `lengths` to larger ones"
        )

    def _prompt(self, task: str, draft: Draft, length: int, number: int, size: int) -> Prompt:
        text = draft.render(size)
        key = f"{length}/{number}" if len(self.tasks) == 1 else f"{length}/{task}/{number}"
        return Prompt(
            self.name, key, text + draft.prefix, ask(text), Hidden(draft.answers, length), TASKS[task].max_new_tokens,
            prefix=draft.prefix.strip(), subject=task, answer=", ".join(draft.answers),
        )  # fmt: skip

    def judge(self, prompt: Prompt, replies: Sequence[Reply]) -> list[Judged]:
        """As RULER does: answers are looked for in the reply without regard to case. Reaching the limit of tokens is no failure of its own:
        RULER's limits are small, and models go on after the answer."""
        return [match(reply.text, prompt.reference.answers, TASKS[prompt.subject].match) for reply in replies]

    def values(self, judged: Sequence[tuple[Prompt, list[Judged]]]) -> dict[str, dict[str, float]]:
        by_length: dict[str, dict[str, float]] = defaultdict(dict)
        for prompt, (one, *_) in judged:
            by_length[str(prompt.reference.length)][prompt.id] = one.mark
        return dict(by_length)

    def questions(self) -> Iterator[Question]:
        """The questions of qa-1 and qa-2 come from published sets. The other tasks have nothing to protect: their items are drawn at random
        when they are asked."""
        for task, library in (("qa-1", squad), ("qa-2", two_hops)):
            if task in self.tasks:
                for one in library(self.folder).questions:
                    yield Question(f"{self.name}/{task}/{one.id}", one.question, one.answers[0])


def match(reply: str, answers: Sequence[str], how: Literal["all", "any"]) -> Judged:
    """RULER's string_match_all (the share of the answers that are in the reply) and string_match_part (1 if any is)."""
    plain = re.sub(r"[\x00-\x1f]", "\n", reply).strip().lower()
    if not plain:
        return Judged.failed("no answer")
    found = [answer for answer in answers if answer.lower() in plain]
    mark = len(found) / len(answers) if how == "all" else float(bool(found))
    return replace(Judged.right(", ".join(found)) if mark == 1 else Judged.failed("wrong", ", ".join(found) or None), mark=mark)


_ABOUT = {"niah": "find values by their keys in a haystack", "vt": "follow a chain of assignments", "cwe": "find the ten most common words",
          "fwe": "find the three most frequent coded words", "qa": "answer a question from documents"}
_READ = ("niah-single-2", "niah-single-3", "niah-multikey-1", "niah-multivalue", "niah-multiquery", "qa-1", "qa-2")  # texts of a folder


def _declared(task: str | None, about: str, reply_tokens: int) -> Declared:
    options = {"lengths", "path"} if task is None or task in _READ else {"lengths"}
    name = f"ruler-{task}" if task else "ruler"
    return Declared(name, about, lambda one: Ruler(task, one.lengths, one.path), reply_tokens, frozenset(options))


SETS = (
    _declared(None, "all thirteen tasks", sum(task.max_new_tokens for task in TASKS.values())),
    *(_declared(name, _ABOUT[name.split("-")[0]], task.max_new_tokens) for name, task in TASKS.items()),
)
