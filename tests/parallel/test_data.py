"""Copies and shards of the weights: equal to one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lmworks.optim.groups import local
from lmworks.optim.optimizer import Ema, build_optimizer
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.train.observe.layer_statistics import LayerStatistics
from parallel.parity import ROWS, Trained, alone, batch_of, compare, model_of, recipe_of, step_of, train
from rank_pool import RankPool

LAYOUTS = [
    {"dp_shard": 2, "zero": 0}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 3, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
]  # fmt: skip


def _name(layout: dict[str, Any]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in layout.items())


KINDS = ("tied", "dense", "moe", "mla", "mtp")
# Each layout and each kind of model once in the fast tests; the other products are slow.
CASES = [
    pytest.param(layout, kind, marks=[] if row == column else pytest.mark.slow, id=f"{_name(layout)}-{kind}")
    for row, layout in enumerate(LAYOUTS) for column, kind in enumerate(KINDS)
] + [pytest.param({"dp_shard": 2, "zero": 3}, "post_norm", marks=pytest.mark.slow, id="dp_shard2-zero3-post_norm")]  # fmt: skip


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    world = layout["dp_shard"] * layout.get("dp_replicate", 1)
    compare(alone(kind), ranks.run(train, world, layout, kind))


@pytest.mark.parametrize("rows", [3, 1])
def test_a_rank_with_a_sequence_less_adds_nothing_for_it(ranks: RankPool, rows: int) -> None:
    """Its blank micro-batch, which may be its only one, has no tokens with a label, but a balancing loss of its own."""
    compare(alone("aux", rows=rows), ranks.run(_uneven, 2, rows))


def _uneven(rows: int) -> Trained:
    return train({"dp_shard": 2}, "aux", rows=rows)


@pytest.mark.parametrize("layout", [{"dp_shard": 2, "zero": 0}, {"dp_shard": 2, "zero": 3}, {"tp": 2}], ids=str)
def test_a_norm_over_ranks_counts_each_number_once(ranks: RankPool, layout: dict[str, Any]) -> None:
    expected = _norm({})
    assert ranks.run(_norm, 2, layout) == [pytest.approx(expected, rel=1e-6)] * 2


def _norm(layout: dict[str, Any]) -> float:
    model, _ = model_of("tied", Ranks(Layout(**layout)))
    return float(model.norm({name: local(parameter.detach()) for name, parameter in model.named_parameters()}))


def test_what_is_measured_with_averaged_weights_is_theirs(ranks: RankPool) -> None:
    """Also where a rank holds gathered weights of the last pass."""
    expected = _losses({})
    assert expected[0] == expected[2] != expected[1]
    for found in ranks.run(_losses, 2, {"dp_shard": 2, "zero": 2}):
        assert found == [pytest.approx(one, rel=1e-6) for one in expected]


def _losses(layout: dict[str, Any]) -> list[float]:
    """Before, with, and after averaged weights of twice the size."""
    model, _ = model_of("tied", Ranks(Layout(**layout)))
    batch, ema = batch_of(0), Ema(dict(model.named_parameters()), 0.9)
    for average in ema.average.values():
        local(average).mul_(2)
    before = model.summed_cross_entropy(batch)
    with model.ema_weights(ema):
        within = model.summed_cross_entropy(batch)
    return [before, within, model.summed_cross_entropy(batch)]


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param({"dp_shard": 2, "zero": zero}, marks=pytest.mark.slow) for zero in (0, 2)), {"dp_shard": 2, "zero": 3}, {"tp": 2}],
    ids=str,
)
def test_statistics_of_layers_are_those_of_one_process(ranks: RankPool, layout: dict[str, Any]) -> None:
    """Of all elements and of a sample, before and after passes in evaluation mode, behind which no backward pass frees the gathered
    weights; and training goes on."""
    expected, after = _statistics_alone()
    for found, loss in ranks.run(_statistics, 2, layout):
        for one, alike in zip(found, expected, strict=True):
            assert one == {name: pytest.approx(value, rel=1e-3, abs=1e-7) for name, value in alike.items()}
        assert loss == pytest.approx(after, rel=1e-4)


@cache
def _statistics_alone() -> tuple[list[dict[str, float]], float]:
    return _statistics({})


def _statistics(layout: dict[str, Any]) -> tuple[list[dict[str, float]], float]:
    """Of the second of three steps, and the loss of the third."""
    model, _ = model_of("moe", Ranks(Layout(**layout)))
    optimizer = build_optimizer(model, recipe_of("moe").optimizer)
    model.train()
    step_of(model, optimizer, batch_of(0), None, 1)
    model.eval()
    model.summed_cross_entropy(batch_of(3))  # a validation
    model.train()
    statistics = [LayerStatistics(model, whole) for whole in (True, False)]
    step_of(model, optimizer, batch_of(1), None, 1)
    found = [one.metrics(batch_of(1).rows(*model.rank_sequences(ROWS))) for one in statistics]
    of_own_rows = ("activation_rms", "attention_logit_max")
    loss = float(step_of(model, optimizer, batch_of(2), None, 1).loss)
    return [{name: value for name, value in one.items() if not name.endswith(of_own_rows)} for one in found], loss
