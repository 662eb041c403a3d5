"""One process per run directory."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from lmworks.errors import UserError
from lmworks.watch import RunLock
from lmworks.watch.ledger import LAUNCH_LOCK, LOCK

_HOLDER = """
import sys, time
from pathlib import Path
from lmworks.watch import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def hold(run_dir):
    process = subprocess.Popen([sys.executable, "-c", _HOLDER, str(run_dir)], stdout=subprocess.PIPE, encoding="utf-8")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_process_is_told_who_holds_the_directory(tmp_path):
    process = hold(tmp_path / "run")
    try:
        with pytest.raises(UserError, match=rf"is in use by process {process.pid} on {socket.gethostname()}; wait for it, stop it, or"):
            RunLock(tmp_path / "run")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    RunLock(tmp_path / "run").release()


def test_who_looks_whether_a_run_is_in_use_does_not_keep_it_from_being_started(tmp_path):
    """The look holds a shared lock for a moment."""
    (tmp_path / LOCK).touch()
    with open(tmp_path / LOCK, "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.05, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        RunLock(tmp_path).release()


def test_released_at_the_end_of_a_block_and_only_once(tmp_path):
    with RunLock(tmp_path) as lock:
        with pytest.raises(UserError, match=f"process {os.getpid()} "):
            RunLock(tmp_path)
        lock.release()
        with RunLock(tmp_path):
            lock.release()
            with pytest.raises(UserError):
                RunLock(tmp_path)
    with RunLock(tmp_path):
        pass


def leave(run, release, file=LOCK):
    """An error that leaves the block after the directory was moved away."""
    with RunLock(run, file) as lock:
        if release:
            lock.release()
        run.rename(run.parent / f"moved {release} {len(file)}")
        raise FileNotFoundError("ledger.jsonl")


def test_a_directory_that_is_moved_away_is_the_cause_of_an_error(tmp_path):
    run = tmp_path / "run"
    for file in (LOCK, LAUNCH_LOCK):
        with pytest.raises(UserError, match=f"^{run} was moved or deleted while it was in use"):
            leave(run, release=False, file=file)
    with pytest.raises(FileNotFoundError):
        leave(run, release=True)


def test_a_child_that_outlives_its_parent_does_not_hold_the_directory(tmp_path):
    lock = RunLock(tmp_path)
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(there, b"forgotten")
        time.sleep(600)
        os._exit(0)
    try:
        os.read(here, 1)
        os.close(lock._fd)
        lock._fd = -1
        RunLock(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file/run"):
        with pytest.raises(UserError, match=r"cannot write .*choose another run_dir"):
            RunLock(run_dir)


def test_a_forbidden_directory_is_a_clear_error(tmp_path):
    """Root may write anywhere, so the attempt is made as nobody."""
    (tmp_path / "closed").mkdir(mode=0o555)
    code = f"""
import os
from pathlib import Path
from lmworks.errors import UserError
from lmworks.watch import RunLock
if os.getuid() == 0:
    os.setuid(65534)
try:
    RunLock(Path({str(tmp_path / "closed/run")!r}))
except UserError as error:
    print(error)
"""
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and str(path).startswith("/tmp/"):
            path.chmod(path.stat().st_mode | 0o055)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    expected = f"cannot write {tmp_path}/closed/run: Permission denied; make it writable, or choose another run_dir\n"
    assert said.stdout == expected, said.stderr
