"""The recurrences between chunks, as operators of the compiler: their gradients, and compiled code that does not grow with the length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lmworks.model.delta_rule import delta_rule
from lmworks.model.documents import Documents
from lmworks.model.layers import softplus
from lmworks.model.lightning import Lightning
from lmworks.model.ssd import scan
from lmworks.model.states import decayed_states, delta_states
from lmworks.recipe.schema.model import Model


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_gradients_of_outputs_and_of_states() -> None:
    """Together, and each alone: the states of a cache, the outputs of training."""
    torch.manual_seed(0)
    given = normal(3, 2, 2, 3), *(normal(3, 2, 2, 2) for _ in range(4)), normal(3, 2), normal(2, 2, 3)
    for chosen in (slice(0, 1), slice(1, 2), slice(0, 2)):
        assert torch.autograd.gradcheck(lambda *parts, chosen=chosen: delta_states(*parts)[chosen], given)
    assert torch.autograd.gradcheck(decayed_states, (normal(3, 2, 2, 3), normal(3, 2), normal(2, 2, 3)))


@pytest.mark.parametrize("which", ["delta rule", "scan"])
def test_operations_do_not_grow_with_the_length(which: str) -> None:
    def operations(length: int) -> int:
        query, key, value = torch.randn(1, length, 1, 8), torch.randn(1, length, 1, 8), torch.randn(1, length, 2, 8)
        decay, positions = -torch.rand(1, length, 2), torch.arange(length)[None]
        run: Callable[..., Any] = delta_rule if which == "delta rule" else scan
        parts = (query, key, value, decay, torch.rand(1, length, 2)) if which == "delta rule" else (query, key, value, decay)
        traced = make_fx(lambda *given: run(*given, positions)[0])(*parts)
        return sum(node.op == "call_function" for node in traced.graph.nodes)

    assert operations(128) == operations(1024)


def test_layers_with_other_decays_share_their_compiled_code() -> None:
    from torch._dynamo.utils import counters

    config = Model.model_validate({
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 16, "lightning": {}, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    })  # fmt: skip
    torch.manual_seed(0)
    layers = [Lightning(config, number) for number in range(2)]
    assert not torch.equal(layers[0].log_decay_H, layers[1].log_decay_H)
    torch._dynamo.reset()
    counters.clear()
    x_BTD, documents = torch.randn(1, 8, 16), Documents(torch.arange(8)[None], None, None)
    for layer in layers:
        for one in layer.parameters():
            torch.nn.init.normal_(one)
        torch.testing.assert_close(
            torch.compile(layer.forward, backend="eager")(x_BTD, None, documents), layer(x_BTD, None, documents), rtol=0, atol=0
        )
    assert counters["stats"]["unique_graphs"] == 1


def test_the_gradient_of_softplus_has_the_strides_that_the_compiler_expects() -> None:
    def loss(x: Tensor) -> Tensor:
        return (softplus(torch.nn.functional.linear(x, matrix)).view(2, 3, 4, 2, 2).permute(0, 3, 4, 1, 2).contiguous() * weight).sum()

    torch.manual_seed(0)
    weight, matrix, x = torch.randn(2, 2, 2, 3, 4), torch.randn(4, 4), torch.randn(2, 12, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    (found,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(softplus(x), torch.nn.functional.softplus(x))
