"""How ranks are started and kept going, on this machine, on a list of hosts, or under Slurm."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT
from lmworks.recipe.schema.units import Seconds


class Slurm(Node):
    """What a job reserves. The nodes must see the run directory and this installation under the same paths."""

    renamed: ClassVar = {"time": "time_limit"}

    partition: str | None = Field(None, description="where the job runs")
    account: str | None = Field(None, description="on whose account")
    qos: str | None = Field(None, description="under which quality of service")
    time_limit: str | None = Field(None, description="limit of the job, as sbatch takes it")
    gpus_per_node: int | None = Field(None, ge=0, description="when left out one per rank, where `--cluster` names one with GPUs")
    cpus_per_rank: int = Field(1, gt=0, description="cores that each rank has")
    memory: str | None = Field(None, pattern=r"^(all|\d+[MG])$", description="of a node, such as 900G, or all")
    warning: Seconds = Field(Seconds.parse("120 s"), description="how long before its end the job is told to save and leave")
    options: tuple[str, ...] = Field((), description="further options of sbatch, such as --constraint=h100")
    setup: tuple[str, ...] = Field((), description="shell commands before the work, such as module load python")


class Launch(Node):
    """Ranks that die or hang are started again from the last checkpoint; nothing here reaches a weight."""

    renamed: ClassVar = {"grace": "grace_period"}
    effect: ClassVar = NO_EFFECT

    timeout: Seconds = Field(Seconds.parse("10 min"), description="wait for the others in one collective, after which all start again")
    max_restarts: int = Field(3, ge=0, description="restarts in a row without a new checkpoint, after which the run stops with the reason")
    exclude_after: int = Field(3, gt=0, description="failures in a row by the ranks of one host, after which the run goes on without it")
    grace_period: Seconds = Field(Seconds.parse("5 min"), description="time that ranks have to save when a scheduler ends them")
    ssh: str = Field("ssh -o BatchMode=yes", description="the command that runs another command on a host")
    slurm: Slurm = Slurm()
