"""Sets of free answers: each makes prompts and judges the replies. Also how a set is declared, and opened with the options of a recipe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lmworks.corpus.contamination import Question
from lmworks.errors import UserError
from lmworks.evaluate.sets.items import Row
from lmworks.evaluate.sets.sources import Data, rows, where
from lmworks.recipe.schema.evaluate import Benchmark

Failure = Literal["no answer", "format", "truncated", "wrong", "timeout"]
"""Why an answer is not correct. no answer: nothing to judge. format: there is something, but not in a form that states an answer.
truncated: the limit of tokens was reached without a stop, and no answer before it. timeout: a program that did not end in its time."""


@dataclass(frozen=True)
class Prompt:
    """One item of a set, in the form for each kind of model.

    A base model continues `text`, until one of the strings `stop`. A chat model answers `messages`; `prefix`, with which `text` ends too,
    is the beginning of its reply, written for it. `reference` is what the set needs to judge a reply, and
    `answer` a correct one, to be read.
    """

    set: str
    id: str
    text: str
    messages: tuple[dict[str, Any], ...]
    reference: Any
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    prefix: str = ""
    subject: str = ""
    answer: str = ""
    samples: int = 1


def ask(content: str) -> tuple[dict[str, Any], ...]:
    """The messages of a conversation in which the user asks `content`."""
    return ({"role": "user", "content": content},)


@dataclass(frozen=True)
class Reply:
    """What a model wrote, without its reasoning and without the stop. `truncated`: it reached the limit of tokens, or the end of the
    context, before it stopped. `tokens` counts what it wrote, `prompt_tokens` what it read."""

    text: str
    truncated: bool = False
    tokens: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Judged:
    """A judgment of one reply. `mark` is from 0 to 1, and 1 for a correct one; `extracted` is the answer that was found in the reply."""

    correct: bool
    mark: float
    extracted: str | None = None
    failure: Failure | None = None

    @classmethod
    def right(cls, extracted: str | None = None) -> Judged:
        return cls(True, 1.0, extracted)

    @classmethod
    def failed(cls, failure: Failure, extracted: str | None = None, mark: float = 0.0) -> Judged:
        return cls(False, mark, extracted, failure)


class Lengths(Protocol):
    """How a model reads prompts: `length` counts the tokens of one, the chat template included; `context` is the model's limit."""

    context: int | None

    def length(self, prompt: Prompt) -> int: ...


class GenerationSet(ABC):
    """A set whose items are answered by generation.

    `shots` is the default number of worked examples, and `most_shots` the largest. `concurrent`: whether replies may be judged in several
    threads at once. `temperature` and `top_p` are those of sampling; 0 is greedy.
    """

    name: str
    shots: int = 0
    most_shots: int = 0
    concurrent: bool = False
    temperature: float = 0.0
    top_p: float = 1.0

    @abstractmethod
    def prompts(self, count: int | None, shots: int, lengths: Lengths) -> list[Prompt]:
        """At most `count` items, always the same ones, a smaller number being part of a larger one; None for all.

        Raises `Unavailable` if the set cannot be had or measured here, with the reason and the remedy in one line.
        """

    @abstractmethod
    def judge(self, prompt: Prompt, replies: Sequence[Reply]) -> list[Judged]:
        """One judgment per reply. Never raises on what a model wrote, and takes time linear in its length."""

    def values(self, judged: Sequence[tuple[Prompt, list[Judged]]]) -> dict[str, dict[str, float]]:
        """The scores of the set: end of the score's name -> item -> value from 0 to 1. "" where the set has one score."""
        return {"": {prompt.id: sum(one.mark for one in of_item) / len(of_item) for prompt, of_item in judged}}

    def baseline(self, prompts: Sequence[Prompt]) -> float:
        """What the best answer that ignores the question gets."""
        return 0.0

    def questions(self) -> Iterable[Question]:
        """Items and fixed examples that no training text may contain. None for sets that are generated afresh."""
        return ()


def commonest(answers: Iterable[str]) -> float:
    """Share of the commonest answer, 0 if all differ: what a model would get that always says the same."""
    counts: dict[str, int] = {}
    for answer in answers:
        counts[answer] = counts.get(answer, 0) + 1
    most = max(counts.values(), default=0)
    return most / sum(counts.values()) if most > 1 else 0.0


GENERATED_ONLY = ("samples", "temperature", "lengths")
_OPTIONS = ("path", "hub", "form", *GENERATED_ONLY)


def given(benchmark: Benchmark, options: Iterable[str]) -> list[str]:
    """Those options that do not have their default value."""
    fields = Benchmark.model_fields
    return [option for option in options if getattr(benchmark, option) != fields[option].get_default(call_default_factory=True)]


@dataclass(frozen=True)
class Declared:
    """A set that a recipe may name. A reply has at most `reply_tokens` tokens. `options` are the keys of `evaluate.benchmarks` that the set
    takes, besides name, items and shots."""

    name: str
    about: str
    make: Callable[[Benchmark], GenerationSet]
    reply_tokens: int
    options: frozenset[str] = frozenset()

    def open(self, benchmark: Benchmark) -> GenerationSet:
        """The set with these options. Raises `UserError` that names a key which the set does not have, without reading any data."""
        key = f"evaluate.benchmarks.{self.name}"
        if odd := [option for option in given(benchmark, _OPTIONS) if option not in self.options]:
            takes = ", ".join(["items", "shots", *sorted(self.options)])
            raise UserError(f"{key}.{odd[0]}: this set does not have this option, only {takes}; leave it out")
        opened = self.make(benchmark)
        if benchmark.shots is not None and benchmark.shots > opened.most_shots:
            most = f"{opened.most_shots} worked examples at most" if opened.most_shots else "no worked examples"
            raise UserError(f"{key}.shots: this set has {most}; leave it out")
        return opened

    def questions(self, benchmark: Benchmark) -> Iterator[Question]:
        """What no training text may contain. Raises `Unavailable`."""
        yield from self.open(benchmark).questions()


def read_rows(name: str, data: Data, columns: tuple[str, ...], path: str | None, hub: bool) -> Iterator[tuple[str, Row]]:
    """The rows of a set with its columns, all of them text. In the package they stand below `doc`."""
    found = False
    for number, row in rows(data, path, hub):
        row = row.get("doc", row) if path is None and not hub else row
        if odd := [column for column in columns if not isinstance(row.get(column), str)]:
            raise UserError(
                f"evaluate.benchmarks.{name}: row {number} of {where(path, hub)} has no text in the column {odd[0]!r}; give the rows of "
                f"{data.repository}, which have the columns {', '.join(columns)}"
            )
        found = True
        yield number, row
    if not found:
        raise UserError(f"evaluate.benchmarks.{name}: {where(path, hub)} has no rows; give a file with the rows of the set")
