"""A process that does tasks of a job for another: reads their names line by line, answers in lines of JSON.

It ends when what it reads ends, so no worker outlives the one it works for, however that came to its end.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from lmworks.corpus.engine.job import Job
from lmworks.corpus.engine.passes.sequence import PASSES
from lmworks.corpus.engine.task import pass_named
from lmworks.errors import UserError

_TELL_SECONDS = 0.2


def main(out: Path) -> None:
    """Work on the job saved in the corpus directory `out`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a step prints is for people
    asked: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    single_threaded()
    job = Job.load(out)
    while True:
        name, number = json.loads(asked.get())
        _answer(answers, attempt(job, name, number, _Telling(answers)))


def _listen(asked: queue.Queue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)


def single_threaded() -> None:
    """One process has one core: libraries that would start a thread for each keep to it."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def attempt(job: Job, name: str, number: int, advance: Any) -> dict[str, Any]:
    """Do one task; returns {} or what went wrong."""
    pass_ = pass_named(PASSES, name)
    try:
        pass_.do(job, pass_.tasks(job)[number], advance)
        if isinstance(advance, _Telling):
            advance.flush()
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return {"fault": f"{pass_.doing(pass_.tasks(job)[number])}: {what}", "traceback": traceback.format_exc()}
    return {}


class _Telling:
    """Passes on how far a task is, some times a second."""

    def __init__(self, answers: Any) -> None:
        self._answers, self._last, self._bytes, self._documents = answers, time.monotonic(), 0, 0

    def __call__(self, size: int, documents: int) -> None:
        self._bytes += size
        self._documents += documents
        if time.monotonic() - self._last > _TELL_SECONDS:
            self.flush()

    def flush(self) -> None:
        _answer(self._answers, {"bytes": self._bytes, "documents": self._documents})
        self._last, self._bytes, self._documents = time.monotonic(), 0, 0


def _answer(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
