"""GPUs by name, with the figures of their vendors: what `--cluster 8xh100` of a plan and `--gpus 8xh100` of a deployment mean.

GPUs without bf16 (V100, T4) are not here; a cluster file can describe them.

The data type in which a device computes fastest. It depends on the processor, so it is chosen where the recipe runs.
"""

from __future__ import annotations

import difflib
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
    multiplies FP8 in hardware, at twice that rate; `board_watts`: the most that its board draws; `price`: dollars per hour where it was
    offered, 0 if not known."""

    name: str
    memory: int
    bandwidth: int
    tflops: float
    fp8: bool
    board_watts: int
    price: float = 0.0

    def peak(self, precision: str) -> float:
        """Dense TFLOPS in a type: all of these GPUs multiply TF32 at half the rate of bf16, and FP8, where they do, at twice the rate."""
        return self.tflops * {"tf32": 0.5, "bf16": 1.0, "fp16": 1.0, "fp8": 2.0 if self.fp8 else 1.0}[precision]

    @property
    def watts(self) -> float:
        """Power with its share of the machine. DGX machines draw 1.8 times their boards: 10.2 kW with 8 x H100 of 700 W, 14.3 kW with 8 x
        B200 of 1,000 W; one of a single card draws less."""
        return round(1.8 * self.board_watts)


GPUS = {gpu.name: gpu for gpu in (
    Gpu("rtx3060", 12, 360, 25.5, False, 170), Gpu("rtx3080", 10, 760, 59.5, False, 320), Gpu("rtx3090", 24, 936, 71, False, 350, 0.22),
    Gpu("rtx3090ti", 24, 1008, 80, False, 450), Gpu("rtx4060ti", 16, 288, 44.1, True, 165), Gpu("rtx4070ti", 12, 504, 80.2, True, 285),
    Gpu("rtx4080", 16, 717, 97.5, True, 320), Gpu("rtx4090", 24, 1008, 165.2, True, 450, 0.34), Gpu("rtx5070ti", 16, 896, 87.9, True, 300),
    Gpu("rtx5080", 16, 960, 112.6, True, 360), Gpu("rtx5090", 32, 1792, 209.5, True, 575, 0.69),
    Gpu("a10", 24, 600, 125, False, 150), Gpu("a30", 24, 933, 165, False, 165), Gpu("a40", 48, 696, 149.7, False, 300),
    Gpu("rtxa6000", 48, 768, 154.8, False, 300), Gpu("rtx6000ada", 48, 960, 364.2, True, 300),
    Gpu("rtxpro6000", 96, 1792, 503.8, True, 600, 0.89), Gpu("rtxpro6000-maxq", 96, 1792, 438.9, True, 300),
    Gpu("l4", 24, 300, 121, True, 72, 0.44), Gpu("l40", 48, 864, 181, True, 300, 0.69), Gpu("l40s", 48, 864, 362, True, 350, 0.79),
    Gpu("a100-40", 40, 1555, 312, False, 400), Gpu("a100", 80, 2039, 312, False, 400, 1.39),
    Gpu("a100-pcie", 80, 1935, 312, False, 300, 1.19), Gpu("h100", 80, 3350, 989, True, 700, 2.69),
    Gpu("h100-pcie", 80, 2000, 756, True, 350, 1.99), Gpu("h100-nvl", 94, 3900, 835, True, 400), Gpu("h800", 80, 3350, 989, True, 700),
    Gpu("h20", 96, 4000, 148, True, 400), Gpu("h200", 141, 4800, 989, True, 700, 3.59), Gpu("h200-nvl", 141, 4800, 835, True, 600),
    Gpu("b200", 180, 7700, 2250, True, 1000, 5.98), Gpu("gb200", 186, 8000, 2500, True, 1200), Gpu("b300", 270, 7700, 2250, True, 1100),
    Gpu("mi300x", 192, 5300, 1307, True, 750), Gpu("mi325x", 256, 6000, 1307, True, 1000), Gpu("mi350x", 288, 8000, 2307, True, 1000),
    Gpu("mi355x", 288, 8000, 2517, True, 1400),
)}  # fmt: skip
"""Dense bf16 and memory as the vendors' data sheets and whitepapers state them, but: MI350X and MI355X are half of what is stated with
sparsity; the RTX Pro 6000 is scaled from its FP32 rate; the memory of the B300 is as reported, not from a data sheet. H100, H800, A100,
H200, B200 and B300 are SXM modules. Prices are the lowest that RunPod asked in March 2026, spot capacity among them, and others ask up to
four times as much (https://deploybase.ai/articles/runpod-gpu-pricing): set `dollars_per_device_hour` to your own."""

_COUNTED = (re.compile(r"(\d{1,7})\s*(?:[x*×]\s*)?(\D.*)", re.DOTALL), re.compile(r"(.*?)\s*(?:[:*×]|x)\s*(\d{1,7})", re.DOTALL))
_MAKERS = "nvidia|geforce|amd|radeon|instinct|tesla|generation|workstation|server|edition|blackwell|gpu|oam|hbm[23]e?|sxm[2-6]?|ac|vf"
_NOISE = re.compile(rf"\b(?:{_MAKERS})\b")
_ALIASES = {
    "a10080": "a100", "a100pcie80": "a100-pcie", "a10080pcie": "a100-pcie", "a100pcie40": "a100-40", "a10040pcie": "a100-40",
    "h10080": "h100", "h20141": "h200", "h200141": "h200", "a6000": "rtxa6000", "pro6000": "rtxpro6000", "rtx6000pro": "rtxpro6000",
    "rtx6000": "rtxpro6000", "pro6000maxq": "rtxpro6000-maxq", "4060ti16": "rtx4060ti", "rtx4060ti16": "rtx4060ti",
}  # fmt: skip
"""Other spellings, without spaces, hyphens, makers and forms. RTX 6000 alone is taken for the newest of three cards of that number."""


def parse_gpus(text: str, option: str) -> tuple[int, Gpu]:
    """A number and a GPU: `8xh100`, `h100`, `H100:8` or `2 x RTX 4090`. Raises `UserError` that names the option."""
    text = text.strip().lower()[:100]
    found = [(1, text)]
    for pattern in _COUNTED:
        if match := pattern.fullmatch(text):
            number, name = match.groups() if match[1].isdecimal() else (match[2], match[1])
            found.append((int(number), name))
    count, gpu = next(((count, gpu) for count, name in found if (gpu := find_gpu(name)) is not None), (0, None))
    if gpu is None:
        close = difflib.get_close_matches(_plain(found[-1][1]), [_plain(name) for name in GPUS], 1)
        meant = f"did you mean {next(name for name in GPUS if _plain(name) == close[0])}? " if close else ""
        raise UserError(f"{option} {text!r} is not known; {meant}write a number and a name such as 8xh100, with one of: {', '.join(GPUS)}")
    if count < 1:
        raise UserError(f"{option} {text!r}: at least 1 GPU is meant")
    return count, gpu


def find_gpu(name: str) -> Gpu | None:
    """The GPU of a name as people write it, or as `nvidia-smi` and torch report it: `NVIDIA A100-SXM4-40GB`, `NVIDIA H100 80GB HBM3`."""
    plain = _plain(name)
    plain = _plain(_ALIASES.get(plain, plain))
    return next((gpu for gpu in GPUS.values() if _plain(gpu.name) in (plain, f"rtx{plain}")), None)


def _plain(name: str) -> str:
    words = _NOISE.sub(" ", name.lower().replace("_", " ").replace("max-q", "maxq"))
    return re.sub(r"[\s()]", "", re.sub(r"\b(\d+) ?gi?b?\b", r"\1", words.replace("-", " ")))


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
