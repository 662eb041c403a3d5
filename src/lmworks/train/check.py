"""What training would refuse, found from the recipe, and from the data of a stage where that was read, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from lmworks.errors import UserError, all_refusals
from lmworks.recipe.schema.dpo import Dpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import Tune
from lmworks.shards.read.tuning_batches import check_batch
from lmworks.train.curriculum import stage_schedules
from lmworks.train.data.replay import replayed_rows
from lmworks.train.data.sets import require_sets
from lmworks.train.early_stopping import EarlyStopping
from lmworks.train.observe.forgetting import GENERAL, RISE

MEASURED = {
    "tune": ("validation/loss",),
    "dpo": ("validation/loss", "validation/reward_accuracy", "validation/reward_margin"),
    "grpo": ("validation/reward", "validation/wrong"),
}
"""What the validations of the stages after pretraining measure."""


def stage_refusals(recipe: Recipe, stage: str) -> Iterator[UserError]:
    """Why a stage after pretraining could not run, whatever its data hold."""
    section = getattr(recipe, stage)
    looks: list[Callable[[], object]] = [partial(require_sets, recipe, stage)]
    if isinstance(section, Tune):
        length, batch = int(section.sequence_length), int(section.global_batch_size)
        looks.append(partial(check_batch, None if section.epochs else int(section.planned_tokens), batch, length))
        if section.replay is not None:
            looks.append(partial(replayed_rows, section.replay, batch // length))
    if section.early_stopping is not None:
        held_out = {"tune": "validation_fraction", "dpo": "held_out_fraction", "grpo": "held_out"}[stage]
        measured = (*(MEASURED[stage] if getattr(section, held_out) else ()), *((GENERAL, RISE) if section.forgetting else ()))
        looks.append(partial(EarlyStopping(section.early_stopping).observe, 0, dict.fromkeys(measured, 0.0)))
    return all_refusals(looks)


def check_steps(recipe: Recipe, stage: str, steps: int, tokens: int, held_out: int) -> None:
    """The same for a stage of which the data are known: `steps` that read `tokens`, and examples that are held out."""
    if isinstance(getattr(recipe, stage), Dpo):
        require_held_out(recipe, held_out)
    each = max(1, tokens // steps)
    stage_schedules(stage, recipe, getattr(recipe, stage), steps, lambda step: step * each)


def require_held_out(recipe: Recipe, held_out: int) -> None:
    """Raise `UserError` if preference optimization is to be stopped by held-out pairs, and there are none."""
    if recipe.dpo is not None and recipe.dpo.early_stopping is not None and not held_out:
        raise UserError("dpo.early_stopping needs held-out pairs; raise dpo.held_out_fraction, or give more pairs")
