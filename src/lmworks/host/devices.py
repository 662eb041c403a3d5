"""GPUs by name, with the figures of their vendors: what `--cluster 8xh100` of a plan and `--gpus 8xh100` of a deployment mean.

GPUs without bf16 (V100, T4) are not here; a cluster file can describe them.

The data type in which a device computes fastest. It depends on the processor, so it is chosen where the recipe runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmworks.errors import UserError
from lmworks.host import machine

if TYPE_CHECKING:
    import torch
    from torch import Tensor


GB = 1e9
LARGEST_NODE = 8
"""GPUs in one machine, as larger numbers are usually built."""


@dataclass(frozen=True)
class Gpu:
    """`memory` in GB and `bandwidth` in GB/s, both decimal; `tflops`: dense bf16 with fp32 sums, without sparsity; `fp8`: whether it
    multiplies FP8 in hardware."""

    name: str
    memory: int
    bandwidth: int
    tflops: float
    fp8: bool


GPUS = {gpu.name: gpu for gpu in (
    Gpu("rtx3060", 12, 360, 25.5, False), Gpu("rtx3080", 10, 760, 59.5, False), Gpu("rtx3090", 24, 936, 71, False),
    Gpu("rtx3090ti", 24, 1008, 80, False), Gpu("rtx4060ti", 16, 288, 44.1, True), Gpu("rtx4070ti", 12, 504, 80.2, True),
    Gpu("rtx4080", 16, 717, 97.5, True), Gpu("rtx4090", 24, 1008, 165.2, True), Gpu("rtx5070ti", 16, 896, 87.9, True),
    Gpu("rtx5080", 16, 960, 112.6, True), Gpu("rtx5090", 32, 1792, 209.5, True),
    Gpu("a10", 24, 600, 125, False), Gpu("a30", 24, 933, 165, False), Gpu("a40", 48, 696, 149.7, False),
    Gpu("rtxa6000", 48, 768, 154.8, False), Gpu("rtx6000ada", 48, 960, 364.2, True), Gpu("l4", 24, 300, 121, True),
    Gpu("l40", 48, 864, 181, True), Gpu("l40s", 48, 864, 362, True), Gpu("a100-40", 40, 1555, 312, False),
    Gpu("a100", 80, 2039, 312, False), Gpu("h100", 80, 3350, 989, True), Gpu("h100-pcie", 80, 2000, 756, True),
    Gpu("h100-nvl", 94, 3900, 835, True), Gpu("h800", 80, 3350, 989, True), Gpu("h20", 96, 4000, 148, True),
    Gpu("h200", 141, 4800, 989, True), Gpu("b200", 180, 7700, 2250, True),
    Gpu("mi300x", 192, 5300, 1307, True), Gpu("mi325x", 256, 6000, 1307, True),
)}  # fmt: skip
"""By the vendors' data sheets and architecture whitepapers. H100, H800, H200, A100 and B200 are the SXM modules."""

_SPEC = re.compile(r"(?:(\d{1,7})\s*x\s*)?([a-z0-9][a-z0-9 _-]{0,40})\Z")
_ALIASES = {"a10080": "a100", "h100sxm": "h100", "a6000": "rtxa6000", "6000ada": "rtx6000ada"}


def parse_gpus(text: str, option: str) -> tuple[int, Gpu]:
    """A number and a GPU: `8xh100`, `h100` or `2 x RTX 4090`. Raises `UserError` that names the option."""
    match = _SPEC.match(text.strip().lower())
    gpu = _by_name(match[2]) if match else None
    if match is None or gpu is None:
        raise UserError(f"{option} {text[:100]!r} is not known; write a number and a name such as 8xh100, with one of: {', '.join(GPUS)}")
    count = int(match[1] or 1)
    if count < 1:
        raise UserError(f"{option} {text!r}: at least 1 GPU is meant")
    return count, gpu


def _by_name(text: str) -> Gpu | None:
    name = _plain(text)
    name = _ALIASES.get(name, name)
    return next((gpu for gpu in GPUS.values() if _plain(gpu.name) in (name, f"rtx{name}")), None)


def _plain(name: str) -> str:
    return re.sub(r"[ _-]|nvidia|geforce|amd|instinct|gb\Z", "", name)


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
