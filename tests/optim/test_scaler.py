"""Dynamic loss scaling."""

from __future__ import annotations

import torch

from lmworks.optim.clip import LossScaler


def test_starts_at_two_to_the_sixteen_with_a_window_of_a_thousand() -> None:
    scaler = LossScaler()
    assert scaler.scale == 2**16
    for _ in range(999):
        scaler.update(True)
    assert scaler.scale == 2**16
    scaler.update(True)
    assert scaler.scale == 2**17
    for _ in range(999):
        scaler.update(True)
    assert scaler.scale == 2**17


def test_halves_on_overflow_and_counts_anew() -> None:
    scaler = LossScaler(initial=8, window=3)
    history = []
    for finite in (True, True, False, True, True, True, False, False, False, False, False):
        scaler.update(torch.tensor(finite))
        history.append(scaler.scale.item())
    assert history == [8, 8, 4, 4, 4, 8, 4, 2, 1, 1, 1]


def test_resumes() -> None:
    scaler, other = LossScaler(initial=8, window=3), LossScaler(window=3)
    scaler.update(True)
    scaler.update(True)
    live = other.state_dict()
    other.load_state_dict(scaler.state_dict())
    assert live["scale"] is other.scale
    for _ in range(5):
        scaler.update(True)
        other.update(True)
        assert other.scale == scaler.scale


def test_it_saves_gradients_that_fp16_would_lose() -> None:
    scaler = LossScaler()
    weight = torch.tensor(1e-4, requires_grad=True)
    ((weight.half() * torch.tensor(1e-4, dtype=torch.float16)).float() * 1e-4).backward()
    assert weight.grad == 0
    ((weight.half() * torch.tensor(1e-4, dtype=torch.float16)).float() * 1e-4 * scaler.scale).backward()
    torch.testing.assert_close(weight.grad / scaler.scale, torch.tensor(1e-8), rtol=1e-3, atol=0)
