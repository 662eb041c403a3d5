"""The fused path and its plain twin equal `torch.optim.AdamW`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lmworks.optim.adamw import AdamW
from lmworks.optim.groups import Group

STEPS = 25


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in {"embedding": (50, 16), "norm": (16,), "head": (50, 16)}.items()}


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    noise = torch.Generator().manual_seed(step)
    for weight in named.values():
        weight.grad = torch.randn(weight.shape, generator=noise) + weight.detach()


@pytest.mark.parametrize("fused", [True, False])
def test_equal_to_torch(fused: bool) -> None:
    """Weights and state after 25 steps at changing rates, two groups; 1e-5, the order of the same roundings."""
    ours, theirs = parameters(), parameters()
    groups = [Group("adamw", 0.01, 0.0, 1.0, {k: ours[k] for k in ("embedding", "norm")}),
              Group("adamw", 0.02, 0.1, 1.0, {"head": ours["head"]})]  # fmt: skip
    adamw = AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=fused)
    assert adamw.fused == fused
    reference = torch.optim.AdamW(
        [
            {"params": [theirs["embedding"], theirs["norm"]], "lr": 0.01, "weight_decay": 0.0},
            {"params": [theirs["head"]], "lr": 0.02, "weight_decay": 0.1},
        ],
        betas=(0.9, 0.95), eps=1e-8, foreach=False, fused=False,
    )  # fmt: skip
    for step in range(STEPS):
        factor = (step + 1) / STEPS
        reference.param_groups[0]["lr"], reference.param_groups[1]["lr"] = 0.01 * factor, 0.02 * factor
        set_gradients(ours, step)
        set_gradients(theirs, step)
        adamw.step(factor)
        reference.step()
    assert adamw.count == STEPS
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(adamw.first[name], reference.state[weight]["exp_avg"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(adamw.second[name], reference.state[weight]["exp_avg_sq"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_a_parameter_without_gradient_is_left_alone(fused: bool) -> None:
    named = parameters()
    set_gradients(named, 0)
    named["head"].grad = None
    before = named["head"].detach().clone()
    adamw = AdamW([Group("adamw", 0.01, 0.1, 1.0, named)], fused=fused)
    adamw.step()
    assert torch.equal(named["head"], before)
    assert not adamw.first["head"].any()
