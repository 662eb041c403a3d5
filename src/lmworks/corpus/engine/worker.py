"""A worker process: reads the names of tasks line by line, runs them, and answers in lines of JSON.

It exits at the end of its input, so it never outlives its parent.
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
from lmworks.corpus.engine.passes import PASSES
from lmworks.corpus.engine.task import pass_named
from lmworks.errors import UserError

_REPORT_SECONDS = 0.2


def main(out: Path) -> None:
    """Work on the job saved in the corpus directory `out`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent decides
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of steps must not be read as an answer
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    single_threaded()
    job = Job.load(out)
    while True:
        name, number = json.loads(requests.get())
        _send(answers, run_task(job, name, number, _ProgressReporter(answers)))


def _read_requests(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)


def single_threaded() -> None:
    """Limit libraries to one thread, since each process has one core."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def run_task(job: Job, name: str, number: int, advance: Any) -> dict[str, Any]:
    """Run one task; returns {} or a description of the error."""
    pass_ = pass_named(PASSES, name)
    try:
        pass_.run(job, pass_.tasks(job)[number], advance)
        if isinstance(advance, _ProgressReporter):
            advance.flush()
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return {"fault": f"{pass_.describe(pass_.tasks(job)[number])}: {what}", "traceback": traceback.format_exc()}
    return {}


class _ProgressReporter:
    """Sends the progress of a task to the parent, a few times a second."""

    def __init__(self, answers: Any) -> None:
        self._answers, self._last, self._bytes, self._documents = answers, time.monotonic(), 0, 0

    def __call__(self, size: int, documents: int) -> None:
        self._bytes += size
        self._documents += documents
        if time.monotonic() - self._last > _REPORT_SECONDS:
            self.flush()

    def flush(self) -> None:
        _send(self._answers, {"bytes": self._bytes, "documents": self._documents})
        self._last, self._bytes, self._documents = time.monotonic(), 0, 0


def _send(answers: Any, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
