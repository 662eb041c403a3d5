"""Where the corpus is made: processes of this machine, a Ray cluster, or arrays of Slurm jobs."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from lmworks.recipe.schema.base import Node


class Executor(Node):
    """Who does the tasks of the corpus stage. Other machines must see the run directory and the sources under the same paths."""

    renamed: ClassVar = {"jobs": "max_jobs", "running": "max_running", "time": "time_limit"}

    kind: Literal["local", "ray", "slurm"] = Field("local", description="processes of this machine, a Ray cluster, or arrays of Slurm jobs")
    cpus: int = Field(1, gt=0, description="ray, slurm: what a task reserves")
    memory: str | None = Field(None, pattern=r"^\d+[MG]$", description="ray, slurm: what a task reserves, such as 8G")
    reduce_memory: str | None = Field(
        None, pattern=r"^\d+[MG]$", description="ray, slurm: the same for the stages that compare all documents; as `memory` when left out"
    )
    address: str | None = Field(None, description="ray: of a running cluster, or auto; without one a cluster is begun on this machine")
    max_jobs: int = Field(1000, gt=0, description="slurm: most jobs of an array, among which the tasks are dealt out (MaxArraySize)")
    max_running: int | None = Field(None, gt=0, description="slurm: most jobs of an array at one time")
    time_limit: str | None = Field(None, description="slurm: limit of a job, as sbatch takes it")
    partition: str | None = Field(None, description="slurm: where the jobs run")
    account: str | None = Field(None, description="slurm: on whose account")
    options: tuple[str, ...] = Field((), description="slurm: further options of sbatch, such as --constraint=nvme")
    setup: tuple[str, ...] = Field((), description="slurm: shell commands before the work, such as module load python")
