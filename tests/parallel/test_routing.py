"""In bf16, too, the ranks of `tp` choose the same experts: from gates in fp32, of the same gathered tokens, by the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.model.router import Router
from parallel.parity import STEPS, train
from rank_pool import RankPool

SPARSE = 3  # layers
Choices = list[tuple[np.ndarray, np.ndarray]]  # gates (N, E) and chosen experts (N, K) of each layer of each micro-batch


def _choices(layout: dict[str, Any]) -> tuple[Choices, dict[str, np.ndarray]]:
    """What this rank's routers chose in some steps, and their weights and biases after the last."""
    seen: Choices = []
    select = Router._select

    def noting(self: Router, gates_NE: Tensor, logits_NE: Tensor) -> Tensor:
        assert gates_NE.dtype == logits_NE.dtype == torch.float32
        experts_NK = select(self, gates_NE, logits_NE)
        seen.append((gates_NE.numpy().copy(), experts_NK.sort(-1).values.numpy().copy()))
        return experts_NK

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_select", noting)
        trained = train(layout, "moe", precision="bf16")
    return seen, {name: value for name, value in trained.weights.items() if ".router." in name}


@pytest.mark.parametrize("layout", [{"tp": 2}, pytest.param({"dp_shard": 2, "ep": 2, "tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_all_ranks_choose_the_same(ranks: RankPool, layout: dict[str, Any]) -> None:
    """To the last bit, in every micro-batch of three steps; the ranks of `tp` are neighbours in number."""
    found = ranks.run(_choices, 2 * layout.get("dp_shard", 1), layout)
    for (one, routers), (other, routers_there) in zip(found[::2], found[1::2], strict=True):
        assert len(one) == len(other) >= STEPS * SPARSE
        for here, there in zip(one, other, strict=True):
            np.testing.assert_array_equal(here[0], there[0])
            np.testing.assert_array_equal(here[1], there[1])
        for name, value in routers.items():
            np.testing.assert_array_equal(value, routers_there[name], err_msg=name)


@pytest.mark.slow
def test_another_choice_than_that_of_one_process_is_a_near_tie(ranks: RankPool) -> None:
    """Sums of shares are rounded to bf16 elsewhere than whole sums, by 2^-8 of a term: gates that are nearer than some of that may change
    places. Everything else is chosen alike. Compared as far as both compute the same: in the first step, whose weights are the same, and in
    each micro-batch up to the first layer that differs, as another expert gives another state to all layers behind it."""
    expected, found = _choices({})[0], ranks.run(_choices, 2, {"tp": 2})[0][0]
    first = len(expected) // STEPS
    compared = differing = 0
    for micro_batch in range(0, first, SPARSE):
        for (gates_NE, experts_NK), (other_NE, other_NK) in list(zip(expected, found, strict=True))[micro_batch : micro_batch + SPARSE]:
            np.testing.assert_allclose(other_NE, gates_NE, rtol=0, atol=2**-6)
            differs_N = (experts_NK != other_NK).any(-1)
            kept, other = (np.take_along_axis(gates_NE[differs_N], chosen[differs_N], -1).sum(-1) for chosen in (experts_NK, other_NK))
            assert (kept - other < 2**-6).all()
            compared, differing = compared + len(differs_N), differing + int(differs_N.sum())
            if differs_N.any():
                break
    assert compared >= len(expected[0][0]) * first // SPARSE and differing < 0.05 * compared
