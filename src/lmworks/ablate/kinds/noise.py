"""A/A: equal arms that differ in chance alone, to measure the noise floor."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lmworks.ablate.kinds.base import Ablation, Expansion
from lmworks.recipe.schema.recipe import Recipe

_PRIME = 1_000_003


class Noise(Ablation):
    """A/A: copies of the recipe with the same data order and other initial weights. Its noise floor serves later ablations (`noise`)."""

    kind: Literal["noise"] = "noise"
    copies: int = Field(2, ge=2, le=100, description="number of equal arms")

    def expand(self, recipe: Recipe) -> Expansion:
        arms = {f"copy-{number}": [f"train.init_seed={number * _PRIME + recipe.init_seed}"] for number in range(1, self.copies + 1)}
        return Expansion(arms, "copy-1")
