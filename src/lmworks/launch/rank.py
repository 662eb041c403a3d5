"""One rank under `torchrun`, which starts all ranks again when one ends with another code than 0.

So a rank that ends for good (done, the user's fault, stopped by the launcher's request) writes down how, and ends with 0. A rank that
`torchrun` itself stops with SIGTERM, because another has failed or one more has come, must not end the run.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lmworks.interrupt import Preempted
from lmworks.launch.folder import Folder

_LOOK = 0.5  # seconds
_STOPPED = (Preempted.EXIT_CODE, 130)
_USERS_FAULT = 2
_UNMET = 20  # starts of the first rank since the ranks last met, after which there is none
_PATIENCE = {_USERS_FAULT: 10.0}  # seconds that a rank has to end by itself once the run is over
_USUALLY = 60.0


def live(folder: Folder, rank: int, work: Callable[[], None]) -> int:
    """Do the work of a rank, which ends as a command does; returns the exit code for `torchrun`."""
    if folder.outcome() is not None:
        return 0
    if rank == 0 and _starts_in_vain(folder) > _UNMET:
        folder.conclude(1, rank, f"the ranks were started {_UNMET} times and never met; see {folder.logs}, mend the cause and launch again")
        return 0
    with _output(folder, rank), _messages(folder):
        code = _code(work)
        if code == _USERS_FAULT:
            _conclude_unless_the_first_does(folder, code, rank)
        elif code and (code not in _STOPPED or folder.stop() is None):
            return code
        elif rank == 0:  # all ranks end alike, and the first speaks for them
            folder.conclude(code, rank)
        return 0


def _code(work: Callable[[], None]) -> int:
    try:
        work()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _starts_in_vain(folder: Folder) -> int:
    """How often this rank has been started since the ranks last met, now included. What ends ranks that have met is counted by `world`."""
    with open(folder.unmet, "ab") as file:
        file.write(b".")
        return file.tell()


def _conclude_unless_the_first_does(folder: Folder, code: int, rank: int) -> None:
    """What is wrong with a recipe all ranks find out, and one message is enough; a disk may be full for one rank alone."""
    deadline = time.monotonic() + (0 if rank == 0 else 3)
    while folder.outcome() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if folder.outcome() is None:
        folder.conclude(code, rank)


@contextmanager
def _output(folder: Folder, rank: int) -> Iterator[None]:
    """The first rank speaks to the terminal, where the launcher keeps standard error for a log; the others write to logs/rank-N.log."""
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
        sys.stdout.flush()
        sys.stderr.flush()


@contextmanager
def _messages(folder: Folder) -> Iterator[None]:
    """While the rank works, a thread looks for what the launcher and the other ranks have to say.

    A request to stop becomes the signal that it names. Until the trainer takes over the signals, and after it, they end the process:
    there is nothing to save.
    """
    parent, done = os.getppid(), threading.Event()

    def leave(*_: object) -> None:
        sys.exit(1 if folder.stop() is None else Preempted.EXIT_CODE)

    def listen() -> None:
        asked, over = False, 0.0
        while not done.wait(_LOOK):
            if os.getppid() != parent:
                os._exit(1)  # the agent is gone, and nobody would end this process
            if not asked and (by := folder.stop()) is not None:
                asked = True
                os.kill(os.getpid(), by)
            if (outcome := folder.outcome()) is not None:
                over = over or time.monotonic()
                if time.monotonic() - over > _PATIENCE.get(outcome["code"], _USUALLY):
                    os._exit(0)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, leave)
    threading.Thread(target=listen, daemon=True, name="messages").start()
    try:
        yield
    finally:
        done.set()
