"""This machine as a cluster: what it has, and its measured matrix-multiply peak."""

from __future__ import annotations

import time

from lmworks.recipe.after import Cluster


def this_machine(threads: int | None = None) -> Cluster:
    """A cluster of this machine's accelerators, or of its CPU. The peak is measured in about a second, not looked up."""
    import psutil
    import torch

    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory
        return _cluster(name, count, memory, _peak(torch.device("cuda"), 8192))
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(threads)
    try:
        return _cluster(f"{torch.get_num_threads()} CPU threads", 1, psutil.virtual_memory().total, _peak(torch.device("cpu"), 1024))
    finally:
        torch.set_num_threads(before)


def _cluster(device: str, count: int, memory: int, tflops: float) -> Cluster:
    return Cluster(
        name="this machine",
        devices_per_node=count,
        device=device,
        bf16_tflops=tflops,
        memory_gib=round(memory / 2**30, 1),
        mfu=0.25 if "CPU" in device else 0.4,
        mfu_source="assumed share of the measured peak; --calibrate measures it",
    )


def _peak(device: object, width: int) -> float:
    """Best of some bf16 products of width^3, in TFLOPS."""
    import torch

    a = torch.randn(width, width, device=device, dtype=torch.bfloat16)  # type: ignore[call-overload]
    best, end = float("inf"), time.perf_counter() + 1.0
    while time.perf_counter() < end:
        start = time.perf_counter()
        a @ a
        if a.is_cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return round(2 * width**3 / best / 1e12, 3)
