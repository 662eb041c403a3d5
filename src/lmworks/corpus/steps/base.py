"""The base of steps: options, which a recipe sets, and `make`, which returns the function that processes documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from lmworks.corpus.document import Step
from lmworks.recipe.schema.base import Node

if TYPE_CHECKING:
    from lmworks.recipe.schema.corpus import Source


@dataclass(frozen=True)
class Context:
    """The source that a step is made for, the seed of the recipe, and the folder that relative paths in the recipe start from."""

    source: Source
    seed: int
    folder: Path


class StepOptions(Node):
    """The options of one step. A subclass declares `step: Literal["NAME"]` with this default, its own options, and `make`."""

    gives_quality: ClassVar[bool] = False
    """Whether the step may set the fact `quality`, which buckets are chosen by."""
    growing: ClassVar[tuple[str, ...]] = ()
    """Options that name files which the step itself writes: their contents do not invalidate its output."""

    step: str = Field(description="which step this is")

    def make(self, context: Context) -> Step:
        """The step for the documents of one source. Raises `UserError` for options that are invalid on this machine or for this source."""
        raise NotImplementedError(f"{type(self).__name__}.make")

    def warnings(self, sources: Sequence[Source]) -> Iterator[str]:
        """One line for each source for which the step is probably not intended."""
        yield from ()
