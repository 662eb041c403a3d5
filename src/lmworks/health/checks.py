"""The checks of a node in their order, and the function that runs them: each in a process of its own, with a time limit.

A call into a driver or a dead mount may never return, and may not even be killed. It costs one check, not the command.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from lmworks.health import disks, gpu, network, stress, system
from lmworks.health.node import DRIVER, Broken, CannotJudge, Node, NotThere
from lmworks.health.report import Checked, Report, Result

_PACKAGES = ("lmworks", "torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy")
QUICK_SECONDS, FULL_SECONDS = 20.0, 55.0  # that the checks of a node may take; Slurm ends a HealthCheckProgram after 60
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass(frozen=True)
class Request:
    """What to check. `folder`: that of the run, or one to write to; `seconds`: the limit of all checks together; `quick`: without the
    checks that take long; `ports` must be free; `reach`: HOST:PORT to which this node must be able to connect."""

    folder: Path
    seconds: float
    quick: bool = False
    ports: tuple[int, ...] = ()
    reach: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """One check. `hangs` is what is wrong if it does not end in time; without it nothing is known then. `alone`: not beside others, which
    would disturb its measurement. `full`: left out of a quick check."""

    name: str
    title: str
    work: Callable[[Node, Request], Result]
    hangs: str = ""
    alone: bool = False
    full: bool = False


def _reach(node: Node, request: Request) -> Result:
    if not request.reach:
        raise NotThere("no address was given (--reach)")
    return network.reach(request.reach)


_DRIVER = "the GPU driver does not answer"

CHECKS = (
    Check("gpu_errors", "GPU memory errors", lambda node, _: gpu.errors(node), _DRIVER),
    Check("gpu_xids", "GPU errors in the kernel log", lambda node, _: gpu.xids(node)),
    Check("gpu_clocks", "GPU throttling and PCIe", lambda node, _: gpu.clocks(node), _DRIVER),
    Check("nvlink", "NVLink", lambda node, _: gpu.nvlink(node), _DRIVER),
    Check("gpu_processes", "processes that hold GPU memory", lambda node, _: gpu.memory_holders(node), _DRIVER),
    Check("infiniband", "InfiniBand and RoCE ports", lambda node, _: network.infiniband(node)),
    Check("ports", "free ports", lambda _, request: network.free_ports(request.ports)),
    Check("reach", "connection to the launcher", _reach, "the connection hangs"),
    Check("memory_errors", "memory errors", lambda node, _: system.memory_errors(node)),
    Check("throttling", "throttled processors", lambda node, _: system.throttling(node)),
    Check("oom", "processes killed for memory", lambda node, _: system.memory_killer(node)),
    Check("limits", "limits of files and locked memory", lambda node, _: system.limits(node)),
    Check("clock", "clock", lambda node, _: system.clock(node)),
    Check("leftovers", "ranks of earlier runs", lambda node, request: system.leftovers(node, request.folder)),
    Check("mounts", "mounts", lambda node, request: disks.mounts(node, request.folder), "a mount hangs"),
    Check("space", "free space", lambda _, request: disks.space(request.folder), "the disk hangs"),
    Check(
        "write",
        "write test",
        lambda node, request: disks.write(node, request.folder, 4 if request.quick else 32),
        "writing hangs",
        alone=True,
    ),
    Check("stress", "stress test", lambda node, _: stress.stress(node, 4.0), alone=True, full=True),
    Check("dcgm", "NVIDIA's diagnostics", lambda node, _: gpu.dcgm(node), alone=True, full=True),
)


def check_node(node: Node, request: Request, checks: Sequence[Check] = CHECKS) -> Report:
    """Run all checks within the time limit of the request."""
    began, start = node.now(), time.monotonic()
    until = start + request.seconds
    wanted = [check for check in checks if not (request.quick and check.full)]
    found: dict[str, Checked] = {}
    for group in ([check for check in wanted if not check.alone], *([check] for check in wanted if check.alone)):
        for checked in _run(node, request, group, until):
            found[checked.name] = checked
    return Report(socket.gethostname(), began, began + time.monotonic() - start, [found[check.name] for check in wanted], versions(node))


def _run(node: Node, request: Request, checks: Sequence[Check], until: float) -> list[Checked]:
    """Run checks at once, each in a child; those that have not ended by `until` are killed and not waited for."""
    began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    running: dict[int, tuple[Check, int, bytearray]] = {}
    for check in checks:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            _work(node, request, check, writing)
        os.close(writing)
        running[reading] = check, child, bytearray()
    found = []
    while running:
        ready, _, _ = select.select(list(running), [], [], max(0.0, until - time.monotonic()))
        for reading in ready or list(running):
            check, child, said = running[reading]
            part = os.read(reading, 1 << 16) if ready else b""
            said += part
            if part:
                continue
            del running[reading]
            os.close(reading)
            for end in (os.kill, os.killpg):  # the child, which has ended or is late, and may have no group yet; and what it has started
                with suppress(ProcessLookupError, PermissionError):
                    end(child, signal.SIGKILL)
            if ready:
                os.waitpid(child, 0)
            found.append(Checked(check.name, check.title, _result(check, bytes(said), bool(ready), request), time.monotonic() - began))
    return found


def _result(check: Check, said: bytes, ended: bool, request: Request) -> Result:
    with suppress(ValueError, TypeError):
        return Result(**json.loads(said))
    if not ended:
        if check.hangs:
            return Result("fail", f"{check.hangs}: no answer within {request.seconds:g} s", "reboot the node if this stays")
        return Result("unknown", f"not ended within {request.seconds:g} s", "raise --timeout")
    return Result("unknown", "its process ended without a result", f"see dmesg; run it alone: lmworks health --only {check.name}")


def _work(node: Node, request: Request, check: Check, writing: int) -> None:
    """The child: writes its result and ends. Its standard streams are closed, so that whoever waits for their end does not wait for a child
    that hangs."""
    try:
        os.setsid()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        with open(writing, "w", encoding="utf-8") as handle:
            json.dump(asdict(judged(node, request, check)), handle)
    finally:
        os._exit(0)


def judged(node: Node, request: Request, check: Check) -> Result:
    """The result of a check in this process; of an exception, that it could not judge."""
    try:
        return check.work(node, request)
    except NotThere as reason:
        return Result("skip", str(reason))
    except CannotJudge as reason:
        return Result("unknown", str(reason))
    except Broken as reason:
        return Result("fail", str(reason), "reboot the node, and look for errors of the driver in dmesg")
    except TimeoutError as error:
        return Result("unknown", str(error), "raise --timeout")
    except Exception as error:
        return Result("unknown", " ".join(f"{type(error).__name__}: {error}".split())[:300], "this is a bug in lmworks; please report it")


def versions(node: Node) -> dict[str, str]:
    """Versions that should be equal on all hosts of a run."""
    found = {"python": platform.python_version(), "kernel": node.read("/proc/sys/kernel/osrelease") or platform.release()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    if driver := node.read(DRIVER):
        found["nvidia driver"] = next((word for word in driver.split() if word[:1].isdigit() and "." in word), driver[:60])
    return found
