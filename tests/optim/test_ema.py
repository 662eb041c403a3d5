"""The average of the weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lmworks.optim.optimizer import Ema


def test_equal_to_the_sum_written_out() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0]))
    ema = Ema({"weight": weight}, 0.9)
    seen = [weight.detach().clone()]
    for step in range(20):
        with torch.no_grad():
            weight.copy_(torch.tensor([math.sin(step), step]))
        ema.step()
        seen.append(weight.detach().clone())
    expected = 0.9**20 * seen[0] + sum(0.1 * 0.9 ** (20 - step) * seen[step] for step in range(1, 21))
    torch.testing.assert_close(ema.average["weight"], expected)


def test_a_bad_step_does_not_count() -> None:
    weight = nn.Parameter(torch.ones(3))
    ema = Ema({"weight": weight}, 0.5)
    with torch.no_grad():
        weight.fill_(math.nan)
    ema.step(torch.tensor(False))
    assert torch.equal(ema.average["weight"], torch.ones(3))


def test_the_model_carries_the_average_and_gets_its_weights_back() -> None:
    layer = nn.Linear(3, 3)
    ema = Ema(dict(layer.named_parameters()), 0.5)
    with torch.no_grad():
        layer.weight.add_(2.0)
    ema.step()
    own = layer.weight.detach().clone()

    def interrupted() -> None:
        with ema.in_place():
            torch.testing.assert_close(layer.weight, own - 1.0)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        interrupted()
    assert torch.equal(layer.weight, own)
