"""Learning rate sweep, with a parabola through the result."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lmworks.ablate.kinds.base import Ablation, Expansion, Findings, distinct, number
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe


class LearningRate(Ablation):
    """Learning rate sweep: one arm per factor on the recipe's peak learning rates. A parabola in the logarithm of the rate gives the
    optimum."""

    kind: Literal["learning-rate"] = "learning-rate"
    factors: list[float] = Field(
        [0.25, 0.5, 1.0, 2.0, 4.0], min_length=3,
        description="factors on optimizer.learning_rate and optimizer.adam_learning_rate; 1 is the baseline, else the factor nearest to it",
    )  # fmt: skip

    def expand(self, recipe: Recipe) -> Expansion:
        if min(self.factors) <= 0 or len(set(self.factors)) < len(self.factors):
            raise UserError("factors: must be positive and differ from each other")
        rate, adam = recipe.optimizer.learning_rate, recipe.optimizer.adam_learning_rate
        assert rate and adam
        factors = sorted(self.factors)
        arms = distinct("factors", ((f"rate-{number(rate * factor)}", _overrides(rate, adam, factor)) for factor in factors))
        rates = dict(zip(arms, factors, strict=True))
        baseline = min(rates, key=lambda name: max(rates[name], 1 / rates[name]))
        return Expansion(arms, baseline, labels={name: rate * factor for name, factor in rates.items()})

    def conclude(self, findings: Findings) -> dict[str, Any] | None:
        return findings.optimum("learning rate")


def _overrides(rate: float, adam: float, factor: float) -> list[str]:
    return [] if factor == 1 else [f"optimizer.learning_rate={rate * factor!r}", f"optimizer.adam_learning_rate={adam * factor!r}"]
