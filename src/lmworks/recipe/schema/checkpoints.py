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

    keep_last: int = Field(2, gt=0, description="number of newest checkpoints to keep")
    keep_every: Duration | None = Field(None, description="interval of checkpoints that are never deleted")
    keep_best: bool = Field(
        True, description="keep the checkpoint with the lowest validation loss, of those whose step is validated and saved; with early "
        "stopping, which saves at each new lowest, the later stages use it"
    )
    asynchronous: bool = Field(True, description="write in the background while training goes on")
    local: str | None = Field(
        None,
        description="directory on each machine's local disk to save to first; a background copy to the run directory follows",
    )
    copy_to: str | None = Field(
        None, description="directory or fsspec URL to copy finished checkpoints to, in the background; `lmworks restore` copies them back"
    )

    def of(self, folder: str) -> Checkpoints:
        """The same settings with `copy_to` extended by the name of a checkpoint folder, so that the copies of two stages stay apart."""
        return self if self.copy_to is None else self.model_copy(update={"copy_to": f"{self.copy_to.rstrip('/')}/{folder}"})
