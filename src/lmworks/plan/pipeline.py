"""Pipeline schedules: their bubble, and the micro-batches that a rank keeps in flight."""

from __future__ import annotations

from lmworks.recipe.schema.layout import Layout


def bubble(stages: int, micro_batches: int, schedule: str = "1f1b", per_rank: int = 1) -> float:
    """Fraction of the step in which a pipeline of p ranks is idle, with `per_rank` (v) stages on each rank.

    GPipe, 1F1B and, with v > 1, interleaved: (p - 1) / (v m + p - 1). Zero-bubble (ZB-1P, arXiv:2401.10241) fills two thirds of it with
    weight gradients, if the forward and both halves of the backward take equal times: (p - 1) / (3 v m + p - 1).
    """
    work = micro_batches * per_rank * (3 if schedule == "zero-bubble" else 1)
    return (stages - 1) / (work + stages - 1)


def micro_batches_for(stages: int, share: float, schedule: str = "1f1b", per_rank: int = 1) -> int:
    """Smallest number of micro-batches with a bubble of at most `share`: m >= (p - 1)(1 - b) / b for 1F1B."""
    micro = 1
    while bubble(stages, micro, schedule, per_rank) > share:
        micro = max(micro + 1, int((stages - 1) * (1 - share) / share / per_rank / (3 if schedule == "zero-bubble" else 1)))
    return micro


def micro_batches_in_flight(layout: Layout, rank: int, micro_batches: int) -> float:
    """Maximum number of micro-batches whose activations a rank of `pp` keeps; with v stages per rank, each stage counts 1 / v."""
    p, v, m = layout.pp, layout.pipeline_stages_per_rank, micro_batches
    if p == 1:
        return 1
    if layout.pipeline_schedule == "gpipe" or (layout.pipeline_schedule == "1f1b" and m < p):
        return m
    if layout.pipeline_schedule == "1f1b":
        return p - rank
    warmup = (v - 1) * (m // max(1, m // p)) + (p if layout.pipeline_schedule == "zero-bubble" else 2 * (p - 1 - rank) + 1)
    return min(warmup, v * m) / v
