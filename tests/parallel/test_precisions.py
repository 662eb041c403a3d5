"""What parity compares is fixed by the comparison, whatever the processor multiplies: fp32 throughout, and bf16 by its own measure."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.recipe.schema.layout import Layout, world_size
from parallel.parity import alone, alone_bf16, compare, compare_bf16, train, train_bf16
from rank_pool import RankPool

FAST: list[tuple[dict[str, Any], str]] = [
    ({"dp_shard": 2, "zero": 3}, "dense"),
]  # fmt: skip
SLOW: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2}, "mla"), ({"cp": 2, "ep": 2}, "moe"), ({"pp": 2}, "tied"),
    ({"dp_shard": 2, "zero": 0}, "moe"), ({"dp_shard": 4, "zero": 1}, "tied"), ({"dp_shard": 2, "zero": 2}, "mtp"),
    ({"dp_replicate": 2}, "mla"), ({"tp": 2}, "moe"), ({"tp": 2}, "mtp"), ({"tp": 2}, "tied"), ({"cp": 2}, "mla"), ({"cp": 4}, "tied"),
    ({"dp_shard": 2, "ep": 2}, "moe"), ({"dp_shard": 2, "ep": 2}, "mla"), ({"pp": 2}, "moe"), ({"pp": 2}, "mtp"),
    ({"dp_shard": 2, "cp": 2, "ep": 4}, "mla"), ({"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2}, "moe"),
]  # fmt: skip


def _name(value: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("layout", "kind"), FAST, ids=_name)
def test_equals_one_process_in_bf16(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare_bf16(*alone_bf16(kind), ranks.run(train_bf16, world_size(Layout(**layout)), layout, kind))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), SLOW, ids=_name)
def test_more_layouts_equal_one_process_in_bf16(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare_bf16(*alone_bf16(kind), ranks.run(train_bf16, world_size(Layout(**layout)), layout, kind))


def test_fp32_is_fp32_whatever_the_processor_multiplies(ranks: RankPool, has_bf16: bool) -> None:
    alone.cache_clear()  # made again under what is said of the machine now
    compare(alone("moe"), ranks.run(train, 2, {"dp_shard": 2, "ep": 2}, "moe"))
