"""Kinds of ablations that sweep the optimization: learning rates (with a parabola), batch sizes on equal tokens, and optimizers."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from lmworks.ablate.file import Ablation, Expansion, Findings, distinct, number, phases_of
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
        arms = distinct("factors", ((f"rate-{number(rate * factor)}", _rate_overrides(rate, adam, factor)) for factor in factors))
        rates = dict(zip(arms, factors, strict=True))
        baseline = min(rates, key=lambda name: max(rates[name], 1 / rates[name]))
        return Expansion(arms, baseline, labels={name: rate * factor for name, factor in rates.items()})

    def conclude(self, findings: Findings) -> dict[str, Any] | None:
        return findings.optimum("learning rate")


def _rate_overrides(rate: float, adam: float, factor: float) -> list[str]:
    return [] if factor == 1 else [f"optimizer.learning_rate={rate * factor!r}", f"optimizer.adam_learning_rate={adam * factor!r}"]


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
        arms = distinct("rates", [(f"{kind}-{number(rate)}", _optimizer_overrides(kind, rate)) for kind, rate in pairs])
        return Expansion(arms, next(iter(arms)))


def _optimizer_overrides(kind: str, rate: float) -> list[str]:
    own = [f"optimizer.kind={kind}", f"optimizer.learning_rate={rate!r}"]
    return own + ([f"optimizer.adam_learning_rate={rate!r}"] if kind == "adamw" else [])
