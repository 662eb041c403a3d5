"""The script that `lmworks.untrusted.sandbox` starts: builds a sandbox, runs an untrusted Python program in it and reports how it ended.

    python -I sandbox_launcher.py '{"seconds": 5, ...}' < PROGRAM        prints {"outcome": ..., "detail": ...}

With `"program_bytes": N` so many bytes are a program, and the rest are the tests that judge it, which run in a process of their own: a
socket connects the two (descriptor 3), and the outcome is that of the tests.

It imports only the standard library. There are three processes: this one, which stays outside the sandbox and enforces the time limit;
the first process of the PID namespace, with which the kernel ends all others in it; and its child, the program, which can reach neither.
The tests are a fourth: the program can send them messages, and can read neither their file nor their memory.
See user_namespaces(7), mount_setattr(2), landlock(7) and seccomp(2).
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

NOBODY = 65534
FOLDER, BASE = "/sandbox", "/usr"  # writable folder; any directory on which the root is mounted
PROGRAM, TESTS = "/program.py", "/tests.py"
READABLE = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/urandom", "/dev/zero")
MOST_FILES = 4096
TAIL, LINE = 4096, 300

NAMESPACES = 0x20000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000  # mounts, IPC, users, processes, network
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x4000, 0x40000
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 0x1, 0x4, 0x1, 0x2
# the numbers of these system calls are the same on all processors
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 428, 429, 442, 444, 445, 446
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
EXECUTE, WRITE, READ, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
OF_A_FILE = EXECUTE | WRITE | READ | 1 << 14
RIGHTS_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # files; version 5 adds ioctl on devices

PROCESSORS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the tables below, and AUDIT_ARCH of seccomp
CLONE, SOCKET = (56, 220), (41, 198)
CLONE3 = 435
DENIED = (
    *((57, None), (58, None)),  # fork, vfork: one process, so that the limit of its memory is that of all
    *((319, 279), (447, 447), (29, 194), (64, 190), (68, 186)),  # memfd_create, memfd_secret, shmget, semget, msgget: more memory
    *((248, 217), (249, 218), (250, 219)),  # add_key, request_key, keyctl: the keyrings of the user who started this
    *((272, 97), (308, 268), (165, 40), (166, 39), (155, 41), (161, 51)),  # unshare, setns, mount, umount2, pivot_root, chroot
    *((number, number) for number in (*range(428, 434), 442, 467)),  # the newer calls around mounts
    *((101, 117), (310, 270), (311, 271), (438, 438)),  # ptrace, process_vm_readv, process_vm_writev, pidfd_getfd
    *((103, 116), (298, 241), (321, 280), (323, 282)),  # syslog, perf_event_open, bpf, userfaultfd: concern the whole machine
    *((425, 425), (426, 426), (427, 427)),  # io_uring, which would bypass this filter
)
CLONE_THREAD, AF_INET, AF_INET6, X32 = 0x10000, 2, 10, 0x40000000
LOAD, IF_EQUAL, IF_FROM, IF_ANY_OF, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x50000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Refused(Exception):
    """The kernel lacks something, and nothing is run."""


def check(result: int, what: str) -> int:
    """The result of a call. Raises `Refused` if it failed."""
    if result < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def prctl(option: int, value: int, pointer: object = None) -> int:
    """prctl(2) with arguments as wide as it reads them."""
    rest = (pointer, ctypes.c_ulong(0), ctypes.c_ulong(0))
    return int(_libc.prctl(option, ctypes.c_ulong(value), *rest))


def enter_namespaces() -> None:
    """Enter new namespaces with one user, nobody. Outside it is the user who started this process, or nobody too if root started it."""
    root = os.geteuid() == 0
    user, group = (NOBODY, NOBODY) if root else (os.geteuid(), os.getegid())
    if root:
        try:
            os.setgroups([])
        except PermissionError:
            raise Refused("root has started it, and may not become another user here") from None
    entered, report_end = os.pipe()
    mapper = os.fork()
    if mapper == 0:  # a process inside the namespace can map only its own user
        os.close(report_end)
        os._exit(write_maps(os.getppid(), user, group) if os.read(entered, 1) else 0)
    check(_libc.unshare(NAMESPACES), "user, process, network and mount namespaces")
    os.write(report_end, b".")
    _, status = os.waitpid(mapper, 0)
    if status:
        raise Refused(f"users of the namespace: {os.strerror(os.waitstatus_to_exitcode(status))}")


def write_maps(process: int, user: int, group: int) -> int:
    """Map the one user and group of the namespace of `process`. Returns an errno, 0 for success."""
    try:
        for name, content in (("setgroups", "deny"), ("gid_map", f"{NOBODY} {group} 1"), ("uid_map", f"{NOBODY} {user} 1")):
            Path(f"/proc/{process}/{name}").write_text(content, encoding="ascii")
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def build_root(sources: dict[str, bytes], room: int) -> list[str]:
    """Change to a root directory that holds only what Python needs (read-only), the programs, and `FOLDER` with `room` bytes (writable).

    Returns the mounted trees. Nothing of it is on a disk, and nothing remains after the last process has ended.
    """
    links: dict[str, str] = {}
    found: set[str] = set()
    for path in filter(os.path.exists, (*READABLE, sys.executable, sys.prefix, sys.base_prefix)):
        found.add(resolve_links(path, links))
    trees = sorted(tree for tree in found if found.isdisjoint(map(str, Path(tree).parents)))
    check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mounts of its own")
    opened = [read_only(tree) for tree in trees]
    os.setgid(NOBODY)  # root has already opened the directories that only root may enter
    os.setuid(NOBODY)
    check(_libc.mount(b"sandbox", BASE.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=755"), "a root directory")
    for tree, place in zip(trees, opened, strict=True):
        whole = stat.S_ISDIR(os.fstat(place).st_mode)
        os.makedirs(BASE + (tree if whole else os.path.dirname(tree)), exist_ok=True)
        if not whole:
            Path(BASE + tree).touch()
        check(_libc.syscall(MOVE_MOUNT, place, b"", AT_FDCWD, os.fsencode(BASE + tree), MOVE_MOUNT_F_EMPTY_PATH), tree)
        os.close(place)
    for link, target in links.items():
        if not any(Path(link).is_relative_to(tree) for tree in trees):
            os.makedirs(BASE + os.path.dirname(link), exist_ok=True)
            os.symlink(target, BASE + link)
    for path, source in sources.items():
        Path(BASE + path).write_bytes(source)
    os.mkdir(BASE + FOLDER)
    options = f"mode=700,size={room},nr_inodes={MOST_FILES}".encode()
    check(_libc.mount(b"sandbox", (BASE + FOLDER).encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), "a directory to write in")
    os.chroot(BASE)
    os.chdir(FOLDER)
    check(set_attributes(AT_FDCWD, b"/", 0, MOUNT_ATTR_RDONLY), "a root directory to read only")
    return trees


def resolve_links(path: str, links: dict[str, str]) -> str:
    """Resolve a path, and add the symbolic links on the way to `links`."""
    at, left = "/", path.split("/")
    while left:
        name = left.pop(0)
        if name == "..":
            at = os.path.dirname(at)
        elif name not in ("", "."):
            step = os.path.join(at, name)
            if os.path.islink(step):
                links[step] = os.readlink(step)
                left = links[step].split("/") + left
                at = "/" if links[step].startswith("/") else at
            else:
                at = step
    return at


def read_only(tree: str) -> int:
    """Open a file or directory, with everything mounted below it, as a read-only mount that is not attached yet."""
    place = check(_libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(tree), OPEN_TREE_CLONE | AT_RECURSIVE), f"mount of {tree}")
    os.set_inheritable(place, False)
    check(set_attributes(place, b"", AT_EMPTY_PATH | AT_RECURSIVE, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID), f"{tree} to read only")
    return place


def set_attributes(place: int, path: bytes, flags: int, attributes: int) -> int:
    """mount_setattr(2)."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    return int(_libc.syscall(MOUNT_SETATTR, place, path, flags, wanted, ctypes.c_size_t(len(wanted))))


