"""The steps of a run: how many there are, which sequences each has, and its learning rate. All in closed form, without data.

`Timeline` has the steps of pretraining. Stages that read their rows a number of times (`tune`, `dpo`), and their plans, cut passes over
rows into steps by one rule: all rows are read, and the last step takes those that are left, which may be fewer than the others have; its
loss is the mean over what it reads. So each row is trained `epochs` times: with a fraction of a pass, `floor(epochs)` times, and the first
rows of the last pass's order once more. A step never ends with an epoch: it goes on with the rows of the next one.

`Schedules` is the learning-rate schedule as a pure function of the step: `Schedules.lr_factor(step)` times a group's peak is its learning
rate. Phases have a warm-up, a shape and a batch ramp, and follow each other without a cold restart. A schedule may span several phases.
A phase is a curve over the tokens x in [0, n] that have been trained on in it; step i of it uses the curve at the end of the step.
So the first step of a run already moves, a warm-up ends on the peak, the last step of a phase ends on the last value of its shape, and
the next phase's curve begins there at x = 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil
from typing import Protocol

from lmworks.errors import UserError
from lmworks.recipe.schema.train import BatchRamp, LrSchedule, Phase
from lmworks.recipe.schema.units import Duration


@dataclass(frozen=True)
class PhaseSteps:
    """The steps of one phase. A linear ramp raises the batch from `first` to `full` sequences over `ramp_steps`."""

    name: str
    sequence_length: int
    steps: int
    first: int
    full: int
    ramp_steps: int

    @classmethod
    def of(cls, phase: Phase, growths: Sequence[tuple[int, int]] = ()) -> PhaseSteps:
        """The largest number of steps whose tokens fit the budget of the phase. `growths` are pairs (step of the phase, tokens per step
        from there on) of a batch that grows with the loss."""
        if phase.loss_ramp is not None:
            return _growing(phase, phase.loss_ramp, growths)
        length, full = int(phase.sequence_length), phase.global_batch_tokens // phase.sequence_length
        first, ramp_steps = full, 0
        if phase.batch_ramp:
            assert phase.batch_ramp.over is not None, "a linear ramp has it"
            first = phase.batch_ramp.start_tokens // length
            average = max(1, (first + full) * length // 2)
            ramp_steps = max(1, phase.batch_ramp.over.steps(step_tokens=average, phase_tokens=int(phase.tokens)))
        endless = cls(phase.name, length, 0, first, full, ramp_steps)
        budget = phase.tokens // length
        steps = 0
        if budget >= endless.before(ramp_steps):
            steps = ramp_steps + (budget - endless.before(ramp_steps)) // full
        else:
            steps = bisect_right(range(ramp_steps + 1), budget, key=endless.before) - 1
        if steps < 1:
            raise UserError(
                f"phase {phase.name}: the budget of {int(phase.tokens):,} tokens is smaller than one step of {first * length:,}; "
                "lower global_batch_tokens or raise tokens"
            )
        return cls(phase.name, length, steps, first, full, ramp_steps)

    def batch(self, step: int) -> int:
        """The number of sequences in the step-th step of the phase."""
        return self.first + (self.full - self.first) * step // self.ramp_steps if step < self.ramp_steps else self.full

    def before(self, step: int) -> int:
        """The number of sequences in all steps of the phase before `step`."""
        inside = min(step, self.ramp_steps)
        rising = _floor_sum(inside, self.ramp_steps, self.full - self.first) if inside else 0
        return inside * self.first + rising + (step - inside) * self.full

    def step_at(self, duration: Duration) -> int:
        """The first step, counted in the phase, that has all of `duration` before it; a share is one of the phase's tokens."""
        if duration.unit == "steps":
            return int(duration.value)
        tokens = duration.tokens(step_tokens=self.full * self.sequence_length, phase_tokens=self.tokens)
        return bisect_left(range(self.steps + 1), -(-tokens // self.sequence_length), key=self.before)

    @property
    def sequences(self) -> int:
        return self.before(self.steps)

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence_length


@dataclass(frozen=True)
class GrowingSteps(PhaseSteps):
    """The steps of a phase whose batch grows with the loss: `sizes` are pairs (first step, sequences per step), from step 0 on.

    The phase has `total` sequences wherever the batch grows, so that no range of the token files moves: the last step takes those that are
    left, a multiple of the smallest batch. What is before a growth does not depend on it.
    """

    sizes: tuple[tuple[int, int], ...]
    total: int

    def batch(self, step: int) -> int:
        return self.before(step + 1) - self.before(step)

    def before(self, step: int) -> int:
        ends = [begin for begin, _ in self.sizes[1:]] + [step]
        read = sum(max(0, min(step, end) - begin) * size for (begin, size), end in zip(self.sizes, ends, strict=True))
        return min(read, self.total)


def _growing(phase: Phase, ramp: BatchRamp, growths: Sequence[tuple[int, int]]) -> GrowingSteps:
    """The steps with these growths; those behind the last step, or to no larger size, do not count: they were those of another recipe."""
    length = int(phase.sequence_length)
    first = int(ramp.start_tokens) // length
    total = int(phase.tokens) // length // first * first
    sizes, steps = [(0, first)], total // first
    for step, tokens in sorted(growths):
        begin, size = sizes[-1]
        if tokens % (first * length) or tokens // length <= size or not begin < step < steps:
            continue
        left = total - GrowingSteps(phase.name, length, 0, first, size, 0, tuple(sizes), total).before(step)
        sizes.append((step, tokens // length))
        steps = step - (-left // (tokens // length))
    return GrowingSteps(phase.name, length, steps, first, phase.global_batch_tokens // length, 0, tuple(sizes), total)


@dataclass(frozen=True)
class Growth:
    """A growth of the batch: from `step` of the run on, a step of `phase` has this many tokens."""

    phase: str
    step: int
    tokens: int


def fewest_steps(phase: Phase, so_far: PhaseSteps | None = None) -> int:
    """The steps of a phase whose batch grows to its full size as early as it can after the growths so far; by themselves these steps are
    the most."""
    steps = PhaseSteps.of(phase) if so_far is None else so_far
    if phase.loss_ramp is None or not isinstance(steps, GrowingSteps):
        return steps.steps
    grown = [(begin, size * steps.sequence_length) for begin, size in steps.sizes[1:]]
    earliest = grown[-1][0] + 1 if grown else phase.loss_ramp.window_steps
    return PhaseSteps.of(phase, [*grown, (earliest, int(phase.global_batch_tokens))]).steps


def norm_steps(phase: Phase, steps: PhaseSteps) -> int | None:
    """The steps over which a phase adds QK norm, None if it does not. They are fewer than it has, so that it ends with the whole norm.
    Raises `UserError`."""
    if phase.qk_norm_steps is None:
        return None
    found = max(1, steps.step_at(phase.qk_norm_steps))
    if found >= steps.steps:
        raise UserError(
            f"phase {phase.name}: qk_norm_steps of {phase.qk_norm_steps.text()} are {found:,} steps, and the phase has {steps.steps:,}; "
            "shorten it, so that the phase ends with the whole norm"
        )
    return found


class Timeline:
    """All steps of a run, numbered from 0 through all phases. `growths` are those of a run that has begun, by its ledger
    (`lmworks.watch.batch_growth`); without them the steps are as many as they can be."""

    def __init__(self, phases: Sequence[Phase], growths: Sequence[Growth] = ()) -> None:
        if not phases:
            raise UserError("train.phases is empty; add at least one phase with tokens, mixture, sequence_length and global_batch_tokens")
        names = [phase.name for phase in phases]
        if len(set(names)) < len(names):
            raise UserError(f"train.phases: two phases have the same name ({', '.join(names)}); rename one, the order is drawn from it")
        self._ends: list[int] = []
        found = []
        for phase in phases:
            begin = self._ends[-1] if self._ends else 0
            steps = PhaseSteps.of(phase, [(one.step - begin, one.tokens) for one in growths if one.phase == phase.name])
            found.append(steps)
            self._ends.append(begin + steps.steps)
        self.phases = tuple(found)

    @property
    def steps(self) -> int:
        return self._ends[-1]

    def phase_of(self, step: int) -> int:
        """Index of the phase that holds `step`; UserError if no phase does."""
        if not 0 <= step < self.steps:
            raise UserError(f"step {step} does not exist: the run has {self.steps:,} steps, numbered from 0 to {self.steps - 1:,}")
        return bisect_right(self._ends, step)

    def first_step(self, phase: int) -> int:
        """The first step of a phase; one past the last phase gives the number of steps."""
        return self._ends[phase - 1] if phase else 0

    def sequences(self, step: int) -> tuple[int, int]:
        """The sequences of a step: the number of the first, counted over all ranks from the start of its phase, and how many."""
        index = self.phase_of(step)
        phase, inside = self.phases[index], step - self.first_step(index)
        return phase.before(inside), phase.batch(inside)

    def first_unread(self, phase: int, sequences: int) -> int:
        """The first step that begins when this many sequences of a phase are read, or more."""
        steps = self.phases[phase]
        return self.first_step(phase) + min(bisect_left(range(steps.steps + 1), sequences, key=steps.before), steps.steps)

    def tokens_before(self, step: int) -> int:
        """Tokens trained on in all steps before `step`, which may be the number of steps."""
        index = self.phase_of(step) if step < self.steps else len(self.phases) - 1
        done = sum(phase.tokens for phase in self.phases[:index])
        return done + self.phases[index].before(step - self.first_step(index)) * self.phases[index].sequence_length


def _floor_sum(n: int, m: int, a: int) -> int:
    """Sum over i < n of floor(a * i / m), by Euclid's algorithm: as many rounds as the numbers have digits, not n."""
    total, b = 0, 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        if top < m:
            return total
        n, b = divmod(top, m)
        m, a = a, m


def rows_read(rows: int, epochs: float) -> int:
    """Rows that are read in `epochs` passes over `rows` of them, rounded up to a whole row: 95 of 63 rows in 1.5 passes."""
    return ceil(Fraction(str(epochs)) * rows)  # 0.1 is a tenth, not the nearest binary fraction


def steps_of(rows: int, rows_per_step: int, epochs: float) -> int:
    """Steps that read these rows, the last of which may have fewer rows."""
    return -(-rows_read(rows, epochs) // rows_per_step)


def places_of(step: int, rows: int, rows_per_step: int, epochs: float) -> range:
    """The places of a step in the passes: place p is row p % rows of the order of pass p // rows."""
    return range(step * rows_per_step, min((step + 1) * rows_per_step, rows_read(rows, epochs)))


class Scheduled(Protocol):
    """What a schedule needs of a phase."""

    @property
    def name(self) -> str: ...
    @property
    def lr_schedule(self) -> LrSchedule: ...
    @property
    def learning_rate_scale(self) -> float: ...
    @property
    def global_batch_tokens(self) -> int: ...
    @property
    def batch_ramp(self) -> BatchRamp | None: ...


@dataclass(frozen=True)
class OnlyPhase:
    """The schedule of a stage that has no phases."""

    name: str
    lr_schedule: LrSchedule
    learning_rate_scale: float
    global_batch_tokens: int = 1
    batch_ramp: None = None


class _Curve:
    """The schedule of one phase, or of all that it spans (`lr_schedule.phases`). Positions are tokens since the first step; values are
    fractions of `optimizer.learning_rate`."""

    def __init__(self, phases: Sequence[Scheduled], steps_per_phase: Sequence[int], tokens_before: Callable[[int], int]) -> None:
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
            tokens = duration.tokens(step_tokens=self.phase.global_batch_tokens, phase_tokens=self.length)
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
            return schedule.gamma ** sum(x > share * self.length for share in schedule.milestone_fractions)
        if schedule.kind == "wsd":
            if x <= self.stable:
                return 1.0
            # 1 - sqrt ends lower than a linear decay of the same length (Hägele et al. 2024, arXiv:2405.18392, section 3).
            return 1 - (1 - final) * math.sqrt((x - self.stable) / (self.length - self.stable))
        done = (x - self.warmup) / (self.length - self.warmup) if self.length > self.warmup else 0.0
        if schedule.kind == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return 1 - (1 - final) * done


def _rescale(phase: Scheduled, batch: int) -> float:
    """The factor for a batch that is still smaller than the phase's global batch (Malladi et al. 2022, arXiv:2205.10287: the root)."""
    ramp = phase.batch_ramp
    if ramp is None or ramp.rescale == "none":
        return 1.0
    ratio = batch / phase.global_batch_tokens
    return math.sqrt(ratio) if ramp.rescale == "sqrt" else ratio


class Schedules:
    """The schedule of a whole run.

    `steps_per_phase[p]` is how many steps phase p has; `tokens_before(step)` how many tokens the run has trained on before `step`, counted
    from 0 through all phases up to and including the number of steps (`Timeline.tokens_before`). Neither time nor memory grows with steps.
    """

    def __init__(self, phases: Sequence[Scheduled], steps_per_phase: Sequence[int], tokens_before: Callable[[int], int]) -> None:
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
