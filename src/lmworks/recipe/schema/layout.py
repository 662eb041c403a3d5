"""The layout of a run: how many ranks stand along each axis of the device mesh."""

from __future__ import annotations

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import RESUME_ONLY

_MOST_RANKS = 1 << 20  # of an axis of the mesh


class Layout(Node):
    """The size of each axis of the device mesh. With `layout: auto` the plan chooses them once the number of ranks is known."""

    renamed: ClassVar = {
        "schedule": "pipeline_schedule", "stages_per_rank": "pipeline_stages_per_rank", "layers_per_stage": "layers_per_pipeline_stage",
    }  # fmt: skip
    effect: ClassVar = RESUME_ONLY

    auto: bool = Field(False, description="let the plan choose the axes before the ranks start; the same as layout: auto")
    pp: int = Field(1, gt=0, le=_MOST_RANKS, description="pipeline stages")
    dp_replicate: int = Field(1, gt=0, le=_MOST_RANKS, description="replicas of the sharded model")
    dp_shard: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks that the weights of a replica are sharded over (FSDP)")
    cp: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks that a sequence is split over (context parallelism)")
    tp: int = Field(1, gt=0, le=_MOST_RANKS, description="ranks that a matrix is split over (tensor parallelism)")
    ep: int = Field(
        1, gt=0, le=_MOST_RANKS, description="ranks that the experts are split over (expert parallelism); they lie inside dp_shard x cp"
    )
    zero: Literal[0, 1, 2, 3] = Field(
        1, description="ZeRO stage: 0 replicates everything, 1 shards optimizer state, 2 also gradients, 3 also weights"
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = Field(
        "1f1b", description="pipeline schedule, the order of micro-batches"
    )
    pipeline_stages_per_rank: int = Field(
        1, gt=0, le=_MOST_RANKS, description="pipeline stages on each rank of pp; more than 1 only with interleaved or zero-bubble"
    )
    layers_per_pipeline_stage: tuple[int, ...] | None = Field(
        None, description="layers of each pipeline stage, first to last; balanced by cost when omitted"
    )

    @model_validator(mode="before")
    @classmethod
    def _spelt_out(cls, value: Any) -> Any:
        return {"auto": True} if value == "auto" else value

    @model_validator(mode="after")
    def _auto_or_axes(self) -> Layout:
        given = [name for name, value in self if name not in ("auto", "zero") and value != Layout.model_fields[name].default]
        if self.auto and given:
            raise ValueError(f"layout.auto chooses all axes; leave out {', '.join(given)}, or auto")
        return self

    def overrides(self) -> list[str]:
        """The layout as arguments of `--set`."""
        return [f"layout.{axis}={json.dumps(value)}" for axis, value in self if value is not None]


def world_size(layout: Layout) -> int:
    """The number of ranks of a layout; `ep` adds none, since it lies inside dp_shard x cp."""
    return layout.pp * layout.dp_replicate * layout.dp_shard * layout.cp * layout.tp
