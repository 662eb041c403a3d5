"""Copies and shards of the weights: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.parity import alone, compare, train
from rank_pool import RankPool

LAYOUTS = [
    {"dp_shard": 2, "zero": 0}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 2}, {"dp_shard": 3, "zero": 3},
    {"dp_replicate": 2, "dp_shard": 2, "zero": 3},
]  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "mla", "mtp"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))
def test_equals_one_process(ranks: RankPool, kind: str, layout: dict[str, Any]) -> None:
    world = layout["dp_shard"] * layout.get("dp_replicate", 1)
    compare(alone(kind), ranks.run(train, world, layout, kind))
