"""Copies between host and device: inputs without a wait, results with one wait for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes: compiled kernels read inputs in vectors of this size


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of these numbers, which may be nested lists. `torch.tensor(values, device=...)` would wait until the device has done all
    that was asked of it before."""
    return moved(torch.tensor(values, dtype=dtype), device)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device, by way of page-locked memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class HostToDevice:
    """Copies on a stream of its own, out of page-locked memory, so that they overlap with the computation of earlier micro-batches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device=device) if device.type == "cuda" else None

    def __call__(self, *arrays: np.ndarray | None) -> list[Tensor | None]:
        """The arrays as tensors on the device, and None for None. On the CPU they share the arrays' memory; to a GPU they are copied
        together, in one transfer."""
        if self._stream is None:
            return [None if array is None else torch.from_numpy(array) for array in arrays]
        given = [array for array in arrays if array is not None]
        computing = torch.accelerator.current_stream(self._device)
        with self._stream:
            copied = moved(torch.from_numpy(pack(given)), self._device)
        computing.wait_stream(self._stream)
        copied.record_stream(computing)  # its memory belongs to the other stream, which would use it again too early
        parts = iter(unpack(copied, given))
        return [None if array is None else next(parts) for array in arrays]


def pack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The bytes of all arrays in one, each at a multiple of 16 bytes."""
    together = np.zeros(sum(map(_padded, arrays)), np.uint8)
    begin = 0
    for array in arrays:
        together[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        begin += _padded(array)
    return together


def unpack(bytes_n: Tensor, arrays: Sequence[np.ndarray]) -> list[Tensor]:
    """Views of what `pack` has made of arrays of these types and shapes."""
    parts = bytes_n.split([_padded(array) for array in arrays])
    dtypes = [torch.from_numpy(array[:0]).dtype for array in arrays]
    return [part[: a.nbytes].view(dtype).view(a.shape) for part, a, dtype in zip(parts, arrays, dtypes, strict=True)]


def _padded(array: np.ndarray) -> int:
    return array.nbytes + -array.nbytes % _ALIGNED


@torch.no_grad()
def to_host(*tensors: Tensor) -> list[Tensor]:
    """The values as fp64 tensors on the CPU, with the shapes that they had. They are copied together: the host waits once. fp64 holds
    every fp32, bool and integer up to 2**53 exactly."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
