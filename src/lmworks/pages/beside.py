"""Writes the run page anew while a run goes on, and once more when it has ended.

A process beside the run starts one of low priority for each page, so that no step waits and no memory is kept. Together they take at most a
hundredth of the time of a core. When the process of the run was killed, which can write nothing, they write the last page.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

COMMAND = [sys.executable, "-P", "-m", "lmworks.pages.beside"]
_FIRST = 20.0  # seconds to the first page: shorter runs have that of their end
_OFTEN = 60.0  # seconds between two pages at least
_SHARE = 0.01  # of the time of a core
_LOOK = 10.0  # seconds between two looks at whether the run is still there


@contextmanager
def page_kept_new(run_dir: Path) -> Iterator[None]:
    """Within the block the page of a run is written every minute or less often, and after it here, by when the run must have given up its
    lock: the page would call it running. Raises `UserError` if the last page cannot be written, unless the block raises itself."""
    writer = _Writer(run_dir)
    try:
        yield
    except BaseException:
        writer.end()
        with suppress(Exception):  # what ended the run is what the user has to see
            _write(run_dir)
        raise
    writer.end()
    _write(run_dir)


def _write(run_dir: Path) -> None:
    from lmworks.pages.run_page import write_page

    write_page(run_dir)


class _Writer:
    """Starts the process after a while."""

    def __init__(self, run_dir: Path) -> None:
        self._command = [*COMMAND, str(run_dir.absolute())]
        self._process: subprocess.Popen[bytes] | None = None
        self._timer = threading.Timer(_FIRST, self._start)
        self._timer.daemon = True
        self._timer.start()

    def _start(self) -> None:
        with suppress(OSError):  # a page is no reason to disturb the run
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            )

    def end(self) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._process is not None:
            assert self._process.stdin is not None
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # also what it has started, whose page would be older than the last
            self._process.stdin.close()
            self._process.wait()


def repeat(write: Callable[[], object], is_over: Callable[[float], bool]) -> None:
    """Call `write` until the run is over, and then once more. `is_over(seconds)` waits for so long, or until then."""
    over = False
    while True:
        before = _used()
        write()
        if over:
            return
        over = is_over(max(_OFTEN, (_used() - before) / _SHARE))


def _used() -> float:
    """Seconds of a core that the processes started here have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(run_dir: str, once: str = "") -> None:
    """Write the page of a run `once`; or for as long as the process lives that has started this one and holds its standard input."""
    if once:
        _write(Path(run_dir))
        return
    os.nice(19)
    run = os.getppid()

    def is_over(seconds: float) -> bool:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], min(left, _LOOK))[0] or os.getppid() != run:
                return True
        return False

    repeat(lambda: subprocess.run([*COMMAND, run_dir, "once"]), is_over)


if __name__ == "__main__":
    main(*sys.argv[1:])
