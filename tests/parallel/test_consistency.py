"""What ranks compare when they meet: versions, layouts, and what their devices multiply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.host import devices
from lmworks.parallel import process_group
from lmworks.parallel.mesh import Ranks, alone
from lmworks.parallel.parallelize import build
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe

CPU = torch.device("cpu")


def meet(other: dict[str, Any], odd: tuple[int, ...]) -> str | tuple[bool, str]:
    """As one of the ranks, of which those in `odd` are different; what was refused, or what they agreed on."""
    environment = process_group.rank_environment(Layout(dp_shard=dist.get_world_size()), CPU)
    mine = replace(environment, host=f"node-{dist.get_rank() // 2}", bf16=True)
    try:
        process_group.check_consistency(replace(mine, **other) if dist.get_rank() in odd else mine)
        return devices._all_ranks_have_bf16, str(devices.dtype_for("auto", CPU))
    except UserError as error:
        return str(error)
    finally:
        devices.set_bf16_on_all_ranks(True)


@pytest.mark.parametrize(
    ("other", "odd", "message"),
    [
        ({"torch": "2.12.0"}, (2,), f"torch is 2.12.0 on rank 2 (on node-1) and {torch.__version__} on the others; install the same"),
        ({"lmworks": "0.0.1"}, (1, 3), "lmworks is 0.0.1 on ranks 1, 3 (on node-0, node-1) and "),
        ({"layout": Layout(tp=4)}, (3,), "the layout of rank 3 (on node-1) differs from that of the others; start all with"),
    ],
)
def test_ranks_that_differ_are_named_by_all(ranks, other: dict[str, Any], odd: tuple[int, ...], message: str) -> None:
    told = ranks.run(meet, 4, other, odd)
    assert all(isinstance(one, str) and one.startswith(message) for one in told), told
    assert len(set(told)) == 1, "the same line on all ranks"


def test_one_device_without_bf16_products_makes_all_compute_in_fp32(ranks) -> None:
    assert ranks.run(meet, 2, {"bf16": False}, (1,)) == [(False, "torch.float32")] * 2


def test_equal_ranks_keep_what_their_devices_have(ranks, has_bf16: bool) -> None:
    assert ranks.run(meet, 2, {}, ()) == [(True, "torch.bfloat16" if has_bf16 else "torch.float32")] * 2


def sparse(expert_size: int, number: str, hidden: int = 32) -> Recipe:
    moe = f"{{n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: {expert_size}}}"
    model = (
        f"model={{hidden_size: {hidden}, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, "
        f"intermediate_size: 64, moe: {moe}}}"
    )
    return load_recipe("quickstart", [model, f"train.precision={number}", "train.compile=false", "tokenizer.vocab_size=512"]).recipe


@pytest.mark.parametrize(
    ("expert_size", "number", "hidden", "message"),
    [
        (
            20,
            "bf16",
            32,
            "model.moe.moe_intermediate_size 20 is not a multiple of 8, which grouped products of 16-bit numbers require; set 24",
        ),
        (
            18,
            "fp32",
            32,
            "model.moe.moe_intermediate_size 18 is not a multiple of 4, which grouped products of 32-bit numbers require; set 20",
        ),
        (16, "bf16", 36, "model.hidden_size 36 is not a multiple of 8, which grouped products of 16-bit numbers require"),
    ],
)
def test_sizes_that_grouped_products_cannot_take(expert_size: int, number: str, hidden: int, message: str) -> None:
    """What is refused would have failed in the kernel, and what is not refused runs."""
    with pytest.raises(UserError, match=message):
        build(sparse(expert_size, number, hidden), alone(), CPU)
    build(sparse(expert_size // 4 * 4, "fp32", 32), alone(), CPU)


def built(expert_size: int, number: str) -> str:
    try:
        build(sparse(expert_size, number), Ranks(Layout(tp=2)), CPU)
        return "built"
    except UserError as error:
        return str(error)


def test_slices_of_experts_that_grouped_products_cannot_take(ranks) -> None:
    message = (
        "model.moe.moe_intermediate_size 24 / tp 2 = 12 is not a multiple of 8, which grouped products of 16-bit numbers require; set 32"
    )
    assert ranks.run(built, 2, 24, "bf16") == [message] * 2
    assert ranks.run(built, 2, 24, "fp32") == ["built"] * 2
