"""The lock of a launch: nothing in RUN/launch is changed by a launch that does not hold it, so a second one cannot disturb the first."""

from __future__ import annotations

import time
from pathlib import Path

from lmworks.errors import UserError
from lmworks.launch.launch_dir import LaunchDir
from lmworks.ui.terminal import console
from lmworks.watch.ledger import LAUNCH_LOCK, LOCK, RunLock, require_free

_POLL_INTERVAL = 0.5  # seconds


def lock_launch(run_dir: Path, ranks_end: float, launch_ends: float = 0.0, fd: int | None = None) -> RunLock:
    """Take the lock of the launches of a run. `fd` is that of `RunLock`.

    The ranks of a launch whose launcher was killed are waited for, `ranks_end` seconds at most, and another launch, `launch_ends` seconds.
    Raises `UserError` that says who uses the run.
    """
    folder, until = LaunchDir.of(run_dir), time.monotonic() + launch_ends
    while True:
        try:
            lock = RunLock(run_dir, LAUNCH_LOCK, fd)
            break
        except UserError:
            if time.monotonic() >= until:
                raise
            time.sleep(_POLL_INTERVAL)
    try:
        if folder.has_ranks():
            console.print(f"waiting for the ranks of an earlier launch of {run_dir}, whose launcher has ended", style="yellow")
        until = time.monotonic() + ranks_end
        while folder.has_ranks():
            if time.monotonic() >= until:
                raise UserError(
                    f"ranks of an earlier launch of {run_dir} have not ended within {ranks_end:.0f} s; "
                    "end them (lmworks health on their machine names them), and launch again"
                )
            time.sleep(_POLL_INTERVAL)
        require_free(run_dir, LOCK)
    except BaseException:
        lock.release()
        raise
    return lock
