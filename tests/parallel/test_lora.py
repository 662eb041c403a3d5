"""Low-rank adapters on every kind of layout: losses, gradients and weights of one process, and a base that nothing changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.recipe.schema.model import Lora
from parallel.parity import MODELS, Trained, compare, train
from rank_pool import RankPool

EVERYTHING = ("all-linear", "experts")
LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"dp_shard": 2, "ep": 2}, "moe"), ({"pp": 2}, "mtp"),
]  # fmt: skip
SLOW: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2}, "moe"), ({"dp_shard": 2, "zero": 3}, "moe"), ({"dp_replicate": 2}, "dense"), ({"tp": 2}, "mla"), ({"cp": 2}, "dense"),
    ({"dp_shard": 2, "tp": 2, "ep": 2, "zero": 3}, "mla"), ({"pp": 2, "dp_shard": 2}, "tied"), ({"dp_shard": 3, "zero": 2}, "moe"),
    ({"dp_shard": 2, "zero": 0}, "mla"), ({"pp": 2, "tp": 2}, "moe"), ({"tp": 2}, "delta"), ({"dp_shard": 2, "zero": 3}, "delta"),
    ({"pp": 2}, "hybrid"), ({"dp_shard": 2, "zero": 1}, "mamba"), ({"dp_shard": 2, "zero": 3}, "lightning"),
    ({"tp": 2}, "hybrid"), ({"tp": 4}, "mamba_pairs"), ({"dp_shard": 2, "tp": 2, "zero": 3}, "mamba_alone"),
]  # fmt: skip


def options(kind: str) -> Lora:
    return Lora(rank=3, alpha=6, targets=EVERYTHING if "moe" in MODELS[kind] else EVERYTHING[:1])


def stepped(layout: dict[str, Any], kind: str, recompute: bool = False) -> Trained:
    """Some steps with adapters on this rank."""
    more = {"activation_checkpointing": "full"} if recompute else {}
    return train(layout, kind, lora=options(kind), **more)


@cache
def alone(kind: str) -> Trained:
    return stepped({}, kind)


@pytest.mark.parametrize(
    ("layout", "kind"), [*LAYOUTS, *(pytest.param(layout, kind, marks=pytest.mark.slow) for layout, kind in SLOW)], ids=str
)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    expected = alone(kind)
    assert expected.grads and all("lora." in name for name in (*expected.grads, *expected.weights))
    assert any("gate_lora" in name for name in expected.grads) == ("moe" in MODELS[kind])
    world = world_size(Layout(**layout))
    # adapters of all matrices: the third step has the rounding of the first two in every layer, twice that of other tests
    compare(expected, ranks.run(stepped, world, layout, kind), tolerance=3e-5)


def test_recomputed_activations_change_nothing() -> None:
    compare(alone("moe"), [stepped({}, "moe", True)])


_SLOW_KINDS = ("mamba", "lightning", "sinks", "conv")


@pytest.mark.parametrize("kind", ["delta", "hybrid", *(pytest.param(kind, marks=pytest.mark.slow) for kind in _SLOW_KINDS)])
def test_recomputed_states_change_no_bit(kind: str) -> None:
    """Layers with a state or sinks, with adapters or whole."""
    compare(alone(kind), [stepped({}, kind, True)], tolerance=0.0, of_update=0.0)
    compare(train({}, kind), [train({}, kind, activation_checkpointing="selective")], tolerance=0.0, of_update=0.0)
