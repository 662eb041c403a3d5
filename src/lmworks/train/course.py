"""What is learnt, step by step: the trainer's only view of data, phases and rates.

Pretraining and tuning differ in their course and in nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from lmworks.recipe.schema.model import Rope
from lmworks.recipe.schema.train import Ewc
from lmworks.recipe.schema.units import Duration
from lmworks.shards.read.batch import Batch


@dataclass(frozen=True)
class Stage:
    """What holds from one phase boundary to the next. `rope` None leaves the positions as they are, `mtp_loss_weight` None that weight."""

    index: int
    name: str
    first_step: int
    sequence_length: int
    rope: Rope | None
    bias_update_rate: float
    mtp_loss_weight: float | None = None
    ewc: Ewc | None = None
    save_every: int | None = None  # steps, counted from the first; None as everywhere in the run


class Course(Protocol):
    """Every method is a pure function of the step, so that a resumed run needs nothing but its number."""

    steps: int
    tokens: int

    def rows(self, step: int) -> int:
        """Sequences of the whole batch of a step, over all ranks and micro-batches."""

    def batch(self, step: int, start: int, stop: int) -> Batch:
        """Sequences [start, stop) of a step."""

    def rate(self, step: int) -> float:
        """The learning rate's factor on its peak."""

    def stage(self, step: int) -> Stage:
        """The phase that a step lies in."""

    def steady_since(self, step: int) -> int:
        """The first step of the stretch around `step` in which losses can be compared: behind the warm-up of its phase and behind the
        last change of what is read. It may lie ahead."""

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one."""

    def earlier(self, stage: Stage, count: int) -> Iterator[Batch]:
        """So many sequences, each a batch, spread evenly over what was trained on before the stage."""


def steps_between(duration: Duration, steps: int, tokens: int) -> int:
    """What comes every `duration` comes after each so many steps of a course of `steps` and `tokens`."""
    return max(1, duration.steps(step_tokens=max(1, tokens // steps), phase_tokens=tokens))
