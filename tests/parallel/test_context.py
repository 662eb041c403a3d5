"""Sequences shared by ranks: equal to one process, in memory that shrinks with the number of ranks.

Losses, all gradients and all updated weights are compared with one process (`parity.compare`, with its tolerances).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.parallel import context
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.after import Layout
from lmworks.recipe.model import Model
from parallel.parity import MODELS, batch_of, compare, train
from rank_pool import RankPool

LAYOUTS: list[dict[str, Any]] = [{"cp": 2}, {"cp": 3, "zero": 3}, {"cp": 4, "zero": 0}, {"cp": 2, "dp_shard": 2, "zero": 2}]


def world(layout: dict[str, Any]) -> int:
    return layout["cp"] * layout.get("dp_shard", 1)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))
def test_equals_one_process(ranks: RankPool, kind: str, layout: dict[str, Any]) -> None:
    compare(train({}, kind, 2), ranks.run(train, world(layout), layout, kind, 2))


@pytest.mark.parametrize("options", [{"compile": True}, {"activation_checkpointing": "full"}], ids=["compiled", "recomputed"])
def test_also_when_compiled_or_recomputed(ranks: RankPool, options: dict[str, Any]) -> None:
    """Compiled code sums in another order and rounds elsewhere: 1e-4."""
    found = ranks.run(_trained_with, 2, {"cp": 2}, "tied", options)
    compare(train({}, "tied"), found, 1e-4 if "compile" in options else 1e-5)


def _trained_with(layout: dict[str, Any], kind: str, options: dict[str, Any]) -> Any:
    return train(layout, kind, **options)
