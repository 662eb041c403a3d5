"""Stages on ranks: equal to one process, under every schedule, and idle for as long as the plan says.

Losses, all gradients and all updated weights are compared with one process (`parity.compare`, with its tolerances).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import PipelineStage

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.tensor_files import incomplete_tensors, read_table
from lmworks.errors import UserError
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.parallel.pipeline_stages import bubble, micro_batches_in_flight
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.shards.batch import IGNORE
from parallel.parity import Trained, alone, batch_of, compare, hashes, recipe_of, train
from rank_pool import RankPool

KINDS = ("dense", "tied", "moe", "mla", "mtp")
FAST: list[tuple[dict[str, Any], str]] = [
    ({"pp": 2, "pipeline_schedule": "gpipe"}, "tied"),
    ({"pp": 4}, "mtp"),
    ({"pp": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2}, "moe"),
    ({"pp": 2, "pipeline_schedule": "zero-bubble", "pipeline_stages_per_rank": 2}, "mtp"),
    ({"pp": 2, "dp_shard": 2, "zero": 1}, "mla"),
]
MORE: list[dict[str, Any]] = [
    {"pp": 2, "layers_per_pipeline_stage": [3, 1]},
    {"pp": 2, "pipeline_schedule": "zero-bubble"},
    {"pp": 2, "dp_shard": 2, "zero": 0},
    {"pp": 2, "dp_shard": 2, "dp_replicate": 2, "zero": 1},
    {"pp": 4, "pipeline_schedule": "zero-bubble"},
    {"pp": 2, "dp_shard": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2},
    {"pp": 2, "dp_shard": 2, "pipeline_schedule": "zero-bubble"},
]
SLOW = [(layout, kind) for layout in [*(layout for layout, _ in FAST), *MORE] for kind in KINDS if (layout, kind) not in FAST]
SLOW += [({"pp": 2}, "post_norm"), ({"pp": 2}, "delta"), ({"pp": 2}, "hybrid"), ({"pp": 2}, "lightning"), ({"pp": 2}, "mamba"),
          ({"pp": 2}, "conv"), ({"pp": 2}, "sinks"), ({"pp": 2, "dp_shard": 2, "zero": 1}, "delta"), ({"pp": 2}, "moe_blocks"),
          ({"pp": 2}, "moe_mamba_blocks")]


def _name(value: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


def _world(layout: dict[str, Any]) -> int:
    return layout["pp"] * layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)


@pytest.mark.parametrize(("layout", "kind"), FAST, ids=_name)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare(alone(kind), ranks.run(train, _world(layout), layout, kind))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), SLOW, ids=_name)
def test_every_model_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare(alone(kind), ranks.run(train, _world(layout), layout, kind))


@pytest.mark.parametrize(
    ("layout", "rows", "micro_batch_size"),
    [
        ({"pp": 2, "dp_shard": 2}, 7, 2),  # one rank has a row less: single rows, and a blank one
        pytest.param({"pp": 4}, 3, 1, marks=pytest.mark.slow),  # fewer micro-batches than stages
        pytest.param(  # 7 rows make no equal rounds in pieces of 2 or 3
            {"pp": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2}, 7, 3, marks=pytest.mark.slow
        ),
    ],
    ids=_name,
)
def test_any_number_of_rows(ranks: RankPool, layout: dict[str, Any], rows: int, micro_batch_size: int) -> None:
    """Blank micro-batches that fill a round count nowhere: not in gradients, losses, nor tokens per expert."""
    compare(alone("mtp", micro_batch_size, rows), ranks.run(train, _world(layout), layout, "mtp", micro_batch_size, rows))


@pytest.mark.parametrize("checkpointing", ["full", "50%"])
def test_also_with_activation_checkpointing(ranks: RankPool, checkpointing: str) -> None:
    """Tokens per expert are of the first pass: activation checkpointing counts nothing twice."""
    compare(alone("moe"), ranks.run(_train, 2, {"pp": 2}, "moe", {"activation_checkpointing": checkpointing}))


def _train(layout: dict[str, Any], kind: str, options: dict[str, Any]) -> Trained:
    return train(layout, kind, **options)


@pytest.mark.parametrize(
    ("layout", "rows"),
    [({"pp": 2, "dp_shard": 2}, 7), ({"pp": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2}, 3)],
    ids=_name,
)
def test_evaluates_what_one_process_evaluates(ranks: RankPool, layout: dict[str, Any], rows: int) -> None:
    """fp32 sums in another order: 1e-6."""
    expected = _evaluated({}, rows)
    assert ranks.run(_evaluated, _world(layout), layout, rows) == pytest.approx([expected] * _world(layout), rel=1e-6)


def _evaluated(layout: dict[str, Any], rows: int) -> float:
    model = _model(layout, "mtp")
    model.eval()
    return model.summed_cross_entropy(batch_of(0, rows))


@pytest.mark.parametrize(
    ("layout", "rows"),
    [({"pp": 2, "dp_shard": 2}, 7), ({"cp": 2}, 2), ({"tp": 2}, 3),
     *(pytest.param(layout, rows, marks=pytest.mark.slow) for layout, rows in (
        ({"pp": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2}, 3), ({"dp_shard": 2, "zero": 3}, 3),
        ({"dp_shard": 2, "cp": 2, "zero": 2}, 1)))],
    ids=_name,
)  # fmt: skip
def test_the_loss_of_each_token_is_that_of_one_process(ranks: RankPool, layout: dict[str, Any], rows: int) -> None:
    """On every rank, in its place, also where a rank has no row. fp32 sums in another order: 1e-5."""
    expected = _token_losses({}, rows)
    assert ((expected > 0) == (batch_of(0, rows).labels != IGNORE)).all()
    found = ranks.run(_token_losses, world_size(Layout(**layout)), layout, rows)
    assert len(found) > 1
    for of_rank in found:
        np.testing.assert_allclose(of_rank, expected, rtol=1e-5, atol=1e-5)


def _token_losses(layout: dict[str, Any], rows: int) -> np.ndarray:
    model = _model(layout, "moe")
    model.eval()
    return model.token_cross_entropy(batch_of(0, rows)).numpy()


def test_a_rank_holds_its_stages_and_no_more(ranks: RankPool) -> None:
    """Names are those of one process; only the embedding that the last stage needs for a tied head is there twice."""
    whole = _held({}, "tied")
    first, last = ranks.run(_held, 2, {"pp": 2, "layers_per_pipeline_stage": [3, 1]}, "tied")
    assert first | last == whole
    assert first & last == {"embedding.weight"}
    assert {name.split(".")[1] for name in last if name.startswith("layers.")} == {"3"}


def test_a_layout_that_cannot_be_is_refused_before_anything_is_built() -> None:
    with pytest.raises(UserError, match="layout: pipeline_stages_per_rank and layers_per_pipeline_stage need a pipeline"):
        build(recipe_of("dense"), Ranks(Layout(pipeline_stages_per_rank=2)), torch.device("cpu"))


def _held(layout: dict[str, Any], kind: str) -> set[str]:
    return set(_model(layout, kind).state_dict())


def _model(layout: dict[str, Any], kind: str) -> ParallelModel:
    ranks = Ranks(Layout.model_validate(layout))
    return ParallelModel(build(recipe_of(kind), ranks, torch.device("cpu")), ranks)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "dp_shard": 2}], ids=_name)
def test_a_checkpoint_holds_the_embedding_once(ranks: RankPool, layout: dict[str, Any], tmp_path: Path) -> None:
    """And is that of one process: which loads it, and the ranks load what one process has saved."""
    expected = _round_trip({}, tmp_path / "one", tmp_path / "one")
    found = ranks.run(_round_trip, _world(layout), layout, tmp_path / "ranks", tmp_path / "one")
    assert not incomplete_tensors(read_table(tmp_path / "ranks" / "step-00000001"))
    for held in found:
        assert held.items() <= expected.items()
    assert _round_trip({}, tmp_path / "again", tmp_path / "ranks") == expected


def _round_trip(layout: dict[str, Any], into: Path, other: Path) -> dict[str, str]:
    """Save this rank's part of a model at its start, forget it, and load the checkpoint at `other`; a hash of each tensor's bits."""
    model = _model(layout, "tied")
    state = {"model": model.state_dict()}
    with Checkpoints(into, Options(asynchronous=False), {}) as checkpoints:
        checkpoints.save(1, model.without_duplicates(state), {})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with Checkpoints(other, Options(asynchronous=False), {}) as checkpoints:
        assert checkpoints.load_latest(state) is not None
    return hashes(state["model"])


Action = tuple[str, int, int]  # F, B, or I and W for the halves of B; stage; micro-batch
SECONDS = {"F": 1, "B": 2, "I": 1, "W": 1}


@pytest.mark.parametrize(
    ("layout", "count"),
    [
        pytest.param({"pp": 4, "pipeline_schedule": "gpipe"}, 6, marks=pytest.mark.slow),
        ({"pp": 4}, 6),
        ({"pp": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2}, 6),
        ({"pp": 4, "pipeline_schedule": "zero-bubble"}, 8),
        pytest.param({"pp": 2, "pipeline_schedule": "zero-bubble", "pipeline_stages_per_rank": 2}, 4, marks=pytest.mark.slow),
    ],
    ids=_name,
)
def test_is_idle_and_keeps_activations_as_planned(ranks: RankPool, layout: dict[str, Any], count: int) -> None:
    """What each rank ran, in its order, played on a clock: a forward takes one second, a backward two, half of it for the weights."""
    orders = ranks.run(_executed, layout["pp"], layout, count)
    wanted = Layout.model_validate(layout)
    share, most = _play(orders, wanted.pp * wanted.pipeline_stages_per_rank)
    assert share == pytest.approx(bubble(wanted.pp, count, wanted.pipeline_schedule, wanted.pipeline_stages_per_rank))
    assert most == [micro_batches_in_flight(wanted, rank, count) * wanted.pipeline_stages_per_rank for rank in range(wanted.pp)]


def _executed(layout: dict[str, Any], count: int) -> list[Action]:
    """What this rank's stages do in a step of `count` micro-batches."""
    done: list[Action] = []
    forward, backward, weight = PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk, PipelineStage.backward_weight_one_chunk

    def record(kind: Any, original: Any) -> Any:
        def run(stage: PipelineStage, index: int, *args: Any, **kwargs: Any) -> Any:
            done.append((kind(kwargs), stage.stage_index, index))
            return original(stage, index, *args, **kwargs)

        return run

    PipelineStage.forward_one_chunk = record(lambda _: "F", forward)  # type: ignore[method-assign]
    PipelineStage.backward_one_chunk = record(lambda said: "B" if said.get("full_backward", True) else "I", backward)  # type: ignore[method-assign]
    PipelineStage.backward_weight_one_chunk = record(lambda _: "W", weight)  # type: ignore[method-assign]
    try:
        _model(layout, "dense").forward_backward(batch_of(0, count), count, 1, 1.0)
    finally:
        PipelineStage.forward_one_chunk, PipelineStage.backward_one_chunk = forward, backward  # type: ignore[method-assign]
        PipelineStage.backward_weight_one_chunk = weight  # type: ignore[method-assign]
    return done


def _play(orders: list[list[Action]], stages: int) -> tuple[float, list[int]]:
    """The share of time that ranks stand idle, and how many forwards each keeps at most until their weights have their gradient."""
    ended: dict[Action, int] = {}
    clocks, places, kept, most = (np.zeros(len(orders), dtype=int) for _ in range(4))
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                kind, stage, index = order[places[rank]]
                needs = [("F", stage - 1, index)] if kind == "F" and stage else []
                if kind in "BI":
                    needs = [("F", stage, index), *([("B", stage + 1, index)] if stage < stages - 1 else [])]
                if any(need not in ended for need in needs):
                    break
                clocks[rank] = max([clocks[rank], *(ended[need] for need in needs)]) + SECONDS[kind]
                ended["B" if kind == "I" else kind, stage, index] = clocks[rank]
                kept[rank] += (kind == "F") - (kind in "BW")
                most[rank] = max(most[rank], kept[rank])
                places[rank] += 1
                moved = True
        assert moved, "the orders of the ranks wait for each other"
    work = sum(SECONDS[kind] for order in orders for kind, *_ in order)
    return 1 - work / (len(orders) * clocks.max()), most.tolist()
