"""The stages after pretraining in a plan: what their data files hold, their steps, and a run without pretraining as phases.

`StageData` is read for plans, and for checks before a run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field, ValidationError

from lmworks.errors import UserError
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.model import Lora
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.tune import GENERATED, Tune
from lmworks.recipe.schema.units import Tokens
from lmworks.recipe.timeline import steps_of

EXACT, SAMPLED, BY_BYTES = "exact", "sampled", "by bytes"
NOUNS = {"tune": "conversations", "dpo": "pairs", "grpo": "prompts"}
# With a warm-up of 5% of the steps, the shortest of the defaults, the first step of a stage with fewer than 20 steps is at the full rate.
_FEW_STEPS = 20
# The loss of one conversation differs from the next one's by about half of it; its mean over 20 is known to a tenth.
_FEW_HELD_OUT = 20
_TOO_LONG = 0.1  # of the examples: a few long ones may be cut or left out, but what all of them lack is never learned
_OFTEN = 10  # passes over the same rows: reading them again gains nothing beyond about 4 (arXiv:2305.16264), and tuning overfits before


@dataclass(frozen=True)
class StageData:
    """The data of a stage and its steps.

    `examples` are trained on and have `tokens`, `held_out` are not; both are without those that were `left_out`, by reason. `read` counts
    the tokens of all steps, padding included, of rows of the stage's sequence length; `passes` how often an example is read. `counted` says
    how: exact, from a sample of the rows, or by the bytes of the text where there is no tokenizer yet. `longest` is the number of tokens of
    the longest example. `cut` are conversations that are trained on without their end, by how they are cut. Rows of `length_for_all` tokens
    cut none, and leave out none as too long.
    """

    stage: str
    examples: int
    held_out: int
    tokens: int
    steps: int
    read: int
    passes: float
    counted: str = EXACT
    left_out: Mapping[str, int] = field(default_factory=dict)
    longest: int = 0
    cut: Mapping[str, int] = field(default_factory=dict)
    length_for_all: int = 0

    @property
    def noun(self) -> str:
        """What an example is."""
        return NOUNS[self.stage]

    @property
    def too_long(self) -> dict[str, int]:
        """What sequence_length cuts and leaves out."""
        return {**self.cut, **{reason: count for reason, count in self.left_out.items() if "sequence_length" in reason}}

    def text(self) -> str:
        """One line: how many examples, which were left out, and the steps that they make."""
        about = "" if self.counted == EXACT else ", estimated from a sample" if self.counted == SAMPLED else ", estimated by bytes"
        left = sum(self.left_out.values())
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
        out = f"; left out {left:,}: {reasons}" if left else ""
        return (
            f"{self.examples:,} {self.noun} of {self.tokens:,} tokens, {self.held_out:,} held out{out}; {self.steps:,} steps read "
            f"{self.read:,} tokens with padding, each of the {self.noun} {self.passes:.3g} times{about}"
        )


def data_warnings(recipe: Recipe, data: Mapping[str, StageData]) -> Iterator[str]:
    """Where the data, the batch and what is held out do not fit each other, with the remedy."""
    for name, found in data.items():
        section = recipe.later_stages[name]
        if found.steps < _FEW_STEPS and not isinstance(section, Grpo):
            yield f"{name}: {found.examples:,} {found.noun} make {found.steps:,} {_plural('step', found.steps)}; {_smaller(section, found)}"
        if isinstance(section, Grpo) and found.examples < section.prompts_per_step:
            yield (
                f"{name}: a step asks {section.prompts_per_step:,} prompts of the {found.examples:,} that there are, some of them twice; "
                f"set grpo.prompts_per_step={found.examples}, or give more prompts"
            )
        if found.passes > _OFTEN:
            yield (
                f"{name}: each of the {found.examples:,} {found.noun} is read {found.passes:,.0f} times; {_fewer(section)}, or give more "
                f"{found.noun}"
            )
        short = found.too_long
        count = found.examples + found.held_out + sum(found.left_out[reason] for reason in short if reason in found.left_out)
        if sum(short.values()) > _TOO_LONG * count:
            how = ", ".join(f"{number:,} {reason}" for reason, number in short.items())
            yield (
                f"{name}: sequence_length is too short for {sum(short.values()):,} of {count:,} {found.noun} ({how}); "
                f"{_longer(section, found.length_for_all)}, which is enough for all, or as long as the memory allows"
            )
        judged = "early_stopping" if section.early_stopping is not None else ""
        if isinstance(section, Tune) and section.final_weights == "best":
            judged = "final_weights: best"
        if judged and 0 < found.held_out < _FEW_HELD_OUT:
            key = f"{name}.validation_{'prompts' if isinstance(section, Grpo) else 'fraction'}"
            yield (
                f"{name}: {judged} is decided by {found.held_out} held-out {_plural(found.noun[:-1], found.held_out)}, too few to tell "
                f"better from worse; raise {key}, so that at least {_FEW_HELD_OUT} are held out"
            )


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


def _fewer(section: Tune | Dpo | Grpo) -> str:
    if isinstance(section, Grpo):
        return "lower grpo.steps"
    return f"set {'tune' if isinstance(section, Tune) else 'dpo'}.epochs to 3 or less" + (
        " in place of tune.tokens" if isinstance(section, Tune) and section.tokens is not None else ""
    )


def _longer(section: Tune | Dpo | Grpo, length: int) -> str:
    """Rows of at least this length, of which steps are made up."""
    if not isinstance(section, Tune):
        return f"set {'dpo' if isinstance(section, Dpo) else 'grpo'}.sequence_length={length}"
    step = int(section.global_batch_tokens)
    fitting = next((one for one in range(length, step + 1) if step % one == 0), None)
    if fitting is not None:
        return f"set tune.sequence_length={fitting}"
    return f"set tune.sequence_length={length} and tune.global_batch_tokens={-(-step // length) * length}"


def _smaller(section: Tune | Dpo | Grpo, found: StageData) -> str:
    """The largest step with which there are enough of them, or more epochs where even the smallest has too few."""
    if isinstance(section, Dpo):
        size = int(found.examples * section.epochs) // _FEW_STEPS
        return f"set dpo.pairs_per_step={size}" if size > 1 else f"give more pairs, or raise dpo.epochs ({_FEW_STEPS} steps at least)"
    assert isinstance(section, Tune)
    length = int(section.sequence_length)
    full = int(found.tokens * found.passes) // length  # rows without padding: there are at least so many
    rows = full // _FEW_STEPS
    if rows >= 1:
        return f"set tune.global_batch_tokens={rows * length}, which makes {full // rows:,} or more"
    return f"give more conversations, or raise tune.epochs ({_FEW_STEPS} steps at least)"


def plain_data(data: Mapping[str, StageData]) -> dict[str, Any]:
    """As JSON values."""
    return {name: {**vars(found), "left_out": dict(found.left_out), "cut": dict(found.cut)} for name, found in data.items()}


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


def recipe_until(recipe: Recipe, stages: Collection[str] | None) -> Recipe:
    """The recipe of a run that has only these of its stages (None: all), without what the others would train."""
    if stages is None:
        return recipe
    return recipe.model_copy(update={name: None for name in recipe.later_stages if name not in stages})


def stages_as_phases(recipe: Recipe, data: Mapping[str, StageData] | None = None) -> Recipe:
    """The recipe with its tuning, preference optimization and reinforcement learning as phases, for plans and checks, if it has no
    pretraining; otherwise `recipe` itself.

    `data` is what was read of the data of these stages. Of others the most that the recipe allows is assumed, in rows of the whole sequence
    length. How long answers are is known only when they have been written. Raises `UserError` for a budget below a step.
    """
    if recipe.trains_base:
        return recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"phases": later_phases(recipe, data)})})


def later_phases(recipe: Recipe, data: Mapping[str, StageData] | None = None) -> list[StagePhase]:
    """The stages after pretraining as phases; `data` and errors as of `stages_as_phases`."""
    try:
        return [
            StagePhase(
                name=name, **_budget(section, (data or {}).get(name)), mixture={name: 1.0}, sequence_length=section.sequence_length,
                lr_schedule=section.lr_schedule, lora=section.lora,
                rollouts=isinstance(section, Grpo), ewc=getattr(section, "ewc", None),
            )
            for name, section in recipe.later_stages.items()
        ]  # fmt: skip
    except ValidationError as error:
        raise UserError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


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
        return {"tokens": _tokens(section), "global_batch_tokens": _step_tokens(section)}
    length = int(section.sequence_length)
    rows = max(1, -(-found.read // (found.steps * length)))
    step = int(section.global_batch_tokens) if isinstance(section, Tune) else rows * length
    return {"tokens": Tokens(found.read), "global_batch_tokens": Tokens(step), "known_steps": found.steps}


def _step_tokens(section: Tune | Dpo | Grpo) -> Tokens:
    if isinstance(section, Tune):
        return section.global_batch_tokens
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
