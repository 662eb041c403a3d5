"""What finished models are evaluated on."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.effect import read_by


class Generator(Node):
    """A generator of verifiable questions in reasoning-gym. Its name alone may stand for it."""

    name: str = Field(description="of the generator, as in reasoning_gym")
    options: dict[str, Any] = Field(default_factory=dict, description="how hard its questions are; its own defaults for what is left out")

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Protected(Node):
    """An evaluation set of your own, whoever asks it: its items are kept out of all text that is trained on."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="of the set, in reports")
    path: str = Field(description="file, directory or glob, relative to the working directory; compressed or not")
    kind: Literal["jsonl", "parquet", "text"] = Field("jsonl", description="how it is stored; text: each file is an item")
    question: str = Field("question", description='the column that is asked, a dotted path, or a template: "{title}\\n\\n{body}"')
    answer: str | None = Field(None, description="the column with the right answer, which short questions are found by")

    @property
    def source(self) -> Source:
        """The same as a source that can be read."""
        keep = (self.answer,) if self.answer and self.kind != "text" else ()
        return Source(name=self.name, kind=self.kind, path=self.path, text_key=self.question, keep=keep, license="evaluation")


class Evaluate(Node):
    """What the finished models are measured with. What they will be asked is kept out of all text that is trained on."""

    effect: ClassVar = read_by("evaluate")

    # what an evaluation asks: all text that is trained on is searched for it
    benchmarks: Annotated[tuple[str, ...], read_by("corpus", "shards", "tune", "evaluate")] = Field(
        (), description="names of the benchmark sets, in cloze form"
    )
    benchmark_items: int = Field(200, gt=0, description="most items per set")
    tasks: Annotated[list[Generator], read_by("corpus", "shards", "tune", "evaluate")] = Field(
        default_factory=list, description="verifiable questions, answered freely"
    )
    task_items: Annotated[int, read_by("corpus", "shards", "tune", "evaluate")] = Field(50, gt=0, description="questions per task")
    protect: Annotated[list[Protected], read_by("corpus", "shards", "tune", "evaluate")] = Field(
        default_factory=list, description="evaluation sets of your own, to be kept out of training text"
    )
    references: bool = Field(True, description="print byte unigram, xz and a text compressor beside the bits per byte")
    prompts: tuple[str, ...] | None = Field(
        None, description="what the base model continues, on the way and at the end; beginnings of held-out documents when left out"
    )
    questions: tuple[str, ...] = Field(
        ("Hello! How are you today?", "What can you do for me?"), description="what the tuned model is asked, likewise"
    )

    @model_validator(mode="after")
    def _tasks_differ(self) -> Evaluate:
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("evaluate.tasks lists a generator twice; scores go by its name, so keep one of them")
        return self

    @model_validator(mode="after")
    def _sets_differ(self) -> Evaluate:
        names = [*self.benchmarks, *(task.name for task in self.tasks), *(one.name for one in self.protect)]
        if twice := next((one.name for one in self.protect if names.count(one.name) > 1), None):
            raise ValueError(f"evaluate.protect.{twice}: another evaluation set has this name; give it one of its own")
        return self
