"""Checks at the start that all ranks have the same versions and layout, because a difference that is found later costs days."""

from __future__ import annotations

import socket
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lmworks import __version__, machine, precision
from lmworks.errors import UserError
from lmworks.progress import console
from lmworks.recipe.schema.layout import Layout

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
    precision.set_bf16_on_all_ranks(not without)
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
