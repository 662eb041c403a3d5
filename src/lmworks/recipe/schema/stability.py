"""Fault handling: what a run does about bad steps, failed saves, slow ranks and missing data."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT, RESUME_ONLY
from lmworks.recipe.schema.units import Duration, Seconds


class Spike(Node):
    """A loss or gradient norm far above the recent ones. Such an update is never applied; `action` says what follows."""

    renamed: ClassVar = {"lower_to": "reduced_lr_factor", "lower_steps": "reduced_lr_steps"}

    action: Literal["skip", "reduce_lr", "rollback"] = Field(
        "skip",
        description="skip: continue; reduce_lr: continue at a reduced learning rate; rollback: return to the last checkpoint and skip "
        "the data since",
    )
    window: int = Field(128, ge=8, description="number of recent steps compared with; a quarter of them must exist before a step is judged")
    threshold: float = Field(16.0, gt=0, description="distance above the median that counts as a spike, in median absolute deviations")
    floor: float = Field(0.3, ge=0, description="minimum rise of the loss above the median, in nats per token")
    norm_factor: float = Field(10.0, gt=1, description="minimum rise of the gradient norm, as a factor on its median")
    max_in_a_row: int = Field(5, gt=0, description="consecutive spikes after which skip and reduce_lr roll back too")
    rollback_after: Duration = Field(
        Duration.parse("1%"), description="spikes before this much of the stage never lead to a rollback: losses are unsteady at first"
    )
    reduced_lr_factor: float = Field(0.3, gt=0, lt=1, description="reduce_lr: initial factor on the learning rate")
    reduced_lr_steps: int = Field(100, gt=0, description="reduce_lr: steps over which the rate returns linearly")


class Stability(Node):
    """Faults, and what the run does about them. Every decision is a line in the ledger."""

    effect: ClassVar = RESUME_ONLY

    max_bad_steps: int = Field(10, gt=0, description="consecutive non-finite steps (none changes a weight) after which the run rolls back")
    max_rollbacks: int = Field(
        3, ge=0, description="rollbacks per phase, to the newest good checkpoint; then a non-finite run stops with the reason, and after a "
        "spike the new level is accepted",
    )  # fmt: skip
    skip_steps: int = Field(100, gt=0, description="number of undone steps before the bad one whose data a rollback skips")
    save_bad_batches: Annotated[int, NO_EFFECT] = Field(
        20, ge=0, description="number of bad batches saved; `lmworks replay` takes those of pretraining and of tuning without LoRA"
    )
    spike: Spike | None = Field(Spike(), description="loss spike handling; null turns it off")
    starved_share: Annotated[float, NO_EFFECT] = Field(
        0.2, gt=0, le=1, description="fraction of wall time spent waiting for data above which the run warns"
    )
    data_timeout: Annotated[Seconds, NO_EFFECT] = Field(
        Seconds.parse("30 min"), description="time limit of waiting for one batch, after which the run stops"
    )
    max_failed_saves: Annotated[int, NO_EFFECT] = Field(
        5, gt=0, description="consecutive failed saves after which the run stops; before that it warns and retries"
    )
    slow_threshold: Annotated[float, NO_EFFECT] = Field(
        8.0, gt=0, description="distance above the median step time of all ranks that counts as a slow rank, in median absolute deviations"
    )
    recheck_every: Annotated[Duration | None, NO_EFFECT] = Field(
        None,
        description="interval between tests for silent data corruption: a micro-batch is run twice, and copies of weights are compared",
    )
    detect_anomaly: bool = Field(
        False, description="check every operator of every step and report the first non-finite result; several times slower, and never "
        "compiled. Without it a non-finite step is run again with these checks",
    )  # fmt: skip
    on_corruption: Annotated[Literal["stop", "rollback"], NO_EFFECT] = Field(
        "stop", description="action after a failed test, in addition to reporting the rank"
    )
