"""Untrusted Python programs, run where they can do little harm. Linux on x86_64 and aarch64 only.

What the kernel enforces: no network at all (a network namespace of its own, and only sockets of the internet protocols); a root
directory in which there is nothing but the interpreter and the system's libraries, to read only, and a directory in memory, of limited
size, to write in (a mount namespace, and Landlock as a second wall); no sight of other processes (a process namespace, no /proc); one
process, in which there may be threads, so that the limits of memory and of CPU time hold for all that a program does; no keyrings, no
shared memory, no namespaces, mounts or tracing of its own (seccomp); no gain of privileges, and never root's user number, whoever starts
it; a clean environment without keys. Time is kept, and the program ended, by a process that it cannot reach. Where one of these is
missing, nothing is run.

What it does not promise: it is no virtual machine, so a hole in the kernel is a hole in it; programs share the machine's clock and cores,
so one can slow others down; whether a program meets its time limit depends on the machine. What the interpreter and its packages lie in
can be read by a program; where root starts it, only what anybody may read of that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lmworks import machine

_LAUNCHER = Path(__file__).with_name("confine.py")
_ENVIRONMENT = {
    "HOME": "/sandbox", "TMPDIR": "/sandbox", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
}
_GRACE = 60.0  # seconds in which the launcher, which keeps the time itself, begins and answers


@dataclass(frozen=True)
class Limits:
    """What one program may use. `seconds` is wall time, and CPU time rounded up; `memory` is address space, in bytes.

    `file_bytes` is the size of a file, and of all that it writes; those lie in memory too, beside `memory`.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    file_bytes: int = 16 << 20
    threads: int = 32
    files: int = 64


@dataclass(frozen=True)
class Ran:
    """How a program ended. `detail` is one line: the last of what it wrote, or why it was stopped or not begun."""

    outcome: Literal["passed", "failed", "timeout", "refused"]
    detail: str


def run_python(source: str, limits: Limits | None = None) -> Ran:
    """Run a Python program of any origin and see whether it exits with 0. Reads nothing from the user; its output is thrown away."""
    limits = limits or Limits()
    if not machine.sandbox():
        return Ran("refused", "this machine has none")
    command, pipe = [sys.executable, "-I", str(_LAUNCHER), json.dumps(asdict(limits))], subprocess.PIPE
    with subprocess.Popen(command, cwd="/", env=_ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as launcher:
        try:
            answer, trouble = launcher.communicate(source.encode("utf-8", "surrogatepass"), limits.seconds + _GRACE)
        except subprocess.TimeoutExpired:
            return Ran("timeout", f"over {limits.seconds:g} s")
        finally:
            launcher.kill()
    if launcher.returncode:
        lines = trouble.decode("utf-8", "replace").strip().splitlines() or [f"exit code {launcher.returncode}"]
        return Ran("refused", f"no sandbox: {lines[-1]}")
    return Ran(**json.loads(answer))
