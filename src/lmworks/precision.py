"""In which type a device computes fastest: a matter of the processor, so it is decided where the recipe runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def has_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 matrices in hardware; a CPU that must widen them first takes several times as long as in fp32."""
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
