"""Passes and their tasks, and how one task is done once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.corpus.engine.job import Job, Piece
from lmworks.corpus.engine.marker import digest, finish, finished
from lmworks.errors import UserError

Advance = Callable[[int, int], None]
"""Called with the input bytes and documents that were processed since the last call."""


@dataclass(frozen=True)
class Pass:
    """One pass of the job. A map has a task for each of `tasks`, a reduction a single task that reads the results of all parts.

    `inputs` is a JSON value that decides what the task writes. `work` writes it, each file whole.
    """

    name: str
    label: str
    tasks: Callable[[Job], Sequence[Any]]
    inputs: Callable[[Job, Any], Any]
    work: Callable[[Job, Any, Advance], None]

    def marker(self, job: Job, task: object) -> Path:
        return job.path(self.name, task, ".json")

    def is_done(self, job: Job, task: object) -> bool:
        """Whether the task has been done with the inputs that it would have now."""
        return finished(self.marker(job, task), self.inputs_digest(job, task))

    def inputs_digest(self, job: Job, task: object) -> str:
        return digest([self.name, self.inputs(job, task)])

    def run(self, job: Job, task: object, advance: Advance) -> None:
        """Do the task, unless it is done."""
        inputs = self.inputs_digest(job, task)
        marker = self.marker(job, task)
        if not finished(marker, inputs):
            marker.unlink(missing_ok=True)  # it describes files that are being replaced
            self.work(job, task, advance)
            finish(marker, inputs)

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
    """The tasks of a pass that a job has where `condition` holds; none elsewhere."""
    return lambda job: tasks(job) if condition(job) else ()


def weight(task: object) -> int:
    """Input bytes of a task, for progress."""
    return task.bytes if isinstance(task, Piece) else 0


def pass_named(passes: Sequence[Pass], name: str) -> Pass:
    """The pass of this name."""
    for pass_ in passes:
        if pass_.name == name:
            return pass_
    raise UserError(f"there is no pass {name!r} of a corpus job; there are: {', '.join(pass_.name for pass_ in passes)}")
