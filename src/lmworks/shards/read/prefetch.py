"""Reads the next batches in a thread while the step computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from lmworks.errors import UserError
from lmworks.shards.read.batch import Batch


class Prefetch:
    """Yields `make(start)`, ..., `make(stop - 1)`; a thread stays up to `depth` batches ahead.

    It has no state to save: start it at any step. `waited` is how long the last `next` waited, in seconds
    (perf/data_wait), and an error while reading is raised by `next`; so is a `UserError` after `patience` seconds
    without one. Use it as a context manager, or `close` it.
    """

    def __init__(
        self, make: Callable[[int], Batch], start: int, stop: int, depth: int = 2, patience: float | None = None
    ) -> None:
        self.waited, self._patience = 0.0, patience
        self.ahead = depth + 2  # from the batch returned last to the first that is certainly not being read yet
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue(maxsize=depth)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(make, start, stop), name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        begin = time.perf_counter()
        item = self._get() if not self._closing.is_set() else None
        self.waited = time.perf_counter() - begin
        if isinstance(item, Batch):
            return item
        self._closing.set()
        if item is None:
            raise StopIteration
        raise item

    def _get(self) -> Batch | BaseException | None:
        try:
            return self._ready.get(timeout=self._patience)
        except queue.Empty:
            return UserError(
                f"no batch arrived for {self._patience:,.0f} s (stability.data_timeout): the storage of the shards does not answer; "
                "check that it can be read, then run the same command again"
            )

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it, at most `patience` seconds if it waits for storage that does not answer."""
        self._closing.set()
        last = None if self._patience is None else time.monotonic() + self._patience
        while self._thread.is_alive() and (last is None or time.monotonic() < last):
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(timeout=0.01)

    def _work(self, make: Callable[[int], Batch], start: int, stop: int) -> None:
        try:
            for step in range(start, stop):
                if not self._offer(make(step)):
                    return
            self._offer(None)
        except BaseException as error:  # passed to the thread that requests the batch
            self._offer(error)

    def _offer(self, item: Batch | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
