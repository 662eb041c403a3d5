"""Copies from the host to a device that wait for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers, which may be nested lists. `torch.tensor(values, device=...)` would wait until the device has done all
    that was asked of it before."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, by way of page-locked memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
