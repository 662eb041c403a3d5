"""The critical batch size of a checkpoint, measured by branching from it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from lmworks.ablate.kinds.base import DEFAULT_MEASURES, Ablation, Expansion, Findings
from lmworks.ablate.kinds.batch import Rescale, rescaled
from lmworks.ablate.kinds.branching import find_start
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe

LOSS = "validation/loss"


class CriticalBatch(Ablation):
    """Critical batch size by branching (Merrill et al. 2025, arXiv:2505.23971): a checkpoint continued over equal tokens with larger
    batches and a rescaled learning rate. The largest batch whose held-out loss is within `tolerance` of the first is reported, beside
    the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162)."""

    kind: Literal["critical-batch"] = "critical-batch"
    checkpoint: str = Field(
        description="what to continue: a run, which stands for its newest checkpoint, or the directory of a checkpoint in one"
    )
    factors: list[int] = Field([1, 2, 4, 8], min_length=2, description="factors on the batch size of the checkpoint; 1 is the baseline")
    rescale: Rescale = Field("sqrt", description="how the learning rate follows the batch size")
    tolerance: float = Field(0.01, gt=0, description="rise of the held-out loss that counts as none, in nats per token")

    default_measures: ClassVar = (*DEFAULT_MEASURES, LOSS)

    def expand(self, recipe: Recipe) -> Expansion:
        if self.budget is None:
            raise UserError("kind critical-batch needs budget, the tokens that each branch trains on")
        if min(self.factors) != 1 or len(set(self.factors)) < len(self.factors):
            raise UserError("factors: must be whole numbers from 1 on that differ from each other, 1 among them")
        start = find_start(self.checkpoint, recipe)
        batch = int(start.phase.global_batch_size)
        largest = max(self.factors) * batch
        tokens = int(self.budget) // largest * largest  # whole steps of every branch
        if not tokens:
            raise UserError(f"budget: {int(self.budget):,} tokens are less than one step of the largest batch, {largest:,}; raise it")
        arms, labels = {}, {}
        for factor in sorted(self.factors):
            arms[f"batch-times-{factor}"] = start.overrides(
                name="branch", tokens=f"{tokens} tokens", mixture=start.phase.mixture, global_batch_size=f"{factor * batch} tokens",
                learning_rate_scale=start.rate * rescaled(factor, self.rescale), lr_schedule={"kind": "constant", "warmup": "0 steps"},
            )  # fmt: skip
            labels[f"batch-times-{factor}"] = float(factor * batch)
        return Expansion(arms, "batch-times-1", start.branch, fixed_tokens=True, labels=labels)

    def conclude(self, findings: Findings) -> dict[str, Any] | None:
        return findings.critical_batch(LOSS, self.tolerance)
