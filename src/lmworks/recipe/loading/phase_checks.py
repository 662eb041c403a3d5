"""Whether the budgets of phases have room for their steps and schedules: what follows from a recipe alone, by `show`, `plan` and `run`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from lmworks.errors import UserError, all_refusals
from lmworks.recipe.derivation.schedules import Schedules
from lmworks.recipe.derivation.timeline import Timeline
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase


def phase_refusals(recipe: Recipe) -> Iterator[UserError]:
    """Phases without a whole step, and schedules longer than their phase: one refusal for each phase; and routers whose temperature is not
    1 at the end. With `time` budgets are set later."""
    if not recipe.trains_base or recipe.time is not None:
        return

    def look(phases: Sequence[Phase]) -> None:
        timeline = Timeline(phases)
        Schedules(phases, [phase.steps for phase in timeline.phases], timeline.tokens_before)

    def end_of_warm_up() -> None:
        moe, steps = recipe.model.moe, Timeline(recipe.train.phases).steps
        if moe is not None and moe.temperature != 1 and moe.temperature_steps >= steps:
            raise UserError(
                f"model.moe.temperature_steps {moe.temperature_steps:,} are not over when the run ends after {steps:,} steps, and the "
                f"model is used at a temperature of 1; set at most {steps - 1:,}"
            )

    found = list(all_refusals(partial(look, [phase]) for phase in recipe.train.phases))
    yield from found or all_refusals([partial(look, recipe.train.phases), end_of_warm_up])
