"""What finished models are evaluated on."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.effect import NO_EFFECT, read_by
from lmworks.recipe.schema.units import Duration, Tokens


class Generator(Node):
    """A generator of verifiable questions in reasoning-gym. Its name alone may stand for it."""

    name: str = Field(description="name of the generator in reasoning_gym")
    options: dict[str, Any] = Field(
        default_factory=dict, description="options of the generator, such as the difficulty; its defaults for omitted options"
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Benchmark(Node):
    """A benchmark set, or a task of your own. Its name, or the path of a task file that ends in .yaml, may stand for it."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="name of the set; of a task of your own, its name in reports")
    file: str | None = Field(None, description="task of your own: its YAML file, relative to the working directory; see docs/evaluation.md")
    path: str | None = Field(
        None,
        description="rows of the set in a local file, directory or glob, in place of those in the package: JSON lines, Parquet or Arrow",
    )
    hub: bool = Field(False, description="read the rows from the Hugging Face hub in place of the package (extra `data`)")
    form: Annotated[Literal["auto", "cloze", "letters", "free"], read_by("evaluate")] = Field(
        "auto",
        description="multiple choice: cloze scores the text of each choice, letters the letter of each listed choice, free reads a "
        "generated answer; auto chooses what suits the training of the model and prints the reason",
    )
    shots: Annotated[int | None, read_by("evaluate")] = Field(
        None, ge=0, description="number of worked examples before each question; null: 5 with letters, else 0, or what the set states"
    )
    items: Annotated[int | None, read_by("evaluate")] = Field(None, gt=0, description="maximum items; null: evaluate.benchmark_items")
    samples: Annotated[int, read_by("evaluate")] = Field(1, gt=0, le=1000, description="humaneval: programs per problem, for pass@k")
    temperature: Annotated[float | None, read_by("evaluate")] = Field(
        None, ge=0, le=10, description="humaneval: temperature of sampling; 0 is greedy; null: 0 for one sample, 0.8 for several"
    )
    lengths: Annotated[tuple[Tokens, ...], read_by("evaluate")] = Field(
        (), description="ruler: lengths of the items with their replies; when omitted, 4096 tokens or the model's context, if it is shorter"
    )

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"file": value} if value.endswith((".yaml", ".yml")) else {"name": value}
        if isinstance(value, dict) and isinstance(value.get("file"), str) and "name" not in value:
            value = {"name": PurePath(value["file"]).stem, **value}
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Benchmark:
        given = [key for key in ("file", "path", "hub") if getattr(self, key)]
        if len(given) > 1:
            raise ValueError(f"evaluate.benchmarks.{self.name}: {' and '.join(given)} are two sources of the same rows; keep one of them")
        return self


class Protected(Node):
    """An evaluation set of your own. Its items are removed from all training text, whether lmworks evaluates on it or not."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="name of the set in reports")
    path: str = Field(description="file, directory or glob, relative to the working directory; compressed or not")
    kind: Literal["jsonl", "parquet", "text"] = Field("jsonl", description="how it is stored; text: each file is an item")
    question: str = Field("question", description='column of the question, a dotted path, or a template: "{title}\\n\\n{body}"')
    answer: str | None = Field(None, description="column of the answer, by which short questions are found")

    @property
    def source(self) -> Source:
        """The same as a source that can be read."""
        keep = (self.answer,) if self.answer and self.kind != "text" else ()
        return Source(name=self.name, kind=self.kind, path=self.path, text_key=self.question, keep=keep, license="evaluation")


def _interval(value: Any) -> Any:
    """Whatever is not `never` is a duration, so that a wrong one has the error of a duration."""
    return value if value is None or value == "never" else Duration._validate(value)


class Evaluate(Node):
    """Evaluation of the finished models. The items of evaluation sets are removed from all training text."""

    effect: ClassVar = read_by("evaluate")

    # what an evaluation asks: all text that is trained on is searched for it
    benchmarks: Annotated[list[Benchmark], read_by("corpus", "shards", "tune", "dpo", "grpo", "evaluate")] = Field(
        default_factory=list, description="benchmark sets, and tasks of your own"
    )
    benchmark_items: int = Field(200, gt=0, description="maximum items per set")
    every: Annotated[Duration | Literal["never"] | None, BeforeValidator(_interval), NO_EFFECT] = Field(
        None,
        description="interval between evaluations during pretraining, in cloze form on `every_items` items of each multiple-choice set; "
        "the scores stand beside the loss on the run page; null: derived, so that it costs less than 5% of training",
    )
    every_items: Annotated[int, NO_EFFECT] = Field(50, gt=0, description="maximum items per set for evaluations during pretraining")
    tasks: Annotated[list[Generator], read_by("corpus", "shards", "tune", "dpo", "grpo", "evaluate")] = Field(
        default_factory=list, description="generators of verifiable questions with free-form answers"
    )
    task_items: Annotated[int, read_by("corpus", "shards", "tune", "dpo", "grpo", "evaluate")] = Field(
        50, gt=0, description="questions per task"
    )
    protect: Annotated[list[Protected], read_by("corpus", "shards", "tune", "dpo", "grpo", "evaluate")] = Field(
        default_factory=list, description="evaluation sets of your own, to be kept out of training text"
    )
    references: bool = Field(True, description="also report a byte unigram, xz and a text compressor as references for bits per byte")
    prompts: tuple[str, ...] | None = Field(
        None, description="prompts for the base model, during training and at the end; beginnings of held-out documents when omitted"
    )
    questions: tuple[str, ...] = Field(
        ("Hello! How are you today?", "What can you do for me?"), description="questions for the tuned model, during tuning and at the end"
    )

    def items_in_loop(self, benchmark: Benchmark) -> int:
        """Maximum items of a set for evaluations during pretraining."""
        return min(self.every_items, benchmark.items or self.every_items)

    @model_validator(mode="after")
    def _tasks_differ(self) -> Evaluate:
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("evaluate.tasks lists a generator twice; scores go by its name, so keep one of them")
        return self

    @model_validator(mode="after")
    def _sets_differ(self) -> Evaluate:
        benchmarks = [one.name for one in self.benchmarks]
        if twice := next((name for name in benchmarks if benchmarks.count(name) > 1), None):
            raise ValueError(f"evaluate.benchmarks lists {twice} twice; keep one of them")
        names = [*benchmarks, *(task.name for task in self.tasks), *(one.name for one in self.protect)]
        if twice := next((one.name for one in self.protect if names.count(one.name) > 1), None):
            raise ValueError(f"evaluate.protect.{twice}: another evaluation set has this name; give it one of its own")
        return self
