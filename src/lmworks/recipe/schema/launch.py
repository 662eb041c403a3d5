"""How ranks are started and kept going, on this machine, on a list of hosts, or under Slurm."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, StringConstraints

from lmworks.recipe.schema.base import Node
from lmworks.recipe.schema.effect import NO_EFFECT
from lmworks.recipe.schema.units import Seconds

OneLine = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f\u0085\u2028\u2029]*$")]
"""Text that stays within a line of a job script."""


_OWN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+|TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    r"|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|LMWORKS_(LAUNCH|COMMAND|HOST|RANKS_HERE)|PYTHONSAFEPATH|SLURM_\w+"
)
_SECRET = re.compile(r"(.*_)?(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|PWD|CREDENTIALS?|AUTH)(_.*)?", re.IGNORECASE)


def _check_variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{name!r} is not the name of an environment variable; write for example NCCL_SOCKET_IFNAME")
    if _OWN.fullmatch(name):
        raise ValueError(f"{name} is set by lmworks, torchrun or Slurm for each rank; leave it out")
    if _SECRET.fullmatch(name):
        raise ValueError(
            f"{name} looks like a secret, and a recipe is stored and printed; export it in the shell that starts the ranks"
        )
    return name


class Slurm(Node):
    """The resources of a Slurm job. The nodes must see the run directory and this installation under the same paths."""

    renamed: ClassVar = {"time": "time_limit"}

    partition: OneLine | None = Field(None, description="partition of the job")
    account: OneLine | None = Field(None, description="account of the job")
    qos: OneLine | None = Field(None, description="quality of service of the job")
    time_limit: OneLine | None = Field(None, description="time limit of the job, in the format of sbatch")
    gpus_per_node: int | None = Field(
        None, ge=0, description="GPUs per node; one per rank when omitted and `--cluster` names a cluster with GPUs"
    )
    cpus_per_rank: int = Field(1, gt=0, description="CPU cores per rank")
    memory: str | None = Field(None, pattern=r"^(all|\d+[MG])$", description="memory per node, such as 900G, or all")
    warning: Seconds = Field(Seconds.parse("120 s"), description="time before the end of the job at which it is signaled to save and exit")
    options: tuple[OneLine, ...] = Field((), description="additional options of sbatch, such as --constraint=h100")
    setup: tuple[str, ...] = Field((), description="shell commands that run first, such as module load python")


class Launch(Node):
    """How ranks are launched. Ranks that die or hang are restarted from the last checkpoint. No key here affects a weight."""

    renamed: ClassVar = {"grace": "grace_period"}
    effect: ClassVar = NO_EFFECT

    timeout: Seconds = Field(Seconds.parse("10 min"), description="time limit of one collective, after which all ranks are restarted")
    max_restarts: int = Field(
        3, ge=0, description="consecutive restarts without a new checkpoint, after which the run stops with the reason"
    )
    exclude_after: int = Field(
        3, gt=0, description="consecutive failures of the ranks of one host, after which the run continues without it"
    )
    grace_period: Seconds = Field(Seconds.parse("5 min"), description="time that ranks have to save when a scheduler stops them")
    ssh: str = Field("ssh -o BatchMode=yes", description="the command that runs another command on a host")
    environment: dict[Annotated[str, AfterValidator(_check_variable)], OneLine] = Field(
        {}, description="environment variables of every rank, such as NCCL_SOCKET_IFNAME: ib0; no secrets, because a recipe is stored"
    )
    pin: bool = Field(
        True,
        description="bind each rank to processors of its own, near its GPU where the system says which; processors that a launcher has "
        "already bound it to are kept",
    )
    slurm: Slurm = Slurm()
