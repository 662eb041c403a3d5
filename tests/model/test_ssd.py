"""The chunked scan equals its recurrent twin, in outputs, states and gradients, and nothing of a document reaches the next."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmworks.model.ssd import scan, scan_plain

_SHAPES = [(2, 200, 1, 4, 8, 6), (1, 64, 2, 4, 16, 4), (2, 7, 4, 4, 4, 4), (2, 130, 2, 6, 8, 8), (1, 3, 1, 2, 4, 4)]  # B, T, G, H, N, P


def drawn(B: int, T: int, G: int, H: int, N: int, P: int) -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values and decays in fp64, and the positions of three documents in each row."""
    generator = torch.Generator().manual_seed(T)
    made = [torch.randn(B, T, *rest, dtype=torch.float64, generator=generator) for rest in ((G, N), (G, N), (H, P))]
    made.append(-3 * torch.rand(B, T, H, dtype=torch.float64, generator=generator))
    lengths = [(T // 3, 1, T - T // 3 - 1) if row else (T // 2, T - T // 2) for row in range(B)]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    return [tensor.requires_grad_() for tensor in made], positions


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("continued", [False, True], ids=["from the start", "from a state"])
def test_chunks_equal_one_token_after_another(shape: tuple[int, ...], continued: bool) -> None:
    (B, T, _, H, N, P), (inputs, positions) = shape, drawn(*shape)
    state = torch.randn(B, H, N, P, dtype=torch.float64) if continued else None
    if continued:  # the first document of each row began five tokens earlier
        positions = torch.where((positions == 0).cumsum(1) == 1, positions + 5, positions)
    weights = torch.randn(B, T, H, P, dtype=torch.float64), torch.randn(B, H, N, P, dtype=torch.float64)
    found = []
    for run in (scan, scan_plain):
        out, last = run(*inputs, positions, state)
        gradients = torch.autograd.grad((out * weights[0]).sum() + (last * weights[1]).sum(), inputs)
        found.append((out, last, *gradients))
    for chunked, plain in zip(*found, strict=True):
        torch.testing.assert_close(chunked, plain, rtol=1e-10, atol=1e-10)


def test_fp32_is_as_exact_as_the_recurrence() -> None:
    """Sums of many decays are differences of large numbers: they are formed in fp64."""
    inputs, positions = drawn(1, 512, 1, 8, 16, 8)
    inputs[3] = inputs[3].detach() * torch.arange(1, 9)  # some heads forget within a token
    exact = scan_plain(*inputs, positions)[0]
    exact, narrow = exact.detach(), [tensor.detach().float() for tensor in inputs]
    chunked, plain = (float((run(*narrow, positions)[0] - exact).abs().max() / exact.abs().max()) for run in (scan, scan_plain))
    assert plain < 1e-6 and chunked < 2e-6


def test_documents_do_not_reach_each_other() -> None:
    inputs, positions = drawn(1, 150, 1, 4, 8, 6)
    whole = scan(*inputs, positions)[0]
    alone = scan(*(tensor[:, 75:] for tensor in inputs), positions[:, 75:])[0]
    assert int(positions[0, 75]) == 0
    torch.testing.assert_close(whole[:, 75:], alone, rtol=1e-10, atol=1e-10)
    gradients = torch.autograd.grad(whole[:, 75:].square().sum(), inputs)
    assert all(not gradient[:, :75].any() for gradient in gradients[:3]) and all(gradient[:, 75:].any() for gradient in gradients[:3])
    changed = [*(torch.cat((tensor[:, :75] * 3, tensor[:, 75:]), 1) for tensor in inputs[:3]), inputs[3]]
    assert torch.equal(scan(*changed, positions)[0][:, 75:], whole[:, 75:])


def test_tokens_that_do_not_count_change_no_state() -> None:
    inputs, positions = drawn(1, 100, 1, 4, 8, 6)
    positions = torch.arange(100)[None]
    counts = (positions < 70)[..., None]
    inputs[2], inputs[3] = inputs[2] * counts[..., None], inputs[3] * counts
    torch.testing.assert_close(scan(*inputs, positions)[1], scan(*(tensor[:, :70] for tensor in inputs), positions[:, :70])[1])
