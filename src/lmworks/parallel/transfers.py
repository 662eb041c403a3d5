"""Copies between host and device: inputs without a wait, results with one wait for all."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16  # bytes: compiled kernels read inputs in vectors of this size


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
        sizes = [array.nbytes + -array.nbytes % _ALIGNED for array in given]
        together = np.zeros(sum(sizes), np.uint8)
        for array, begin in zip(given, np.cumsum([0, *sizes[:-1]]), strict=True):
            together[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        computing = torch.accelerator.current_stream(self._device)
        with self._stream:
            copied = torch.from_numpy(together).pin_memory().to(self._device, non_blocking=True)
        computing.wait_stream(self._stream)
        copied.record_stream(computing)  # its memory belongs to the other stream, which would use it again too early
        parts = iter(copied.split(sizes))
        return [None if array is None else _as(next(parts), array) for array in arrays]


def _as(bytes_n: Tensor, array: np.ndarray) -> Tensor:
    """The first bytes as a tensor with the type and shape of `array`."""
    return bytes_n[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)


@torch.no_grad()
def to_host(*tensors: Tensor) -> list[Tensor]:
    """The values as fp64 tensors on the CPU, with the shapes that they had. They are copied together: the host waits once. fp64 holds
    every fp32, bool and integer up to 2**53 exactly."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu()
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
