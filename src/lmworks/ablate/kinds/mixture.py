"""Data mixture: each source taken out, or weighted otherwise."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field

from lmworks.ablate.kinds.base import Ablation, Expansion, distinct, meant, number, phases_of
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe


class Mixture(Ablation):
    """Data mixture: one arm per source, whose weight is multiplied by `factor` in every phase; the other weights are scaled to a sum of
    1."""

    kind: Literal["mixture"] = "mixture"
    sources: list[str] = Field(default_factory=list, description="sources to change, an arm each; all sources of the mixtures when omitted")
    factor: float = Field(0.0, ge=0, le=1000, description="factor on the weight of the source; 0 takes it out")

    def expand(self, recipe: Recipe) -> Expansion:
        phases_of(recipe)
        if self.factor == 1:
            raise UserError("factor: 1 changes no mixture; write 0 to take sources out, or another factor")
        known = list(dict.fromkeys(name for phase in recipe.train.phases for name in phase.mixture))
        word = "without-{}" if not self.factor else f"{{}}-times-{number(self.factor)}"
        arms: list[tuple[str, list[str]]] = [("recipe", [])]
        for source in self.sources or known:
            if source not in known:
                raise UserError(f"sources: no mixture has {source!r}; {meant(source, known)}")
            overrides = []
            for phase in recipe.train.phases:
                weights = {name: weight * (self.factor if name == source else 1) for name, weight in phase.mixture.items()}
                total = sum(weights.values())
                if not total:
                    raise UserError(
                        f"sources: phase {phase.name} has no source but {source}, so it cannot be taken out; write a factor above 0"
                    )
                scaled = {name: weight / total for name, weight in weights.items() if weight}
                if source in phase.mixture:
                    overrides.append(f"train.phases.{phase.name}.mixture={json.dumps(scaled)}")
            arms.append((word.format(source), overrides))
        return Expansion(distinct("sources", arms), "recipe")
