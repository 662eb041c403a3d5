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
