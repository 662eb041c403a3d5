"""Checks of processors, memory, limits, the clock, and processes that earlier runs have left."""

from __future__ import annotations

import re
from pathlib import Path

from lmworks.health.node import Node, NotThere
from lmworks.health.report import Result
from lmworks.watch.ledger import in_use

_FILES, _FEW_FILES = 1024, 65_536  # open files: fewer than the first stop a run, fewer than the second a large one
_THROTTLED = 0.01  # share of the time since the start of the machine
_AHEAD = 5.0  # seconds by which clocks may differ
_FIRST_YEAR = 1_767_225_600  # 2026 began: no node that runs this is older


def memory_errors(node: Node) -> Result:
    """Errors of the main memory that the kernel has counted (EDAC, Documentation/admin-guide/ras.rst)."""
    controllers = node.paths("/sys/devices/system/edac/mc", "mc*/ue_count")
    if not controllers:
        raise NotThere("the kernel counts no memory errors here (no EDAC driver)")
    uncorrected = sum(node.number(path) or 0 for path in controllers)
    corrected = sum(node.number(path.replace("ue_count", "ce_count")) or 0 for path in controllers)
    figures = {"uncorrected": float(uncorrected), "corrected": float(corrected)}
    text = f"{uncorrected} uncorrected and {corrected} corrected errors of {len(controllers)} memory controllers"
    if uncorrected:
        return Result("fail", text, "drain the node, and replace the module that edac-util names", figures)
    if corrected:
        return Result("warn", text, "watch whether the number grows; many corrected errors come before an uncorrected one", figures)
    return Result("ok", text, figures=figures)


def throttling(node: Node) -> Result:
    """Time that processors were slowed down because they were too hot, since the start of the machine."""
    found = node.paths("/sys/devices/system/cpu", "cpu*/thermal_throttle/package_throttle_total_time_ms")
    up = float((node.read("/proc/uptime") or "0").split()[0])
    if not found or not up:
        raise NotThere("the kernel does not count thermal throttling here")
    worst = max(node.number(path) or 0 for path in found) / 1000
    counts = sum(node.number(path.replace("package_throttle_total_time_ms", "core_throttle_count")) or 0 for path in found)
    figures = {"throttled_seconds": worst, "core_throttle_count": float(counts), "uptime_seconds": up}
    text = f"a processor was throttled for {worst:,.0f} s of {up:,.0f} s since the start, cores {counts:,} times"
    if worst > _THROTTLED * up:
        return Result("fail" if worst > 10 * _THROTTLED * up else "warn", text, "check cooling, fans and the power profile", figures)
    return Result("ok", text, figures=figures)


def memory_killer(node: Node) -> Result:
    """Processes that the kernel has killed because memory was full, since the start of the machine."""
    found = re.search(r"^oom_kill (\d+)$", node.read("/proc/vmstat") or "", flags=re.M)
    if not found:
        raise NotThere("the kernel does not count killed processes here")
    kills = int(found[1])
    figures = {"oom_kills": float(kills)}
    if kills:
        text = f"the kernel has killed {kills} processes for memory since the start of the machine"
        return Result("warn", text, "lower the memory of the run (lmworks plan), or find what else uses it", figures)
    return Result("ok", "no process was killed for memory since the start of the machine", figures=figures)


def limits(node: Node) -> Result:
    """Limits of open files and of locked memory, which InfiniBand adapters need to register buffers."""
    text = node.read("/proc/self/limits")
    if text is None:
        raise NotThere("there is no /proc/self/limits")
    files, locked = (_soft_limit(text, name) for name in ("Max open files", "Max locked memory"))
    rdma = bool(node.paths("/sys/class/infiniband", "*"))
    figures = {name: value for name, value in (("open_files", files), ("locked_memory_bytes", locked)) if value < float("inf")}
    said = f"{files:,.0f} open files, " + ("any" if locked == float("inf") else f"{locked / 2**20:,.0f} MiB of") + " locked memory"
    if rdma and locked < float("inf"):
        return Result("fail", f"{said}: InfiniBand cannot register its buffers", "set memlock to unlimited (limits.conf, slurmd)", figures)
    if files < _FILES:
        return Result("fail", said, "ulimit -n 65536 (limits.conf)", figures)
    if files < _FEW_FILES:
        return Result("ok" if not rdma else "warn", said, "" if not rdma else "ulimit -n 65536 (limits.conf)", figures)
    return Result("ok", said, figures=figures)


def _soft_limit(text: str, name: str) -> float:
    found = re.search(rf"^{name}\s+(\S+)", text, flags=re.M)
    return float("inf") if not found or found[1] == "unlimited" else float(found[1])


def clock(node: Node) -> Result:
    """Whether the clock is plausible, and synchronized as far as the system says."""
    now = node.now()
    if now < _FIRST_YEAR:
        return Result("fail", f"the clock says {now:.0f} s since 1970, which is before 2026", "set the clock: chronyc makestep")
    try:
        _, text = node.run(("chronyc", "-n", "tracking"), 3.0)
    except NotThere:
        if node.paths("/run/systemd/timesync", "synchronized"):
            return Result("ok", "the clock is synchronized by systemd-timesyncd")
        return Result("ok", "the clock is plausible; that it is synchronized is not known (no chronyc)")
    found = re.search(r"System time\s*:\s*([\d.]+) seconds (slow|fast)", text)
    if not found or "Not synchronised" in text:
        return Result("warn", "chronyc: the clock is not synchronized", "start chronyd, with a server that answers")
    figures = {"offset_seconds": float(found[1])}
    said = f"the clock is {found[1]} s {found[2]} (chronyc)"
    return Result("fail" if float(found[1]) > _AHEAD else "ok", said, "chronyc makestep" if float(found[1]) > _AHEAD else "", figures)


def leftovers(node: Node, folder: Path) -> Result:
    """Ranks whose launcher has ended, stopped ranks, and the lock of the run."""
    ranks = [one for one in node.processes() if one.launch and one.command]
    orphans = [f"{one} is a rank of {one.launch} whose launcher has ended" for one in ranks if one.parent == 1]
    stopped = [f"{one} is a rank of {one.launch} that is stopped" for one in ranks if one.state == "T" and one.parent != 1]
    if orphans or stopped:
        return Result(
            "fail", "; ".join(orphans + stopped), "end them by their process id: kill -9 PID", {"processes": float(len(orphans + stopped))}
        )
    others = f"; {len(ranks)} ranks of runs are here" if ranks else ""
    if (folder / "lock").exists() and in_use(folder):
        return Result("ok", f"{folder} is in use by a running process{others}")
    return Result("ok", f"no rank of an earlier run is left{others}")
