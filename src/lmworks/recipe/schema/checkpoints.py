"""Checkpoints: which are saved, kept and copied."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT
from lmworks.recipe.schema.units import Duration


class Checkpoints(Node):
    """What is saved and what is kept."""

    effect: ClassVar = NO_EFFECT

    keep_last: int = Field(2, gt=0, description="newest checkpoints to keep")
    keep_every: Duration | None = Field(None, description="checkpoints at these intervals are never pruned")
    keep_best: bool = Field(True, description="keep the one with the lowest validation loss; what follows an early end is made of it")
    asynchronous: bool = Field(True, description="write in the background while training goes on")
    local: str | None = Field(
        None, description="directory on each machine's own disk to save into first; copied from there to the run, in the background"
    )
    copy_to: str | None = Field(
        None, description="directory or fsspec URL to copy finished checkpoints to, in the background; `lmworks restore` brings them back"
    )

    def of(self, folder: str) -> Checkpoints:
        """These with the copies of a run's checkpoint folder in one of the same name, so that those of two stages stay apart."""
        return self if self.copy_to is None else self.model_copy(update={"copy_to": f"{self.copy_to.rstrip('/')}/{folder}"})
