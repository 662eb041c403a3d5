"""Layer-wise learning-rate decay: the updated weights beside a plain loop over the same gradients."""

from __future__ import annotations

import re

import pytest
import torch

from lmworks.model import Transformer
from lmworks.optim.optimizer import build_optimizer
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.train import Optimizer as Options
from small_config import small_config

LAYERS, DECAY, RATE, ADAM_RATE = 3, 0.5, 0.02, 0.003


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_updated_weights_equal_a_plain_loop(kind: str) -> None:
    torch.manual_seed(0)
    config = Model.model_validate(small_config(num_hidden_layers=LAYERS, attention_bias=True))
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    options = Options(
        kind=kind, learning_rate=RATE, adam_learning_rate=ADAM_RATE, layer_lr_decay=DECAY, weight_decay=0.1, momentum=0.9, betas=(0.9, 0.95)
    )
    optimizer = build_optimizer(model, options)
    expected = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in expected.items()}
    second = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 4):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            layer = re.match(r"layers\.(\d+)\.", name)
            matrix = layer is not None and parameter.ndim >= 2
            below_top = LAYERS - 1 - int(layer[1]) if layer else LAYERS if name.startswith("embedding") else 0
            rate = (RATE if kind == "adamw" or matrix else ADAM_RATE) * DECAY**below_top
            decay = 0.1 if matrix or name == "head.weight" else 0.0
            value, grad = expected[name], parameter.grad
            value.mul_(1 - rate * decay)
            if kind == "muon" and matrix:
                first[name] = 0.9 * first[name] + grad
                value.sub_(rate * _orthogonal(grad + 0.9 * first[name]))
                continue
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            value.sub_(rate * (first[name] / (1 - 0.9**step)) / ((second[name] / (1 - 0.95**step)).sqrt() + 1e-8))
        optimizer.step()
    for name, parameter in model.named_parameters():
        # fp32: Newton-Schulz of the two sums in another order, three times
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def _orthogonal(update: torch.Tensor) -> torch.Tensor:
    """Muon's update with `rms` scaling: five Newton-Schulz iterations (Jordan et al. 2024), then 0.2 sqrt(max(rows, columns))."""
    x = update / (update.norm() + 1e-7)
    turned = x.T if x.shape[0] > x.shape[1] else x
    for _ in range(5):
        square = turned @ turned.T
        turned = 3.4445 * turned + (-4.775 * square + 2.0315 * square @ square) @ turned
    x = turned.T if x.shape[0] > x.shape[1] else turned
    return x * 0.2 * max(x.shape) ** 0.5
