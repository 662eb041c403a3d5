"""Stages on ranks: equal to one process, under every schedule.

Losses, all gradients and all updated weights are compared with one process (`parity.compare`, with its tolerances).
"""

from __future__ import annotations

from typing import Any

import pytest

from parallel.parity import compare, train
from rank_pool import RankPool

LAYOUTS: list[dict[str, Any]] = [
    {"pp": 2, "schedule": "gpipe"}, {"pp": 4}, {"pp": 2, "layers_per_stage": [3, 1]},
    {"pp": 2, "schedule": "interleaved", "stages_per_rank": 2}, {"pp": 2, "schedule": "zero-bubble", "stages_per_rank": 2},
    {"pp": 2, "schedule": "zero-bubble"},
    {"pp": 2, "dp_shard": 2, "zero": 0}, {"pp": 2, "dp_shard": 2, "zero": 1}, {"pp": 2, "dp_shard": 2, "dp_replicate": 2, "zero": 1},
]  # fmt: skip


def world(layout: dict[str, Any]) -> int:
    return layout["pp"] * layout.get("dp_shard", 1) * layout.get("dp_replicate", 1)


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "mla", "mtp"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))
def test_equals_one_process(ranks: RankPool, kind: str, layout: dict[str, Any]) -> None:
    compare(train({}, kind), ranks.run(train, world(layout), layout, kind))
