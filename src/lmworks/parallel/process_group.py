"""Checks at the start that all ranks have the same versions and layout, because a difference that is found later costs days.

Initializes a rank that `torchrun` or `lmworks launch` has started: its device, its threads, and the process groups.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lmworks import __version__
from lmworks.errors import UserError
from lmworks.host import devices, machine
from lmworks.parallel.mesh import AXES, Ranks, backend_for
from lmworks.recipe.schema.layout import Layout, layout_for
from lmworks.ui.terminal import console

_NAMED = 8  # ranks


@dataclass(frozen=True)
class RankEnvironment:
    """The properties of a rank that are compared."""

    host: str
    torch: str
    lmworks: str
    layout: Layout
    bf16: bool


def rank_environment(layout: Layout, device: torch.device) -> RankEnvironment:
    return RankEnvironment(socket.gethostname(), torch.__version__, __version__, layout, machine.multiplies_bf16(device))


def check_consistency(own: RankEnvironment) -> None:
    """Collective. If only some devices multiply bf16 in hardware, `train.precision: auto` becomes fp32 on all ranks.

    Raises `UserError`, the same on all ranks, that names the ranks with a different library version or layout.
    """
    found: list[RankEnvironment] = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    for what in ("torch", "lmworks", "layout"):
        values = [getattr(environment, what) for environment in found]
        usual, _ = Counter(values).most_common(1)[0]
        if others := [rank for rank, value in enumerate(values) if value != usual]:
            raise UserError(_different(what, others, found, usual))
    without = [rank for rank, environment in enumerate(found) if not environment.bf16]
    devices.set_bf16_on_all_ranks(not without)
    if 0 < len(without) < len(found) and dist.get_rank() == 0:
        text = f"{_names(without, found)} cannot multiply bf16 in hardware, so train.precision: auto is fp32 on all ranks"
        console.print(f"{text}; omit those ranks, or set train.precision", style="yellow")


def _different(what: str, ranks: list[int], found: list[RankEnvironment], usual: object) -> str:
    if what == "layout":
        return f"the layout of {_names(ranks, found)} differs from that of the others; start all with the same recipe and the same --set"
    theirs = ", ".join(sorted({str(getattr(found[rank], what)) for rank in ranks}))
    return f"{what} is {theirs} on {_names(ranks, found)} and {usual} on the others; install the same version on all hosts"


def _names(ranks: list[int], found: list[RankEnvironment]) -> str:
    """`ranks 2, 3 (on b)`."""
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    hosts = sorted({found[rank].host for rank in ranks})
    where = ", ".join(hosts[:_NAMED]) + (f" and {len(hosts) - _NAMED} more hosts" if len(hosts) > _NAMED else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more} (on {where})"


_JOIN_TIMEOUT = 600.0  # seconds that the slowest rank may take to start
_MESHED = 128
"""Ranks up to which gloo connects each pair when a group is made.

A group of all ranks needs ranks - 1 sockets, of the 1,024 files that a process may open by default: two groups, and up to five axes that
span all, fit 128 ranks. Beyond, pairs connect when they first speak, 2 to log2(ranks) of a rank per group. Below, a rank that dies
before the first collective of a group is noticed at once; a pair that connects later waits without a limit (pytorch/gloo issue 520,
torch 2.13), until heartbeats report it.
"""
_FLIGHT_RECORDER_SIZE = "256"  # latest collectives that a rank records, for the diagnosis of a hang


def is_launched() -> bool:
    """Whether this process was started as a rank by a launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def init_ranks(layout: Layout, timeout: float, threads: int | None = None) -> Ranks:
    """Join the process group; a process that was not launched as a rank runs alone.

    `timeout`: seconds after which a collective times out. `threads`: CPU threads of the machine, which its ranks share; by default all
    cores. Raises `UserError` if the layout does not fit the number of ranks that were started, or if the ranks have different versions or
    layouts.
    """
    assert not layout.auto, "the layout is chosen before the ranks start"
    torch.set_num_threads(max(1, (threads or machine.cores()) // machine.ranks_here()[1]))
    if not is_launched():
        return Ranks(layout)
    layout = layout_for(layout, int(os.environ["WORLD_SIZE"]))
    device = _device()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _FLIGHT_RECORDER_SIZE)
    if int(os.environ["WORLD_SIZE"]) > _MESHED:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    collective_timeout = timedelta(seconds=timeout)
    if not dist.is_initialized():
        # with its device, NCCL connects now, so that a bad link is found at the start, and splits the other groups from this one
        bound = device if device.type == "cuda" else None
        dist.init_process_group(backend_for(device), timeout=timedelta(seconds=max(timeout, _JOIN_TIMEOUT)), device_id=bound)
    check_consistency(rank_environment(layout, device))
    ranks = Ranks(layout, device.type)
    for group in (dist.group.WORLD, *map(ranks.group, AXES)):
        if group is not None:
            group.set_timeout(collective_timeout)  # a mesh gives its groups torch's default, half an hour with gloo
    return ranks


def _device() -> torch.device:
    """The device of this rank, which becomes the current one: its GPU among those that the process sees. Launchers show a rank all GPUs of
    the machine, or, as Slurm may, only its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", machine.ranks_here()[0] % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def destroy_ranks() -> None:
    """Destroy the process groups, after all ranks have finished their work."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
