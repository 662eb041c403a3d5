"""The data type in which a device computes fastest. It depends on the processor, so it is chosen where the recipe runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmworks import machine

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_all_ranks_have_bf16 = True


def set_bf16_on_all_ranks(all_have_bf16: bool) -> None:
    """Set, once the ranks of a run are connected, whether the devices of all ranks multiply bf16, so that all ranks choose alike."""
    global _all_ranks_have_bf16
    _all_ranks_have_bf16 = all_have_bf16


def has_bf16(device: torch.device) -> bool:
    """Whether this device, and those of all ranks of the run, multiply bf16 matrices in hardware.

    A CPU without bf16 instructions takes several times as long as in fp32.
    """
    return _all_ranks_have_bf16 and machine.multiplies_bf16(device)


def at_least_fp32(x: Tensor) -> Tensor:
    """x in fp32, or unchanged in fp64."""
    return x if x.dtype.itemsize == 8 else x.float()


def dtype_for(precision: str, device: torch.device) -> torch.dtype:
    """The type of activations and matrix products for `train.precision` on this device; `auto` is bf16 where it is fast, else fp32."""
    import torch

    if precision == "auto":
        precision = "bf16" if has_bf16(device) else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
