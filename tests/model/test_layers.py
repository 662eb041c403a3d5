"""Norm, rows of experts and loss as eager code on CPUs runs them, against their plain twins: outputs and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lmworks.model import layers
from lmworks.model.layers import RMSNorm
from lmworks.model.loss import IGNORE, head_loss, head_loss_plain
from lmworks.model.loss import chunk_loss as loss_of_chunk
from lmworks.model.moe import combine, dispatch
from lmworks.model.router import Routing


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 17, 24), (3, 5, 4, 24), (1, 24)])
def test_norm_in_pieces_equals_plain(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Pieces of four rows, the last one shorter. In bf16 the output is rounded twice, by half of 2^-7 each time."""
    monkeypatch.setattr(layers, "_CACHED", 4 * shape[-1])
    x, grad = random(*shape).to(dtype), random(*shape, seed=1).to(dtype)
    weight = 1 + 0.3 * random(shape[-1], seed=2)

    def run(plain: bool, dtype: torch.dtype) -> list[torch.Tensor]:
        norm = RMSNorm(shape[-1], 1e-5)
        norm.plain = plain
        norm.weight.data = weight.clone()
        inputs = x.to(dtype, copy=True).requires_grad_()
        # a transposed view of what came before and after, as around a head's norm
        out = norm(inputs.transpose(0, -2)).transpose(0, -2)
        out.backward(grad.to(dtype))
        assert out.dtype == inputs.grad.dtype == dtype and norm.weight.grad.dtype == torch.float32
        return [one.detach().float() for one in (out, inputs.grad, norm.weight.grad)]

    before = x.clone()
    exact, found = run(True, torch.float32), run(False, dtype)
    assert torch.equal(x, before), "what came in is left as it was"
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    for truth, ours in zip(exact, found, strict=True):
        assert (ours - truth).abs().max() <= tolerance * truth.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choices", [1, 2, 3])
def test_rows_go_to_their_experts_and_back(choices: int, dtype: torch.dtype) -> None:
    """`dispatch` and `combine` beside an index and an index_add; sums of bf16 rows are rounded once, ties either way."""
    tokens, experts = 13, 4
    x, weigh = random(tokens, 6).to(dtype), random(tokens * choices, 6, seed=1).to(dtype)
    order = [torch.randperm(experts, generator=torch.Generator().manual_seed(token))[:choices] for token in range(tokens)]
    chosen = torch.stack(order)
    routing = Routing(chosen, torch.ones(tokens, choices), torch.bincount(chosen.flatten(), minlength=experts), None)
    grad = random(tokens, 6, seed=2).to(dtype)

    ours = x.clone().requires_grad_()
    rows, _, places = dispatch(ours, routing)
    out = combine(rows * weigh, places)
    out.backward(grad)

    plain = x.float().requires_grad_()
    sorted_by_expert = chosen.flatten().argsort(stable=True) // choices
    products = plain[sorted_by_expert].to(dtype) * weigh
    expected = torch.zeros(tokens, 6).index_add(0, sorted_by_expert, products.float())
    expected.backward(grad.float())

    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert torch.equal(rows, x[sorted_by_expert])
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.grad.float(), plain.grad, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize(("softcap", "z_weight"), [(0.0, 0.0), (5.0, 0.0), (0.0, 1e-2), (30.0, 1e-3)])
@pytest.mark.parametrize("spread", [1.0, 60.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_in_chunks_equals_plain(weighted: bool, spread: float, softcap: float, z_weight: float) -> None:
    """Also where the probability of the target is too small for fp32, and its logarithm is not. With weights there is no z-loss."""
    hidden, weight = random(21, 8), spread * random(50, 8, seed=1)
    labels = torch.randint(50, (21,), generator=torch.Generator().manual_seed(2))
    labels[::5] = IGNORE
    if spread > 1 and not softcap:
        assert (F.linear(hidden, weight).softmax(-1).gather(1, labels.clamp_min(0)[:, None]) == 0).any()
    weights = random(21, seed=3) if weighted else None
    results = []
    for plain in (False, True):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        args = (*inputs, labels)
        if plain:
            total, parts = head_loss_plain(*args, softcap=softcap, z_weight=0.0 if weighted else z_weight, weights_N=weights)
        else:
            options = {"chunk": 8, "chunk_loss": loss_of_chunk, "weights_N": weights}
            total, parts = head_loss(*args, softcap=softcap, z_weight=z_weight, **options)
        total.backward()
        results.append([total.detach(), *parts, *(one.grad for one in inputs)])
    for ours, expected in zip(*results, strict=True):
        assert torch.isfinite(expected).all()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
