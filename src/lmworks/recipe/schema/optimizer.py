"""The optimizer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import read_by

Beta = Annotated[float, Field(ge=0, lt=1)]
MOST_RATE = 10.0  # a first update moves each weight by about the rate, and weights begin near 0.02


class Optimizer(Node):
    """Muon for hidden matrices and experts, AdamW for embeddings, head, norms and biases; or AdamW for all."""

    renamed: ClassVar = {"clip": "max_grad_norm", "layer_decay": "layer_lr_decay", "ema": "ema_decay"}
    effect: ClassVar = read_by("pretrain", "tune", "dpo", "grpo")

    kind: Literal["muon", "adamw"] = Field("muon", description="optimizer of the hidden matrices")
    learning_rate: float | None = Field(
        None, gt=0, le=MOST_RATE, description="peak learning rate of the hidden matrices; derived from the model size when omitted"
    )
    adam_learning_rate: float | None = Field(
        None, gt=0, le=MOST_RATE, description="peak learning rate of what AdamW trains when kind is muon; derived when omitted"
    )
    update_scale: Literal["rms", "spectral"] = Field(
        "rms",
        description="scale of Muon updates. rms: that of AdamW (0.2 RMS, arXiv:2502.16982); spectral: sqrt(rows/cols), for rates near 0.02",
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="momentum of Muon")
    nesterov: bool = Field(True, description="Nesterov momentum in Muon")
    newton_schulz_steps: int = Field(5, gt=0, le=100, description="iterations of Muon's orthogonalization")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), description="decay rates of AdamW's first and second moments")
    eps: float = Field(1e-8, gt=0, le=1, description="added to the denominator of AdamW")
    weight_decay: float = Field(0.1, ge=0, le=10, description="decoupled weight decay; not applied to norms, biases and embeddings")
    max_grad_norm: float = Field(1.0, ge=0, description="gradients are clipped to this global norm; 0 turns clipping off")
    layer_lr_decay: float = Field(
        1.0, gt=0, le=1, description="layer-wise learning rate decay: rate of each layer relative to the layer above it"
    )
    ema_decay: Annotated[float, read_by("pretrain", "tune", "dpo", "grpo", "evaluate", "export")] = Field(
        0.0, ge=0, lt=1, description="decay of an exponential moving average of the weights; 0 turns it off"
    )
