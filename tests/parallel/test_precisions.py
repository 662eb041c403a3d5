"""What parity compares is fixed by the comparison, whatever the processor multiplies: fp32 throughout, and 16 bits by their own measure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmworks.optim.clip import LossScaler
from lmworks.optim.groups import local
from lmworks.optim.optimizer import build_optimizer
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.schema.layout import Layout, world_size
from parallel.parity import OF_FP16, alone, alone_16bit, batch_of, compare, compare_16bit, recipe_of, step_of, train, train_16bit, whole
from rank_pool import RankPool

FAST: list[tuple[dict[str, Any], str]] = [
    ({"dp_shard": 2, "zero": 3}, "dense"),
]  # fmt: skip
SLOW: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2}, "mla"), ({"cp": 2, "ep": 2}, "moe"), ({"pp": 2}, "tied"),
    ({"dp_shard": 2, "zero": 0}, "moe"), ({"dp_shard": 4, "zero": 1}, "tied"), ({"dp_shard": 2, "zero": 2}, "mtp"),
    ({"dp_replicate": 2}, "mla"), ({"tp": 2}, "moe"), ({"tp": 2}, "mtp"), ({"tp": 2}, "tied"), ({"cp": 2}, "mla"), ({"cp": 4}, "tied"),
    ({"dp_shard": 2, "ep": 2}, "moe"), ({"dp_shard": 2, "ep": 2}, "mla"), ({"pp": 2}, "moe"), ({"pp": 2}, "mtp"),
    ({"dp_shard": 2, "cp": 2, "ep": 4}, "mla"), ({"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2}, "moe"), ({"tp": 2}, "mamba"),
    ({"tp": 4}, "mamba_pairs"), ({"dp_shard": 2, "tp": 2, "zero": 3}, "mamba_alone"),
]  # fmt: skip


def _name(value: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("layout", "kind"), FAST, ids=_name)
def test_equals_one_process_in_bf16(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare_16bit(*alone_16bit(kind), ranks.run(train_16bit, world_size(Layout(**layout)), layout, kind))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), SLOW, ids=_name)
def test_more_layouts_equal_one_process_in_bf16(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare_16bit(*alone_16bit(kind), ranks.run(train_16bit, world_size(Layout(**layout)), layout, kind))


@pytest.mark.slow
def test_equals_one_process_in_fp16(ranks: RankPool) -> None:
    """With a scaled loss. The tolerance is again a multiple of the error of one process, and an eighth of bf16's for losses and norms."""
    layout, kind = FAST[0]
    compare_16bit(*alone_16bit(kind, "fp16"), ranks.run(train_16bit, 2, layout, kind, "fp16"), OF_FP16)


def after_overflow(layout: dict[str, Any], kind: str) -> tuple[float, bool, list[str]]:
    """A step in fp16 in which the gradients of rank 1 alone overflow: the scale of the loss after it, whether the update was applied, and
    the weights that it changed."""
    recipe, ranks = recipe_of(kind, precision="fp16"), Ranks(Layout(**layout))
    model = ParallelModel(build(recipe, ranks, torch.device("cpu")), ranks)
    optimizer, scaler, forward_backward = build_optimizer(model, recipe.optimizer), LossScaler(initial=2.0**10), model.forward_backward
    before = {name: whole(value) for name, value in model.state_dict().items()}

    def overflow(*inputs: Any) -> Any:
        sums = forward_backward(*inputs)
        if ranks.global_rank == 1:
            for parameter in model.parameters():
                local(parameter.grad).fill_(float("inf"))
        return sums

    model.forward_backward = overflow  # type: ignore[method-assign]
    model.train()
    result = step_of(model, optimizer, batch_of(0), scaler)
    changed = [name for name, value in model.state_dict().items() if not np.array_equal(whole(value), before[name])]
    return float(scaler.scale), bool(result.applied), changed


def test_an_overflow_on_one_rank_halves_the_scale_of_all(ranks: RankPool) -> None:
    assert ranks.run(after_overflow, 2, *FAST[0]) == [(2.0**9, False, [])] * 2


def test_fp32_is_fp32_whatever_the_processor_multiplies(ranks: RankPool, has_bf16: bool) -> None:
    alone.cache_clear()  # made again under what is said of the machine now
    compare(alone("moe"), ranks.run(train, 2, {"dp_shard": 2, "ep": 2}, "moe"))
