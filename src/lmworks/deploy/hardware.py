"""The devices that a deployment is for."""

from __future__ import annotations

from dataclasses import dataclass

from lmworks import gpus, machine
from lmworks.errors import UserError
from lmworks.gpus import GB

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
    def amd(self) -> bool:
        """Whether the devices are GPUs of AMD, which need images of their own."""
        return self.device.startswith(("mi", "amd", "radeon"))

    @property
    def text(self) -> str:
        """For people: number, name and memory."""
        if self.on_cpu:
            return f"a CPU with {self.memory / GB:.3g} GB"
        return f"{self.count} x {self.device.upper()} of {self.memory / GB:.0f} GB"


def parse_gpus(text: str) -> Hardware:
    """`8xh100` or `h100`. Raises `UserError` for an unknown GPU or number."""
    count, gpu = gpus.parse_gpus(text, "--gpus")
    if count > _MOST:
        raise UserError(f"--gpus {text!r}: the GPUs of one machine, from 1 to {_MOST}, are meant")
    return Hardware(gpu.name, count, gpu.memory * GB, gpu.fp8)


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
