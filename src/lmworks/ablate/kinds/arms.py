"""Arms that are written out."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from lmworks.ablate.kinds.base import Ablation, Expansion, meant
from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe


class Arms(Ablation):
    """Arms that are written out: a name and its overrides."""

    kind: Literal["arms"] = Field("arms", description="which kind of ablation this is")
    arms: dict[str, list[str]] = Field(
        description="overrides of each arm by its name, each A.B=C as for --set; an empty list is the recipe itself"
    )
    baseline: str | None = Field(None, description="arm that the others are compared with; the first when omitted")

    @field_validator("arms")
    @classmethod
    def _several(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        if len(value) < 2:
            raise ValueError("needs two arms or more, one of them the baseline; an empty list of overrides is the recipe itself")
        return value

    def expand(self, recipe: Recipe) -> Expansion:
        baseline = self.baseline or next(iter(self.arms))
        if baseline not in self.arms:
            raise UserError(f"baseline: there is no arm {baseline!r}; {meant(baseline, self.arms)}")
        return Expansion(self.arms, baseline)
