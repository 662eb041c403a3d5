"""Steps, bubble, time, money and disk."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks.plan.counts import Counts
from lmworks.recipe.schema.cluster import Cluster
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.train import Phase
from lmworks.shards.order.timeline import PhaseSteps


def bubble(stages: int, micro_batches: int, schedule: str = "1f1b", per_rank: int = 1) -> float:
    """Share of the step that a pipeline of p ranks stands idle, with `per_rank` (v) of its stages on each.

    GPipe, 1F1B and, with v > 1, interleaved: (p - 1) / (v m + p - 1). Zero-bubble (ZB-1P, arXiv:2401.10241) fills all but a third with
    gradients of weights, if forward and both halves of the backward take equal times: (p - 1) / (3 v m + p - 1).
    """
    work = micro_batches * per_rank * (3 if schedule == "zero-bubble" else 1)
    return (stages - 1) / (work + stages - 1)


def micro_batches_for(stages: int, share: float, schedule: str = "1f1b", per_rank: int = 1) -> int:
    """Fewest micro-batches that keep the bubble at or under `share`: m >= (p - 1)(1 - b) / b under 1F1B."""
    micro = 1
    while bubble(stages, micro, schedule, per_rank) > share:
        micro = max(micro + 1, int((stages - 1) * (1 - share) / share / per_rank / (3 if schedule == "zero-bubble" else 1)))
    return micro


def alive(layout: Layout, rank: int, micro_batches: int) -> float:
    """How many micro-batches' activations a rank of `pp` keeps at most, each of all its layers: with v stages, one stage's is 1 / v."""
    p, v, m = layout.pp, layout.pipeline_stages_per_rank, micro_batches
    if p == 1:
        return 1
    if layout.pipeline_schedule == "gpipe" or (layout.pipeline_schedule == "1f1b" and m < p):
        return m
    if layout.pipeline_schedule == "1f1b":
        return p - rank
    warmup = (v - 1) * (m // max(1, m // p)) + (p if layout.pipeline_schedule == "zero-bubble" else 2 * (p - 1 - rank) + 1)
    return min(warmup, v * m) / v


def batch_tokens(data_ranks: int, micro_batch_size: int, sequence_length: int, accumulation: int) -> int:
    """Tokens of one optimizer step."""
    return data_ranks * micro_batch_size * sequence_length * accumulation


def steps(tokens: int, tokens_per_step: int) -> int:
    """Whole optimizer steps that a budget pays for."""
    return tokens // tokens_per_step


def device_hours(devices: int, seconds: float) -> float:
    """What the bill counts."""
    return devices * seconds / 3600


def phase_steps(phase: Phase) -> PhaseSteps:
    """Steps and tokens of a phase, exactly as the trainer walks them, batch ramp included."""
    return PhaseSteps.of(phase)


@dataclass(frozen=True)
class Disk:
    """Bytes on disk. `data` is an upper bound: what is repeated over epochs is stored once."""

    checkpoint: float
    checkpoints_kept: int
    data: float


def disk(recipe: Recipe, counts: Counts, matrices: int) -> Disk:
    """fp32 weights and optimizer state of one checkpoint, how many are kept at most, and the token files."""
    trained = counts.trained
    states = matrices * 4 + (trained - matrices) * 8 if recipe.optimizer.kind == "muon" else trained * 8
    ema = trained * 4 if recipe.optimizer.ema_decay else 0
    kept = recipe.checkpoints.keep_last + recipe.checkpoints.keep_best
    tokens = sum(phase.tokens for phase in recipe.train.phases)
    if recipe.checkpoints.keep_every:
        for phase in recipe.train.phases:
            every = recipe.checkpoints.keep_every.tokens(step_tokens=phase.global_batch_size, phase_tokens=phase.tokens)
            kept += phase.tokens // every if every else 0
    width = 2 if (recipe.model.vocab_size or 0) < 65_500 else 4
    return Disk(trained * 4 + states + ema, kept, tokens * width)


def seconds(flops: float, devices: int, cluster: Cluster, mfu: float) -> float:
    """Time for useful operations at a share `mfu` of the dense peak."""
    return flops / (devices * cluster.tflops * 1e12 * mfu)
