"""One rank under `torchrun`, which restarts all ranks when one exits with a nonzero code.

A rank that ends the run (done, a user error, a stop request of the launcher) therefore records the outcome and exits with 0. When
`torchrun` itself stops a rank with SIGTERM, because another rank has failed or a node has joined, the run must not end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lmworks.errors import UserError
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.ui.exit_codes import ExitCode
from lmworks.ui.terminal import Interrupted, Preempted
from lmworks.watch.heartbeat import classify_error, shared_interval
from lmworks.watch.run_end import RunEnd, remember, remembered

_POLL_INTERVAL = 0.5  # seconds
_ASKED_TO_STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_STOPPED = (ExitCode.PREEMPTED, ExitCode.INTERRUPTED)
_MAX_FAILED_STARTS = 20  # starts of rank 0 without a successful rendezvous, after which the run ends
_EXIT_SECONDS = {ExitCode.USER_ERROR: 10.0}  # that a rank has to exit by itself once the run is over, by exit code of the run
_DEFAULT_EXIT_SECONDS = 60.0
_OUTCOME_SECONDS = 60.0  # that rank 0 has to record the end of the run once the other ranks are done
_STOPPED_SECONDS = 10.0  # the same once they are asked to stop: it may wait in a collective for a rank that was stopped before
_FIRST_RANK_SECONDS = 3.0  # that the other ranks leave to rank 0 to record a user error


def run_rank(folder: LaunchDir, rank: int, work: Callable[[], None]) -> int:
    """Run `work`, the command of a rank; returns the exit code for `torchrun`. A `UserError` ends the run of all ranks."""
    if folder.outcome() is not None:
        return 0
    if rank == 0 and _count_start(folder) > _MAX_FAILED_STARTS:
        reason = f"the ranks were started {_MAX_FAILED_STARTS} times without a successful rendezvous; see {folder.logs}"
        folder.conclude(1, rank, f"{reason}, fix the cause and launch again")
        return 0
    remember(None)
    with folder.attended(), _output(folder, rank), _messages(folder):
        code = _exit_code(work)
        for number in _ASKED_TO_STOP:  # one that comes now asks for what is under way, and would end it before it is recorded
            signal.signal(number, signal.SIG_IGN)
        if code == ExitCode.USER_ERROR:
            _conclude_unless_rank_0_does(folder, code, rank)
        elif code and (code not in _STOPPED or folder.stop_signal() is None):
            return code
        elif rank == 0:  # all ranks end with the same code, so rank 0 records it for all
            folder.conclude(code, rank, reason=_reason())
        elif not _first_rank_concludes(folder):
            return 1
        return 0


def _first_rank_concludes(folder: LaunchDir) -> bool:
    """Wait until rank 0 has recorded the end of the run. It does not if it was stopped or has failed: its last command to the others, that
    they are done, is the same then. An agent whose ranks leave with 0 takes part in no further group, so these ranks must not."""

    def leave(*_: object) -> None:
        if folder.stop_signal() is None:
            os._exit(1)  # torchrun starts all ranks again, and waits for this one

    signal.signal(signal.SIGTERM, leave)
    patience = _OUTCOME_SECONDS if folder.stop_signal() is None else _STOPPED_SECONDS
    deadline, interval = time.monotonic() + patience, shared_interval(int(os.environ.get("WORLD_SIZE", "1")))
    while folder.outcome() is None:
        if folder.failed.exists() or time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def _exit_code(work: Callable[[], None]) -> int:
    try:
        work()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except (KeyboardInterrupt, Interrupted) as stop:
        return RunEnd.of_error(stop).code
    except UserError as error:  # of work that is no command of lmworks, which prints the line itself
        remember(RunEnd.of_error(error))
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except BaseException as error:
        if (stopped := stop_behind(error)) is not None:
            return RunEnd.of_error(stopped).code
        traceback.print_exc()
        return 1
    return 0


def stop_behind(error: BaseException) -> Interrupted | None:
    """Of the error of a collective in a rank that was asked to stop: the stop, which has ended the other ranks first. None for other
    errors."""
    by = LaunchDir(Path(os.environ[VARIABLE])).stop_signal() if VARIABLE in os.environ else None
    if by is None or classify_error(error) != "cut":
        return None
    kind = Interrupted if by == signal.SIGINT else Preempted
    return kind(f"stopped by {by.name} before it had saved; the same command resumes it")


def _count_start(folder: LaunchDir) -> int:
    """Count a start of rank 0 and return the number since the last successful rendezvous. Failures after a rendezvous are counted in
    `rank_context`."""
    with open(folder.failed_starts, "ab") as file:
        file.write(b".")
        return file.tell()


def _conclude_unless_rank_0_does(folder: LaunchDir, code: int, rank: int) -> None:
    """Record a user error. All ranks find an invalid recipe, and one message is enough, but a disk may be full for one rank only."""
    deadline = time.monotonic() + (0 if rank == 0 else _FIRST_RANK_SECONDS)
    while folder.outcome() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if folder.outcome() is None:
        folder.conclude(code, rank, reason=_reason())


def _reason() -> str:
    """Why the run of this process ended, where it had begun."""
    end = remembered()
    return "" if end is None else end.reason


@contextmanager
def _output(folder: LaunchDir, rank: int) -> Iterator[None]:
    """Rank 0 writes to standard output, because the launcher redirects standard error to a log; other ranks write to logs/rank-N.log."""
    sys.stdout.flush()
    sys.stderr.flush()
    if rank:
        folder.logs.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder.logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.close(fd)
    os.dup2(1, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # what cannot be printed does not change how the rank ends
                stream.flush()


@contextmanager
def _messages(folder: LaunchDir) -> Iterator[None]:
    """While the rank runs, a thread polls the directory for messages of the launcher and of other ranks.

    A stop request is turned into the signal that it names. Before the trainer installs its signal handlers, and after it removes them,
    the signals end the process: there is nothing to save.
    """
    parent, done, interval = os.getppid(), threading.Event(), shared_interval(int(os.environ.get("WORLD_SIZE", "1")))

    def leave(*_: object) -> None:
        sys.exit(1 if folder.stop_signal() is None else ExitCode.PREEMPTED)

    def listen() -> None:
        stopping, over_since, asked = False, 0.0, time.monotonic()
        while not done.wait(_POLL_INTERVAL):
            if os.getppid() != parent:
                os._exit(1)  # the agent has died, and nothing else would end this process
            if time.monotonic() < asked + interval - _POLL_INTERVAL / 2:
                continue
            asked = time.monotonic()
            if not stopping and (by := folder.stop_signal()) is not None:
                stopping = True
                os.kill(os.getpid(), by)
            if (outcome := folder.outcome()) is not None:
                over_since = over_since or time.monotonic()
                if time.monotonic() - over_since > _EXIT_SECONDS.get(outcome["code"], _DEFAULT_EXIT_SECONDS):
                    os._exit(0)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, leave)
    threading.Thread(target=listen, daemon=True, name="messages").start()
    try:
        yield
    finally:
        done.set()
