"""QK-clip on many ranks: the largest score of each head, and the clipped weights, are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.recipe.schema.layout import Layout, world_size
from parallel.parity import THRESHOLDS, alone, compare, train
from rank_pool import RankPool

FAST: list[tuple[dict[str, Any], str]] = [
    ({"cp": 2, "tp": 2}, "clip"), ({"pp": 2}, "clip_alone"), ({"dp_shard": 3, "zero": 3}, "clip_latent"),
]  # fmt: skip
SLOW: list[dict[str, Any]] = [
    {"dp_shard": 2, "zero": 0}, {"dp_shard": 3, "zero": 1}, {"dp_shard": 4, "zero": 2}, {"dp_shard": 8, "zero": 3}, {"tp": 2}, {"cp": 4},
    {"pp": 2, "pipeline_schedule": "interleaved", "pipeline_stages_per_rank": 2}, {"pp": 4, "pipeline_schedule": "zero-bubble"},
    {"dp_shard": 3, "tp": 2, "zero": 3}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"dp_shard": 2, "ep": 2, "tp": 2, "zero": 2},
    {"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2},
]  # fmt: skip


def _equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    expected = alone(kind)
    of_heads = expected.extras[-16:]  # in the last step
    assert min(of_heads) < THRESHOLDS[kind] < max(of_heads)
    compare(expected, ranks.run(train, world_size(Layout(**layout)), layout, kind))


@pytest.mark.parametrize(("layout", "kind"), FAST)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    _equals_one_process(ranks, layout, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", THRESHOLDS)
@pytest.mark.parametrize("layout", SLOW)
def test_every_layout_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    _equals_one_process(ranks, layout, kind)
