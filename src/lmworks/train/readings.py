"""What a metrics line says of a step: its losses, its experts, and where the time since the last line went."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lmworks.metrics import system
from lmworks.model.balance import statistics
from lmworks.parallel.model import ParallelModel
from lmworks.train.step import StepResult


@dataclass
class Clock:
    """Where the wall time since the last metrics line went, in seconds, and what was done in it."""

    step: float = 0.0
    own: float = 0.0  # of this rank alone, before it meets the others
    data_wait: float = 0.0
    save: float = 0.0
    steps: int = 0
    tokens: int = 0

    def metrics(self, flops_per_token: float, peak: float) -> dict[str, float]:
        """`perf/...`; `peak` is in operations per second, of all ranks."""
        return {
            "perf/tokens_per_second": self.tokens / max(self.step, 1e-9),
            "perf/step_seconds": self.step / max(1, self.steps),
            "perf/data_wait": self.data_wait,
            "perf/save_seconds": self.save,
            "perf/mfu": system.mfu(flops_per_token * self.tokens, self.step, peak),
            "perf/memory": system.memory_bytes(),
        }


def losses(result: StepResult) -> dict[str, float]:
    """The losses of a step and the norm of its gradients."""
    loss = float(result.loss)
    values = {
        "train/loss": loss,
        "train/perplexity": math.exp(min(loss, 80.0)) if math.isfinite(loss) else loss,
        "train/z_loss": float(result.z_loss),
        "train/valid_tokens": result.valid_tokens,
        "optim/grad_norm": float(result.grad_norm),
    }
    if result.auxiliary_loss is not None:
        values["train/auxiliary_loss"] = float(result.auxiliary_loss)
    if result.mtp_loss is not None:
        values["train/mtp_loss"] = float(result.mtp_loss)
    return values


def experts(model: ParallelModel, counts_LE: Tensor | None) -> dict[str, float]:
    """How evenly a step's tokens fell on the experts (L sparse layers, E experts), over all and by layer."""
    moe = model.config.moe
    if counts_LE is None or moe is None:
        return {}
    layers = statistics(counts_LE, moe.capacity_factor)
    bias_L = model.largest_biases()
    values: dict[str, float] = {}
    for name, per_layer, whole in (
        ("load_cv", layers["cv"], layers["cv"].mean()),
        ("load_max", layers["max_ratio"], layers["max_ratio"].max()),
        ("load_min", layers["min_ratio"], layers["min_ratio"].min()),
        ("dead", layers["dead"], layers["dead"].sum()),
        ("overflow", layers["overflow"], layers["overflow"].mean()),
        ("bias_max", bias_L, bias_L.max()),
    ):
        values[f"experts/{name}"] = float(whole)
        values |= {f"experts/{name}/{moe.first_k_dense_replace + i}": round(float(value), 6) for i, value in enumerate(per_layer)}
    return values
