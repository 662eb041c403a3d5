"""How ranks are started and kept going: on this machine, on a list of hosts, or under Slurm.

Fault handling (`Stability`): what a run does about bad steps, failed saves, slow ranks and missing data.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints

from lmworks.recipe.schema.base import NO_EFFECT, RESUME_ONLY, Node
from lmworks.recipe.schema.units import Duration, Seconds

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

    effect: ClassVar = NO_EFFECT

    timeout: Seconds = Field(Seconds.parse("10 min"), description="time limit of one collective, after which all ranks are restarted")
    max_restarts: int = Field(
        3, ge=0, description="consecutive restarts without a new checkpoint, after which the run stops with the reason"
    )
    exclude_after_failures: int = Field(
        3,
        gt=0,
        description="consecutive failures of the ranks of one host, in this launch and since it was readmitted, after which the run "
        "continues without it",
    )
    health_check: bool = Field(
        True,
        description="check each host of `lmworks launch hosts` before ranks start on it, in seconds, and exclude a host that fails",
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


class Spike(Node):
    """A loss or gradient norm far above the recent ones. Such an update is never applied; `action` says what follows."""

    action: Literal["skip", "reduce_lr", "rollback"] = Field(
        "skip",
        description="skip: continue; reduce_lr: continue at a reduced learning rate; rollback: return to the last checkpoint and skip "
        "the data since",
    )
    window_steps: int = Field(128, ge=8, description="recent steps compared with; a quarter of them must exist before a step is judged")
    threshold_mads: float = Field(16.0, gt=0, description="distance above the median that counts as a spike, in median absolute deviations")
    min_rise_nats: float = Field(0.3, ge=0, description="minimum rise of the loss above the median, in nats per token")
    norm_factor: float = Field(10.0, gt=1, description="minimum rise of the gradient norm, as a factor on its median")
    max_in_a_row: int = Field(5, gt=0, description="consecutive spikes after which skip and reduce_lr roll back too")
    rollback_after: Duration = Field(
        Duration.parse("1%"), description="spikes before this much of the stage never lead to a rollback: losses are unsteady at first"
    )
    reduced_lr_factor: float = Field(0.3, gt=0, lt=1, description="reduce_lr: initial factor on the learning rate")
    reduced_lr_steps: int = Field(100, gt=0, description="reduce_lr: steps over which the rate returns linearly")


class Stability(Node):
    """Faults, and what the run does about them. Every decision is a line in the ledger."""

    effect: ClassVar = RESUME_ONLY

    max_bad_steps: int = Field(10, gt=0, description="consecutive non-finite steps (none changes a weight) after which the run rolls back")
    max_rollbacks: int = Field(
        3, ge=0, description="rollbacks per phase, to the newest good checkpoint; then a non-finite run stops with the reason, and after a "
        "spike the new level is accepted",
    )  # fmt: skip
    skip_steps: int = Field(100, gt=0, description="number of undone steps before the bad one whose data a rollback skips")
    save_bad_batches: Annotated[int, NO_EFFECT] = Field(
        20, ge=0, description="number of bad batches saved; `lmworks replay` takes those of pretraining and of tuning without LoRA"
    )
    spike: Spike | None = Field(Spike(), description="loss spike handling; null turns it off")
    starved_fraction: Annotated[float, NO_EFFECT] = Field(
        0.2, gt=0, le=1, description="fraction of wall time spent waiting for data above which the run warns"
    )
    data_timeout: Annotated[Seconds, NO_EFFECT] = Field(
        Seconds.parse("30 min"), description="time limit of waiting for one batch, after which the run stops"
    )
    max_failed_saves: Annotated[int, NO_EFFECT] = Field(
        5, gt=0, description="consecutive failed saves after which the run stops; before that it warns and retries"
    )
    slow_threshold_mads: Annotated[float, NO_EFFECT] = Field(
        8.0, gt=0, description="distance above the median step time of all ranks that counts as a slow rank, in median absolute deviations"
    )
    recheck_every: Annotated[Duration | None, NO_EFFECT] = Field(
        None,
        description="interval between tests for silent data corruption: a micro-batch is run twice, and copies of weights are compared",
    )
    detect_anomaly: bool = Field(
        False, description="check every operator of every step and report the first non-finite result; several times slower, and never "
        "compiled. Without it a non-finite step is run again with these checks",
    )  # fmt: skip
    on_corruption: Annotated[Literal["stop", "rollback"], NO_EFFECT] = Field(
        "stop", description="action after a failed test, in addition to reporting the rank"
    )
