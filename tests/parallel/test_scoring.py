"""Batches that are only scored may have any length: lmworks chooses some itself, for first losses, general text and needles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout, world_size
from parallel.parity import batch_of, model_of
from rank_pool import RankPool

ROWS, LENGTHS = 3, (23, 22)  # which no two ranks share
_FAST: list[tuple[dict[str, Any], str]] = [({"cp": 2}, "mtp"), ({"pp": 2, "tp": 2}, "tied")]
_SLOW: list[tuple[dict[str, Any], str]] = [
    ({"cp": 2, "tp": 2}, "moe"), ({"pp": 2, "cp": 2}, "moe"), ({"tp": 2}, "mamba"), ({"cp": 3, "zero": 3}, "mla"),
    ({"pp": 2, "cp": 2, "tp": 2}, "dense"), ({"dp_shard": 2, "cp": 2}, "gemma"),
]  # fmt: skip


def scored(layout: dict[str, Any], kind: str) -> list[tuple[float, np.ndarray]]:
    model, _ = model_of(kind, Ranks(Layout(**layout)))
    batches = [batch_of(0, ROWS, length) for length in LENGTHS]
    return [(model.summed_cross_entropy(batch), model.token_cross_entropy(batch, 2).numpy()) for batch in batches]


@pytest.mark.parametrize(("layout", "kind"), [*_FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in _SLOW)], ids=str)
def test_any_length_is_scored_as_in_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    """fp32 sums in another order."""
    expected = scored({}, kind)
    for found in ranks.run(scored, world_size(Layout(**layout)), layout, kind):
        for (total, nats_BT), (their_total, theirs_BT) in zip(found, expected, strict=True):
            assert total == pytest.approx(their_total, rel=1e-5)
            assert nats_BT.shape == theirs_BT.shape
            np.testing.assert_allclose(nats_BT, theirs_BT, atol=1e-5)
