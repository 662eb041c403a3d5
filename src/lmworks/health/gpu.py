"""Checks of GPUs: memory errors, XIDs of the kernel log, throttling, PCIe and NVLink, NVIDIA's own diagnostics."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from lmworks.health.node import Node, NotThere
from lmworks.health.report import Result

# Bits of nvmlDeviceGetCurrentClocksThrottleReasons, from nvml.h. Idle, application clocks, a power cap and sync boost are no faults.
_SLOWED = {0x8: "hardware slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}
_WARM = {0x20: "software thermal slowdown"}
# XIDs after which NVIDIA's catalog (docs.nvidia.com/deploy/xid-errors) asks for a reset, a reboot or a repair of the node. Others, such
# as 13, 31, 43 and 45, are most often faults of a program.
_BROKEN_XID = {
    46: "the GPU stopped processing", 48: "double-bit ECC error", 62: "internal micro-controller halt", 64: "row remapping failed",
    74: "NVLink error", 79: "the GPU has fallen off the bus", 95: "uncontained memory error", 110: "security fault",
    119: "GSP timeout", 120: "GSP error", 140: "unrecovered ECC error",
}  # fmt: skip
_WORN_XID = {63: "a row is to be remapped", 92: "many corrected ECC errors", 94: "contained memory error"}
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")


def errors(node: Node) -> Result:
    """Uncorrected memory errors, remapped rows and retired pages of each GPU; and GPUs that the driver has lost."""
    broken, worn, figures = [], [], {}
    gpus = node.gpus()
    on_bus = node.gpus_on_bus()
    if on_bus > len(gpus):
        broken.append(f"the driver finds {len(gpus)} of {on_bus} GPUs on the PCI bus")
    for index, gpu in enumerate(gpus):
        for key, text in (("ecc_volatile", "uncorrected ECC errors since the driver was loaded"), ("rows_failed", "row remapping failed")):
            if gpu.get(key):
                broken.append(f"GPU {index}: {text}" + (f": {gpu[key]}" if key.startswith("ecc") else ""))
        for key, text in (("rows_pending", "a row waits for a reset to be remapped"), ("pages_pending", "a page waits to be retired")):
            if gpu.get(key):
                worn.append(f"GPU {index}: {text}")
        for key in ("ecc_volatile", "ecc_aggregate", "ecc_corrected", "rows_remapped", "pages_retired"):
            if key in gpu:
                figures[f"gpu{index}/{key}"] = float(gpu[key])
    if broken:
        return Result(
            "fail", "; ".join(broken + worn), "reset the GPU (nvidia-smi --gpu-reset) or reboot; replace it if this returns", figures
        )
    if worn:
        return Result("warn", "; ".join(worn), "reset the GPU (nvidia-smi --gpu-reset) before the next run", figures)
    names = Counter(str(gpu.get("name", "GPU")) for gpu in gpus)
    return Result("ok", f"{', '.join(f'{n} x {name}' for name, n in names.items())} without uncorrected memory errors", figures=figures)


def xids(node: Node) -> Result:
    """Errors of NVIDIA's driver in the kernel log (XIDs) that a program does not cause."""
    node.require_driver()
    found = Counter((place, int(number)) for line in node.kernel_log() for place, number in _XID.findall(line))
    figures = {f"{place}/xid_{number}": float(count) for (place, number), count in found.items()}
    broken = [f"{place}: XID {number}, {_BROKEN_XID[number]}" for place, number in found if number in _BROKEN_XID]
    worn = [f"{place}: XID {number}, {_WORN_XID[number]}" for place, number in found if number in _WORN_XID]
    if broken:
        return Result("fail", "; ".join(broken + worn), "drain the node, reset the GPU or reboot, and run dcgmi diag -r 3", figures)
    if worn:
        return Result("warn", "; ".join(worn), "reset the GPU (nvidia-smi --gpu-reset) before the next run", figures)
    others = f", {sum(found.values())} XIDs of programs" if found else ""
    return Result("ok", f"no XID of broken hardware in the kernel log{others}", figures=figures)


def clocks(node: Node) -> Result:
    """Reasons for which GPUs are slowed down now, their temperature, and the width of their PCIe link."""
    slowed, warm, figures = [], [], {}
    gpus = node.gpus()
    for index, gpu in enumerate(gpus):
        bits = int(gpu.get("throttle", 0))
        slowed += [f"GPU {index}: {text}" for bit, text in _SLOWED.items() if bits & bit]
        warm += [f"GPU {index}: {text}" for bit, text in _WARM.items() if bits & bit]
        if gpu.get("pcie_width", 0) < gpu.get("max_pcie_width", 0):
            warm.append(f"GPU {index}: PCIe x{gpu['pcie_width']} instead of x{gpu['max_pcie_width']}")
        for key in ("clock", "max_clock", "temperature", "slowdown_temperature"):
            if key in gpu:
                figures[f"gpu{index}/{key}"] = float(gpu[key])
    if slowed:
        return Result("fail", "; ".join(slowed + warm), "check cooling and power supply of the node", figures)
    if warm:
        return Result("warn", "; ".join(warm), "check cooling and PCIe slots; a reboot often restores the width of a link", figures)
    hottest = max((figures[name] for name in figures if name.endswith("/temperature")), default=0)
    return Result(
        "ok", f"{len(gpus)} GPUs are not throttled" + (f", the hottest has {hottest:.0f} degrees C" if hottest else ""), figures=figures
    )


