"""Programs that mean harm, in the sandbox."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from lmworks.untrusted import sandbox_launcher
from lmworks.untrusted.sandbox import Limits, RunResult, run_python
from patience import PATIENCE

PATIENT = Limits(seconds=PATIENCE)


@pytest.fixture(scope="module", autouse=True)
def confined() -> None:
    ran = run_python("pass", PATIENT)
    if ran.outcome == "refused":
        pytest.skip(ran.detail)
    assert ran.outcome == "passed", ran.detail


def named(name: str) -> str:
    """A line of code that names the process of the program, so that it can be found from outside."""
    return f"import ctypes, os, signal, time\nctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n"


def processes(name: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["name"]) if process.info["name"] == name]


@pytest.mark.parametrize(
    ("program", "outcome", "detail"),
    [
        ("print(sum(range(10)))", "passed", ""),
        ("import json, decimal, asyncio, sqlite3\nasyncio.run(asyncio.sleep(0))", "passed", ""),
        ("open('note', 'w').write('a')\nassert open('note').read() == 'a'", "passed", ""),
        ("import tempfile\ntempfile.NamedTemporaryFile().write(b'x')", "passed", ""),
        ("import threading\nfor _ in range(8): threading.Thread(target=print).start()", "passed", ""),
        ("open('/dev/null', 'w').write(str(open('/dev/urandom', 'rb').read(9)))", "passed", ""),
        ("1 / 0", "failed", "ZeroDivisionError"),
        ("raise SystemExit(3)", "failed", "exit code 3"),
        ("print('no sandbox: so they say')\nraise SystemExit(125)", "failed", "no sandbox: so they say"),
        ("import os\nos.kill(os.getpid(), 9)", "failed", "exit code 137"),
        ("input()", "failed", "EOFError"),
        ("import ctypes\nctypes.string_at(0)", "failed", "exit code 139"),
        ("x = bytearray(1 << 30)", "failed", "MemoryError"),
        ("import socket\nsocket.create_connection(('1.1.1.1', 80), 2)", "failed", "unreachable"),
        ("import socket\nsocket.create_connection(('127.0.0.1', 22), 2)", "failed", "Error"),
        ("import socket\nsocket.socket(40, socket.SOCK_STREAM)", "failed", "not supported"),  # AF_VSOCK leads out of a virtual machine
        ("open('/etc/passwd').read()", "failed", "FileNotFoundError"),
        ("import os\nos.listdir('/')", "failed", "PermissionError"),
        ("import os\nos.stat('/proc/1')", "failed", "FileNotFoundError"),
        ("with open('big', 'wb') as out:\n    for _ in range(64): out.write(bytes(1 << 20))", "failed", "File too large"),
        ("for name in range(64): open(str(name), 'wb').write(bytes(1 << 20))", "failed", "No space left"),
        ("for name in range(9999): open(str(name), 'wb').close()", "failed", "No space left"),
        ("import os\nopened = [os.open('/dev/null', 0) for _ in range(1000)]", "failed", "Too many open files"),
        ("import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/', None, 1 << 5, None) == 0", "failed", "AssertionError"),
    ],
)  # fmt: skip
def test_programs_in_the_sandbox(program: str, outcome: str, detail: str) -> None:
    ran = run_python(program, PATIENT)
    assert ran.outcome == outcome, ran.detail
    assert detail in ran.detail


@pytest.mark.parametrize(
    "attack",
    [
        "os.symlink({secret!r}, 'output')",
        "os.mkfifo('output')",
        "os.symlink('/dev/zero', 'output')",
        "pass",
        "exec('for _ in range(3000): os.mkdir(\"d\"); os.chdir(\"d\")')",
        "print('x' * 50_000_000)",
    ],
)
def test_what_a_program_leaves_behind_does_nothing_to_whoever_reads_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: str
) -> None:
    (tmp_path / "secret").write_text("a key\n")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    remove = "os.remove('output') if os.path.exists('output') else None"
    ran = run_python(f"import os\n{remove}\n{attack.format(secret=str(tmp_path / 'secret'))}\nraise SystemExit('the end')", PATIENT)
    assert ran == RunResult("failed", "the end")
    assert not list((tmp_path / "temporary").iterdir())


def test_nothing_outside_changes_and_nothing_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "kept"
    kept.write_text("mine")
    tmp_path.chmod(0o777)
    kept.chmod(0o666)
    before = kept.stat()
    here, new, door = str(kept), str(tmp_path / "new"), str(tmp_path / "door")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)
        server.bind("door")  # by a short name: paths of sockets have 108 bytes
        server.listen()
        os.chmod("door", 0o777)
        for act in (
            f"open({here!r}, 'w')",
            f"open({here!r}).read()",
            f"os.remove({here!r})",
            f"os.mkdir({new!r})",
            f"os.link({here!r}, 'mine')",
            f"os.chmod({here!r}, 0)",
            f"os.utime({here!r}, (0, 0))",
            f"os.setxattr({here!r}, 'user.a', b'1')",
            f"socket.socket(socket.AF_UNIX).connect({door!r})",
            "os.utime(sys.executable, (0, 0))",
            "os.chmod(sys.prefix, 0o777)",
        ):
            ran = run_python(f"import os, socket, sys\n{act}", PATIENT)
            assert ran.outcome == "failed" and "Error" in ran.detail, act
    assert kept.read_text() == "mine" and kept.stat().st_mode == before.st_mode and kept.stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["door", "kept"]
    monkeypatch.setenv("OPENAI_API_KEY", "a key")
    assert run_python("import os\nassert 'OPENAI_API_KEY' not in os.environ\nassert len(os.environ) < 12", PATIENT).outcome == "passed"
    places = "('/', '/usr', '/dev/null', sys.prefix, sys.base_prefix, os.path.realpath(sys.executable))"
    assert run_python(f"import os, sys\nassert all(os.statvfs(p).f_flag & os.ST_RDONLY for p in {places})", PATIENT).outcome == "passed"


def test_what_the_kernel_is_not_asked() -> None:
    column, _ = sandbox_launcher.PROCESSORS[os.uname().machine]
    denied = [row[column] for row in sandbox_launcher.DENIED if row[column] is not None]
    program = f"import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfor n in {denied}:\n  assert libc.syscall(n, 0, 0, 0, 0, 0) == -1"
    assert run_python(program + "\n  assert ctypes.get_errno() == 1, n", PATIENT) == RunResult("passed", "")


@pytest.mark.parametrize(
    "program",
    [
        "import os\nif os.fork() == 0: os._exit(0)",
        "import subprocess\nsubprocess.run(['/bin/true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import os\nos.memfd_create('more')",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
    ],
)
def test_all_that_a_program_does_is_within_the_memory_of_one_process(program: str) -> None:
    ran = run_python(program, PATIENT)
    assert ran.outcome == "failed" and "Operation not permitted" in ran.detail, ran.detail


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "time.sleep(600)",
        "signal.pthread_sigmask(0, range(1, 32))\ntime.sleep(600)",
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nos.kill(0, signal.SIGSTOP)\nos.setsid()\ntime.sleep(600)",
        "os.close(1)\nos.close(2)\ntime.sleep(600)",
        "while True: print('x' * 4096)",
    ],
)
def test_what_does_not_end_is_ended(program: str) -> None:
    name = f"lmw{os.getpid()}x{abs(hash(program)) % 1000}"
    assert run_python(named(name) + program, Limits(seconds=1)).outcome == "timeout"
    assert not processes(name)


def test_nothing_stays_where_the_launcher_is_killed() -> None:
    name = f"lmw{os.getpid()}k"
    command = [sys.executable, "-I", sandbox_launcher.__file__, json.dumps(asdict(PATIENT))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as launcher:
        assert launcher.stdin
        launcher.stdin.write((named(name) + "time.sleep(600)").encode())
        launcher.stdin.close()
        until = time.monotonic() + PATIENCE
        while not processes(name) and time.monotonic() < until:
            time.sleep(0.05)
        (program,) = processes(name)
        assert 0 not in program.uids() and 0 not in program.gids(), "never as root, whoever starts it"
        launcher.kill()
    program.wait(PATIENCE)


def test_a_launcher_that_gets_no_time_says_timeout() -> None:
    """It sleeps over the end of the program, which the limit of CPU time has killed, and over that of its time."""
    limits = Limits(seconds=1)
    command = [sys.executable, "-I", sandbox_launcher.__file__, json.dumps(asdict(limits))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdin and launcher.stdout
        launcher.stdin.write(b"while True: pass")
        launcher.stdin.close()
        below = psutil.Process(launcher.pid)
        with suppress(psutil.NoSuchProcess):  # on a busy machine the program may have been killed before it is seen
            while not any(child.children() for child in below.children()):
                time.sleep(0.01)
        os.kill(launcher.pid, signal.SIGSTOP)
        while any(child.status() != psutil.STATUS_ZOMBIE for child in below.children()):
            time.sleep(0.05)
        os.kill(launcher.pid, signal.SIGCONT)
        assert json.loads(launcher.stdout.read()) == {"outcome": "timeout", "detail": "over 1 s"}


@pytest.mark.parametrize(
    ("ended", "late", "outcome"),
    [
        ({"code": 0, "cpu": 0.0}, True, "passed"),
        ({"code": -signal.SIGXCPU, "cpu": 0.99}, False, "timeout"),
        ({"code": -signal.SIGXCPU, "cpu": 0.99}, True, "timeout"),
        ({"code": -signal.SIGKILL, "cpu": 1.99}, True, "timeout"),
        ({"code": -signal.SIGKILL, "cpu": 0.5}, False, "failed"),
        ({}, True, "timeout"),
        ({}, False, "failed"),
        ({"refused": "why"}, True, "refused"),
    ],
)
def test_who_ended_a_program_decides(ended: dict[str, object], late: bool, outcome: str) -> None:
    assert sandbox_launcher.outcome_of(ended, "", late, 1.0)[0] == outcome


def test_many_at_once() -> None:
    found: list[RunResult] = []
    threads = [threading.Thread(target=lambda n=n: found.append(run_python(f"assert {n} % 2", PATIENT))) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ran.outcome for ran in found) == ["failed"] * 3 + ["passed"] * 3


@pytest.mark.parametrize(
    ("constant", "value", "detail"),
    [
        ("PROCESSORS", {}, "none for "),
        ("NAMESPACES", 1 << 4, "user, process, network and mount namespaces: "),
        ("OPEN_TREE", 9999, "mount of "),
        ("MOUNT_SETATTR", 9999, "to read only: "),
        ("LANDLOCK_CREATE", 9999, "Landlock: "),
        ("PR_SET_SECCOMP", 9999, "seccomp: "),
        ("NOBODY", -1, "users of the namespace: "),
    ],
)  # fmt: skip
def test_where_the_kernel_lacks_something_nothing_is_run(constant: str, value: object, detail: str) -> None:
    command = (
        f"from lmworks.untrusted import sandbox_launcher as launcher\nlauncher.{constant} = {value!r}\nlauncher.main({asdict(PATIENT)})"
    )
    ran = subprocess.run([sys.executable, "-c", command], input=b"raise SystemExit('it ran')", capture_output=True, check=True)
    answer = json.loads(ran.stdout)
    assert answer["outcome"] == "refused"
    assert answer["detail"].startswith("no sandbox: ") and detail in answer["detail"]
