"""The learning-rate schedule as a pure function of the step: `Schedules.lr_factor(step)` times a group's peak is its learning rate.

Phases have a warm-up, a shape and a batch ramp, and follow each other without a cold restart. A schedule may span several phases.

A phase is a curve over the tokens x in [0, n] that have been trained on in it; step i of it uses the curve at the end of the step.
So the first step of a run already moves, a warm-up ends on the peak, the last step of a phase ends on the last value of its shape, and
the next phase's curve begins there at x = 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from lmworks.errors import UserError
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.units import Duration


class _Curve:
    """The schedule of one phase, or of all that it spans (`lr_schedule.phases`). Positions are tokens since the first step; values are
    fractions of `optimizer.learning_rate`."""

    def __init__(self, phases: Sequence[Phase], steps_per_phase: Sequence[int], tokens_before: Callable[[int], int]) -> None:
        self.phases, self._ends = phases, list(accumulate(steps_per_phase))
        phase = self.phase = phases[0]
        steps = self.steps = self._ends[-1]
        self.tokens_before = tokens_before
        self.length = tokens_before(steps)
        # Also catches a function that gives the tokens of one step where the tokens before it are meant.
        assert tokens_before(0) == 0
        assert self.length > 0
        schedule = phase.lr_schedule
        self.warmup = self._tokens(schedule.warmup, "warmup", tokens_before)
        decay = 0
        if schedule.kind == "wsd":
            decay = self._tokens(schedule.decay, "decay", lambda last: self.length - tokens_before(steps - last))
        if self.warmup + decay > self.length:
            raise UserError(
                f"phase {phase.name}: lr_schedule.warmup ({schedule.warmup.text()}) and lr_schedule.decay ({schedule.decay.text()}) "
                f"are together "
                f"longer than its {self.length:,} tokens; shorten one"
            )
        self.stable = self.length - decay
        self.start = 0.0
        """The last value of the phase before."""

    def _tokens(self, duration: Duration, name: str, tokens_of_steps: Callable[[int], int]) -> int:
        """The length of `duration` in tokens; steps under a ramp are not equally long, so they are asked for."""
        if duration.unit != "steps":
            tokens = duration.tokens(step_tokens=self.phase.global_batch_size, phase_tokens=self.length)
        else:
            tokens = tokens_of_steps(int(duration.value)) if duration.value <= self.steps else self.length + 1
        if tokens > self.length:
            raise UserError(
                f"phase {self.phase.name}: lr_schedule.{name} of {duration.text()} is longer than the phase's {self.steps:,} steps "
                f"({self.length:,} tokens); shorten it or raise tokens"
            )
        return tokens

    def value(self, step: int) -> float:
        """At the end of the step-th step."""
        x = self.tokens_before(step + 1)
        top = self.phase.learning_rate_scale * _rescale(self.phases[bisect_right(self._ends, step)], x - self.tokens_before(step))
        if x < self.warmup:
            return self.start + (top - self.start) * x / self.warmup
        return top * self._shape(x)

    @property
    def warmup_end(self) -> int:
        """The first step after the warm-up."""
        return bisect_left(range(self.steps), self.warmup, key=self.tokens_before)

    def _shape(self, x: int) -> float:
        schedule, final = self.phase.lr_schedule, self.phase.lr_schedule.min_lr_ratio
        if schedule.kind == "constant":
            return 1.0
        if schedule.kind == "multistep":
            return schedule.gamma ** sum(x > share * self.length for share in schedule.milestones)
        if schedule.kind == "wsd":
            if x <= self.stable:
                return 1.0
            # 1 - sqrt ends lower than a linear decay of the same length (Hägele et al. 2024, arXiv:2405.18392, section 3).
            return 1 - (1 - final) * math.sqrt((x - self.stable) / (self.length - self.stable))
        done = (x - self.warmup) / (self.length - self.warmup) if self.length > self.warmup else 0.0
        if schedule.kind == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return 1 - (1 - final) * done


def _rescale(phase: Phase, batch: int) -> float:
    """The factor for a batch that is still smaller than the phase's global batch (Malladi et al. 2022, arXiv:2205.10287: the root)."""
    ramp = phase.batch_ramp
    if ramp is None or ramp.rescale == "none":
        return 1.0
    ratio = batch / phase.global_batch_size
    return math.sqrt(ratio) if ramp.rescale == "sqrt" else ratio


class Schedules:
    """The schedule of a whole run.

    `steps_per_phase[p]` is how many steps phase p has; `tokens_before(step)` how many tokens the run has trained on before `step`, counted
    from 0 through all phases up to and including the number of steps (`Timeline.tokens_before`). Neither time nor memory grows with steps.
    """

    def __init__(self, phases: Sequence[Phase], steps_per_phase: Sequence[int], tokens_before: Callable[[int], int]) -> None:
        self._ends: list[int] = []  # of the curves
        self._curves: list[_Curve] = []
        index = first = 0
        while index < len(phases):
            stop = index + phases[index].lr_schedule.phases
            curve = _Curve(phases[index:stop], steps_per_phase[index:stop], _since(first, tokens_before))
            if self._curves:
                curve.start = self._curves[-1].value(self._curves[-1].steps - 1)
            self._curves.append(curve)
            index, first = stop, first + curve.steps
            self._ends.append(first)

    def lr_factor(self, step: int) -> float:
        """The factor of a step on the peak learning rates (`optimizer.learning_rate`); after the last step, that of the last step."""
        step = min(step, self._ends[-1] - 1)
        index = bisect_right(self._ends, step)
        curve = self._curves[index]
        return curve.value(step - self._ends[index] + curve.steps)

    def warmup_end(self, step: int) -> int:
        """The first step after the warm-up of the phase that contains `step`; it may be later than `step`."""
        index = bisect_right(self._ends, min(step, self._ends[-1] - 1))
        return self._ends[index] - self._curves[index].steps + self._curves[index].warmup_end


def _since(first: int, tokens_before: Callable[[int], int]) -> Callable[[int], int]:
    return lambda step: tokens_before(first + step) - tokens_before(first)
