"""A flipped bit is found, and whose it is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from unsteady import AnotherOrder

from lmworks.train.corruption import compare_replicas
from lmworks.watch.monitors import Deviation, Traced, checksum, checksums, differing, outlying, trace, vote


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    """One bit of one element."""
    raw = tensor.detach().reshape(-1).view(torch.uint8)
    raw[element * tensor.element_size() + bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_any_flipped_bit_changes_the_checksum(dtype):
    draw = random.Random(2)
    tensor = torch.randn(7, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    bits = 1 if dtype == torch.bool else 8 * tensor.element_size()
    for _ in range(40):
        element, bit = draw.randrange(tensor.numel()), draw.randrange(bits)
        flip(tensor, element, bit)
        assert checksum(tensor) != before, (element, bit)
        flip(tensor, element, bit)


def test_nan_and_zero_have_checksums_too():
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor(3.0)).shape == ()


def test_the_majority_is_right():
    good = {("a", "whole"): 1, ("b", "0"): 2}
    assert vote([good] * 4) == []
    assert vote([good, good, {**good, ("b", "0"): 9}, good]) == [Deviation(2, "b", True)]
    assert vote([good, {**good, ("a", "whole"): 9}]) == [Deviation(0, "a", False), Deviation(1, "a", False)]
    assert vote([{("a", "rows 0-3"): 1}, {("a", "rows 4-7"): 5}]) == [], "different parts are no copies"


def _at_call(number: int | None, act: Callable[..., None]) -> Callable[..., None]:
    """A hook that acts when it is called the `number`th time, from 1 on."""
    calls = []

    def hook(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            act(*arguments)

    return hook


def _model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4)), torch.randn(5, 8)


def _runs(model: nn.Module, x: torch.Tensor, count: int) -> list[Traced]:
    parts = {f"layer {name}": module for name, module in model.named_children()}

    def run() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    return [trace(run, parts, dict(model.named_parameters())) for _ in range(count)]


def _twice(model: nn.Module, x: torch.Tensor) -> list[str]:
    return differing(*_runs(model, x, 2))


def test_sound_arithmetic_is_the_same_twice_and_leaves_no_trace():
    model, x = _model()
    state, grads = torch.get_rng_state(), [p.grad for p in model.parameters()]
    assert _twice(model, x) == []
    assert torch.equal(torch.get_rng_state(), state)
    assert [p.grad for p in model.parameters()] == grads == [None] * 4
    assert not any(module._forward_hooks for module in model.modules())


def test_a_flipped_bit_in_an_activation_is_found_where_it_happened():
    model, x = _model()
    model[0].register_forward_hook(_at_call(2, lambda module, inputs, output: flip(output, 7, 12)))
    assert _twice(model, x)[0] == "output of layer 0"


def test_a_flipped_bit_in_a_gradient_is_found():
    model, x = _model()
    model[2].weight.register_post_accumulate_grad_hook(_at_call(1, lambda parameter: flip(parameter.grad, 3, 2)))
    assert _twice(model, x) == ["gradient of 2.weight"]


class _Unsteady(nn.Sequential):
    def forward(self, x):
        return self[2](AnotherOrder.apply(self[1](self[0](x)), 2**-8))


@pytest.mark.parametrize("corrupt", [None, 1, 2, 3])
def test_kernels_that_add_up_in_another_order_are_sound_and_a_run_that_stands_out_is_not(corrupt):
    torch.manual_seed(0)
    model, x = _Unsteady(nn.Linear(64, 128), nn.Dropout(0.5), nn.Linear(128, 64)), torch.randn(50, 64)

    def flip_sign_and_exponent(parameter):
        parameter.grad[3, 5] *= -64

    model[0].weight.register_post_accumulate_grad_hook(_at_call(corrupt, flip_sign_and_exponent))
    runs = _runs(model, x, 3)
    assert "gradient of 0.weight" in differing(*runs[:2]) and "output of layer 2" not in differing(*runs[:2])
    assert outlying(runs, 2**-8) == ([] if corrupt is None else ["gradient of 0.weight"])


def test_what_rounding_can_do_is_sound_though_only_one_run_shows_it():
    """As of kernels whose order of sums changes rarely."""
    model, x = _model()

    def round_otherwise(parameter):
        parameter.grad[1, 1] *= 1 + 2**-9

    model[2].weight.register_post_accumulate_grad_hook(_at_call(2, round_otherwise))
    runs = _runs(model, x, 3)
    assert differing(*runs[:2]) == ["gradient of 2.weight"]
    assert outlying(runs, 2**-8) == [] and outlying(runs, 2**-23) == ["gradient of 2.weight"]


def test_outputs_have_equal_bits_wherever_gradients_need_not():
    model, x = _model()
    model[0].register_forward_hook(_at_call(3, lambda module, inputs, output: flip(output, 7, 1)))
    assert outlying(_runs(model, x, 3), 2**-8)[0] == "output of layer 0"


def replica(planted: int | None) -> list[tuple[int, str, bool]]:
    """On each rank: a DTensor sharded over two and copied over two ranks, a plain one, and optimizer state; one bit flipped on one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    draw = torch.Generator().manual_seed(3)
    sharded = distribute_tensor(torch.randn(6, 4, generator=draw), mesh, [Replicate(), Shard(0)])
    copied = distribute_tensor(torch.ones(3), mesh, [Replicate()] * 2)
    tensors = {"sharded": sharded, "plain": torch.randn(5, generator=draw), "copied": copied}
    if dist.get_rank() == planted:
        flip(tensors["plain"], 2, 1)
        flip(sharded.to_local(), 1, 30)
    return [(one.rank, one.tensor, one.certain) for one in compare_replicas(tensors, dist.group.WORLD)]


@pytest.mark.slow
def test_the_rank_is_named_among_four(ranks):
    assert ranks.run(replica, 4, None) == [[]] * 4
    for planted in range(4):
        shard_mates = [(rank, "sharded", False) for rank in sorted({planted, (planted + 2) % 4})]
        assert ranks.run(replica, 4, planted) == [[(planted, "plain", True), *shard_mates]] * 4


def test_checksums_are_plain_numbers():
    tensors = {"a": torch.ones(3), "b": torch.arange(4)}
    assert checksums(tensors) == {"a": int(np.float32(1).view(np.int32)) * 3, "b": 6}
    assert checksums({}) == {}
