"""What holds in each phase of pretraining: the one function that training, saving, resuming, tuning, replaying and planning ask."""

from __future__ import annotations

from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe


def in_force(recipe: Recipe) -> list[Model]:
    """The model as each phase trains it: that of the recipe with the changes of the phase and of those before it (`Phase.changed`).

    They may concern positions, windows, the balancing of experts and the weight of multi-token prediction, never a weight's shape.
    """
    found, model = [], recipe.model
    for phase in recipe.train.phases:
        model = phase.changed(model)
        found.append(model)
    return found


def final(recipe: Recipe) -> Model:
    """The model as the last phase trains it, and as every later stage takes it over."""
    return (in_force(recipe) or [recipe.model])[-1]
