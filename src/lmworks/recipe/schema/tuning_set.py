"""What sets of conversations, of preference pairs and of rewarded prompts have in common."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.evaluate import Generator

Column = Literal[
    "messages", "system", "tools", "prompt", "instruction", "input", "history", "response", "text", "segments", "chosen", "rejected",
    "label", "answer", "tests", "role", "content", "train",
]  # fmt: skip
GENERATED = 2000  # rows of a set that is not the user's own


LEARNING_RATE = (
    "peak learning rate of this stage; derived from that of pretraining when omitted. Under muon it is that of the matrices, and what "
    "AdamW trains keeps its proportion to it; adapters, which AdamW trains, have it as it is"
)
NO_SCALE = {"learning_rate_scale": "set learning_rate, the peak rate itself, which was this times optimizer.learning_rate"}
"""Former keys of the stages after pretraining."""


class TuningSet(Node):
    """A set of files or of generated questions."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of this set, also in the names of files")
    path: str | None = Field(
        None,
        description="kind files: a file (.jsonl, .json or .parquet, also compressed), a folder or a pattern, relative to the working "
        "directory",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="our name of a column: its name in the files, as {prompt: question_text, response: reply}; role, content and train are "
        f"those of each message. Ours are {', '.join(get_args(Column))}",
    )
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = Field(
        default_factory=dict, description="name of a speaker in the files: its role, as {customer: user, agent: assistant}"
    )
    tasks: list[Generator] = Field(
        default_factory=list, description="kind tasks: generators of the questions; those of evaluate.tasks when omitted"
    )

    @model_validator(mode="after")
    def _known_columns(self) -> TuningSet:
        for name in self.columns:
            if name not in get_args(Column):
                raise ValueError(f"{self.name}: columns has {name!r}, which is none of our names: {', '.join(get_args(Column))}")
        return self
