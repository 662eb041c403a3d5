"""What a step has found, on the host: one copy for everything that the trainer, the policies and the metrics read of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lmworks.model.transfers import to_host
from lmworks.optim.scaler import LossScaler
from lmworks.train.step import StepResult


@dataclass(frozen=True)
class StepValues:
    """A `StepResult` as numbers, the loss scale after the step (1 without a scaler), and whether no smaller one can mend its overflow.

    `counts_LE` and `biases_L`, the largest absolute bias of each of L sparse layers, are fp64 tensors on the CPU. `biases_L` and `penalty`
    (of elastic weight consolidation) are None where they were not asked for.
    """

    loss: float
    z_loss: float
    auxiliary_loss: float | None
    mtp_loss: float | None
    grad_norm: float
    counts_LE: Tensor | None
    valid_tokens: int
    loss_scale: float
    scale_exhausted: bool
    biases_L: Tensor | None
    penalty: float | None


def read_values(
    result: StepResult, scaler: LossScaler | None, biases_L: Tensor | None = None, penalty: Tensor | None = None
) -> StepValues:  # fmt: skip
    """Wait for the step, once, and read what it has found."""
    optional = {
        "auxiliary_loss": result.auxiliary_loss, "mtp_loss": result.mtp_loss, "counts_LE": result.counts_LE, "biases_L": biases_L,
        "penalty": penalty, "scale": None if scaler is None else scaler.scale, "exhausted": None if scaler is None else scaler.exhausted,
    }  # fmt: skip
    given = {name: tensor for name, tensor in optional.items() if tensor is not None}
    loss, norm, z, *rest = to_host(result.loss, result.grad_norm, result.z_loss, *given.values())
    found = dict(zip(given, rest, strict=True))

    def number(name: str) -> float | None:
        return float(found[name]) if name in found else None

    return StepValues(
        float(loss), float(z), number("auxiliary_loss"), number("mtp_loss"), float(norm), found.get("counts_LE"), result.valid_tokens,
        float(found.get("scale", 1.0)), bool(found.get("exhausted", False)), found.get("biases_L"), number("penalty"),
    )  # fmt: skip
