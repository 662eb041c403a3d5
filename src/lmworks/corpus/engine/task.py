"""Passes and their tasks, and how a task is run once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.corpus.engine.job import Job, Piece, digest, is_finished, mark_finished
from lmworks.errors import UserError

Advance = Callable[[int, int], None]
"""Called with the numbers of input bytes and documents processed since the last call."""


@dataclass(frozen=True)
class Pass:
    """A pass of the job. A map has a task for each of `tasks`; a reduction has a single task that reads the results of all parts.

    `inputs` is a JSON value that determines what the task writes. `work` writes it, each file atomically.
    """

    name: str
    label: str
    tasks: Callable[[Job], Sequence[Any]]
    inputs: Callable[[Job, Any], Any]
    work: Callable[[Job, Any, Advance], None]

    def marker(self, job: Job, task: object) -> Path:
        return job.path(self.name, task, ".json")

    def is_done(self, job: Job, task: object) -> bool:
        """Whether the task was finished with its current inputs."""
        return is_finished(self.marker(job, task), self.inputs_digest(job, task))

    def inputs_digest(self, job: Job, task: object) -> str:
        return digest([self.name, self.inputs(job, task)])

    def run(self, job: Job, task: object, advance: Advance) -> None:
        """Run the task, unless it is finished."""
        inputs = self.inputs_digest(job, task)
        marker = self.marker(job, task)
        if not is_finished(marker, inputs):
            marker.unlink(missing_ok=True)  # it describes files that will be replaced
            self.work(job, task, advance)
            mark_finished(marker, inputs)

    def describe(self, task: object) -> str:
        """The pass and the task, for messages."""
        return f"{self.label} {task.source.name} part {task.number}" if isinstance(task, Piece) else f"{self.label} {task or ''}".rstrip()


def reduction(job: Job) -> Sequence[str]:
    """The tasks of a pass with a single task."""
    return ("all",)


def pieces(job: Job) -> Sequence[Piece]:
    """The tasks of a pass with one task per part."""
    return job.pieces


def only_if(condition: Callable[[Job], object], tasks: Callable[[Job], Sequence[Any]]) -> Callable[[Job], Sequence[Any]]:
    """The tasks of a pass if `condition` holds for the job; otherwise none."""
    return lambda job: tasks(job) if condition(job) else ()


def task_bytes(task: object) -> int:
    """Input bytes of a task, for progress."""
    return task.bytes if isinstance(task, Piece) else 0


def pass_named(passes: Sequence[Pass], name: str) -> Pass:
    """The pass of this name."""
    for pass_ in passes:
        if pass_.name == name:
            return pass_
    raise UserError(f"a corpus job has no pass {name!r}; it has: {', '.join(pass_.name for pass_ in passes)}")
