"""One process per run directory."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from lmworks.errors import UserError
from lmworks.io.files import explain_os_errors, try_lock


class RunLock:
    """Holds `run_dir/lock` until `release`, the end of a `with` block, or the end of the process for any reason.

    Raises `UserError` that names the holder's process and machine, or says that the directory cannot be written.
    The file is not removed: otherwise two processes could hold locks on two files of the same name.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = Path(run_dir) / "lock"
        try:
            with explain_os_errors(run_dir):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise UserError(f"cannot write {run_dir}: a part of it is not a directory; choose another with --set run_dir=PATH") from None
        except OSError as error:  # names that are too long, special file systems, broken disks
            raise UserError(f"cannot write {run_dir}: {error.strerror}; choose another directory with --set run_dir=PATH") from error
        if not try_lock(self._fd):
            holder = _holder(self._fd)
            os.close(self._fd)
            raise UserError(
                f"{run_dir} is in use by process {holder.get('pid', '?')} on {holder.get('host', '?')}; "
                "wait for it, stop it, or choose another directory with --set run_dir=PATH"
            )
        # A forked child shares the lock with its parent; a child that outlives it would keep the lock.
        os.register_at_fork(after_in_child=self._forget)
        with explain_os_errors(run_dir):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}).encode() + b"\n", 0)

    def release(self) -> None:
        """Release the lock. Releasing twice is allowed."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._forget()

    def _forget(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def in_use(run_dir: Path) -> bool:
    """Whether a process holds the lock of a run."""
    try:
        with open(run_dir / "lock", "rb") as handle:
            return not try_lock(handle.fileno())
    except FileNotFoundError:
        return False


def is_lock(path: Path) -> bool:
    """Whether a file is one of these locks, held or released."""
    with open(path, "rb") as handle:
        text = handle.read(4096)
    try:
        return not text or "pid" in json.loads(text)
    except (ValueError, TypeError):
        return False


def _holder(fd: int) -> dict[str, Any]:
    """The process and machine that the holder has written; empty if it has not written them yet."""
    try:
        return dict(json.loads(os.pread(fd, 4096, 0)))
    except ValueError:
        return {}
