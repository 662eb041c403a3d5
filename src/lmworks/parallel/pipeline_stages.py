"""How a model is cut into pipeline stages, for the plan and for the run.

Pipeline schedules: their bubble, and the micro-batches that a rank keeps in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

from lmworks.recipe.parameters import kind, layer_parameters, layers_by_kind, mtp_parameters
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.train import Train


def pipeline_stage_layers(model: Model, layout: Layout) -> list[range]:
    """The layers of each pipeline stage, in the order of the forward pass; stage s is on rank s % pp.

    Without `layers_per_pipeline_stage` the cost of the most expensive stage is minimized. The cost of a layer is its number of active
    parameters; the embedding adds to the first stage, and the head and multi-token prediction to the last.
    """
    assert model.num_hidden_layers
    counts = layout.layers_per_pipeline_stage or _balanced(_costs(model), layout.pp * layout.pipeline_stages_per_rank)
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def pipeline_stage_problems(model: Model, layout: Layout, train: Train) -> Iterator[str]:
    """The reasons why a model cannot be cut and run as the layout says; none if it can."""
    stages, name = layout.pp * layout.pipeline_stages_per_rank, layout.pipeline_schedule
    assert model.num_hidden_layers
    if layout.pp == 1:
        if layout.pipeline_stages_per_rank > 1 or layout.layers_per_pipeline_stage:
            yield "pipeline_stages_per_rank and layers_per_pipeline_stage need a pipeline; remove them, or set pp"
        return
    if layout.zero >= 2:
        yield f"ZeRO-{layout.zero} cannot be combined with a pipeline (it would gather and scatter for each micro-batch); set ZeRO-1"
    if stages > model.num_hidden_layers:
        of = f"pp {layout.pp}" + (
            f" x pipeline_stages_per_rank {layout.pipeline_stages_per_rank}" if layout.pipeline_stages_per_rank > 1 else ""
        )
        yield f"{of} exceeds the {model.num_hidden_layers} layers"
    elif (given := layout.layers_per_pipeline_stage) and (len(given) != stages or sum(given) != model.num_hidden_layers or min(given) < 1):
        yield (
            f"layers_per_pipeline_stage must be {stages} positive numbers that add up to {model.num_hidden_layers}; "
            "without it, the stages are balanced"
        )
    if name in ("gpipe", "1f1b") and layout.pipeline_stages_per_rank > 1:
        yield f"schedule {name} has one stage on each rank; set pipeline_stages_per_rank=1, or schedule=interleaved"
    if name == "interleaved" and layout.pipeline_stages_per_rank == 1:
        yield "schedule interleaved needs several stages on each rank; set pipeline_stages_per_rank=2, or schedule=1f1b"
    if name == "zero-bubble" and train.compile:
        yield "schedule zero-bubble splits the backward pass, which compiled layers cannot do; set train.compile=false, or schedule=1f1b"
    else:
        yield from train.activation_checkpointing.problems(name)


def rank_layers(model: Model, layout: Layout, rank: int) -> list[int]:
    """All layers on a rank of `pp`."""
    return [layer for layers in pipeline_stage_layers(model, layout)[rank :: layout.pp] for layer in layers]


@lru_cache(maxsize=16)
def _costs(model: Model) -> tuple[float, ...]:
    """The cost of each layer; the embedding counts for the first, head and multi-token prediction for the last."""
    assert model.num_hidden_layers and model.vocab_size and model.hidden_size
    of_kind = {key: sum(p.size * p.active for p in layer_parameters(model, first)) for key, (first, _) in layers_by_kind(model).items()}
    costs = [of_kind[kind(model, layer)] for layer in range(model.num_hidden_layers)]
    head = model.vocab_size * model.hidden_size
    costs[0] += head
    costs[-1] += head
    for depth in range(model.mtp.num_nextn_predict_layers if model.mtp else 0):
        costs[-1] += head + sum(p.size * p.active for p in mtp_parameters(model, depth))
    return tuple(costs)


@lru_cache(maxsize=256)
def _balanced(costs: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """The number of consecutive layers of each stage, at least one: minimizes the largest stage cost, then the sum of squared costs.

    Raises `ValueError` with fewer layers than stages.
    """
    if stages > len(costs):
        raise ValueError(f"{len(costs)} layers cannot fill {stages} stages")
    before = [0.0, *accumulate(costs)]
    best: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (len(costs) + 1)
    best[0] = (0.0, 0.0, ())
    for stage in range(stages):
        longer: list[tuple[float, float, tuple[int, ...]] | None] = [None] * (len(costs) + 1)
        for end in range(stage + 1, len(costs) - (stages - stage - 1) + 1):
            for start in range(end - 1, stage - 1, -1):
                cost = before[end] - before[start]
                if (found := longer[end]) is not None and cost > found[0]:
                    break
                if (head := best[start]) is not None:
                    candidate = (max(head[0], cost), head[1] + cost * cost, (*head[2], end - start))
                    longer[end] = candidate if found is None else min(found, candidate)
        best = longer
    found = best[-1]
    assert found is not None
    return found[2]


def runnable(layout: Layout, micro_batches: int) -> int:
    """The smallest number of micro-batches, at least `micro_batches`, that the pipeline schedule can run in a step."""
    if layout.pipeline_schedule in ("gpipe", "1f1b"):
        return micro_batches
    # interleaved schedules run rounds of equal size, each of about as many micro-batches as ranks
    return next(count for count in range(micro_batches, 2 * micro_batches + layout.pp) if count % max(1, count // layout.pp) == 0)


def pipelined_micro_batch(layout: Layout, sequences: int, max_size: int) -> int | None:
    """The largest micro-batch size up to `max_size` for which the pipeline schedule can run the number of micro-batches, or None."""
    sizes = range(min(sequences, max_size), 0, -1)
    return next((size for size in sizes if sequences % size == 0 and runnable(layout, sequences // size) == sequences // size), None)


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
