"""The executor for a Slurm cluster: one job array per pass, each depending on the previous one; the jobs of an array share its tasks.

Tasks of a pass that a job of a batch system runs.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lmworks.corpus.engine.job import Job, Pass, pass_named, task_bytes
from lmworks.corpus.engine.local_executor import raise_task_error, run_task, single_threaded
from lmworks.corpus.engine.passes import PASSES
from lmworks.errors import UserError
from lmworks.io.files import write_text
from lmworks.io.urls import reveal
from lmworks.ui.terminal import Bar, bar

_POLL_SECONDS = 5.0


def execute(job: Job, passes: Sequence[Pass]) -> None:
    """Submit job arrays for unfinished passes and wait for them. Raises UserError if Slurm is not available or a job fails."""
    if shutil.which("sbatch") is None:
        raise UserError("corpus.executor kind slurm needs sbatch, which is not on this machine; run this on a login node")
    passes = [pass_ for pass_ in passes if pass_.tasks(job)]
    first = next((place for place, pass_ in enumerate(passes) if not _all_done(job, pass_)), len(passes))
    shutil.rmtree(failures_folder(job), ignore_errors=True)
    submitted: list[str] = []
    try:
        for pass_ in passes[first:]:
            submitted.append(_submit(job, pass_, submitted[-1] if submitted else None))
        for pass_ in passes[first:]:
            _wait(job, pass_, submitted)
    except BaseException:
        if submitted:
            subprocess.run(["scancel", *submitted], capture_output=True, check=False)
        raise


def _all_done(job: Job, pass_: Pass) -> bool:
    return all(pass_.is_done(job, task) for task in pass_.tasks(job))


def failures_folder(job: Job) -> Path:
    """The folder where jobs write their errors."""
    return job.staging / "failures"


def batch_script(job: Job, pass_: Pass) -> str:
    """The batch script of a pass."""
    node = job.recipe.corpus.executor
    jobs = min(len(pass_.tasks(job)), node.max_jobs)
    reduces = not any(map(task_bytes, pass_.tasks(job)))
    options = {
        "job-name": f"lmworks-{pass_.name}",
        "array": f"0-{jobs - 1}" + (f"%{node.max_running_jobs}" if node.max_running_jobs else ""),
        "output": f"{job.staging}/slurm/{pass_.name}-%A-%a.log",
        "cpus-per-task": str(node.cpus),
        "mem": node.reduce_memory or node.memory if reduces else node.memory,
        "time": node.time_limit,
        "partition": node.partition,
        "account": node.account,
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    lines += ["#SBATCH --requeue", *(f"#SBATCH {option}" for option in node.options)]
    work = [sys.executable, "-P", "-m", "lmworks.cli.main", "corpus", "task", str(job.out), pass_.name]
    command = f'exec {shlex.join(work)} "$SLURM_ARRAY_TASK_ID" --of {jobs}'
    return "\n".join(["#!/bin/bash", *lines, "set -euo pipefail", "export OMP_NUM_THREADS=1", *reveal(node.setup), command, ""])


def _submit(job: Job, pass_: Pass, after: str | None) -> str:
    path = job.staging / "slurm" / f"{pass_.name}.sh"
    write_text(path, batch_script(job, pass_), private=True)  # the setup may contain credentials
    waiting = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    command = ["sbatch", "--parsable", *waiting, str(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        raise UserError(f"sbatch rejected {path}: {' '.join(done.stderr.split())}; correct corpus.executor")
    return done.stdout.strip().partition(";")[0]


def _wait(job: Job, pass_: Pass, submitted: Sequence[str]) -> None:
    """Wait until all tasks of a pass are done; raise UserError if its jobs end before that."""
    tasks = list(pass_.tasks(job))
    with bar(pass_.label, sum(map(task_bytes, tasks)) or None) as progress:
        while tasks:
            jobs_left = _any_alive(submitted)  # queried before the markers, so that a job that ends in between counts as done
            tasks = _unfinished(job, pass_, tasks, progress)
            if tasks and (not jobs_left or failures_folder(job).exists()):
                raise UserError(_failure_message(job, pass_, len(tasks)))
            if tasks:
                time.sleep(_POLL_SECONDS)


def _unfinished(job: Job, pass_: Pass, tasks: list[object], progress: Bar) -> list[object]:
    left = [task for task in tasks if not pass_.is_done(job, task)]
    progress.advance(sum(map(task_bytes, tasks)) - sum(map(task_bytes, left)))
    progress.note(f"{len(left)} of {len(pass_.tasks(job))} tasks left")
    return left


def _any_alive(submitted: Sequence[str]) -> bool:
    command = ["squeue", "--noheader", "--format=%i", "--jobs", ",".join(submitted)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
    return bool(done.stdout.strip()) or (done.returncode != 0 and "Invalid job id" not in done.stderr)


def _failure_message(job: Job, pass_: Pass, left: int) -> str:
    messages = sorted(failures_folder(job).glob("*.txt"))
    if messages:
        return messages[0].read_text(encoding="utf-8").strip()
    return (
        f"the Slurm jobs of the pass {pass_.name!r} ended with {left} unfinished tasks; see the logs in {job.staging / 'slurm'}, fix the "
        "cause (often memory or time: corpus.executor.memory, .time), and run the same command again"
    )


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
