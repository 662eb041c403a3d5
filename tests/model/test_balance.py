"""Balancing: what is counted, what moves, and that a skewed router becomes even, layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.model.test_transformer import _SMALL, CONFIGS, build, sample
from torch.utils._python_dispatch import TorchDispatchMode

from lmworks.model import Transformer
from lmworks.model.balance import load_error, load_statistics, set_temperature, step_loss, update_biases
from lmworks.model.init import initialize
from lmworks.model.moe import grouped_mm_cpu
from lmworks.model.router import Router, sinkhorn
from lmworks.parallel.parallelize import checkpoint_activations
from lmworks.recipe.schema.layout import ActivationCheckpointing
from lmworks.recipe.schema.model import Balance, Model, Moe
from lmworks.train.answers import Answer, pack


def skewed(balance: Balance) -> Transformer:
    """Two sparse layers, each with a selection that strongly prefers its own experts."""
    model = initialize(
        Transformer(
            Model(
                **_SMALL,
                moe=Moe(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1, balance=balance),
            )
        ),
        1,
    )
    with torch.no_grad():
        for layer, ffn in enumerate(model.moe_layers()):
            ffn.router.bias[layer : layer + 2] = 0.05
    return model


def counts_of(model: Transformer, seed: int) -> torch.Tensor:
    tokens = torch.randint(128, (4, 64), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        _, experts = model.hidden(tokens)
    assert experts.counts is not None
    return experts.counts


def test_padding_loads_the_experts_as_the_text_of_its_row_does() -> None:
    """Which one token in all of its places does not: it always goes to the same two of eight."""
    model = skewed(Balance())
    text = np.random.default_rng(3).integers(1, 128, 33)
    begins = np.array([0, 32, 64], np.int32)
    row = pack([Answer(text, np.arange(33) > 4)], 64, 0).batch
    assert (row.cu_seqlens == begins).all() and row.valid_tokens == 28
    with torch.no_grad():
        (whole, alone) = (model.hidden(torch.from_numpy(tokens).long(), torch.from_numpy(bounds))[1].counts
                          for tokens, bounds in ((row.tokens, begins), (row.tokens[:, :32], begins[:2])))  # fmt: skip
    assert whole is not None and alone is not None and torch.equal(whole, 2 * alone)


@pytest.mark.parametrize("update", ["sign", "proportional"])
def test_a_skewed_router_becomes_even_and_stays_so(update: str) -> None:
    balance = Balance(bias_update=update, bias_update_rate=0.003)
    model = skewed(balance)
    before = load_statistics(counts_of(model, 0), 1.25)["cv"]
    history = []
    for step in range(90):
        counts = counts_of(model, step)
        update_biases(model.moe_layers(), counts, balance.bias_update_rate, balance)
        history.append(load_statistics(counts, 1.25)["cv"])
    late = torch.stack(history[-30:])
    assert (before > 1.0).all(), "the start must be badly skewed in every layer"
    assert (late.mean(0) < 0.25).all(), late.mean(0)
    assert (late.max(0).values < 0.5).all(), "it stays even"
    biases = [ffn.router.bias for ffn in model.moe_layers()]
    assert not torch.allclose(biases[0], biases[1], atol=1e-3), "one bias per layer"


def test_each_way_of_choosing_moves_as_published() -> None:
    balance = Balance(bias_update_rate=0.1, bias_clamp=0.15)
    model = skewed(balance)
    for ffn in model.moe_layers():
        ffn.router.bias.zero_()
    counts = torch.tensor([[8.0, 0, 0, 0, 4, 4, 4, 4], [3.0, 3, 3, 3, 3, 3, 3, 3]])
    update_biases(model.moe_layers(), counts, 0.1, balance)
    assert model.moe_layers()[0].router.bias.tolist() == pytest.approx([-0.1, 0.1, 0.1, 0.1, -0.1, -0.1, -0.1, -0.1])
    assert model.moe_layers()[1].router.bias.tolist() == [0.0] * 8
    update_biases(model.moe_layers(), counts, 0.1, balance)
    assert model.moe_layers()[0].router.bias.abs().max() == pytest.approx(0.15), "the clamp"
    model.moe_layers()[0].router.bias.zero_()
    update_biases(model.moe_layers(), counts, 0.1, balance.model_copy(update={"bias_update": "proportional"}))
    assert model.moe_layers()[0].router.bias.tolist() == pytest.approx([-0.1, 0.1, 0.1, 0.1, *[-0.1 / 3] * 4])
    before = model.moe_layers()[0].router.bias.clone()
    update_biases(model.moe_layers(), counts, 0.1, balance, apply=torch.tensor(False))
    update_biases(model.moe_layers(), counts, 0.0, balance)
    assert torch.equal(model.moe_layers()[0].router.bias, before), "a bad step, and rate 0, move nothing"


def test_loads_are_the_shares_of_tokens_that_chose_an_expert() -> None:
    shares = torch.tensor([[1.0, 10, 100, 0, 0, 0, 0, 1000], [2.0] * 8])
    found = step_loss(shares, torch.tensor([[4, 3, 1, 0, 0, 0, 0, 0], [1] * 8]), 2)  # two of each of 4 tokens
    assert float(found) == 1.0 + 7.5 + 25.0 + 2 * 8 * 0.25


@pytest.mark.parametrize("mode", ["full", "selective", "50%"])
def test_activation_checkpointing_counts_nothing_twice(mode: str) -> None:
    tokens, labels, cu_seqlens = sample()
    plain, checkpointed = build(CONFIGS["aux"]), build(CONFIGS["aux"])
    checkpoint_activations(checkpointed, ActivationCheckpointing.parse(mode))
    losses = []
    for model in (plain, checkpointed):
        loss = model.loss(tokens, labels, cu_seqlens)
        loss.total.backward()
        losses.append(loss)
    assert losses[0].layers.counts is not None
    assert losses[1].layers.counts is not None
    assert torch.equal(losses[0].layers.counts, losses[1].layers.counts)
    assert losses[0].layers.counts.sum(-1).tolist() == [tokens.numel() * 2] * 2, "each token counts top_k times in each layer"
    torch.testing.assert_close(losses[0].total, losses[1].total, rtol=1e-6, atol=0)
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6, msg=name)


class _Products(TorchDispatchMode):
    """Counts the products of experts in bf16 on a CPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is grouped_mm_cpu
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("selective", 1), ("full", 2)])
def test_selective_checkpointing_keeps_the_products_of_experts(mode: str, times: int) -> None:
    """Gate, up and down of each of two layers are computed once; with full recomputation again backward."""
    model = build(CONFIGS["aux"])
    model.compute_dtype = torch.bfloat16
    checkpoint_activations(model, ActivationCheckpointing.parse(mode))
    tokens = torch.randint(128, (4, 64), generator=torch.Generator().manual_seed(0))
    with _Products() as products:
        model.loss(tokens, tokens).total.backward()
    assert products.count == 2 * 3 * times


