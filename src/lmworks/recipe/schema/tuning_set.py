"""What sets of conversations, of preference pairs and of rewarded prompts have in common."""

from __future__ import annotations

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.evaluate import Generator


class TuningSet(Node):
    """A set of files or of generated questions."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="name of this set, also in the names of files")
    path: str | None = Field(
        None,
        description="kind files: a file (.jsonl or .json, also compressed, or .parquet), a folder or a pattern, relative to the working "
        "directory",
    )
    tasks: list[Generator] = Field(
        default_factory=list, description="kind tasks: generators of the questions; those of evaluate.tasks when omitted"
    )
