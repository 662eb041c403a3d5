"""The executor for a Ray cluster: each task is a remote function with the directory of the job and the number of the task."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lmworks.corpus.engine.job import Job, Pass, task_bytes
from lmworks.corpus.engine.local_executor import Rate, raise_task_error, run_task, single_threaded
from lmworks.errors import UserError
from lmworks.io.urls import reveal
from lmworks.ui.terminal import bar

_WAITING_PER_CPU = 4  # submitted tasks per CPU, so that Ray is neither idle nor flooded


def execute(job: Job, passes: Sequence[Pass]) -> None:
    """Run all passes in order; finished tasks are skipped. Raises UserError if Ray is not installed or its cluster cannot be reached."""
    ray: Any = None
    try:
        for pass_ in passes:
            tasks = pass_.tasks(job)
            todo = [number for number, task in enumerate(tasks) if not pass_.is_done(job, task)]
            if todo:
                ray = ray or _connect(job)
                _run_pass(ray, job, pass_, tasks, todo)
    finally:
        if ray:
            ray.shutdown()


def _connect(job: Job) -> Any:
    """Import ray and connect it to the cluster; returns the package."""
    try:
        import ray
    except ImportError:
        raise UserError("corpus.executor kind ray needs Ray: pip install 'lmworks[ray]'") from None
    node = job.recipe.corpus.executor
    cpus = job.recipe.corpus.processes if node.address is None else None
    try:
        ray.init(address=reveal(node.address), num_cpus=cpus, include_dashboard=False, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"cannot reach the Ray cluster at {node.address}: {str(error).splitlines()[0]}") from None
    return ray


def _run_pass(ray: Any, job: Job, pass_: Pass, tasks: Sequence[Any], todo: list[int]) -> None:
    node = job.recipe.corpus.executor
    todo.sort(key=lambda number: -task_bytes(tasks[number]))
    reduces = not any(map(task_bytes, tasks))
    memory = memory_bytes(node.reduce_memory or node.memory if reduces else node.memory)
    remote = ray.remote(num_cpus=node.cpus, memory=memory, max_retries=3)(_run_task)
    window = _WAITING_PER_CPU * max(int(ray.cluster_resources().get("CPU", 1)), 1)
    total, left = sum(map(task_bytes, tasks)), sum(task_bytes(tasks[number]) for number in todo)
    running: dict[Any, int] = {}
    with bar(pass_.label, total or None, total - left) as progress:
        rate = Rate(progress)
        while todo or running:
            while todo and len(running) < window:
                number = todo.pop(0)
                running[remote.remote(str(job.out), pass_.name, number)] = number
            done, _ = ray.wait(list(running), num_returns=1)
            number = running.pop(done[0])
            try:
                answer = ray.get(done[0])
            except ray.exceptions.RayError as error:
                why = str(error).strip().splitlines()[0]
                raise UserError(f"Ray lost a process three times while working on: {pass_.describe(tasks[number])} ({why})") from None
            raise_task_error(answer)
            rate(answer["bytes"], answer["documents"])


def memory_bytes(text: str | None) -> int | None:
    """Bytes of `8G` or `500M`, in the units of sbatch."""
    return None if text is None else int(text[:-1]) * {"M": 1 << 20, "G": 1 << 30}[text[-1]]


def _run_task(out: str, name: str, number: int) -> dict[str, Any]:
    """The remote function: run one task."""
    path = Path(out) / "staging" / "job.json"
    single_threaded()
    counted = _ProgressCounter()
    answer = run_task(_job(out, path.stat().st_mtime_ns), name, number, counted)
    return {**answer, "bytes": counted.bytes, "documents": counted.documents}


@lru_cache(maxsize=1)
def _job(out: str, changed: int) -> Job:
    return Job.load(Path(out))


class _ProgressCounter:
    def __init__(self) -> None:
        self.bytes = self.documents = 0

    def __call__(self, size: int, documents: int) -> None:
        self.bytes += size
        self.documents += documents
