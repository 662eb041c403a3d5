"""The plan of a run that trains a base model further without pretraining."""

from __future__ import annotations

from collections.abc import Iterator

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


def lora_of(phase: Phase) -> Lora | None:
    """The low-rank adapters that a phase trains instead of the weights."""
    return phase.lora if isinstance(phase, StagePhase) else None


def has_rollouts(phase: Phase) -> bool:
    """Whether the ranks draw answers in a phase."""
    return isinstance(phase, StagePhase) and phase.rollouts


def stages_as_phases(recipe: Recipe) -> Recipe:
    """The recipe with its tuning, preference optimization and reinforcement learning as phases, for plans and checks, if it has no
    pretraining; otherwise `recipe` itself.

    How many pairs there are is known only when they have been read, and how long answers are when they have been written: the most that
    the recipe allows is assumed, in rows of the whole sequence length.
    """
    if recipe.trains_base:
        return recipe
    phases = [
        StagePhase(
            name=name, tokens=_tokens(section), mixture={name: 1.0}, sequence_length=section.sequence_length,
            global_batch_size=_step_tokens(section), lr_schedule=section.lr_schedule, lora=section.lora,
            rollouts=isinstance(section, Grpo), ewc=getattr(section, "ewc", None),
        )
        for name, section in recipe.later_stages.items()
    ]  # fmt: skip
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": phases})})


def assumptions(recipe: Recipe) -> Iterator[str]:
    """What the plan of these phases does not know, one line each."""
    stages = {phase.name: phase for phase in recipe.train.phases if isinstance(phase, StagePhase)}
    frozen = [name for name, phase in stages.items() if phase.lora]
    if frozen:
        yield f"{', '.join(frozen)}: low-rank adapters take 4 operations per parameter and token instead of 6, and the tables count 4"
    if "dpo" in stages:
        yield "dpo: all pairs that dpo.data allows are assumed, in rows of the whole length; the time of reference scores is not included"
    if "grpo" in stages:
        yield "grpo: the time is that of the updates, in rows of the whole sequence length; writing the answers is not included"


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
