"""The executor for one machine: runs the tasks of a pass in this process if they are small, otherwise in worker processes.

A worker is this file as a program. It reads the names of tasks line by line, runs them, answers in lines of JSON, and exits at the end of
its input, so it never outlives its parent.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmworks.corpus.engine.job import Advance, Job, Pass, pass_named, task_bytes
from lmworks.corpus.engine.passes import PASSES
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.ui.terminal import Bar, bar

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


_MIN_BYTES_PER_PROCESS = 8_000_000  # below this, starting a process takes longer than the work


def execute(job: Job, passes: Sequence[Pass]) -> None:
    """Run all passes in order; finished tasks are skipped."""
    pool = _Pool(job)
    try:
        for pass_ in passes:
            tasks = pass_.tasks(job)
            todo = [number for number, task in enumerate(tasks) if not pass_.is_done(job, task)]
            total, left = sum(map(task_bytes, tasks)), sum(task_bytes(tasks[number]) for number in todo)
            workers = min(job.recipe.corpus.processes or machine.cores(), len(todo), left // _MIN_BYTES_PER_PROCESS + 1)
            with bar(pass_.label, total or None, total - left) as progress:
                rate = Rate(progress)
                if workers > 1:
                    pool.run_tasks(pass_, tasks, todo, workers, rate)
                else:
                    for number in todo:
                        pass_.run(job, tasks[number], rate)
    finally:
        pool.close()


class Rate:
    """Advances a bar and shows documents and megabytes per second beside it."""

    def __init__(self, progress: Bar) -> None:
        self._bar, self._began, self._bytes, self._documents = progress, time.monotonic(), 0, 0

    def __call__(self, size: int, documents: int) -> None:
        self._bytes += size
        self._documents += documents
        seconds = max(time.monotonic() - self._began, 1e-3)
        self._bar.note(f"{self._documents / seconds:,.0f} documents/s, {self._bytes / 1e6 / seconds:.1f} MB/s")
        self._bar.advance(size)


class _Worker:
    """A process of this file, and its current task."""

    def __init__(self, job: Job) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "lmworks.corpus.engine.local_executor", str(job.out)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.task: Any = None
        self._rest = b""

    def assign(self, pass_: Pass, number: int, task: Any) -> None:
        self.task = task
        assert self.process.stdin
        try:
            self.process.stdin.write(json.dumps([pass_.name, number]).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:  # it has died; reading from it will say so
            pass

    def answers(self) -> list[dict[str, Any]] | None:
        """The answers since the last call; None if the process has ended."""
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


class _Pool:
    """Worker processes, started when there is first work for them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._workers: list[_Worker] = []

    def run_tasks(self, pass_: Pass, tasks: Sequence[Any], todo: Sequence[int], workers: int, advance: Advance) -> None:
        """Run the tasks, the heaviest first, and wait for them."""
        while len(self._workers) < workers:
            self._workers.append(_Worker(self._job))
        waiting = deque(sorted(todo, key=lambda number: -task_bytes(tasks[number])))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers[:workers]:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
                self._assign_next(worker, pass_, tasks, waiting)
            while any(worker.task is not None for worker in self._workers):
                for key, _ in selector.select():
                    self._handle_answers(key.data, pass_, tasks, waiting, advance)

    def _assign_next(self, worker: _Worker, pass_: Pass, tasks: Sequence[Any], waiting: deque[int]) -> None:
        worker.task = None
        if waiting:
            number = waiting.popleft()
            worker.assign(pass_, number, tasks[number])

    def _handle_answers(self, worker: _Worker, pass_: Pass, tasks: Sequence[Any], waiting: deque[int], advance: Advance) -> None:
        answers = worker.answers()
        if answers is None:
            raise UserError(_exit_message(worker.process.wait(), pass_.describe(worker.task)))
        for answer in answers:
            if "bytes" in answer:
                advance(answer["bytes"], answer["documents"])
                continue
            raise_task_error(answer)
            self._assign_next(worker, pass_, tasks, waiting)

    def close(self) -> None:
        for worker in self._workers:
            worker.end()


def raise_task_error(answer: dict[str, Any]) -> None:
    """Raise the error that a task reported from another process."""
    if "error" in answer:
        raise UserError(answer["error"])
    if "fault" in answer:
        error = RuntimeError(answer["fault"])
        error.add_note(answer["traceback"])
        raise error


def _exit_message(code: int, doing: str) -> str:
    if code == -signal.SIGKILL:
        return (
            f"a process was killed while working on: {doing}; most likely memory ran out: lower corpus.processes or corpus.part_bytes, "
            "and run the same command again"
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"a process ended ({how}) while working on: {doing}; run the same command again, it resumes where it stopped"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
