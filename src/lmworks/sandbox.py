"""Programs that nobody has read, run where they can do little harm. Linux only.

What the kernel enforces: no network at all (a network namespace of its own); no reading of files other than the interpreter's and
the system's libraries, and no writing outside a temporary directory that is removed afterwards (Landlock); no sight of other processes,
and none left behind (a process namespace); limits on CPU time, memory, size of a file, open files and processes; no gain of privileges; a
clean environment without keys. Where one of the namespaces or Landlock is missing, nothing is run.

What it does not promise: it is no virtual machine, so a hole in the kernel is a hole in it; programs share the machine's clock, cores
and disk, so one can slow others down and write to the disk for as long as it runs; whether a program meets its time limit depends on the
machine; a socket that is a file can be talked to where its permissions allow it; and the number of processes is not limited where root
starts it with a Python that lies where nobody else can go.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

_LAUNCHER = Path(__file__).with_name("confine.py")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
_REFUSED = 125
_GRACE = 2.0
_TAIL = 300


@dataclass(frozen=True)
class Limits:
    """What one program may use. `seconds` is wall time, and CPU time rounded up; `memory` is address space, in bytes."""

    seconds: float = 5.0
    memory: int = 512 << 20
    file_bytes: int = 16 << 20
    processes: int = 32
    files: int = 64


@dataclass(frozen=True)
class Ran:
    """How a program ended. `detail` is one line: the last of what it wrote, or why it was stopped or not begun."""

    outcome: Literal["passed", "failed", "timeout", "refused"]
    detail: str


def run_python(source: str, limits: Limits | None = None) -> Ran:
    """Run a Python program of any origin and see whether it exits with 0. Reads nothing from the user; its output is thrown away."""
    limits = limits or Limits()
    if sys.platform != "linux":
        return Ran("refused", "the sandbox needs Linux")
    with tempfile.TemporaryDirectory(prefix="lmworks-sandbox-", ignore_cleanup_errors=True) as folder:
        program, output = Path(folder, "program.py"), Path(folder, "output")
        program.write_text(source, encoding="utf-8", errors="surrogatepass")
        environment = {"HOME": folder, "TMPDIR": folder, **_ENVIRONMENT}
        command = [sys.executable, "-I", str(_LAUNCHER), json.dumps(asdict(limits)), folder, str(program)]
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
            )
            try:
                code = process.wait(limits.seconds + _GRACE)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        return _verdict(code, _last_line(output), limits)


def _verdict(code: int | None, line: str, limits: Limits) -> Ran:
    if code is None or code in (128 + signal.SIGXCPU, 128 + signal.SIGALRM):
        return Ran("timeout", f"over {limits.seconds:g} s")
    if code == _REFUSED and line.startswith("no sandbox: "):
        return Ran("refused", line)
    return Ran("passed", "") if code == 0 else Ran("failed", line or f"exit code {code}")


def _last_line(output: Path) -> str:
    size = output.stat().st_size
    with output.open("rb") as written:
        written.seek(max(0, size - 4096))
        lines = written.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_TAIL] if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the whole session; the first process of a namespace takes the others with it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
