"""DeepSpeed as the engine of a training step."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node

Place = Literal["none", "cpu", "nvme"]
BUCKET = 1 << 26  # numbers that are reduced or gathered at a time: enough for the full bandwidth, and 256 MB
LIVE = 1 << 28  # numbers of weights that may be whole at a time under ZeRO-3


class DeepSpeed(Node):
    """DeepSpeed ZeRO at stage `layout.zero` over the ranks of `layout.dp_shard`, with offloading of the training state."""

    offload: Place = Field("none", description="where optimizer state is kept and updated: on the GPU, in CPU memory, or on a disk")
    offload_weights: Place = Field("none", description="where weights are kept until a layer needs them; with layout.zero 3")
    path: str | None = Field(None, description="nvme: directory on a fast disk of each machine; not needed after the run")

    @model_validator(mode="after")
    def _consistent(self) -> DeepSpeed:
        if "nvme" in (self.offload, self.offload_weights) and self.path is None:
            raise ValueError("nvme needs path: a directory on the disk to use")
        return self
