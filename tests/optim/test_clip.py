"""The global norm and clipping by it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from lmworks.optim.clip import clip_gradients, global_norm


def with_gradients() -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((8, 5), (3, 4, 6), (7,), (2,))]
    for parameter in parameters[:-1]:  # one has no gradient
        parameter.grad = torch.randn_like(parameter)
    return parameters


@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_equal_to_torch(limit: float) -> None:
    ours, theirs = with_gradients(), with_gradients()
    norm, _ = clip_gradients(ours, limit)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, limit))
    assert norm.dtype == torch.float32
    for one, other in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_zero_is_off_and_clipped_gradients_have_the_norm() -> None:
    parameters = with_gradients()
    before = [parameter.grad.clone() for parameter in parameters[:-1]]
    clip_gradients(parameters, 0.0)
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters[:-1], before, strict=True))
    clip_gradients(parameters, 0.25)
    assert clip_gradients(parameters, 0.0)[0].item() == pytest.approx(0.25, rel=1e-5)


def test_the_norm_is_exact_on_large_tensors() -> None:
    """A running fp32 sum is off by 1e-5 or more here; by rows it is right to 1e-6."""
    torch.manual_seed(0)
    tensors = [torch.randn(4000, 1000) * 1e-3, torch.randn(10)]
    exact = torch.cat([tensor.flatten() for tensor in tensors]).double().norm().item()
    assert global_norm(tensors).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_one_bad_element_shows_in_the_norm(poison: float) -> None:
    parameters = with_gradients()
    parameters[1].grad[2, 3, 5] = poison
    assert not torch.isfinite(clip_gradients(parameters, 1.0)[0])


def test_no_gradients_no_norm() -> None:
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0)[0] == 0


def test_what_another_stage_counts_is_scaled_and_not_counted() -> None:
    parameters = with_gradients()
    copy, others = parameters[0], [one.grad for one in parameters[1:] if one.grad is not None]
    before, counted = copy.grad.clone(), torch.stack([grad.norm() for grad in others]).norm()
    norm, _ = clip_gradients(parameters, 0.5, copies=[copy])
    torch.testing.assert_close(norm, counted)
    torch.testing.assert_close(copy.grad, before * 0.5 / counted, rtol=1e-4, atol=0)


def test_squares_are_summed_by_kind() -> None:
    parameters = with_gradients()
    kinds = {id(parameter): kind for parameter, kind in zip(parameters, (2, 0, 2, 1), strict=True)}
    _, squares = clip_gradients(parameters, 0.0, kind_of=kinds, count=3)
    first, second, third = (one.grad.square().sum() for one in parameters[:-1])
    torch.testing.assert_close(squares, torch.stack([second, torch.zeros(()), first + third]))
