"""Confines itself and becomes another program: the first half of `lmworks.sandbox`, run as a script by an interpreter of its own.

    python -I confine.py '{"seconds": 5, ...}' FOLDER PROGRAM

Imports nothing but the standard library. Exit code 125 with a line on standard error: the kernel lacks something, and nothing was run.
Landlock: landlock(7). The numbers of its system calls are the same on all architectures.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import stat
import struct
import sys
from pathlib import Path
from typing import NoReturn

REFUSED = 125
NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
EXECUTE, WRITE, READ, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
OF_A_FILE = EXECUTE | WRITE | READ | 1 << 14
RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # files; version 5 adds ioctl on devices
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")

_libc = ctypes.CDLL(None, use_errno=True)


def refuse(what: str) -> NoReturn:
    print(f"no sandbox: {what}", file=sys.stderr, flush=True)
    os._exit(REFUSED)


def check(result: int, what: str) -> int:
    """The result of a call, unless it failed."""
    if result < 0:
        refuse(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def unshare(*own: str) -> None:
    """Into namespaces of its own; as nobody, to whom the paths `own` are given, where root started it and nobody can get at Python."""
    if os.geteuid() == 0 and all(reachable(path) for path in (sys.executable, sys.base_prefix)):
        for path in own:
            os.chown(path, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    check(_libc.unshare(CLONE_NEWUSER), "user namespace")
    check(_libc.unshare(CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWNS | CLONE_NEWPID), "network and process namespaces")


def reachable(path: str) -> bool:
    """Whether anybody may go there."""
    whole = Path(path).resolve()
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in (whole, *whole.parents))


def landlock(folder: str) -> None:
    """From here on: read and execute under `READABLE` and the interpreter, everything under `folder`, nothing elsewhere."""
    version = check(_libc.syscall(LANDLOCK_CREATE, None, 0, 1), "Landlock")
    handled = RIGHTS_BY_VERSION.get(version, RIGHTS_BY_VERSION[3])
    attributes = struct.pack("=Q", handled)
    rules = check(_libc.syscall(LANDLOCK_CREATE, attributes, len(attributes), 0), "Landlock rules")
    for path in {*READABLE, sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)}:
        allow(rules, path, (EXECUTE | READ | READ_DIR) & handled)
    allow(rules, "/dev/null", (READ | WRITE) & handled)
    allow(rules, folder, handled)
    check(_libc.syscall(LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


def allow(rules: int, path: str, rights: int) -> None:
    """Add a path that is there to the rules."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= OF_A_FILE
    beneath = struct.pack("=Qi", rights, place)
    check(_libc.syscall(LANDLOCK_ADD, rules, 1, beneath, 0), f"Landlock rule for {path}")
    os.close(place)


def limit(limits: dict[str, float]) -> None:
    """Resource limits; the processor's is in whole seconds."""
    for which, most in (
        (resource.RLIMIT_CPU, math.ceil(limits["seconds"])),
        (resource.RLIMIT_AS, int(limits["memory"])),
        (resource.RLIMIT_FSIZE, int(limits["file_bytes"])),
        (resource.RLIMIT_NOFILE, int(limits["files"])),
        (resource.RLIMIT_NPROC, int(limits["processes"])),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (most, most))


def main(limits: dict[str, float], folder: str, program: str) -> NoReturn:
    """Confine this process, then become the program in a child; this process waits and passes its end on."""
    unshare(folder, program)
    child = os.fork()
    if child == 0:
        check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "end with the parent")
        check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
        landlock(folder)
        limit(limits)
        try:
            os.execv(sys.executable, [sys.executable, "-I", "-X", "utf8", program])
        except OSError as error:
            refuse(f"{sys.executable}: {error}")
    signal.signal(signal.SIGALRM, lambda number, frame: os.kill(child, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, limits["seconds"])
    _, status = os.waitpid(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    ended = os.waitstatus_to_exitcode(status)
    late = ended == -signal.SIGKILL
    os._exit(128 + signal.SIGALRM if late else ended if ended >= 0 else 128 - ended)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3])
