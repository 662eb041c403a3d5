"""Why a run cannot be split as a layout says: the one list of reasons that the plan gives, and for which the builder refuses.

What phases change counts too: a model is built once, and trained on the same ranks as each phase changes it.
"""

from __future__ import annotations

from collections.abc import Iterator

from lmworks.parallel.pipeline_stages import pipeline_stage_problems
from lmworks.recipe.mixers import cp_problems, tp_problems
from lmworks.recipe.phases import trained_models
from lmworks.recipe.schema.layout import Layout, ep_problems
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe


def split_problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """The reasons why the model of a recipe, in any of its phases, cannot be split over the ranks of a layout; none if it can."""
    yield from ep_problems(layout)
    said: set[str] = set()
    for model in trained_models(recipe):
        for problem in (*model_problems(model, layout), *pipeline_stage_problems(model, layout, recipe.train)):
            if problem not in said:
                said.add(problem)
                yield problem


def model_problems(model: Model, layout: Layout) -> Iterator[str]:
    """The same of one model, as far as it depends on nothing else of the recipe."""
    yield from tp_problems(model, layout.tp)
    yield from cp_problems(model, layout.cp)
    if layout.ep > 1 and not model.moe:
        yield f"ep {layout.ep} needs a mixture of experts; this model is dense"
    elif model.moe and model.moe.n_routed_experts % layout.ep:
        yield f"ep {layout.ep} does not divide the {model.moe.n_routed_experts} experts"
    if layout.pp > 1 and model.moe is not None and model.moe.balance.method == "aux":
        yield (
            "balance.method aux, of model.moe or of a phase, needs the counts of a whole step before its backward pass, unlike a pipeline; "
            "set bias, or pp=1"
        )
