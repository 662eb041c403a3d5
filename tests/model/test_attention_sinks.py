"""Attention sinks, biases of experts and the clamped SwiGLU: every fast path against plain operations, and these against the definition.

Tolerance: 1e-5 of the largest value; fp32 sums in another order cost 1e-6 here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.model.flex_on_cpu import flex_on_cpu
from torch.nn.attention.flex_attention import flex_attention

from lmworks.inference.model import for_inference
from lmworks.model import Transformer, chunked
from lmworks.model.chunked import attend_flex_lse, block_mask
from lmworks.model.documents import from_cu_seqlens
from lmworks.model.moe import clamped_swiglu
from lmworks.model.sinks import attend_sinks
from lmworks.plan.memory import layer_activations
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import Balance, Model, Moe
from saved_bytes import saved_bytes

B, H, K, C = 2, 6, 2, 8
_MOE = Moe(
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, n_shared_experts=0, first_k_dense_replace=0,
    scoring_func="softmax", balance=Balance(method="aux"), add_bias=True, swiglu_alpha=1.702, swiglu_limit=0.5,
)  # fmt: skip
CONFIG = Model(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=32,
    attention_bias=True, attention_output_bias=True, attention_sinks=True, sliding_window="5 tokens",
    layer_types=("sliding_attention", "full_attention"), moe=_MOE,
)  # fmt: skip


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def model(config: Model = CONFIG) -> Transformer:
    made, generator = Transformer(config), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return made


def drawn(T: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(T)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((B, H, T, C), (B, K, T, C), (B, K, T, C), (H,))]


def test_a_sink_is_a_key_without_a_value() -> None:
    T = 5
    query, key, value, sinks = drawn(T)
    found = attend_sinks(query, key, value, None, 0.0, sinks, plain=True)
    for head in range(H):
        scores = query[:, head] @ key[:, head // (H // K)].mT / C**0.5
        scores = scores.masked_fill(~torch.ones(T, T, dtype=torch.bool).tril(), float("-inf")).exp()
        weights = scores / (scores.sum(-1, keepdim=True) + sinks[head].exp())
        near(found[:, head], weights @ value[:, head // (H // K)])


@pytest.mark.parametrize(("T", "window", "documents", "fused"), [
    (1, None, False, False), (7, None, False, False), (40, 5, True, False), (40, None, True, False), (200, 30, True, True),
])  # fmt: skip
def test_kernels_equal_plain(T: int, window: int | None, documents: bool, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used = flex_on_cpu(monkeypatch) if fused else []
    inputs, grad = drawn(T), torch.randn(B, H, T, C)
    borders = torch.tensor([0, T // 3, T, 2 * T]) if documents else None
    spans = from_cu_seqlens((B, T), borders, window, grad.device)
    mask = spans.window_mask if window else spans.mask
    found = [attend_sinks(*inputs[:3], mask, 0.0, inputs[3], plain) for plain in (False, True)]
    near(found[0], found[1])
    for fast, plain in zip(*(torch.autograd.grad((out * grad).sum(), inputs) for out in found), strict=True):
        near(fast, plain)
    assert len(used) == (2 if fused else 0) - fused


def test_the_fused_kernel_gives_the_log_sum_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention itself, not compiled, since its kernel for CPUs does not give it: natural logarithms, as of `attend_chunks`."""
    monkeypatch.setattr(chunked, "_compiled", lambda: flex_attention)
    query, key, value = (x.detach() for x in drawn(160)[:3])
    places = torch.arange(160).expand(B, -1)
    out, lse = attend_flex_lse(query, key, value, block_mask(torch.zeros_like(places), places, 160))
    mask = from_cu_seqlens((B, 160), torch.tensor([0, 160, 320]), None, query.device).mask
    assert mask is not None
    expected = mask.attend_lse(query, key, value)
    near(out, expected[0])
    near(lse, expected[1])