def landlock(trees: list[str], path: str) -> None:
    """Apply Landlock as a second layer: read and execute under `trees`, read the program at `path`, everything under `FOLDER`, nothing
    elsewhere, so that a program cannot read the tests."""
    version = check(_libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1), "Landlock")
    handled = RIGHTS_BY_VERSION.get(version, RIGHTS_BY_VERSION[3])
    attributes = struct.pack("=Q", handled)
    rules = check(_libc.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock rules")
    program = (path, READ)
    for path, rights in (*((tree, EXECUTE | READ | READ_DIR) for tree in trees), program, ("/dev/null", WRITE), (FOLDER, handled)):
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            rights &= OF_A_FILE
        check(_libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("=Qi", rights & handled, place), 0), f"Landlock rule for {path}")
        os.close(place)
    check(_libc.syscall(LANDLOCK_RESTRICT, rules, 0), "Landlock")
    os.close(rules)


def limit(limits: dict[str, float]) -> None:
    """Set resource limits where they are not lower already. CPU time is in whole seconds: SIGXCPU, and SIGKILL one second later."""
    seconds = math.ceil(limits["seconds"])
    for which, soft, hard in (
        (resource.RLIMIT_CPU, seconds, seconds + 1),
        (resource.RLIMIT_AS, int(limits["memory"]), int(limits["memory"])),
        (resource.RLIMIT_FSIZE, int(limits["file_bytes"]), int(limits["file_bytes"])),
        (resource.RLIMIT_NOFILE, int(limits["files"]), int(limits["files"])),
        (resource.RLIMIT_NPROC, int(limits["threads"]), int(limits["threads"])),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        _, highest = resource.getrlimit(which)
        hard = hard if highest == resource.RLIM_INFINITY else min(hard, highest)
        resource.setrlimit(which, (min(soft, hard), hard))


def filter_calls() -> None:
    """Apply seccomp: threads but no other processes, only internet sockets (without a network), none of the system calls in `DENIED`."""
    column, processor = PROCESSORS[os.uname().machine]
    denied = [number for row in DENIED if (number := row[column]) is not None]
    rules = [
        *((LOAD, 0, 0, 4), (IF_EQUAL, 1, 0, processor), (RETURN, 0, 0, KILL)),  # 32-bit programs have other numbers
        *((LOAD, 0, 0, 0), (IF_FROM, 0, 1, X32), (RETURN, 0, 0, FAIL | errno.ENOSYS)),
        # its flags are in memory, which filters cannot read; the C library falls back to clone
        *((IF_EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | errno.ENOSYS)),
        *(rule for number in denied for rule in ((IF_EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL | errno.EPERM))),
        *((IF_EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, 16), (IF_ANY_OF, 0, 1, CLONE_THREAD)),
        *((RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | errno.EPERM)),
        *((IF_EQUAL, 0, 5, SOCKET[column]), (LOAD, 0, 0, 16), (IF_EQUAL, 1, 0, AF_INET), (IF_EQUAL, 0, 1, AF_INET6)),
        *((RETURN, 0, 0, ALLOW), (RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT)),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    check(prctl(PR_SET_SECCOMP, 2, program), "seccomp")


def execute_program(path: str, output_end: int, limits: dict[str, float], trees: list[str], channel: int | None) -> NoReturn:
    """Confine this process and execute the program at `path`, whose output goes to `output_end`, with the `channel` as descriptor 3."""
    os.setsid()  # signals to its process group reach no other process
    for place, number in ((os.open("/dev/null", os.O_RDONLY), 0), (output_end, 1), (output_end, 2)):
        os.dup2(place, number)
    if channel is not None:
        os.dup2(channel, 3)  # above, if it was 3, its own number; the others are closed at exec
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no new privileges")
    landlock(trees, path)
    limit(limits)
    filter_calls()
    try:
        os.execv(sys.executable, [sys.executable, "-s", "-P", "-X", "utf8", path])
    except OSError as error:
        whose = "; where root starts the sandbox, everybody must be able to read Python"
        raise Refused(f"{sys.executable}: {error.strerror}{whose if error.errno == errno.EACCES else ''}") from None


def first_process(report_end: int, output_end: int, limits: dict[str, float], trees: list[str], paths: list[str]) -> None:
    """First process of the namespace: start the program, or program and tests, and report how the last one of them ended. When this process
    ends, all others do."""
    check(prctl(PR_SET_PDEATHSIG, signal.SIGKILL), "end with the parent")
    os.write(report_end, b"\n")  # fails where the parent is gone already
    ends = socket.socketpair() if len(paths) > 1 else ()
    silent = os.open("/dev/null", os.O_WRONLY)
    started = []
    for path, end in zip(paths, ends or (None,), strict=True):
        started.append(os.fork())
        if started[-1] == 0:
            try:
                execute_program(path, output_end if path == paths[-1] else silent, limits, trees, end.fileno() if end else None)
            except (Refused, OSError) as error:
                os.write(report_end, json.dumps({"refused": str(error)}).encode())
            finally:
                os._exit(1)
    for end in ends:
        end.close()
    os.close(output_end)
    _, status, used = os.wait4(started[-1], 0)
    ended = {"code": os.waitstatus_to_exitcode(status), "cpu": used.ru_utime + used.ru_stime}
    if len(started) > 1 and status:
        program, of_program, _ = os.wait4(started[0], os.WNOHANG)
        if program and os.waitstatus_to_exitcode(of_program) in (-signal.SIGXCPU, -signal.SIGKILL):
            ended["code"], ended["cpu"] = -signal.SIGXCPU, limits["seconds"]  # the tests have seen its end only
    os.write(report_end, b"\n" + json.dumps(ended).encode())


def watch(limits: dict[str, float], trees: list[str], paths: list[str]) -> tuple[str, str]:
    """Run the programs until the last one ends or reaches its time limit. Returns its outcome and detail."""
    (report, report_end), (output, output_end) = os.pipe(), os.pipe()
    first = os.fork()
    if first == 0:
        try:
            first_process(report_end, output_end, limits, trees, paths)
        finally:
            os._exit(0)
    os.close(report_end)
    os.close(output_end)
    report_data, tail, late, ends = b"", b"", False, [report, output]
    deadline = time.monotonic() + limits["seconds"]
    while report in ends and not late:
        left = deadline - time.monotonic()
        for end in select.select(ends, [], [], max(left, 0))[0]:
            data = os.read(end, 1 << 16)
            if not data:
                ends.remove(end)
            elif end == report:
                report_data += data
            else:
                tail = (tail + data)[-TAIL:]
        late = left <= 0
    os.kill(first, signal.SIGKILL)  # a child of this process, so the number is still its own
    os.waitpid(first, 0)  # returns when all in the namespace have ended
    while data := os.read(report, 1 << 16):
        report_data += data
    while data := os.read(output, 1 << 16):
        tail = (tail + data)[-TAIL:]
    lines = tail.decode("utf-8", "replace").strip().splitlines()
    ended = json.loads(report_data.strip().partition(b"\n")[0] or b"{}")
    return outcome_of(ended, lines[-1][:LINE] if lines else "", late, limits["seconds"])


def outcome_of(ended: dict[str, Any], line: str, late: bool, seconds: float) -> tuple[str, str]:
    """(outcome, detail) from the report of the first process, the last line of output, and whether the time limit was reached."""
    code = ended.get("code")
    if "refused" in ended:
        return "refused", f"no sandbox: {ended['refused']}"
    if code == 0:
        return "passed", ""
    used_up = code == -signal.SIGXCPU or (code == -signal.SIGKILL and ended["cpu"] >= math.ceil(seconds))
    if used_up or (code is None and late):
        return "timeout", f"over {seconds:g} s"
    if code is None:
        return "failed", "the system ended it"
    return "failed", line or f"exit code {code if code > 0 else 128 - code}"


def main(limits: dict[str, float]) -> None:
    """Read the program, run it, and print its outcome."""
    source, size = sys.stdin.buffer.read(), int(limits.pop("program_bytes", 0))
    sources = {PROGRAM: source[:size], TESTS: source[size:]} if size else {PROGRAM: source}
    try:
        if os.uname().machine not in PROCESSORS or sys.maxsize < 1 << 32:
            raise Refused(f"none for {os.uname().machine}, only for {' and '.join(PROCESSORS)}")
        os.umask(0o022)
        enter_namespaces()
        outcome, detail = watch(limits, build_root(sources, int(limits["file_bytes"])), list(sources))
    except (Refused, OSError) as error:
        outcome, detail = "refused", f"no sandbox: {error}"
    print(json.dumps({"outcome": outcome, "detail": detail}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
