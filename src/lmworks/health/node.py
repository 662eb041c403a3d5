"""The node that is checked: files of the kernel, programs, processes and the GPUs, all read through this one class.

With `LMWORKS_MACHINE=recorded=FOLDER` they are read from a recording instead: `sys/`, `proc/`, `dev/kmsg` and `run/` as below /,
`nvml.json` as `gpus` returns it, `processes.json`, `programs/NAME` with the standard output of a program, and `clock_offset` in seconds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmworks.health.nvml import read_gpus
from lmworks.host import machine
from lmworks.io.files import read_at_most
from lmworks.ui.exit_codes import ExitCode

DRIVER = "/proc/driver/nvidia/version"
LAUNCH = "LMWORKS_LAUNCH"  # environment variable of the ranks of a run, see lmworks.launch.launch_dir
_MOST = 4 << 20  # bytes of a file or an output that are read
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor and class
_SET_ASIDE = re.compile(r"^DRIVER=(.*vfio.*|pci-stub|pciback)$", re.MULTILINE)  # drivers that hand a device over to virtual machines


class NotThere(Exception):
    """This machine does not have what a check reads; the message says why."""


class CannotJudge(Exception):
    """A check cannot be made although this machine has what it checks; the message says why."""


class Broken(Exception):
    """What a check reads is broken; the message says how."""


@dataclass(frozen=True)
class Process:
    """`state` as in /proc (R, S, D, Z, T); `launch`: the launch folder of the run of which it is a rank; `started`: seconds since 1970."""

    pid: int
    parent: int
    user: str
    state: str
    command: str
    started: float
    launch: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} ({self.command[:60]})"


@dataclass(frozen=True)
class Node:
    """`recorded`: the folder of a recording; None for this machine."""

    recorded: Path | None = None

    @classmethod
    def here(cls) -> Node:
        return cls(machine.recorded())

    def path(self, path: str) -> Path:
        """Where a file of the kernel is read."""
        return Path(path) if self.recorded is None else self.recorded / path.lstrip("/")

    def read(self, path: str) -> str | None:
        """The text of a file of the kernel without its last newline; None if it cannot be read."""
        try:
            with open(self.path(path), "rb") as handle:
                return read_at_most(handle, _MOST).decode("utf-8", errors="replace").rstrip("\n")
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """The number in a file of the kernel; None if there is none."""
        try:
            return int((self.read(path) or "").split()[0])
        except (ValueError, IndexError):
            return None

    def paths(self, folder: str, pattern: str) -> list[str]:
        """The paths that match below a folder of the kernel, sorted."""
        root = self.path(folder)
        with suppress(OSError):
            return sorted(f"{folder}/{path.relative_to(root)}" for path in root.glob(pattern))
        return []

    def run(self, command: Sequence[str], seconds: float, name: str = "") -> tuple[int, str]:
        """Exit code and standard output of a program. Raises `NotThere` if it is not installed, `TimeoutError` if it does not end.

        `name`: of its recording; by default that of the program.
        """
        if self.recorded is not None:
            path = self.recorded / "programs" / (name or command[0])
            if not path.is_file():
                raise NotThere(f"{path.name} is not in the recording")
            return ExitCode.OK, path.read_text(encoding="utf-8", errors="replace")[:_MOST]
        if shutil.which(command[0]) is None:
            raise NotThere(f"{command[0]} is not installed")
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{command[0]} did not end within {seconds:.0f} s") from None
        return done.returncode, done.stdout[:_MOST].decode("utf-8", errors="replace")

    def now(self) -> float:
        """Seconds since 1970 by the clock of this node."""
        offset = self.recorded and self.read("/clock_offset")
        return time.time() + float(offset or 0)

    def gpus_on_bus(self) -> int:
        """How many NVIDIA GPUs are on the PCI bus, without those that are set aside for virtual machines."""
        devices = [path.rpartition("/")[0] for path in self.paths("/sys/bus/pci/devices", "*/vendor") if self.read(path) == _NVIDIA]
        displays = [device for device in devices if (self.read(f"{device}/class") or "").startswith(_DISPLAY)]
        return sum(not _SET_ASIDE.search(self.read(f"{device}/uevent") or "") for device in displays)

    def require_driver(self) -> None:
        """Raise `NotThere` without NVIDIA's driver, and `Broken` where there are GPUs for it."""
        if self.read(DRIVER) is None:
            if count := self.gpus_on_bus():
                raise Broken(f"{count} NVIDIA GPU{'s are' if count > 1 else ' is'} on the PCI bus, and no driver is loaded")
            raise NotThere("there is no NVIDIA driver")

    def gpus(self) -> list[dict[str, Any]]:
        """The values of NVML of each GPU (see `lmworks.health.nvml`). Raises `NotThere` where there is no GPU, else `CannotJudge` without
        the package that reads them, and `Broken` if the driver is not loaded or does not find them."""
        self.require_driver()
        if self.recorded is None:
            if importlib.util.find_spec("pynvml") is None:
                raise CannotJudge("nvidia-ml-py is not installed, which reads the GPUs: pip install 'lmworks[gpu]'")
            found = read_gpus()
            if isinstance(found, str):
                raise Broken(found)
            return found
        text = self.read("/nvml.json")
        if text is None:
            raise NotThere("there is no GPU in the recording")
        return [dict(gpu) for gpu in json.loads(text)]

    def kernel_log(self) -> list[str]:
        """The lines of the kernel log since the start of the machine. Raises `NotThere` if it may not be read."""
        path = self.path("/dev/kmsg")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            raise NotThere(f"the kernel log cannot be read ({error.strerror})") from None
        parts: list[bytes] = []
        try:
            while sum(map(len, parts)) < _MOST and (part := os.read(fd, 1 << 13)):  # one record of /dev/kmsg at a time
                parts.append(part)
        except BlockingIOError:  # that was the last record
            pass
        except OSError as error:
            raise NotThere(f"the kernel log cannot be read ({error.strerror})") from None
        finally:
            os.close(fd)
        return b"".join(parts).decode("utf-8", errors="replace").splitlines()

    def processes(self) -> list[Process]:
        """The processes of this machine, without those that belong to this command."""
        if self.recorded is not None:
            return [Process(**one) for one in json.loads(self.read("/processes.json") or "[]")]
        import psutil

        own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
        found = []
        for process in psutil.process_iter():
            if process.pid in own:
                continue
            with suppress(psutil.Error), process.oneshot():
                launch = ""
                with suppress(psutil.Error):
                    launch = process.environ().get(LAUNCH, "")
                state = _STATES.get(process.status(), "S")
                command = " ".join(process.cmdline()) or process.name()
                found.append(Process(process.pid, process.ppid(), process.username(), state, command, process.create_time(), launch))
        return found


_STATES = {"zombie": "Z", "dead": "Z", "stopped": "T", "tracing-stop": "T", "disk-sleep": "D", "running": "R"}


def record_processes(processes: Sequence[Process]) -> str:
    """The text of `processes.json` in a recording."""
    return json.dumps([asdict(one) for one in processes])
