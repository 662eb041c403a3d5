"""Runs untrusted Python programs in a sandbox. Linux on x86_64 and aarch64 only.

The kernel enforces the following. If any of it is not available, the program is not run.

- No network: a network namespace, and only sockets of the internet protocols.
- Files: a root directory that holds only the interpreter and the system's libraries, read-only, and one writable directory in memory, of
  limited size (a mount namespace, and Landlock as a second layer).
- Processes: a PID namespace without /proc, and one process, which may have threads. So the limits of memory and CPU time hold for
  everything that the program does.
- System calls (seccomp): no keyrings, no shared memory, no namespaces, mounts or tracing.
- Users: no gain of privileges, and never root's user id, even if root starts it. The environment is clean and holds no keys.
- Time: enforced by a process that the program cannot reach.

Limits of the sandbox: it is not a virtual machine, so a kernel vulnerability is one of the sandbox. Programs share the machine's clock and
cores, so one can slow others down, and whether a program meets its time limit depends on the machine. A program can read the directories
of the interpreter and its packages; if root starts it, only what is readable for everybody.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lmworks.host import machine

_LAUNCHER, _JUDGED = Path(__file__).with_name("sandbox_launcher.py"), Path(__file__).with_name("judged.py")
_ENVIRONMENT = {
    "HOME": "/sandbox", "TMPDIR": "/sandbox", "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
}
_GRACE = 60.0  # seconds for the launcher, which enforces the time limit itself, to start and to answer


@dataclass(frozen=True)
class Limits:
    """Limits of one program. `seconds` limits wall time and, rounded up, CPU time; `memory` limits the address space, in bytes.

    `file_bytes` limits one file and also the sum of all files. Files are held in memory too, in addition to `memory`.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    file_bytes: int = 16 << 20
    threads: int = 32
    files: int = 64


@dataclass(frozen=True)
class RunResult:
    """How a program ended. `detail` is one line: the last line that it wrote, or why it was stopped or not started."""

    outcome: Literal["passed", "failed", "timeout", "refused"]
    detail: str


def run_python(source: str, limits: Limits | None = None) -> RunResult:
    """Run an untrusted Python program and report whether it exits with 0. Its standard input is empty; its output is discarded."""
    return _run(_bytes(source), limits or Limits(), {})


def judge_python(source: str, tests: str, limits: Limits | None = None) -> RunResult:
    """Run tests of an untrusted Python program, and report whether they end without an exception.

    The tests see the program's names, except those of builtins and those that begin with two underscores; modules of the standard library
    that its text imports at the top are the real ones. They run in another process, so that the program can read neither them nor what
    their verdict is made of: it is called with plain values and returns such (`judged`). Objects of its own classes can be made and used by
    the tests, and are equal to no plain value. Functions of the tests cannot be handed to it, and what it prints is not seen.
    """
    parts = _JUDGED.read_bytes()
    program = parts + b"\nserve(" + repr(_bytes(source)).encode() + b")\n"
    names = f"{{**names_of(Channel(), {_bytes(source)!r}), '__name__': 'tests'}}"
    run = f"exec(compile({_bytes(tests)!r}, 'tests', 'exec'), {names})\n"
    return _run(program + parts + b"\n" + run.encode(), limits or Limits(), {"program_bytes": len(program)})


def _bytes(source: str) -> bytes:
    return source.encode("utf-8", "surrogatepass")


def _run(source: bytes, limits: Limits, more: dict[str, int]) -> RunResult:
    if not machine.sandbox():
        return RunResult("refused", "this machine has none")
    command, pipe = [sys.executable, "-I", str(_LAUNCHER), json.dumps(asdict(limits) | more)], subprocess.PIPE
    with subprocess.Popen(command, cwd="/", env=_ENVIRONMENT, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True) as launcher:
        try:
            answer, trouble = launcher.communicate(source, limits.seconds + _GRACE)
        except subprocess.TimeoutExpired:
            return RunResult("timeout", f"over {limits.seconds:g} s")
        finally:
            launcher.kill()
    if launcher.returncode:
        lines = trouble.decode("utf-8", "replace").strip().splitlines() or [f"exit code {launcher.returncode}"]
        return RunResult("refused", f"no sandbox: {lines[-1]}")
    return RunResult(**json.loads(answer))
