"""The devices that a deployment is for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lmworks import machine
from lmworks.errors import UserError

GB = 1e9
GPUS: dict[str, tuple[int, bool]] = {
    "a10": (24, False), "l4": (24, True), "rtx4090": (24, True), "a100-40": (40, False), "l40s": (48, True), "a100": (80, False),
    "h100": (80, True), "h200": (141, True), "mi300x": (192, True), "b200": (180, True),
}  # fmt: skip
"""Name -> memory in GB and whether it multiplies FP8 in hardware, by the vendors' data sheets."""
_SPEC = re.compile(r"(?:(\d+)\s*x\s*)?([a-z][a-z0-9-]*)\Z")
_MOST = 64


@dataclass(frozen=True)
class Hardware:
    """`count` equal devices of one machine. `memory` is in bytes per device; `fp8` whether they multiply FP8 in hardware."""

    device: str
    count: int
    memory: float
    fp8: bool = False

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def text(self) -> str:
        """For people: number, name and memory."""
        if self.on_cpu:
            return f"a CPU with {self.memory / GB:.3g} GB"
        return f"{self.count} x {self.device.upper()} of {self.memory / GB:.0f} GB"


def parse_gpus(text: str) -> Hardware:
    """`8xh100` or `h100`. Raises `UserError` for an unknown GPU or number."""
    match = _SPEC.match(text.strip().lower())
    if match is None or match[2] not in GPUS:
        raise UserError(f"--gpus {text!r} is not known; write a number and a name such as 8xh100, with one of: {', '.join(GPUS)}")
    count = int(match[1] or 1)
    if not 1 <= count <= _MOST:
        raise UserError(f"--gpus {text!r}: the GPUs of one machine, from 1 to {_MOST}, are meant")
    memory, fp8 = GPUS[match[2]]
    return Hardware(match[2], count, memory * GB, fp8)


def cpu() -> Hardware:
    """The CPU of this machine, with its memory or the limit of its container."""
    return Hardware("cpu", 1, float(machine.memory()))


def detect() -> Hardware:
    """The GPUs of this machine, or its CPU if it has none. Raises `UserError` for GPUs of several kinds."""
    import torch

    if not torch.cuda.is_available():
        return cpu()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    if len({one.name for one in found}) > 1:
        kinds = ", ".join(sorted({one.name for one in found}))
        raise UserError(f"this machine has GPUs of several kinds ({kinds}); say which: --gpus 2xh100")
    fp8 = (found[0].major, found[0].minor) >= (8, 9)
    return Hardware(found[0].name.removeprefix("NVIDIA ").lower(), len(found), float(found[0].total_memory), fp8)