def test_evaluation_leaves_no_trace() -> None:
    model = build(CONFIGS["aux"]).eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tokens, labels, cu_seqlens = sample()
    with torch.no_grad():
        assert model.loss(tokens, labels, cu_seqlens).layers.aux is None
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())


def test_the_bias_selects_but_never_weights() -> None:
    model = build(CONFIGS["moe"]).eval()
    router = model.moe_layers()[0].router
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        router.bias.zero_()
        router.bias[3] = 100.0
        forced = router(x)
    assert (forced.experts == 3).any(-1).all(), "the bias selects"
    gates = torch.sigmoid(x[0] @ router.weight.T)
    chosen = gates.gather(1, forced.experts)
    torch.testing.assert_close(forced.weights, 2.5 * chosen / chosen.sum(-1, keepdim=True))


def test_statistics_by_hand() -> None:
    values = load_statistics(torch.tensor([[4.0, 0.0, 2.0, 2.0]]), capacity_factor=1.25)
    assert float(values["cv"]) == pytest.approx((2 / 4) ** 0.5)
    assert float(values["max_ratio"]) == 2
    assert float(values["min_ratio"]) == 0
    assert int(values["dead"]) == 1
    assert float(values["overflow"]) == pytest.approx((2 - 1.25) / 4)
    assert load_error(torch.tensor([[4.0, 0.0, 2.0, 2.0]])).tolist() == [[-1.0, 1.0, 0.0, 0.0]]


