"""In which type a device computes fastest: a matter of the processor, so it is decided where the recipe runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


_all_ranks_have_bf16 = True


def agree(all_have_bf16: bool) -> None:
    """Once the ranks of a run have met: whether the devices of all multiply bf16, so that none decides by its own."""
    global _all_ranks_have_bf16
    _all_ranks_have_bf16 = all_have_bf16


def has_bf16(device: torch.device) -> bool:
    """Whether the device, and those of all ranks of this run, multiply bf16 matrices in hardware.

    A CPU that must widen them first takes several times as long as in fp32.
    """
    return _all_ranks_have_bf16 and multiplies_bf16(device)


def multiplies_bf16(device: torch.device) -> bool:
    """The same of this device alone."""
    import torch

    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        return any(able.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16", "sve_bf16"))
    return False


def dtype_for(precision: str, device: torch.device) -> torch.dtype:
    """The type of activations and matrix products for `train.precision` on this device; `auto` is bf16 where it is fast, else fp32."""
    import torch

    if precision == "auto":
        precision = "bf16" if has_bf16(device) else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