def nvlink(node: Node) -> Result:
    """Links between the GPUs that are down."""
    gpus = node.gpus()
    links = [list(gpu.get("nvlinks", ())) for gpu in gpus]
    up = [sum(map(bool, one)) for one in links]
    if not any(up):
        raise NotThere("no GPU has an active NVLink")
    figures = {f"gpu{index}/nvlinks": float(count) for index, count in enumerate(up)}
    figures |= {f"gpu{index}/nvlink_errors": float(gpu["nvlink_errors"]) for index, gpu in enumerate(gpus) if "nvlink_errors" in gpu}
    fewer = [f"GPU {index} has {count} active links, others have {max(up)}" for index, count in enumerate(up) if count < max(up)]
    if fewer:
        return Result("fail", "; ".join(fewer), "drain the node, and look for NVLink errors with nvidia-smi nvlink --status", figures)
    return Result("ok", f"{max(up)} active links on each of {len(up)} GPUs", figures=figures)


def memory_holders(node: Node) -> Result:
    """Processes that hold memory of a GPU although nobody waits for them, and memory that no process of this machine holds."""
    gpus, processes = node.gpus(), {one.pid: one for one in node.processes()}
    left, busy, figures = [], [], {}
    for index, gpu in enumerate(gpus):
        figures[f"gpu{index}/memory_used_bytes"] = float(gpu.get("memory_used", 0))
        for pid, count in gpu.get("processes", ()):
            process = processes.get(pid)
            amount = f"{count / 1e9:.1f} GB of GPU {index}"
            if process is None:  # of another container, or of a process that has ended
                busy.append(f"{amount} are held by process {pid}, which cannot be seen here")
            elif process.state in "ZT" or (process.parent == 1 and process.launch):
                left.append(f"{amount} are held by {process}, which is {_left_how(process.state)}")
            else:
                busy.append(f"{amount} are held by {process}")
    if left:
        return Result(
            "fail", "; ".join(left + busy), "end them by their process id (kill -9 PID); if the memory stays, reset the GPU", figures
        )
    if busy:
        return Result("warn", "; ".join(busy), "make sure that they belong to this run; it shares the GPU with them", figures)
    return Result("ok", f"no process holds memory of the {len(gpus)} GPUs", figures=figures)


def _left_how(state: str) -> str:
    return {"Z": "dead", "T": "stopped"}.get(state, "a rank whose launcher has ended")


def dcgm(node: Node) -> Result:
    """NVIDIA's short diagnostics, `dcgmi diag -r 1`."""
    code, text = node.run(("dcgmi", "diag", "-r", "1", "-j"), 40.0)
    found = list(diagnostics(text))
    failed = [f"{test} on {where}: {why or 'failed'}" for test, where, status, why in found if status == "fail"]
    warned = [f"{test} on {where}: {why or 'warning'}" for test, where, status, why in found if status == "warn"]
    if failed:
        return Result("fail", "; ".join(failed + warned), "drain the node, and run dcgmi diag -r 3")
    if not any(status == "pass" for _, _, status, _ in found):
        last = " ".join(text.split())[-200:]
        return Result("unknown", f"dcgmi diag exited with code {code} and judged nothing: {last}", "start nv-hostengine, or update DCGM")
    if warned:
        return Result("warn", "; ".join(warned), "dcgmi diag -r 2 examines it for two minutes")
    return Result("ok", f"dcgmi diag -r 1: {len({test for test, _, status, _ in found if status == 'pass'})} tests passed")


def diagnostics(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Test, GPU, status (pass, fail, warn, skip) and message in the JSON of `dcgmi diag -j`.

    Its form is in nvvs/include/NvvsCommon.h of NVIDIA/DCGM: categories with tests with results. DCGM 4 names the outermost key "DCGM
    Diagnostic" instead of "DCGM GPU Diagnostic", a result has entity_id instead of gpu_id, and warnings are objects with a message.
    """
    start = text.find("{")
    try:
        tree = json.loads(text[start:]) if start >= 0 else {}
    except (ValueError, RecursionError):
        return
    for outer in tree.values() if isinstance(tree, dict) else ():
        for category in _dicts(outer, "test_categories"):
            for test in _dicts(category, "tests"):
                for result in _dicts(test, "results"):
                    given = [result.get(key) for key in ("gpu_id", "gpu_ids", "entity_id")]
                    gpu = next((f"GPU {value}" for value in given if value not in (None, "")), "the node")
                    status = {"skipped": "skip", "not run": "skip", "warning": "warn"}.get(
                        word := str(result.get("status", "")).lower(), word
                    )
                    warnings = result.get("warnings") or []
                    listed = warnings if isinstance(warnings, list) else [warnings]
                    texts = [str(one.get("warning", one.get("message", one)) if isinstance(one, dict) else one) for one in listed]
                    yield str(test.get("name", "test")), gpu, status, " ".join(" ".join(texts).split())[:300]


def _dicts(tree: Any, key: str) -> list[dict[str, Any]]:
    found = tree.get(key) if isinstance(tree, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
