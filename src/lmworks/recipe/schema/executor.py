"""Where the corpus is made: processes of this machine, a Ray cluster, or arrays of Slurm jobs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node


class Executor(Node):
    """What runs the tasks of the corpus stage. Other machines must see the run directory and the sources under the same paths."""

    renamed: ClassVar = {"jobs": "max_jobs", "running": "max_running", "time": "time_limit"}

    kind: Literal["local", "ray", "slurm"] = Field("local", description="processes of this machine, a Ray cluster, or arrays of Slurm jobs")
    cpus: int = Field(1, gt=0, description="ray, slurm: CPU cores per task")
    memory: str | None = Field(None, pattern=r"^\d+[MG]$", description="ray, slurm: memory per task, such as 8G")
    reduce_memory: str | None = Field(
        None, pattern=r"^\d+[MG]$", description="ray, slurm: memory of the passes that compare all documents; `memory` when omitted"
    )
    address: str | None = Field(
        None, description="ray: address of a running cluster, or auto; a cluster is started on this machine when omitted"
    )
    max_jobs: int = Field(1000, gt=0, description="slurm: maximum jobs of an array, which share the tasks (MaxArraySize)")
    max_running: int | None = Field(None, gt=0, description="slurm: maximum jobs of an array that run at one time")
    time_limit: str | None = Field(None, description="slurm: time limit of a job, in the format of sbatch")
    partition: str | None = Field(None, description="slurm: partition of the jobs")
    account: str | None = Field(None, description="slurm: account of the jobs")
    options: tuple[str, ...] = Field((), description="slurm: additional options of sbatch, such as --constraint=nvme")
    setup: tuple[str, ...] = Field((), description="slurm: shell commands that run first, such as module load python")
