"""Where metrics are written."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT
from lmworks.recipe.schema.units import Duration


class Metrics(Node):
    """Where metrics are written. JSONL is always written."""

    effect: ClassVar = NO_EFFECT

    tensorboard: bool = Field(False, description="also write TensorBoard events")
    wandb_project: str | None = Field(None, description="also log to this Weights & Biases project")
    prometheus_port: int | None = Field(None, gt=0, description="also serve /metrics on this loopback port")
    dollars_per_hour: float = Field(
        0.0,
        ge=0,
        description="price of a device (a GPU, or the cores of one rank), for the run page; the price in the cluster file when omitted",
    )
    watts: float = Field(
        0.0, ge=0, description="power draw of a device, for the run page, where it is not measured; that of the cluster file when omitted"
    )
    detail_every: Duration | None = Field(
        None, description="interval between per-layer metrics (activations, attention logits, gradients, updates); never when omitted"
    )
