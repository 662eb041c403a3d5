"""What the data files of a stage hold, and the steps that the stage will take on them: for plans, and for checks before a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmworks.recipe.schema.dpo import Dpo
from lmworks.recipe.schema.grpo import Grpo
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.tune import Tune

EXACT, SAMPLED, BY_BYTES = "exact", "sampled", "by bytes"
NOUNS = {"tune": "conversations", "dpo": "pairs", "grpo": "prompts"}
# With a warm-up of 5% of the steps, the shortest of the defaults, the first step of a stage with fewer than 20 steps is at the full rate.
_FEW_STEPS = 20
# The loss of one conversation differs from the next one's by about half of it; its mean over 20 is known to a tenth.
_FEW_HELD_OUT = 20
_OFTEN = 10  # passes over the same rows: reading them again gains nothing beyond about 4 (arXiv:2305.16264), and tuning overfits before


@dataclass(frozen=True)
class StageData:
    """The data of a stage and its steps.

    `examples` are trained on and have `tokens`, `held_out` are not; both are without those that were `left_out`, by reason. `read` counts
    the tokens of all steps, padding included, of rows of the stage's sequence length; `passes` how often an example is read. `counted` says
    how: exact, from a sample of the rows, or by the bytes of the text where there is no tokenizer yet. `longest` is the number of tokens of
    the longest example.
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

    @property
    def noun(self) -> str:
        """What an example is."""
        return NOUNS[self.stage]

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


def warnings(recipe: Recipe, data: Mapping[str, StageData]) -> Iterator[str]:
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
        judged = "early_stopping" if section.early_stopping is not None else ""
        if isinstance(section, Tune) and section.keep == "best":
            judged = "keep: best"
        if judged and 0 < found.held_out < _FEW_HELD_OUT:
            key = "tune.validation_fraction" if isinstance(section, Tune) else f"{name}.held_out" + "_fraction" * isinstance(section, Dpo)
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
        return f"set tune.global_batch_size={rows * length}, which makes {full // rows:,} or more"
    return f"give more conversations, or raise tune.epochs ({_FEW_STEPS} steps at least)"


def plain(data: Mapping[str, StageData]) -> dict[str, Any]:
    """As JSON values."""
    return {name: {**vars(found), "left_out": dict(found.left_out)} for name, found in data.items()}
