"""Batch size sweep on equal tokens."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from lmworks.ablate.kinds.base import Ablation, Expansion, phases_of
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe

Rescale = Literal["none", "sqrt", "linear"]


def rescaled(ratio: float, rescale: Rescale) -> float:
    """The factor on the learning rate for a batch that is `ratio` times as large (sqrt: Malladi et al. 2022, arXiv:2205.10287)."""
    return {"none": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[rescale]


class Batch(Ablation):
    """Batch size sweep: one arm per factor on the batch size of every phase, on equal tokens."""

    kind: Literal["batch"] = "batch"
    factors: list[float] = Field(
        [0.5, 1.0, 2.0, 4.0], min_length=2, description="factors on global_batch_size of every phase; 1 is the baseline"
    )
    rescale: Rescale = Field("sqrt", description="how the learning rate follows the batch size")

    def expand(self, recipe: Recipe) -> Expansion:
        phases_of(recipe)
        if min(self.factors) <= 0 or 1 not in self.factors or len(set(self.factors)) < len(self.factors):
            raise UserError("factors: must be positive, differ from each other, and contain 1, the baseline")
        arms: dict[str, list[str]] = {}
        labels: dict[str, float] = {}
        for factor in sorted(self.factors):
            overrides = []
            for phase in recipe.train.phases:
                size = phase.global_batch_size * factor
                if size % phase.sequence_length or size < 1:
                    raise UserError(
                        f"factors: {factor:g} times the batch of phase {phase.name} ({phase.global_batch_size:,} tokens) is not a multiple "
                        f"of its sequence length {phase.sequence_length:,}; take another factor"
                    )
                overrides.append(f"train.phases.{phase.name}.global_batch_size={int(size)} tokens")
                if phase.batch_ramp:
                    overrides.append(f"train.phases.{phase.name}.batch_ramp=null")
            scale = rescaled(factor, self.rescale)
            assert recipe.optimizer.learning_rate and recipe.optimizer.adam_learning_rate
            if scale != 1:
                overrides.append(f"optimizer.learning_rate={recipe.optimizer.learning_rate * scale!r}")
                overrides.append(f"optimizer.adam_learning_rate={recipe.optimizer.adam_learning_rate * scale!r}")
            name = f"batch-{int(recipe.train.phases[0].global_batch_size * factor)}"
            arms[name], labels[name] = overrides, recipe.train.phases[0].global_batch_size * factor
        baseline = f"batch-{int(recipe.train.phases[0].global_batch_size)}"
        return Expansion(arms, baseline, labels=labels)
