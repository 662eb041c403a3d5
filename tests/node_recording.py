"""A recording of a healthy node for `lmworks health`: 8 H100 with NVLink, 8 InfiniBand ports, a network mount. Tests make it sick.

Values of NVML, the text of /sys and of programs are in the forms that NVML, Linux, chronyc and DCGM document.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmworks.health.node import Process, record_processes

GPU = {
    "name": "NVIDIA H100 80GB HBM3", "driver": "570.86.15", "ecc_volatile": 0, "ecc_aggregate": 0, "ecc_corrected": 3, "rows_remapped": 1,
    "rows_pending": 0, "rows_failed": 0, "pages_retired": 0, "pages_pending": 0, "throttle": 0x1, "clock": 345, "max_clock": 1980,
    "temperature": 33, "slowdown_temperature": 87, "pcie_width": 16, "max_pcie_width": 16, "nvlinks": [1] * 18, "nvlink_errors": 0,
    "memory_used": 0, "processes": [],
}  # fmt: skip
GPUS, TESTS = 8, ("Denylist", "NVML Library", "CUDA Main Library", "Permissions and OS Blocks", "Page Retirement/Row Remap", "Software")

CHRONYC = """\
Reference ID    : 0A000001 (10.0.0.1)
Stratum         : 3
System time     : {offset} seconds slow of NTP time
Leap status     : Normal
"""
LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
XID_LINE = "6,1200,4000000,-;NVRM: Xid (PCI:0000:1b:00): {number}, pid='<unknown>', name=<unknown>, planted\n"


def diagnostics(status: str = "Pass", warning: str = "", newer: bool = True) -> str:
    """The output of `dcgmi diag -r 1 -j` of DCGM 4 or of DCGM 3, with the last test of GPU 5 as given."""
    tests = []
    for name in TESTS:
        results = []
        for gpu in range(GPUS):
            sick = gpu == 5 and name == TESTS[-1]
            own: dict[str, Any] = {"entity_group": "GPU", "entity_id": gpu} if newer else {"gpu_id": str(gpu)}
            own["status"] = (status if newer else status.upper()) if sick else ("Pass" if newer else "PASS")
            if sick and warning:
                own["warnings"] = [{"error_id": 60, "warning": warning}] if newer else warning
            results.append(own)
        tests.append({"name": name, "results": results})
    key = "DCGM Diagnostic" if newer else "DCGM GPU Diagnostic"
    return json.dumps({key: {"test_categories": [{"category": "Deployment", "tests": tests}]}, "metadata": {"version": "4.2.3"}})


def record(root: Path, mount: Path) -> Path:
    """Write the recording of a healthy node to `root`; `mount` is the mount point of its file server."""

    def put(path: str, text: object) -> None:
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")

    put("nvml.json", json.dumps([GPU | {"uuid": f"GPU-{index}"} for index in range(GPUS)]))
    put("processes.json", record_processes([Process(700, 1, "root", "S", "slurmd", 1.0)]))
    put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025")
    put("dev/kmsg", "6,1100,3000000,-;" + "eth0: link up")
    for index in range(GPUS):
        put(f"sys/bus/pci/devices/0000:{index:02x}:00.0/vendor", "0x10de")
        put(f"sys/bus/pci/devices/0000:{index:02x}:00.0/class", "0x030200")
        port = f"sys/class/infiniband/mlx5_{index}/ports/1"
        for name, text in (
            ("state", "4: ACTIVE"),
            ("phys_state", "5: LinkUp"),
            ("rate", "400 Gb/sec (4X NDR)"),
            ("link_layer", "InfiniBand"),
        ):
            put(f"{port}/{name}", text)
        put(f"{port}/counters/link_downed", 0)
    for index in range(4):
        put(f"sys/devices/system/edac/mc/mc{index}/ue_count", 0)
        put(f"sys/devices/system/edac/mc/mc{index}/ce_count", 0)
        put(f"sys/devices/system/cpu/cpu{index}/thermal_throttle/package_throttle_total_time_ms", 120)
        put(f"sys/devices/system/cpu/cpu{index}/thermal_throttle/core_throttle_count", 1)
    put("proc/uptime", "864000.00 1728000.00")
    put("proc/vmstat", "nr_free_pages 1\noom_kill 0\npgfault 7")
    put("proc/self/limits", LIMITS)
    put("proc/self/mounts", f"/dev/nvme0n1p2 / ext4 rw,relatime,errors=remount-ro 0 0\nfiler:/scratch {mount} nfs4 rw,hard 0 0")
    put("proc/sys/kernel/osrelease", "6.8.0-60-generic")
    put("programs/chronyc", CHRONYC.format(offset="0.000012"))
    put("programs/dcgmi", diagnostics())
    put("programs/stress", json.dumps(measured()))
    return root


def measured(change: Callable[[list[dict[str, Any]]], object] = lambda found: None) -> list[dict[str, Any]]:
    """Measurements of the stress test."""
    cores = [{"name": f"core {n}", "kind": "core", "flops": 9e10 + n, "equal": True, "digest": "c0ffee"} for n in range(4)]
    gpus = [{"name": f"GPU {n}", "kind": GPU["name"], "flops": 7e14 + n, "equal": True, "digest": "77"} for n in range(GPUS)]
    change(found := cores + gpus)
    return found
