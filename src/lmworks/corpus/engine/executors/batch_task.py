"""Tasks of a pass that a job of a batch system runs."""

from __future__ import annotations

from pathlib import Path

from lmworks.corpus.engine.executors.local import raise_task_error
from lmworks.corpus.engine.executors.slurm import failures_folder
from lmworks.corpus.engine.executors.worker import run_task, single_threaded
from lmworks.corpus.engine.job import Job
from lmworks.corpus.engine.passes.sequence import PASSES
from lmworks.corpus.engine.task import pass_named
from lmworks.errors import UserError
from lmworks.files import write_text


def run_tasks(out: Path, name: str, first: int, step: int) -> None:
    """Run tasks `first`, `first + step` and so on of the pass `name`. Errors are also written where the executor looks for them."""
    job = Job.load(Path(out))
    count = len(pass_named(PASSES, name).tasks(job))
    if first >= count:
        raise UserError(f"the pass {name} has {count} tasks, numbered from 0")
    single_threaded()
    for number in range(first, count, step):
        answer = run_task(job, name, number, _silent)
        if answer:
            write_text(failures_folder(job) / f"{name}-{number}.txt", answer.get("error") or answer["fault"])
            raise_task_error(answer)


def _silent(size: int, documents: int) -> None:
    pass
