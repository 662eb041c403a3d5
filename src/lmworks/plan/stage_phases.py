"""The plan of a run that trains a base model further without pretraining."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, ValidationError

from lmworks.errors import UserError
from lmworks.plan.stage_data import StageData
from lmworks.recipe.derivation.passes import steps_of
from lmworks.recipe.schema.dpo import Dpo
from lmworks.recipe.schema.grpo import Grpo
from lmworks.recipe.schema.lora import Lora
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.schema.tuning_set import GENERATED
from lmworks.recipe.schema.units import Tokens


class StagePhase(Phase):
    """A stage after pretraining as a phase. With `lora` the weights are frozen, and only adapters have gradients and optimizer state. With
    `rollouts` each rank also draws answers, for which it gathers all weights."""

    lora: Lora | None = None
    rollouts: bool = False
    known_steps: int | None = Field(None, description="steps, where the data were read; they need not have equal batches")


def lora_of(phase: Phase) -> Lora | None:
    """The low-rank adapters that a phase trains instead of the weights."""
    return phase.lora if isinstance(phase, StagePhase) else None


def has_rollouts(phase: Phase) -> bool:
    """Whether the ranks draw answers in a phase."""
    return isinstance(phase, StagePhase) and phase.rollouts


def stages_as_phases(recipe: Recipe, data: Mapping[str, StageData] | None = None) -> Recipe:
    """The recipe with its tuning, preference optimization and reinforcement learning as phases, for plans and checks, if it has no
    pretraining; otherwise `recipe` itself.

    `data` is what was read of the data of these stages. Of others the most that the recipe allows is assumed, in rows of the whole sequence
    length. How long answers are is known only when they have been written. Raises `UserError` for a budget below a step.
    """
    if recipe.trains_base:
        return recipe
    try:
        phases = _phases(recipe, data or {})
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases})})


def _phases(recipe: Recipe, data: Mapping[str, StageData]) -> list[StagePhase]:
    return [
        StagePhase(
            name=name, **_budget(section, data.get(name)), mixture={name: 1.0}, sequence_length=section.sequence_length,
            lr_schedule=section.lr_schedule, lora=section.lora,
            rollouts=isinstance(section, Grpo), ewc=getattr(section, "ewc", None),
        )
        for name, section in recipe.later_stages.items()
    ]  # fmt: skip


def assumptions(recipe: Recipe, data: Mapping[str, StageData], measured: bool = False) -> Iterator[str]:
    """What the plan of these phases does not know, one line each; `measured`: their time is that of a rehearsal."""
    stages = {phase.name: phase for phase in recipe.train.phases if isinstance(phase, StagePhase)}
    frozen = [name for name, phase in stages.items() if phase.lora]
    if frozen:
        yield f"{', '.join(frozen)}: low-rank adapters take 4 operations per parameter and token instead of 6, and the tables count 4"
    for name in (one for one in stages if one not in data):
        rest = " in rows of the whole length" if name == "dpo" else ""
        yield f"{name}: its data were not read, so that all that {name}.data and the budget allow is assumed{rest}"
    if "grpo" in stages and not measured:
        yield "grpo: the time is that of the updates, in rows of the whole sequence length; writing the answers is not included"


def _budget(section: Tune | Dpo | Grpo, found: StageData | None) -> dict[str, Any]:
    """Tokens, tokens per step and the number of steps. Steps of preference pairs differ in size, and a plan shows their mean."""
    if found is None or isinstance(section, Grpo):
        return {"tokens": _tokens(section), "global_batch_size": _step_tokens(section)}
    length = int(section.sequence_length)
    rows = max(1, -(-found.read // (found.steps * length)))
    step = int(section.global_batch_size) if isinstance(section, Tune) else rows * length
    return {"tokens": Tokens(found.read), "global_batch_size": Tokens(step), "known_steps": found.steps}


def _step_tokens(section: Tune | Dpo | Grpo) -> Tokens:
    if isinstance(section, Tune):
        return section.global_batch_size
    if isinstance(section, Dpo):
        rows = section.pairs_per_step * (1 if section.loss == "kto" else 2)
    else:
        rows = section.prompts_per_step * section.group_size // section.updates_per_rollout
    return Tokens(rows * section.sequence_length)


def _tokens(section: Tune | Dpo | Grpo) -> Tokens:
    if isinstance(section, Tune):
        return section.planned_tokens
    step = _step_tokens(section)
    if isinstance(section, Dpo):
        pairs = sum(source.limit or GENERATED for source in section.data)
        return Tokens(step * steps_of(pairs, section.pairs_per_step, section.epochs))
    return Tokens(step * section.steps * section.updates_per_rollout)
