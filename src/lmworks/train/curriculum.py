"""What is trained, step by step: the trainer's only view of data, phases and learning rates.

Where to look first: `Curriculum.lr_factor(step)` is the schedule's factor on the peak learning rates of a step, and
`PhaseSettings.bias_update_rate` is the rate at which the expert biases of a phase move (`phase_settings` resolves it from
`model.moe.balance.bias_update_rate` and `train.phases[].bias_update_rate`). Pretraining and tuning differ in their curriculum and in
nothing else.

`PhaseBoundary` applies what changes between two phases: the model in force (`lmworks.recipe.phases`) and the penalty of `ewc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.model.balance import set_temperature
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.phases import in_force
from lmworks.recipe.schema.align import Dpo, Grpo
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Ewc
from lmworks.recipe.schema.tune import Tune
from lmworks.recipe.timeline import OnlyPhase, PhaseSteps, Schedules, Timeline, norm_steps
from lmworks.shards.batch import Batch
from lmworks.shards.batches import Batches
from lmworks.shards.validation import TuningBatches
from lmworks.train.data.chat import chat_shards
from lmworks.train.data.mixture import Replay, append_rows, read_changes, replayed_rows, text_batches
from lmworks.train.ewc import EwcPenalty
from lmworks.train.fault_handler import FaultHandler
from lmworks.watch.batch_growth import read_growths
from lmworks.watch.heartbeat import Heartbeat
from lmworks.watch.ledger import Ledger


@dataclass(frozen=True)
class PhaseSettings:
    """Settings that are constant within a phase.

    `model` is the model as the phase trains it, None where it keeps what it has. `norm_steps`: steps over which it adds QK norm.
    `save_every` is in steps, counted from `first_step`; None where the interval of the run holds.
    """

    index: int
    name: str
    first_step: int
    sequence_length: int
    model: Model | None
    bias_update_rate: float
    ewc: Ewc | None = None
    save_every: int | None = None
    norm_steps: int | None = None

    def norm_blend(self, step: int) -> float | None:
        """The share of QK norm in a step of the run: from 0 in the first step of the phase to 1 after `norm_steps`. None where the phase
        does not change it."""
        return None if self.norm_steps is None else min(1.0, (step - self.first_step) / self.norm_steps)

    def begin_step(self, model: ParallelModel, step: int) -> None:
        """Set what changes with each step: the share of QK norm, and the temperature of the routers, which is 1 after pretraining."""
        if self.model is not None:
            set_temperature(model.moe_layers(), self.model.moe, step)
        if (blend := self.norm_blend(step)) is not None:
            model.set_norm_blend(blend)


class Curriculum(Protocol):
    """Batches, learning rate and phase of each step. Every method is a pure function of the step: a resumed run needs only its number."""

    steps: int
    tokens: int

    @property
    def planned_steps(self) -> int:
        """`steps` by the recipe alone, the most where the batch grows with the loss. Intervals that are a share of the run count by them,
        so that they do not move when it grows."""
        return self.steps

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources of the batches (`Batch.sources`), for metrics; empty where they are not known."""
        return ()

    def sequences(self, step: int) -> int:
        """Sequences of the whole batch of a step, over all ranks and micro-batches."""

    def batch(self, step: int, start: int, stop: int) -> Batch:
        """Sequences [start, stop) of a step."""

    def lr_factor(self, step: int) -> float:
        """The factor of the learning-rate schedule: a group's learning rate is this times its peak."""

    def phase(self, step: int) -> PhaseSettings:
        """The settings of the phase that contains a step."""

    def steady_since(self, step: int) -> int:
        """The first step of the range around `step` in which losses are comparable: after the warm-up of its phase and after the last
        change of the mixture. It may be later than `step`."""

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before this one."""

    def sequences_before(self, phase: PhaseSettings, count: int) -> Iterator[Batch]:
        """`count` sequences, each a batch: of `phase.ewc.mixture`, or spread evenly over the data that was trained on before the phase."""


class PretrainingCurriculum:
    """The phases of `train.phases` as a `Curriculum`."""

    def __init__(self, recipe: Recipe, batches: Batches) -> None:
        self.recipe, self.batches = recipe, batches
        self.follow_order()
        self.planned_steps = Timeline(recipe.train.phases).steps

    def follow_order(self) -> None:
        """Take the steps of the order, which has changed if the batch has grown."""
        self.timeline = self.batches.order.timeline
        self.steps, self.tokens = self.timeline.steps, sum(phase.tokens for phase in self.timeline.phases)
        self.phases = phase_settings(self.recipe, self.timeline)
        phases = self.timeline.phases
        self._schedules = Schedules(self.recipe.train.phases, [phase.steps for phase in phases], self.timeline.tokens_before)

    @property
    def sources(self) -> tuple[str, ...]:
        return self.batches.sources

    def sequences(self, step: int) -> int:
        return self.batches.order.sequences(step)[1]

    def batch(self, step: int, start: int, stop: int) -> Batch:
        return self.batches.batch(step, start, stop)

    def lr_factor(self, step: int) -> float:
        return self._schedules.lr_factor(step)

    def phase(self, step: int) -> PhaseSettings:
        return self.phases[self.timeline.phase_of(step)]

    def steady_since(self, step: int) -> int:
        return max(self._schedules.warmup_end(step), self.batches.order.mixture_since(step))

    def tokens_before(self, step: int) -> int:
        return self.timeline.tokens_before(step)

    def sequences_before(self, phase: PhaseSettings, count: int) -> Iterator[Batch]:
        if phase.ewc is not None and phase.ewc.mixture:
            return _earlier_text(self.batches.recipe, phase, phase.ewc, self.batches.shards_dir, count)
        return sample_sequences(self.batches, phase.index - 1, count)


def phase_settings(recipe: Recipe, timeline: Timeline) -> list[PhaseSettings]:
    """The settings of each phase of pretraining. What a phase changes in the model holds in later phases too (`in_force`)."""
    settings = []
    for index, (phase, model) in enumerate(zip(recipe.train.phases, in_force(recipe), strict=True)):
        first_step, planned = timeline.first_step(index), timeline.phases[index]
        if phase.loss_ramp is not None:
            planned = PhaseSteps.of(phase)  # an interval does not move when the batch grows
        save_every = None if phase.save_every is None else phase.save_every.interval(planned.steps, planned.tokens)
        settings.append(PhaseSettings(
            index, phase.name, first_step, int(phase.sequence_length), model, model.moe.balance.bias_update_rate if model.moe else 0.0,
            phase.ewc, save_every, norm_steps(phase, timeline.phases[index]),
        ))  # fmt: skip
    return settings


def sample_sequences(batches: Batches, phase: int, count: int) -> Iterator[Batch]:
    """`count` sequences of a phase, each a batch, spread evenly over its steps."""
    timeline = batches.order.timeline
    first = timeline.first_step(phase)
    steps = timeline.first_step(phase + 1) - first
    for number in range(count):
        step = first + number * steps // count
        index = number % batches.order.sequences(step)[1]
        yield batches.batch(step, index, index + 1)


def _earlier_text(recipe: Recipe, phase: PhaseSettings, options: Ewc, shards_dir: Path, count: int) -> Iterator[Batch]:
    return sample_sequences(text_batches(recipe, "ewc", options.mixture, shards_dir, count, 1, phase.sequence_length), 0, count)


def stage_schedules(
    name: str, recipe: Recipe, options: Tune | Dpo | Grpo, steps: int, tokens_before: Callable[[int], int]
) -> Schedules:  # fmt: skip
    """The schedule of a stage after pretraining. Raises `UserError` for a warm-up or decay that is longer than the stage."""
    base = getattr(recipe.optimizer, recipe.replaced_rate(options))
    assert options.learning_rate and base, "derived when the recipe is loaded"
    phase = OnlyPhase(name, options.lr_schedule, options.learning_rate / base)
    return Schedules([phase], [steps], tokens_before)


class StageCurriculum(Curriculum):
    """A stage after pretraining as a `Curriculum` of one phase, with the positions and windows of the model that it starts from.

    Its `bias_update_rate` is 0: the expert biases stay as they are.
    """

    def __init__(
        self, name: str, recipe: Recipe, options: Tune | Dpo | Grpo, steps: int, ewc: Ewc | None = None
    ) -> None:
        """`tokens_before` must work before this is called."""
        self.steps, self.tokens = steps, self.tokens_before(steps)
        length = int(options.sequence_length)
        self._phase = PhaseSettings(0, name, 0, length, None, 0.0, ewc)
        self._schedules = stage_schedules(name, recipe, options, steps, self.tokens_before)

    def lr_factor(self, step: int) -> float:
        return self._schedules.lr_factor(step)

    def phase(self, step: int) -> PhaseSettings:
        return self._phase

    def steady_since(self, step: int) -> int:
        return self._schedules.warmup_end(step)


def tuning_batches(recipe: Recipe, data: Path) -> tuple[TuningBatches, int]:
    """The batches of conversations that `tune` reads, and how many sequences of general text each step has besides."""
    options = recipe.tune
    assert options is not None
    prefixes, weights = chat_shards(data)
    length, whole, budget = int(options.sequence_length), int(options.global_batch_tokens), int(options.planned_tokens)
    replayed = replayed_rows(options.replay, whole // length) if options.replay else 0
    batch = whole - replayed * length
    read = None if options.epochs else budget // whole * batch if replayed else budget
    return TuningBatches(prefixes, length, batch, read, recipe.training_seed, weights, options.epochs), replayed


class TuningCurriculum(StageCurriculum):
    """The conversations of `tune`."""

    def __init__(self, recipe: Recipe, data: Path) -> None:
        assert recipe.tune is not None
        options = recipe.tune
        self._length, self._batch = int(options.sequence_length), int(options.global_batch_tokens)
        self._recipe, self._shards = recipe, data.parents[1] / "shards"
        self.batches, replayed = tuning_batches(recipe, data)
        super().__init__("tune", recipe, options, self.batches.steps, options.ewc)
        self.replay = Replay(recipe, options.replay, self._shards, self.steps, replayed, self._length) if options.replay else None

    @property
    def sources(self) -> tuple[str, ...]:
        """The datasets of `tune.data`; and, with `tune.replay`, the sources of the corpus as `replay.NAME`."""
        return (*self.batches.sources, *(f"replay.{name}" for name in (self.replay.sources if self.replay else ())))

    def sequences(self, step: int) -> int:
        return self._batch // self._length

    def batch(self, step: int, start: int, stop: int) -> Batch:
        found = self.batches.batch(step)
        return (append_rows(found, self.replay.batch(step)) if self.replay else found).rows(start, stop)

    def tokens_before(self, step: int) -> int:
        return step * self._batch

    def sequences_before(self, phase: PhaseSettings, count: int) -> Iterator[Batch]:
        """Sequences of `tune.ewc.mixture`, or of the last phase of pretraining."""
        if phase.ewc is not None and phase.ewc.mixture:
            return _earlier_text(self._recipe, phase, phase.ewc, self._shards, count)
        run_dir = self._shards.parent
        batches = Batches(self._recipe, self._shards, read_changes(run_dir).order, growths=read_growths(run_dir))
        return sample_sequences(batches, len(self._recipe.train.phases) - 1, count)


class PhaseBoundary:
    """The phase that is being trained (`phase`, None before the first step) and its penalty (`penalty`, None without `ewc`)."""

    def __init__(
        self, stage: str, model: ParallelModel, curriculum: Curriculum, checkpoints: Checkpoints, ledger: Ledger, heartbeat: Heartbeat,
        faults: FaultHandler,
    ) -> None:  # fmt: skip
        self.phase: PhaseSettings | None = None
        self.penalty: EwcPenalty | None = None
        self._stage, self._model, self._curriculum = stage, model, curriculum
        self._checkpoints, self._ledger, self._heartbeat, self._faults = checkpoints, ledger, heartbeat, faults
        self._kept = True  # whether the penalty is on the disk

    def enter(self, phase: PhaseSettings, step: int, saved: int, loss_scale: float) -> None:
        """Apply the settings of a phase before its `step`; weights and optimizer state are left unchanged.

        `saved` is the step of the checkpoint that the run was resumed from, or of the newest since.
        """
        self._kept = True
        self.penalty = None if phase.ewc is None else self._ewc_penalty(phase, phase.ewc, step, saved, loss_scale)
        if phase.model is not None:
            self._model.configure(phase.model)
        if step == phase.first_step or self.phase is not None:
            self._ledger.write("phase", stage=self._stage, phase=phase.name, step=step, sequence_length=phase.sequence_length)
        self.phase = phase

    def _ewc_penalty(self, phase: PhaseSettings, options: Ewc, step: int, saved: int, loss_scale: float) -> EwcPenalty:
        """The penalty of a phase: estimated at the weights that the phase begins with, or loaded where the run resumes inside it."""
        penalty = EwcPenalty(self._model, options)
        if saved > phase.first_step:
            penalty.load(self._checkpoints, phase.name, phase.first_step)
            return penalty
        if phase.first_step:  # as in the step before, whether that was in this process or not
            before = self._curriculum.phase(phase.first_step - 1)
            if before.model is not None:
                self._model.configure(before.model)
            before.begin_step(self._model, phase.first_step - 1)
        elif (blend := phase.norm_blend(0)) is not None:  # weights of start_from already have the rest
            self._model.set_norm_blend(blend)
        self._heartbeat.beat(step, "ewc")
        penalty.estimate(self._curriculum.sequences_before(phase, options.sequences), loss_scale)
        self._kept = False
        try:
            penalty.save(self._checkpoints, phase.name, phase.first_step)
        except UserError as error:  # on all ranks alike
            self._faults.save_failed(step, error)
        else:
            self._kept = True
        self._ledger.write("ewc", stage=self._stage, phase=phase.name, step=step, sequences=options.sequences)
        return penalty

    def keep_penalty(self) -> None:
        """Save the penalty of the phase, if that failed when it began; all ranks call it together. Raises `UserError` if it fails again: a
        checkpoint inside the phase cannot be resumed from without it."""
        if self._kept:
            return
        assert self.phase is not None and self.penalty is not None
        self.penalty.save(self._checkpoints, self.phase.name, self.phase.first_step)
        self._kept = True
