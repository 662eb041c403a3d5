"""The optimizer."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import read_by


class Optimizer(Node):
    """Muon for hidden matrices and experts, AdamW for embeddings, head, norms and biases; or AdamW for all."""

    renamed: ClassVar = {"clip": "max_grad_norm", "layer_decay": "layer_lr_decay", "ema": "ema_decay"}
    effect: ClassVar = read_by("pretrain", "tune")

    kind: Literal["muon", "adamw"] = Field("muon", description="what trains the matrices")
    learning_rate: float | None = Field(None, gt=0, description="peak rate of the matrices; derived from the model size when left out")
    adam_learning_rate: float | None = Field(None, gt=0, description="peak rate of what AdamW trains under muon; derived")
    update_scale: Literal["rms", "spectral"] = Field(
        "rms", description="rms: updates as large as AdamW's (0.2 RMS, arXiv:2502.16982); spectral: sqrt(rows/cols), rates near 0.02"
    )
    momentum: float = Field(0.95, ge=0, lt=1, description="of muon")
    nesterov: bool = Field(True, description="look ahead along muon's momentum")
    newton_schulz_steps: int = Field(5, gt=0, description="iterations of muon's orthogonalisation")
    betas: tuple[float, float] = Field((0.9, 0.95), description="of adamw")
    eps: float = Field(1e-8, gt=0, description="of adamw")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; never on norms, biases and embeddings")
    max_grad_norm: float = Field(1.0, ge=0, description="largest global gradient norm; 0 is off")
    layer_lr_decay: float = Field(1.0, gt=0, le=1, description="rate of each layer relative to the one above it")
    ema_decay: Annotated[float, read_by("pretrain", "tune", "evaluate", "export")] = Field(
        0.0, ge=0, lt=1, description="decay of an exponential moving average of the weights; 0 is off"
    )
