"""Initializes a rank that `torchrun` or `lmworks launch` has started: its device, its threads, and the process groups."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from lmworks import machine
from lmworks.errors import UserError
from lmworks.parallel import consistency
from lmworks.parallel.mesh import AXES, Ranks, backend_for
from lmworks.recipe.schema.layout import Layout, world_size

_JOINING = 600.0  # seconds that the slowest rank may take to start
_RECORDED = "256"  # newest collectives that a rank remembers, for the report on a hang


def min_world_size(layout: Layout) -> int:
    """The least number of ranks of a layout; every other is a multiple of it."""
    axis = _data_axis(layout)
    per_data_rank = 1 if axis == "dp_replicate" else max(1, layout.ep // layout.cp)  # experts need dp_shard in multiples of this
    return world_size(layout) // int(getattr(layout, axis)) * per_data_rank


def layout_for(layout: Layout, world: int) -> Layout:
    """The layout on `world` ranks: pp, cp, tp and ep stay as they are, and the data axis takes what is there.

    That axis is dp_shard, or dp_replicate where the recipe has replicas: then dp_shard is what a replica needs to fit.
    Raises `UserError` naming the nearest numbers of ranks that are possible.
    """
    axis, least = _data_axis(layout), min_world_size(layout)
    if world % least:
        legal = sorted({size for size in (world // least * least, -(-world // least) * least) if size})
        sizes = {name: getattr(layout, name) for name in ("pp", "dp_shard", "cp", "tp", "ep") if name != axis}
        kept = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise UserError(f"{world} ranks do not divide by layout {kept} ({least} at a time); start {' or '.join(map(str, legal))} ranks")
    return layout.model_copy(update={axis: world // (world_size(layout) // int(getattr(layout, axis)))})


def _data_axis(layout: Layout) -> str:
    return "dp_replicate" if layout.dp_replicate > 1 else "dp_shard"


def is_launched() -> bool:
    """Whether this process was started as a rank by a launcher."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def init_ranks(layout: Layout, timeout: float, threads: int | None = None) -> Ranks:
    """Join the other ranks; one process that nobody launched stays alone.

    `timeout`: seconds that a rank waits for the others in one collective before it gives up. `threads`: CPU threads of the machine, which
    its ranks share; all cores when left out. Raises `UserError` if the layout cannot be had on the ranks that were started, or if these
    differ in what they must have in common.
    """
    assert not layout.auto, "chosen before the ranks start"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (threads or machine.cores()) // here))
    if not is_launched():
        return Ranks(layout)
    layout = layout_for(layout, int(os.environ["WORLD_SIZE"]))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _RECORDED)
    patience = timedelta(seconds=timeout)
    if not dist.is_initialized():
        dist.init_process_group(backend_for(device), timeout=timedelta(seconds=max(timeout, _JOINING)))
    consistency.check_consistency(consistency.rank_environment(layout, device))
    ranks = Ranks(layout, device.type)
    for group in (dist.group.WORLD, *map(ranks.group, AXES)):
        if group is not None:
            group.set_timeout(patience)  # a mesh gives its groups torch's default, half an hour on gloo
    return ranks


def destroy_ranks() -> None:
    """Destroy the process groups, after all ranks have finished their work."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
