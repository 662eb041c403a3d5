"""The costs of a plan: steps, time, money and disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmworks.plan.counts import count_adapters
from lmworks.plan.stages import StagePhase, lora_of
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.layout import Cluster
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.schema.units import Duration
from lmworks.recipe.timeline import PhaseSteps
from lmworks.shards.indexed import token_dtype


def batch_tokens(data_ranks: int, micro_batch_size: int, sequence_length: int, accumulation: int) -> int:
    """Tokens of one optimizer step."""
    return data_ranks * micro_batch_size * sequence_length * accumulation


def steps(tokens: int, tokens_per_step: int) -> int:
    """Whole optimizer steps of a token budget."""
    return tokens // tokens_per_step


def device_hours(devices: int, seconds: float) -> float:
    """Device-hours of a run of `seconds` on `devices` devices."""
    return devices * seconds / 3600


def phase_steps(phase: Phase) -> tuple[int, int]:
    """Steps and tokens of a phase, exactly as in training: with the batch-size ramp, or as counted in the data of a later stage."""
    if isinstance(phase, StagePhase) and phase.known_steps is not None:
        return phase.known_steps, int(phase.tokens)
    found = PhaseSteps.of(phase)
    return found.steps, found.tokens


@dataclass(frozen=True)
class Course:
    """The steps of a phase within its stage, of which it has those from `begin` to `end`. A percentage of a key outside the phases, such as
    `train.validate_every`, is one of the whole stage."""

    begin: int
    end: int
    steps: int
    tokens: int

    def multiples(self, every: Duration) -> int:
        """Steps of the phase that are multiples of this interval."""
        interval = every.interval(self.steps, self.tokens)
        return self.end // interval - self.begin // interval

    def times(self, every: Duration) -> int:
        """How often an event that has this interval happens in the phase, and at the last step of the stage too."""
        return self.multiples(every) + (self.end == self.steps and self.steps % every.interval(self.steps, self.tokens) > 0)


def courses(phases: Sequence[Phase]) -> list[Course]:
    """The course of each phase: those of pretraining follow each other, each of the later stages is its own."""
    sums = [phase_steps(phase) for phase in phases]
    steps, tokens, begin, found = sum(own for own, _ in sums), sum(read for _, read in sums), 0, []
    for phase, (own, read) in zip(phases, sums, strict=True):
        if isinstance(phase, StagePhase):
            found.append(Course(0, own, own, read))
        else:
            found.append(Course(begin, begin + own, steps, tokens))
            begin += own
    return found


@dataclass(frozen=True)
class Disk:
    """Bytes on disk. `data` is an upper bound, because tokens that are repeated over epochs are stored once."""

    checkpoint: float
    checkpoints_kept: int
    data: float


def _saved_parameters(recipe: Recipe) -> tuple[int, int]:
    """Parameters that a checkpoint has, and how many of them Muon may train: all, or adapters where no phase trains more."""
    loras = [lora_of(phase) for phase in recipe.train.phases]
    adapters = [count_adapters(recipe.model, lora) for lora in loras if lora is not None]
    if adapters and len(adapters) == len(loras):
        return max(adapters), 0  # AdamW trains them
    sizes = [(parameter.size, parameter.is_matrix) for parameter in parameters(recipe.model)]
    return sum(size for size, _ in sizes), sum(size for size, matrix in sizes if matrix)


def disk(recipe: Recipe) -> Disk:
    """Bytes of one checkpoint (fp32 weights and optimizer state), the maximum number kept, and bytes of the token files."""
    trained, matrices = _saved_parameters(recipe)
    states = matrices * 4 + (trained - matrices) * 8 if recipe.optimizer.kind == "muon" else trained * 8
    ema = trained * 4 if recipe.optimizer.ema_decay else 0
    kept = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    tokens = sum(phase.tokens for phase in recipe.train.phases)
    if recipe.checkpoints.keep_every:
        kept += sum(course.multiples(recipe.checkpoints.keep_every) for course in courses(recipe.train.phases))
    return Disk(trained * 4 + states + ema, kept, tokens * token_dtype(recipe.model.vocab_size or 0).itemsize)


def seconds(flops: float, devices: int, cluster: Cluster, mfu: float) -> float:
    """Seconds for `flops` operations at MFU `mfu`."""
    return flops / (devices * cluster.tflops * 1e12 * mfu)
