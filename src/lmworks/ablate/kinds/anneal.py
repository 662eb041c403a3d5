"""Annealing: a checkpoint continued on new data, to see what the new data are worth."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from lmworks.ablate.kinds.base import Ablation, Expansion
from lmworks.ablate.kinds.branching import find_start
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe

_DIGITS = 12  # of a weight: the old mixture as new data is the old one again, whatever its sums are rounded to


class Anneal(Ablation):
    """Annealing, to judge new data (the method of arXiv:2407.21783, section 3.1.3): a checkpoint continued over the budget while the
    learning rate falls linearly to 0, with the mixture that it was trained on (the baseline), and with 40% of it and 60% of new data."""

    kind: Literal["anneal"] = "anneal"
    checkpoint: str = Field(
        description="what to continue: a run, which stands for its newest checkpoint, or the directory of a checkpoint in one"
    )
    candidates: dict[str, dict[str, float]] = Field(
        min_length=1, description="new data of each arm by its name: weights of sources of the recipe; they are scaled to a sum of 1"
    )
    old: float = Field(0.4, ge=0, lt=1, description="fraction of the mixture that the checkpoint was trained on, in arms with new data")

    @field_validator("candidates")
    @classmethod
    def _weighted(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for name, weights in value.items():
            if name == "old":
                raise ValueError("old is the name of the baseline; give this arm another")
            if not weights or min(weights.values()) <= 0:
                raise ValueError(f"{name} needs at least one source, with weights above 0")
        return value

    def expand(self, recipe: Recipe) -> Expansion:
        if self.budget is None:
            raise UserError("kind anneal needs budget, the tokens to continue for")
        start = find_start(self.checkpoint, recipe)
        batch = int(start.phase.global_batch_size)
        tokens = int(self.budget) // batch * batch
        if not tokens:
            raise UserError(f"budget: {int(self.budget):,} tokens are less than one step of {batch:,}; raise it")
        arms = {}
        for name, new in {"old": {}, **self.candidates}.items():
            total = sum(new.values())
            kept = self.old if new else 1.0
            mixture = {source: kept * weight for source, weight in start.phase.mixture.items() if kept}
            for source, weight in new.items():
                mixture[source] = mixture.get(source, 0.0) + (1 - kept) * weight / total
            mixture = {source: round(weight, _DIGITS) for source, weight in mixture.items()}
            arms[name] = start.overrides(
                name="anneal", tokens=f"{tokens} tokens", mixture=mixture, global_batch_size=f"{batch} tokens",
                learning_rate_scale=start.rate, lr_schedule={"kind": "linear", "warmup": "0 steps", "min_lr_ratio": 0.0},
            )  # fmt: skip
        return Expansion(arms, "old", start.branch, fixed_tokens=True)
