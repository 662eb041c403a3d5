"""Matrices and the residual stream shared by ranks: equal to one process."""

from __future__ import annotations

import pytest

from parallel.parity import compare, train
from rank_pool import RankPool

KINDS = ["dense", "tied", "moe", "mla", "mtp"]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_process(ranks: RankPool, kind: str) -> None:
    compare(train({}, kind), ranks.run(train, 2, {"tp": 2}, kind))
