"""What happens when a step, a disk, a rank or the data source misbehaves."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT, RESUME_ONLY
from lmworks.recipe.schema.units import Duration, Seconds


class Spike(Node):
    """A loss or gradient norm far above the last ones of its phase. Such an update is never applied; what else is done is `action`."""

    renamed: ClassVar = {"lower_to": "reduced_lr_factor", "lower_steps": "reduced_lr_steps"}

    action: Literal["skip", "reduce_lr", "rollback"] = Field(
        "skip",
        description="skip: go on; reduce_lr: at a reduced learning rate for a while; rollback: from the last checkpoint, without the "
        "data since",
    )
    window: int = Field(128, ge=8, description="steps looked back on; a quarter of them must be known before any step is judged")
    threshold: float = Field(16.0, gt=0, description="how far above the median is a spike, in median absolute deviations")
    floor: float = Field(0.3, ge=0, description="least rise of the loss above the median, in nats per token")
    norm_factor: float = Field(10.0, gt=1, description="least rise of the gradient norm, as a factor on its median")
    max_in_a_row: int = Field(5, gt=0, description="spikes in a row after which skip and reduce_lr roll back too")
    reduced_lr_factor: float = Field(0.3, gt=0, lt=1, description="reduce_lr: what the rate is multiplied by at first")
    reduced_lr_steps: int = Field(100, gt=0, description="reduce_lr: steps until the rate is back, linearly")


class Stability(Node):
    """Faults, and what the run does about them. Every decision is a line in the ledger."""

    effect: ClassVar = RESUME_ONLY

    max_bad_steps: int = Field(10, gt=0, description="non-finite steps in a row (none changes a weight) after which the run rolls back")
    max_rollbacks: int = Field(
        3, ge=0, description="rollbacks per phase, to the newest good checkpoint; then a non-finite run stops with the reason, and after a "
        "spike the new level is accepted",
    )  # fmt: skip
    skip_steps: int = Field(100, gt=0, description="steps up to the bad one whose data a rollback leaves out, as far as they are undone")
    save_bad_batches: Annotated[int, NO_EFFECT] = Field(20, ge=0, description="batches kept for replay")
    spike: Spike | None = Field(Spike(), description="what to do about sudden rises; null is off")
    starved_share: Annotated[float, NO_EFFECT] = Field(
        0.2, gt=0, le=1, description="share of the wall time spent waiting for data above which the run warns"
    )
    data_timeout: Annotated[Seconds, NO_EFFECT] = Field(Seconds.parse("30 min"), description="wait for one batch after which the run stops")
    max_failed_saves: Annotated[int, NO_EFFECT] = Field(
        5, gt=0, description="failed saves in a row after which the run stops; before, it warns and tries again"
    )
    slow_threshold: Annotated[float, NO_EFFECT] = Field(
        8.0, gt=0, description="how far above the median of all ranks a slow one's own time is, in median absolute deviations"
    )
    recheck_every: Annotated[Duration | None, NO_EFFECT] = Field(
        None, description="distance between tests for silent corruption: a micro-batch is run twice, and copies of weights are compared"
    )
    detect_anomaly: bool = Field(
        False, description="watch every operator of every step, and name the first whose result is not finite; several times slower, and "
        "never compiled. Without it a step that was not finite is run again under watch",
    )  # fmt: skip
    on_corruption: Annotated[Literal["stop", "rollback"], NO_EFFECT] = Field(
        "stop", description="what a failed test leads to, beside naming the rank"
    )