def test_sinkhorn_evens_each_skewed_sequence() -> None:
    skew = torch.tensor([[3.0, 2, 0, 0, 0, 0, 0, 0], [0.0, 0, 0, 0, 0, 0, 2, 3]])
    logits = torch.randn(2, 512, 8, generator=torch.Generator().manual_seed(5)) + skew[:, None]
    load = lambda scores: torch.bincount(scores.topk(2, -1).indices.flatten(), minlength=8).float()  # noqa: E731
    for given, balanced in zip(logits, sinkhorn(logits), strict=True):
        assert load(given).std() / load(given).mean() > 0.8
        assert load(balanced).std() / load(balanced).mean() < 0.2
        torch.testing.assert_close(balanced, _sinkhorn_on_paper(given.double()).float(), rtol=1e-4, atol=0)  # fp32 against fp64


def _sinkhorn_on_paper(logits_TE: torch.Tensor) -> torch.Tensor:
    """Sinkhorn and Knopp's iteration: rows to 1/T, then columns to 1/E, eight times, on exp(logits)."""
    plan = (logits_TE - logits_TE.max()).exp()
    for _ in range(8):
        plan = plan / plan.sum(1, keepdim=True) / len(plan)
        plan = plan / plan.sum(0, keepdim=True) / plan.shape[1]
    return plan


@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_auxiliary_losses_are_the_papers(gate: str) -> None:
    """Value and gradient against loops over sequences, tokens and experts in fp64, to the rounding of fp32."""
    balance = Balance(method="aux", aux_loss_weight=0.5, sequence_aux_loss_weight=0.3)
    moe = Moe(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, scoring_func=gate, balance=balance)  # type: ignore[arg-type]
    router, draw = Router(moe, 16), torch.Generator().manual_seed(6)
    with torch.no_grad():
        router.weight.copy_(torch.randn(6, 16, generator=draw))
        router.bias.copy_(torch.randn(6, generator=draw))
    x_BTD = torch.randn(3, 7, 16, generator=draw)
    for of_step in (None, torch.tensor([5.0, 1, 0, 3, 9, 2])):
        router.weight.grad = None
        routing = router(x_BTD)
        assert routing.aux is not None and routing.shares is not None
        counts = routing.counts if of_step is None else of_step
        found = routing.aux + step_loss(routing.shares[None], counts[None], 2)
        found.backward()
        weight = router.weight.detach().double().requires_grad_()
        chosen = routing.experts.view(3, 7, 2)
        expected = _auxiliary_on_paper(x_BTD.double(), weight, chosen.tolist(), gate, of_step)
        expected.backward()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(router.weight.grad.double(), weight.grad, rtol=1e-4, atol=1e-5)


def _auxiliary_on_paper(x: torch.Tensor, weight: torch.Tensor, chosen: list, gate: str, of_step: torch.Tensor | None) -> torch.Tensor:
    """DeepSeek-V3's equations 17 to 20 for each sequence, and the same over all tokens, each times the tokens that it spans."""
    E, K, (B, T) = 6, 2, x.shape[:2]
    shares = []
    for b in range(B):
        for t in range(T):
            logits = x[b, t] @ weight.T
            gates = logits.sigmoid() if gate == "sigmoid" else logits.exp() / logits.exp().sum()
            shares.append(gates / gates.sum())
    total = torch.zeros((), dtype=torch.float64)
    for e in range(E):
        for b in range(B):
            f = E / (K * T) * sum(e in chosen[b][t] for t in range(T))
            P = sum(shares[b * T + t][e] for t in range(T)) / T
            total = total + 0.3 * f * P * T
        found = sum(e in token for row in chosen for token in row) / (B * T) if of_step is None else float(K * of_step[e] / 20)
        total = total + 0.5 * E / K * found * sum(share[e] for share in shares)
    return total


def test_the_router_temperature_warms_up() -> None:
    moe = Moe(n_routed_experts=4, num_experts_per_tok=1, moe_intermediate_size=8, temperature=2.0, temperature_steps=10)
    model = Transformer(Model(**_SMALL, moe=moe))
    for step, expected in ((0, 2.0), (5, 1.5), (10, 1.0), (1000, 1.0)):
        set_temperature(model.moe_layers(), model.config.moe, step)
        assert float(model.moe_layers()[0].router.temperature) == expected
