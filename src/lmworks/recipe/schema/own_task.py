"""A task of the user's own: a YAML file that says what the columns of a data file mean."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import Effect, read_by


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
        return self
