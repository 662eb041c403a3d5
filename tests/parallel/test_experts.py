"""Experts on different ranks: equal to one process. Wide layouts are in `test_layouts.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.errors import UserError
from lmworks.model.moe import run_sorted, run_sorted_plain
from lmworks.model.router import Router
from parallel.parity import MODELS, alone, compare, train
from rank_pool import RankPool

FAST: list[tuple[int, dict[str, Any], str]] = [
    (2, {"dp_shard": 2, "ep": 2}, "moe"), (4, {"dp_shard": 4, "ep": 2, "zero": 3}, "mla"),
]  # fmt: skip
SLOW: list[tuple[int, dict[str, Any], str]] = [
    (2, {"dp_shard": 2, "ep": 2, "zero": 0}, "mla"), (4, {"dp_shard": 4, "ep": 4, "zero": 2}, "mtp"), (2, {"cp": 2, "ep": 2}, "moe"),
    (4, {"dp_shard": 2, "ep": 2, "tp": 2}, "mtp"), (4, {"dp_shard": 2, "ep": 2, "tp": 2}, "delta"),
    (2, {"dp_shard": 2, "zero": 3}, "delta"), (2, {"dp_shard": 2, "zero": 3}, "hybrid"),
    (4, {"dp_shard": 2, "ep": 2, "tp": 2}, "moe_blocks"), (2, {"dp_shard": 2, "ep": 2, "zero": 3}, "moe_mamba_blocks"),
    (2, {"dp_shard": 2, "ep": 2, "zero": 3}, "lightning"), (2, {"dp_shard": 2, "ep": 2, "zero": 3}, "mamba"),
    (2, {"dp_shard": 2, "zero": 3}, "sinks"),
    (2, {"dp_shard": 2, "ep": 2, "zero": 3}, "sinks"), (4, {"dp_shard": 2, "ep": 2, "tp": 2}, "sinks"),
    (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "zero": 3}, "moe"),
]  # fmt: skip


def _name(value: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("world", "layout", "kind"), FAST, ids=_name)
def test_equals_one_process(ranks: RankPool, world: int, layout: dict[str, Any], kind: str) -> None:
    compare(alone(kind), ranks.run(train, world, layout, kind))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout", "kind"), SLOW, ids=_name)
def test_more_layouts_equal_one_process(ranks: RankPool, world: int, layout: dict[str, Any], kind: str) -> None:
    # the gradient of a recurrence's time steps is a sum that nearly cancels, 1e-4 of the others: rounding moves it by 1.02e-5
    compare(alone(kind), ranks.run(train, world, layout, kind), tolerance=3e-5 if kind == "delta" else 1e-5)


def test_all_tokens_may_go_to_one_rank(ranks: RankPool) -> None:
    """And none to the other: experts 0 to 3 are chosen always, and lie on rank 0."""
    compare(_train_lopsided({}), ranks.run(_train_lopsided, 2, {"dp_shard": 2, "ep": 2}))


def _train_lopsided(layout: dict[str, Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        select = Router._select
        patch.setattr(Router, "_select", lambda *args: select(*args)[:, :1] % 2 + torch.tensor([0, 2]))
        return train(layout, "moe")


def test_fewer_experts_than_ranks_are_cut_along_the_hidden_states(ranks: RankPool) -> None:
    """One of two experts here, on two ranks: each has half of its columns."""
    compare(_train_few({}), ranks.run(_train_few, 4, {"dp_shard": 4, "ep": 2, "zero": 2}))


def _train_few(layout: dict[str, Any]) -> Any:
    moe = MODELS["moe"]["moe"] | {"n_routed_experts": 2, "num_experts_per_tok": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "moe", MODELS["moe"] | {"moe": moe})
        return train(layout, "moe")


@pytest.mark.parametrize("policy", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_also_with_activation_checkpointing(ranks: RankPool, policy: str) -> None:
    compare(alone("moe"), ranks.run(_train, 2, {"dp_shard": 2, "ep": 2}, {"activation_checkpointing": policy}))


def _train(layout: dict[str, Any], options: dict[str, Any]) -> Any:
    return train(layout, "moe", **options)


def test_the_plain_twin_of_sorted_rows_agrees() -> None:
    """Outputs and gradients; fp32 sums in another order: 1e-5."""
    torch.manual_seed(0)
    rows, weights, ends = torch.randn(9, 8), torch.rand(9), torch.tensor([4, 4, 9], dtype=torch.int32)
    stacks = [torch.randn(3, 16, 8), torch.randn(3, 16, 8), torch.randn(3, 8, 16)]
    found = []
    for run in (run_sorted, run_sorted_plain):
        inputs = [tensor.clone().requires_grad_() for tensor in (rows, weights, *stacks)]
        out = run(inputs[0], inputs[1], ends, *inputs[2:])
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-4)


def test_experts_that_do_not_divide_are_refused(ranks: RankPool) -> None:
    said = "layout: ep 3 does not divide the 8 experts"
    assert set(ranks.run(_refused, 3, {"dp_shard": 3, "ep": 3}, "moe")) == {said}
    said = "layout: ep 2 needs a mixture of experts; this model is dense"
    assert set(ranks.run(_refused, 2, {"dp_shard": 2, "ep": 2}, "dense")) == {said}


def _refused(layout: dict[str, Any], kind: str) -> str:
    try:
        train(layout, kind)
    except UserError as error:
        return str(error)
    return "accepted"
