"""Some tasks of a pass, done by a job of a batch system."""

from __future__ import annotations

from pathlib import Path

from lmworks.corpus.engine.executors.local import raise_for
from lmworks.corpus.engine.executors.slurm import failures
from lmworks.corpus.engine.executors.worker import attempt, single_threaded
from lmworks.corpus.engine.job import Job
from lmworks.corpus.engine.passes.sequence import PASSES
from lmworks.corpus.engine.task import pass_named
from lmworks.errors import UserError
from lmworks.files import write_text


def run_tasks(out: Path, name: str, first: int, step: int) -> None:
    """Tasks `first`, `first + step` and so on of the pass called `name`. What goes wrong is also written where the executor looks."""
    job = Job.load(Path(out))
    count = len(pass_named(PASSES, name).tasks(job))
    if first >= count:
        raise UserError(f"the pass {name} has {count} tasks, numbered from 0")
    single_threaded()
    for number in range(first, count, step):
        answer = attempt(job, name, number, _silent)
        if answer:
            write_text(failures(job) / f"{name}-{number}.txt", answer.get("error") or answer["fault"])
            raise_for(answer)


def _silent(size: int, documents: int) -> None:
    pass
