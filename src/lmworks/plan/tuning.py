"""The plan of a run that tunes a base model without pretraining."""

from __future__ import annotations

from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase


def tuning_as_phase(recipe: Recipe) -> Recipe:
    """The recipe with its tuning as the only phase, for plans and checks, if it has no pretraining; otherwise `recipe` itself."""
    if recipe.trains_base or recipe.tune is None:
        return recipe
    phase = Phase(
        name="tune", tokens=recipe.tune.planned_tokens, mixture={"conversations": 1.0}, sequence_length=recipe.tune.sequence_length,
        global_batch_size=recipe.tune.global_batch_size, lr_schedule=recipe.tune.lr_schedule,
    )  # fmt: skip
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": [phase]})})
