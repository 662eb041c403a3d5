"""The table of layouts: each axis alone, pairs, and eight ranks with three and four axes, on dense, sparse and latent models.

Three steps with Muon, accumulation, document masks and balancing; losses, every gradient and every updated weight are compared with one
process (`parity.compare`, with its tolerances). The rooms' own tests have the most telling of these; here is the whole table.
"""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.recipe.schema.layout import Layout, world_size
from parallel.parity import alone, compare, train
from rank_pool import RankPool

LAYOUTS: list[dict[str, Any]] = [
    # one axis
    {"dp_shard": 2, "zero": 0}, {"dp_shard": 3, "zero": 1}, {"dp_shard": 4, "zero": 2}, {"dp_shard": 8, "zero": 3}, {"dp_replicate": 2},
    {"tp": 2}, {"cp": 2}, {"cp": 4}, {"pp": 2}, {"pp": 4, "pipeline_schedule": "zero-bubble"},
    # two
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3}, {"dp_shard": 2, "tp": 2, "zero": 0}, {"dp_shard": 2, "tp": 2, "zero": 1},
    {"dp_shard": 2, "tp": 2, "zero": 2}, {"dp_shard": 3, "tp": 2, "zero": 3}, {"dp_replicate": 2, "tp": 2}, {"cp": 2, "tp": 2},
    {"dp_shard": 2, "cp": 2, "zero": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "dp_shard": 2},
    # with experts on different ranks
    {"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 4, "zero": 0}, {"dp_shard": 4, "ep": 2, "zero": 3}, {"cp": 2, "ep": 2},
    {"dp_shard": 2, "ep": 2, "tp": 2, "zero": 2}, {"pp": 2, "dp_shard": 2, "ep": 2}, {"dp_shard": 2, "cp": 2, "ep": 4},
    # eight ranks
    {"dp_replicate": 2, "dp_shard": 4, "ep": 2, "zero": 3}, {"dp_shard": 4, "ep": 2, "tp": 2, "zero": 0},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "tp": 2, "zero": 2}, {"dp_shard": 2, "cp": 2, "ep": 4, "tp": 2, "zero": 3},
    {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2}, {"pp": 2, "dp_shard": 2, "cp": 2, "ep": 2}, {"pp": 2, "cp": 2, "tp": 2, "ep": 2},
]  # fmt: skip


def _name(layout: dict[str, Any]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in layout.items())


CASES = [
    pytest.param(layout, kind, id=f"{_name(layout)}-{kind}")
    for layout in LAYOUTS for kind in ("dense", "moe", "mla") if kind != "dense" or "ep" not in layout
] + [
    pytest.param(layout, "gemma", id=f"{_name(layout)}-gemma")
    for layout in ({"tp": 2}, {"pp": 2}, {"cp": 2, "tp": 2}, {"dp_shard": 2, "zero": 3})
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare(alone(kind), ranks.run(train, world_size(Layout(**layout)), layout, kind))
