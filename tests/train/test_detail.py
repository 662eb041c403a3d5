"""Signals per layer are what a plain computation gives, and the first bad module is named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lmworks.model import Transformer, attention
from lmworks.model.init import initialize
from lmworks.recipe.model import Model
from lmworks.train.detail import largest_score, watching


def model() -> Transformer:
    config = Model(
        hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, ffn_size=48, vocab_size=64, qk_norm=True, max_length="64 tokens",
    )  # fmt: skip
    return initialize(Transformer(config), 3).eval()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (2, 12)))
    return tokens, tokens.roll(-1, 1)


def named(found: Transformer) -> tuple[dict[str, torch.nn.Module], dict[str, torch.nn.Module]]:
    blocks = {f"layers.{number}": block for number, block in enumerate(found.layers)}
    return blocks, {name: block.attention for name, block in blocks.items()}


def test_activations_and_scores_are_those_of_a_plain_computation(monkeypatch: pytest.MonkeyPatch):
    found, outputs, scores = model(), [], []
    for block in found.layers:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output[0].detach()))
    honest = attention.attend_fast

    def plain(query: Tensor, key: Tensor, value: Tensor, mask: object, dropout: float) -> Tensor:
        every = torch.einsum("bhtc,bhsc->bhts", query.detach(), key.detach().repeat_interleave(2, 1)) / 8**0.5
        scores.append(max(float(every[b, h, t, s]) for b in range(2) for h in range(4) for t in range(12) for s in range(t + 1)))
        return honest(query, key, value, mask, dropout)

    monkeypatch.setattr(attention, "attend_fast", plain)
    with watching(*named(found)) as seen:
        expected = found.loss(*batch()).total
    monkeypatch.undo()
    for number, output in enumerate(outputs):
        squares, count = seen.activations()[f"layers.{number}"]
        assert count == output.numel()
        np.testing.assert_allclose(squares, float(output.double().square().sum()), rtol=1e-12)
    np.testing.assert_allclose([seen.logits()[f"layers.{number}"] for number in range(3)], scores, rtol=1e-5)  # another order of sums
    assert seen.first_bad() is None
    assert torch.equal(found.loss(*batch()).total, expected), "watching changes nothing"


def test_the_largest_score_keeps_to_the_mask():
    query, key = torch.ones(1, 1, 2, 4), torch.tensor([1.0, 9.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    assert largest_score(query[:, :, :1], key[:, :, :1], None) == 2
    assert largest_score(query, key, None) == 18
    assert largest_score(query, key, torch.tensor([[[[True, False], [True, False]]]])) == 2


@pytest.mark.parametrize("where", ["layers.1.ffn.down", "layers.2.attention.query", "norm"])
def test_the_first_module_that_went_wrong_is_named(where: str):
    found = model()
    found.get_submodule(where).register_forward_hook(lambda module, inputs, output: output * float("inf"))
    with watching({name: module for name, module in found.named_modules() if name}, {}) as seen:
        found.loss(*batch()).total.backward()
    assert seen.first_bad() == f"output of {where}"


def test_a_gradient_that_went_wrong_is_named_too():
    found = model()

    def spoil(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(lambda grad: grad * float("nan"))

    found.get_submodule("layers.1.attention.output").register_forward_hook(spoil)
    with watching({name: module for name, module in found.named_modules() if name}, {}) as seen:
        found.loss(*batch()).total.backward()
    assert seen.first_bad() == "gradient of layers.1.attention.output"


def test_nothing_is_left_behind():
    found, honest = model(), (attention.attend_fast, attention.attend_plain)
    with pytest.raises(RuntimeError, match="stop"), watching(*named(found)):
        raise RuntimeError("stop")
    assert (attention.attend_fast, attention.attend_plain) == honest
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in found.modules())
