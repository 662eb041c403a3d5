"""The data sets of the stages after pretraining."""

from __future__ import annotations

from lmworks.errors import UserError
from lmworks.recipe.schema.recipe import Recipe

_LEAST = {"tune": "one body of conversations", "dpo": "one set of preference pairs", "grpo": "one set of prompts"}


def require_sets(recipe: Recipe, stage: str) -> None:
    """Raise `UserError` if the recipe lists no data for a stage."""
    if not getattr(recipe, stage).data:
        raise UserError(f"{stage}.data is empty; list at least {_LEAST[stage]}")
