"""The steps of a run: how many there are, and which sequences each has. Everything is computed in closed form, without data."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from lmworks.errors import UserError
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.units import Duration


@dataclass(frozen=True)
class PhaseSteps:
    """The steps of one phase. A ramp raises the batch from `first` to `full` sequences, linearly over `ramp_steps`."""

    name: str
    sequence_length: int
    steps: int
    first: int
    full: int
    ramp_steps: int

    @classmethod
    def of(cls, phase: Phase) -> PhaseSteps:
        """The largest number of steps whose tokens fit the budget of the phase."""
        length, full = int(phase.sequence_length), phase.global_batch_size // phase.sequence_length
        first, ramp_steps = full, 0
        if phase.batch_ramp:
            first = phase.batch_ramp.start // length
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
                "lower global_batch_size or raise tokens"
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


class Timeline:
    """All steps of a run, numbered from 0 through all phases."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        if not phases:
            raise UserError("train.phases is empty; add at least one phase with tokens, mixture, sequence_length and global_batch_size")
        names = [phase.name for phase in phases]
        if len(set(names)) < len(names):
            raise UserError(f"train.phases: two phases have the same name ({', '.join(names)}); rename one, the order is drawn from it")
        self.phases = tuple(PhaseSteps.of(phase) for phase in phases)
        self._ends: list[int] = []
        for phase in self.phases:
            self._ends.append((self._ends[-1] if self._ends else 0) + phase.steps)

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