def test_the_clamped_swiglu() -> None:
    """By the formula of the report: alpha 1.702 and limit 7, the gate clamped above alone."""
    gate, up = torch.tensor([-20.0, -1.0, 0.5, 9.0]), torch.tensor([-9.0, 0.25, 8.0, 1.0])
    expected = [-8.0 + 1, 1.25, 8.0, 2.0]
    for number, (factor, clamped) in enumerate(zip(expected, (-20.0, -1.0, 0.5, 7.0), strict=True)):
        expected[number] = (-6.0 if number == 0 else factor) * clamped / (1 + torch.tensor(-1.702 * clamped).exp().item())
    near(clamped_swiglu(gate, up, 1.702, 7.0), torch.tensor(expected))


def test_fast_equals_plain_in_loss_and_gradients() -> None:
    one, tokens, found = model(), torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(2)), []
    assert {parameter.name: parameter.shape for parameter in parameters(CONFIG)} == {
        name: tuple(parameter.shape) for name, parameter in one.named_parameters()
    }  # fmt: skip
    for plain in (False, True):
        one.plain(plain).zero_grad()
        loss = one.loss(tokens, tokens.roll(-1, 1), torch.tensor([0, 11, 30, 60])).total
        loss.backward()
        found.append({"loss": loss.detach()} | {name: parameter.grad.clone() for name, parameter in one.named_parameters()})
    for name, expected in found[1].items():
        near(found[0][name], expected)


@pytest.mark.parametrize("change", [{}, {"moe": _MOE.model_copy(update={"add_bias": False, "swiglu_alpha": None, "swiglu_limit": None})}])
def test_a_plan_knows_what_a_layer_saves(change: dict[str, Any]) -> None:
    """Bytes per token of a layer by the plan and by autograd, in eager mode; they differ by less than 2 in 100."""
    sizes, length = [], 256
    for layers in (2, 4):
        one = model(CONFIG.model_copy(update={"num_hidden_layers": layers, "sliding_window": None, "layer_types": ()} | change))
        tokens, cu_seqlens = torch.randint(64, (2, length)), torch.tensor([0, length, 2 * length])
        sizes.append(saved_bytes(partial(one.loss, tokens, tokens.roll(-1, 1), cu_seqlens), without=one))
    config = CONFIG.model_copy(update=change)
    planned = layer_activations(config, 1, Layout(), 4, length, eager=True)["none"]
    assert (sizes[1] - sizes[0]) / 2 / (2 * length) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_model_for_inference_computes_the_same_token_by_token(dropout: float) -> None:
    one = model(CONFIG.model_copy(update={"attention_dropout": dropout})).eval()
    tokens = torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, ready, steps = one(tokens), for_inference(one), []
        near(ready(tokens), expected)
        near(for_inference(one, torch.float64, join=False)(tokens).float(), expected)
        cache = ready.cache(2, 32)
        for begin, end in ((0, 13), *((at, at + 1) for at in range(13, 30))):
            steps.append(ready(tokens[:, begin:end], cache=cache))
            cache.finish(end - begin)
        near(torch.cat(steps, dim=1), expected)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"moe": {"swiglu_alpha": 1.702}}, "moe.swiglu_alpha needs moe.swiglu_limit"),
        ({"moe": {"swiglu_limit": 7.0}}, "moe.swiglu_limit needs moe.swiglu_alpha"),
        ({"rope": {"truncate": False}}, "rope.truncate does nothing under rope.scaling none"),
        ({"mla": {}, "attention_sinks": True}, "model.attention_sinks does not combine with model.mla"),
        ({"mla": {}, "attention_output_bias": True}, "model.attention_output_bias does not combine with model.mla"),
    ],
)
def test_what_does_not_combine_is_refused(change: dict[str, Any], reason: str) -> None:
    if "moe" in change:
        change = {"moe": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32} | change["moe"]}
    with pytest.raises(ValueError, match=reason):
        Model.model_validate(change)
