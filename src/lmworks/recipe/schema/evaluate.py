"""What finished models are evaluated on.

A task of the user's own is a YAML file that says what the columns of a data file mean (`OwnTask`); `load_task` reads it.
"""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from lmworks.errors import UserError
from lmworks.recipe.document import parse
from lmworks.recipe.schema.base import NO_EFFECT, Effect, Node, read_by
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.units import Duration, Tokens


class Generator(Node):
    """A generator of verifiable questions in reasoning-gym. Its name alone may stand for it."""

    text_form: ClassVar = {"type": "string"}

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

    text_form: ClassVar = {"type": "string"}
    model_config = ConfigDict(
        json_schema_extra=lambda schema: schema.update(required=[], anyOf=[{"required": [one]} for one in ("name", "file")])
    )

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
        facts = (self.answer,) if self.answer and self.kind != "text" else ()
        return Source(name=self.name, kind=self.kind, path=self.path, text_key=self.question, fact_keys=facts, license="evaluation")


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


AnswerIs = Literal["text", "letter", "index"]


class OwnTask(Node):
    """The YAML file of a task. Paths in it are relative to it."""

    effect: ClassVar[Effect] = read_by("corpus", "shards", "tune", "dpo", "grpo", "evaluate")

    file: str = Field(description="data: file, directory or glob of JSON lines, Parquet or Arrow")
    question: str = Field("question", description='column of the question, or a template of columns: "{title}\\n{body}"')
    choices: str | list[str] | None = Field(
        None, description="column with a list of choices, or one column per choice; without it the question is answered freely"
    )
    answer: str = Field(
        "answer",
        description="column of the right answer; with choices: the text of the choice, its letter, or its index from 0; else a text, a "
        "number, or a list of accepted ones",
    )
    answer_is: AnswerIs | None = Field(
        None,
        description="what the answers to questions with choices are; by default what fits all rows, which must give one right choice",
    )
    id: str | None = Field(None, description="column that identifies an item; its number by default")
    subject: str | None = Field(None, description="column of a part of the set; scores are also reported by it")
    prompt: str = Field("Question: {question}\nAnswer:", description="text before the answer, in which {question} stands for the question")
    form: Literal["cloze", "letters", "free"] | None = Field(None, description="form of the questions; chosen to suit the model by default")
    shots: int | None = Field(None, ge=0, description="number of worked examples; that of the form by default")
    examples: str | None = Field(None, description="data of the worked examples; by default some items, which are then not asked")
    metric: Literal["exact", "number", "contains"] = Field(
        "exact",
        description="how free answers without choices are judged: exact (but for case, articles and punctuation), number or contains",
    )

    @model_validator(mode="after")
    def _prompted(self) -> OwnTask:
        if "{question}" not in self.prompt:
            raise ValueError("prompt: it has no {question}")
        if self.choices is None and self.form in ("cloze", "letters"):
            raise ValueError(f"form: {self.form} needs choices")
        if self.choices is None and self.answer_is is not None:
            raise ValueError("answer_is: it needs choices; leave it out of a task whose questions are answered freely")
        return self


_LARGEST_TASK = 1 << 16  # bytes of the YAML file


def load_task(path: str) -> OwnTask:
    """Read the YAML file. Raises `UserError` that names the file and the key."""
    place = Path(path).expanduser()
    try:
        with open(place, encoding="utf-8-sig") as file:
            text = file.read(_LARGEST_TASK + 1)
        tree = parse(text, path).tree if len(text) <= _LARGEST_TASK else None
    except (OSError, RecursionError, ValueError) as error:
        raise UserError(f"the task {path} cannot be read: {' '.join(str(error).split())[:300]}") from None
    if tree is None:
        raise UserError(f"{path} is larger than {_LARGEST_TASK:,} bytes; a task is a few lines of YAML beside its data file")
    try:
        return OwnTask(**{str(key): value for key, value in tree.items()})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        known = f"; its keys are {', '.join(OwnTask.model_fields)}" if first["type"] == "extra_forbidden" else ""
        raise UserError(f"the task {path}: {key}: {first['msg'].removeprefix('Value error, ')}{known}") from None


def data_path(path: str, name: str) -> str:
    """A path that a task file names, relative to it."""
    return str(Path(path).expanduser().parent / name)


def local_paths(benchmark: Benchmark) -> list[str]:
    """The files, directories and globs on which a benchmark depends. Raises `UserError` for a task file that cannot be read."""
    if benchmark.file is None:
        return [benchmark.path] if benchmark.path is not None else []
    task = load_task(benchmark.file)
    return [benchmark.file, *(data_path(benchmark.file, name) for name in (task.file, task.examples) if name is not None)]
