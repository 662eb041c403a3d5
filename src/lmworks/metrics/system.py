"""System metrics: memory, temperature, power, and the matrix-multiply peak of this machine."""

from __future__ import annotations

import gc
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from lmworks.host import machine
from lmworks.host.devices import dtype_for
from lmworks.host.machine import return_freed_memory
from lmworks.ui import terminal

if TYPE_CHECKING:
    import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_largest = 0  # bytes, where there is no /proc
_peaks: dict[tuple[torch.device, torch.dtype, int], float] = {}
_unreported: set[str] = set()  # metrics of which it has been said that NVML reports no value


def memory_bytes() -> int:
    """Largest memory in use since the last `reset_memory_peak`: allocated on the GPU or, without one, resident in this process.

    The resident peak is the kernel's `VmHWM`. Where the kernel does not let a process reset it, it is the peak since the process began;
    without /proc (not on Linux) it is the largest of this and earlier calls only.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    import psutil

    global _largest
    _largest = max(_largest, int(psutil.Process(os.getpid()).memory_info().rss))
    return _largest


def reset_memory_peak() -> None:
    """Begin a new peak of `memory_bytes`. Without a GPU, memory that was freed and kept by the C library is given back first, as it would
    count; Linux resets the peak when a 5 is written to /proc/self/clear_refs."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    global _largest
    _largest = 0
    gc.collect()
    return_freed_memory()
    with suppress(OSError):
        _CLEAR.write_text("5", encoding="utf-8")


def machine_metrics() -> dict[str, float]:
    """`system/cpu` (%, since the last call) and `system/memory` (bytes) of all programs on this machine."""
    import psutil

    used = max(0, machine.memory() - machine.available_memory())
    return {"system/cpu": psutil.cpu_percent(), "system/memory": float(used)}


def gpu_metrics() -> dict[str, float]:
    """`system/gpu_temp` (degrees C), `system/power` (W) and `perf/gpu_utilization` (share of NVML's last sample, up to a second, in
    which a kernel ran) of the current GPU; empty where there is no GPU or no NVML package.

    Without a value that NVML does not report, as of a MIG slice or a vGPU, which is said once.
    """
    import importlib.util

    import torch

    if not torch.cuda.is_available() or importlib.util.find_spec("pynvml") is None:
        return {}
    import pynvml

    found: dict[str, float] = {}
    read = (torch.cuda.temperature, 1), (torch.cuda.power_draw, 1000), (torch.cuda.utilization, 100)
    for name, (value, unit) in zip(("system/gpu_temp", "system/power", "perf/gpu_utilization"), read, strict=True):
        try:
            found[name] = value() / unit
        except pynvml.NVMLError as error:
            if name not in _unreported:
                _unreported.add(name)
                terminal.console.print(f"{name} is not recorded: NVML reports no value ({error})", style="yellow")
    return found


def measure_peak(seconds: float = 1.0) -> float:
    """FLOP/s of this machine's best matrix multiplication in the type it is fastest in, with the threads that torch uses now.

    Square matrices of a few sizes in turn, since the best one depends on the caches; the fastest single product counts, because other
    programs can only slow one down. Measured once per process, device, type and number of threads.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    key = (device, dtype_for("auto", device), torch.get_num_threads())

    def ask() -> float:
        if key not in _peaks:
            _peaks[key] = _measure(device, key[1], seconds)
        return _peaks[key]

    return machine.override_or("peak", ask)


def _measure(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    import torch

    sizes = (4096, 8192, 16384) if device.type == "cuda" else (1024, 2048, 3072)
    matrices = [[torch.randn(size, size, device=device).to(dtype) for _ in range(3)] for size in sizes]

    def speed(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
        begin = time.perf_counter()
        torch.mm(left, right, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 2 * len(left) ** 3 / (time.perf_counter() - begin)

    for group in matrices:
        speed(*group)
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0 or time.perf_counter() < end:
        best = max(best, *(speed(*group) for group in matrices))
    return best


def mfu(model_flops: float, seconds: float, peak: float) -> float:
    """Model FLOPs utilization: `model_flops` per `seconds` as a fraction of `peak` (FLOP/s). Recomputation does not count."""
    return model_flops / seconds / peak
