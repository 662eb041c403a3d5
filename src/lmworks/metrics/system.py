"""System metrics: memory, pressure and transfers of this machine, power and errors of its GPU, and its matrix-multiply peak."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmworks.host import counters, machine
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


class ProcessSignals:
    """Metrics of this process since the last time that they were read; 0.05 ms."""

    def __init__(self) -> None:
        self._cpu, self._retries = time.process_time(), _alloc_retries()

    def metrics(self) -> dict[str, float]:
        """`perf/cpu_seconds`, `perf/resident_memory` and, on a GPU, `perf/memory_reserved` and `perf/alloc_retries`."""
        import torch

        cpu, retries = time.process_time(), _alloc_retries()
        found = {"perf/cpu_seconds": cpu - self._cpu, "perf/resident_memory": float(machine.resident_memory())}
        if torch.cuda.is_available():
            found |= {"perf/memory_reserved": float(torch.cuda.memory_reserved()), "perf/alloc_retries": float(retries - self._retries)}
        self._cpu, self._retries = cpu, retries
        return found


def _alloc_retries() -> int:
    import torch

    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if torch.cuda.is_available() else 0


_SHARE = 200  # the machine is read again when this many times the duration of the last reading has passed: 0.5% of the time at most


class MachineSignals:
    """Metrics of the machine of this process since the last time that they were read: all programs, the control group, the GPU.

    `metrics` is called for each metrics line. Where lines follow each other so fast that reading the machine would take more than half a
    per cent of the time, by its own timer, some lines go without.
    """

    def __init__(self) -> None:
        import psutil

        psutil.cpu_percent()  # since when the next call counts
        self._gpu = GpuSignals()
        self._before, self._again = counters.read_counters(), 0.0

    def metrics(self) -> dict[str, float]:
        """`system/...` and `perf/gpu_utilization`; empty if it is too early to read them again."""
        if (began := time.monotonic()) < self._again:
            return {}
        now = counters.read_counters()
        found = counted(self._before, now) | machine_metrics() | self._gpu.metrics()
        self._before = now
        ended = time.monotonic()
        self._again = ended + _SHARE * (ended - began)
        return found


def counted(before: counters.Counters, now: counters.Counters) -> dict[str, float]:
    """What the machine has counted between two readings, as metrics; without those that it does not count."""
    since = now.since(before)
    seconds = max(since.pop("time"), 1e-9)
    names = {f"{name}_pressure": f"system/{name}_pressure" for name in counters.PRESSURES}
    rates = {name: min(1.0, since[key] / seconds) for key, name in names.items() if key in since}
    speeds = {"network": "network", "disk_read": "disk_read", "disk_written": "disk_write"}
    rates |= {f"system/{name}_bytes_per_second": since[key] / seconds for key, name in speeds.items() if key in since}
    counts = {"throttled": "system/throttled_seconds", "oom_kills": "system/oom_kills"}
    return rates | {name: since[key] for key, name in counts.items() if key in since}


def machine_metrics() -> dict[str, float]:
    """`system/cpu` (%, since the last call), `system/memory` (bytes) and `system/load` of all programs on this machine."""
    import psutil

    used = max(0, machine.memory() - machine.available_memory())
    return {"system/cpu": psutil.cpu_percent(), "system/memory": float(used), "system/load": counters.runnable_tasks()}


# Reasons for lower clocks (nvml.h, nvmlClocksEventReason...): slowdown by hardware, heat by software and by hardware, power brake. Not the
# power cap, which holds a GPU that is busy at its limit.
_THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
_UNCORRECTED, _SINCE_DRIVER, _XID = 1, 0, 8  # nvmlMemoryErrorType_t, nvmlEccCounterType_t, nvmlEventTypeXidCriticalError
_MOST_XIDS = 1000  # that are counted at a time


class GpuSignals:
    """Metrics of the current GPU by NVML; none where there is no GPU or no NVML package (extra `gpu`).

    Without a value that NVML does not report, as of a MIG slice or a vGPU, which is said once.
    """

    def __init__(self) -> None:
        import importlib.util

        import torch

        self._nvml: Any = None
        self._events: Any = None
        self._ecc: int | None = None
        if torch.cuda.is_available() and importlib.util.find_spec("pynvml") is not None:
            import pynvml

            self._nvml = pynvml

    def metrics(self) -> dict[str, float]:
        """`system/gpu_temp` (degrees C), `system/power` (W), `perf/gpu_utilization` (share of NVML's last sample, up to a second, in which
        a kernel ran), `system/gpu_throttled` (1 where heat or the hardware holds the clocks down) and `system/gpu_errors` (XID errors, and
        memory errors that ECC has not corrected, since the last call)."""
        if self._nvml is None:
            return {}
        import torch

        reads: dict[str, Callable[[], float]] = {
            "system/gpu_temp": torch.cuda.temperature,
            "system/power": lambda: torch.cuda.power_draw() / 1000,
            "perf/gpu_utilization": lambda: torch.cuda.utilization() / 100,
            "system/gpu_throttled": self._throttled,
            "system/gpu_errors": self._errors,
        }
        found: dict[str, float] = {}
        for name, read in reads.items():
            try:
                found[name] = read()
            except self._nvml.NVMLError as error:
                if name not in _unreported:
                    _unreported.add(name)
                    terminal.console.print(f"{name} is not recorded: NVML reports no value ({error})", style="yellow")
        return found

    @cached_property
    def _handle(self) -> Any:
        import torch

        self._nvml.nvmlInit()
        return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}")

    def _throttled(self) -> float:
        return float(bool(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle) & _THROTTLED))

    def _errors(self) -> float:
        """The first call sets the counts from which later ones count."""
        nvml, handle = self._nvml, self._handle
        if self._events is None:
            events = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, _XID, events)
            self._events = events
        xids = 0
        with suppress(nvml.NVMLError_Timeout):  # no more have happened
            while xids < _MOST_XIDS:
                nvml.nvmlEventSetWait(self._events, 0)
                xids += 1
        try:
            ecc = int(nvml.nvmlDeviceGetTotalEccErrors(handle, _UNCORRECTED, _SINCE_DRIVER))
        except nvml.NVMLError_NotSupported:  # a GPU without ECC still has XIDs
            return float(xids)
        before, self._ecc = self._ecc, ecc
        return float(xids + (0 if before is None else max(0, ecc - before)))


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
