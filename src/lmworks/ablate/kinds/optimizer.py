"""Optimizers, each at several learning rates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from lmworks.ablate.kinds.base import Ablation, Expansion, distinct, number
from lmworks.recipe.schema.recipe import Recipe


class Optimizer(Ablation):
    """Optimizers: one arm per optimizer and learning rate. Under muon the rate is that of the matrices, and the recipe's adam_learning_rate
    stays."""

    kind: Literal["optimizer"] = "optimizer"
    rates: dict[Literal["muon", "adamw"], list[float]] = Field(
        min_length=1, description="learning rates to try, by optimizer; the first one of the first optimizer is the baseline"
    )

    @field_validator("rates")
    @classmethod
    def _positive(cls, value: dict[str, list[float]]) -> dict[str, list[float]]:
        for name, rates in value.items():
            if not rates or min(rates) <= 0:
                raise ValueError(f"{name} needs at least one learning rate above 0")
        return value

    def expand(self, recipe: Recipe) -> Expansion:
        pairs = [(kind, rate) for kind, rates in self.rates.items() for rate in rates]
        arms = distinct("rates", [(f"{kind}-{number(rate)}", _overrides(kind, rate)) for kind, rate in pairs])
        return Expansion(arms, next(iter(arms)))


def _overrides(kind: str, rate: float) -> list[str]:
    own = [f"optimizer.kind={kind}", f"optimizer.learning_rate={rate!r}"]
    return own + ([f"optimizer.adam_learning_rate={rate!r}"] if kind == "adamw" else [])
