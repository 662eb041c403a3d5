"""The steps that a document goes through, in the order of `corpus.steps`.

Each is one node, told apart by `step`. What a step does is in `lmworks.corpus.steps`; here is what a recipe may say about it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from lmworks.recipe.base import Node


class Clean(Node):
    """Mend Unicode, line ends, odd spaces and invisible characters."""

    step: Literal["clean"] = Field("clean", description="which step this is")


class Rules(Node):
    """Drop what the quality rules of its domain and language reject (`lmworks.corpus.rules`)."""

    step: Literal["rules"] = Field("rules", description="which step this is")


class Python(Node):
    """A step of your own: a function in a Python file."""

    step: Literal["python"] = Field("python", description="which step this is")
    name: str | None = Field(None, description="what the report calls it; the function's name when left out")
    file: str = Field(description="the Python file, relative to the recipe")
    function: str = Field(description="takes a `Document`, returns one, or `Drop(reason)`")
    options: dict[str, Any] = Field(default_factory=dict, description="handed to the function by name")


Step = Annotated[Clean | Rules | Python, Field(discriminator="step")]
