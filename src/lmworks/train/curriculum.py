"""What is trained, step by step: the trainer's only view of data, phases and learning rates.

Where to look first: `Curriculum.lr_factor(step)` is the schedule's factor on the peak learning rates of a step, and
`PhaseSettings.bias_update_rate` is the rate at which the expert biases of a phase move (`phase_settings` resolves it from
`model.moe.balance.bias_update_rate` and `train.phases[].bias_update_rate`). Pretraining and tuning differ in their curriculum and in
nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lmworks.recipe.derivation.phases import in_force
from lmworks.recipe.derivation.schedules import Schedules
from lmworks.recipe.derivation.timeline import Timeline
from lmworks.recipe.schema.dpo import Dpo
from lmworks.recipe.schema.grpo import Grpo
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Ewc, Phase
from lmworks.recipe.schema.tune import Tune
from lmworks.shards.read.batch import Batch
from lmworks.shards.read.batches import Batches
from lmworks.shards.read.tuning_batches import TuningBatches
from lmworks.train.data.chat import chat_shards
from lmworks.train.data.mixture import read_changes
from lmworks.train.data.replay import Replay, append_rows, replayed_rows, text_batches


@dataclass(frozen=True)
class PhaseSettings:
    """Settings that are constant within a phase.

    `model` is the model as the phase trains it, None where it keeps what it has. `save_every` is in steps, counted from `first_step`; None
    where the interval of the run holds.
    """

    index: int
    name: str
    first_step: int
    sequence_length: int
    model: Model | None
    bias_update_rate: float
    ewc: Ewc | None = None
    save_every: int | None = None


class Curriculum(Protocol):
    """Batches, learning rate and phase of each step. Every method is a pure function of the step: a resumed run needs only its number."""

    steps: int
    tokens: int

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
        self.batches = batches
        self.timeline = batches.order.timeline
        self.steps, self.tokens = self.timeline.steps, sum(phase.tokens for phase in self.timeline.phases)
        self.phases = phase_settings(recipe, self.timeline)
        self._schedules = Schedules(recipe.train.phases, [phase.steps for phase in self.timeline.phases], self.timeline.tokens_before)

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
        first_step = timeline.first_step(index)
        steps, tokens = timeline.first_step(index + 1) - first_step, timeline.phases[index].tokens
        save_every = None if phase.save_every is None else phase.save_every.interval(steps, tokens)
        settings.append(PhaseSettings(
            index, phase.name, first_step, int(phase.sequence_length), model, model.moe.balance.bias_update_rate if model.moe else 0.0,
            phase.ewc, save_every,
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
    """The schedule of a stage after pretraining, expressed as a phase, so that `Schedules` serves all stages. Raises `UserError` for a
    warm-up or decay that is longer than the stage."""
    base = getattr(recipe.optimizer, recipe.replaced_rate(options))
    assert options.learning_rate and base, "derived when the recipe is loaded"
    phase = Phase(
        name=name, tokens=f"{tokens_before(steps)} tokens", mixture={name: 1.0}, sequence_length="1 tokens", global_batch_size="1 tokens",
        learning_rate_scale=options.learning_rate / base, lr_schedule=options.lr_schedule,
    )  # fmt: skip
    return Schedules([phase], [steps], tokens_before)


class OnePhase(Curriculum):
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
    length, whole, budget = int(options.sequence_length), int(options.global_batch_size), int(options.planned_tokens)
    replayed = replayed_rows(options.replay, whole // length) if options.replay else 0
    batch = whole - replayed * length
    read = None if options.epochs else budget // whole * batch if replayed else budget
    return TuningBatches(prefixes, length, batch, read, recipe.training_seed, weights, options.epochs), replayed


class TuningCurriculum(OnePhase):
    """The conversations of `tune`."""

    def __init__(self, recipe: Recipe, data: Path) -> None:
        assert recipe.tune is not None
        options = recipe.tune
        self._length, self._batch = int(options.sequence_length), int(options.global_batch_size)
        self._recipe, self._shards = recipe, data.parents[1] / "shards"
        self.batches, replayed = tuning_batches(recipe, data)
        super().__init__("tune", recipe, options, self.batches.steps, options.ewc)
        self.replay = Replay(recipe, options.replay, self._shards, self.steps, replayed, self._length) if options.replay else None

    def sequences(self, step: int) -> int:
        return self._batch // self._length

    def batch(self, step: int, start: int, stop: int) -> Batch:
        found = self.batches.batch(step)
        return (append_rows(found, self.replay.batch(step)) if self.replay else found).sequences(start, stop)

    def tokens_before(self, step: int) -> int:
        return step * self._batch

    def sequences_before(self, phase: PhaseSettings, count: int) -> Iterator[Batch]:
        """Sequences of `tune.ewc.mixture`, or of the last phase of pretraining."""
        if phase.ewc is not None and phase.ewc.mixture:
            return _earlier_text(self._recipe, phase, phase.ewc, self._shards, count)
        batches = Batches(self._recipe, self._shards, read_changes(self._shards.parent).applied)
        return sample_sequences(batches, len(self._recipe.train.phases) - 1, count)
