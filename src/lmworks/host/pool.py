"""Worker processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from lmworks.errors import UserError


def map_unordered(processes: int, work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (task, work(*task)) in order of completion; in this process if `processes` is 1, otherwise in that many processes.

    `work` is a function of a module, and `tasks` must be picklable. The first error cancels the other tasks and is raised here; a process
    killed by the system is a UserError. Workers end whenever the loop ends, also on Ctrl-C and if this process dies.
    """
    tasks = list(tasks)
    if processes <= 1 or len(tasks) <= 1:
        yield from ((task, work(*task)) for task in tasks)
        return
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(min(processes, len(tasks)), context, initializer=_begin, initargs=(os.getpid(),))
    try:
        waiting = {executor.submit(work, *task): task for task in tasks}
        for done in as_completed(waiting):
            yield waiting.pop(done), done.result()
        executor.shutdown()
    except BrokenProcessPool:
        raise UserError("the system killed a worker process, most likely because memory ran out; lower `threads` and run again") from None
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()


def _begin(parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_follow, args=(parent,), name="parent", daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
