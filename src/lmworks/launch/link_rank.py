"""A rank that measures the links to the others: `python -m lmworks.launch.link_rank FOLDER`; the first writes what all have found."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmworks.io.files import write_json
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.launch.links import FOUND, RECIPE, rounds_of
from lmworks.launch.rank import run_rank
from lmworks.launch.rank_context import rank_context
from lmworks.parallel.bandwidth import all_reduce_speed, clock_offset, pair_speed
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.heartbeat import HOST

# Each pair is measured in passes over all pairs, and the best one counts: other traffic only makes a link slower, and what is slow each
# time is not traffic that comes and goes.
_PASSES = 2


def measure(folder: Path) -> None:
    """Measure the links, and write the result on the first rank."""
    recipe = Recipe.model_validate_json((folder / RECIPE).read_text(encoding="utf-8"))
    with rank_context(recipe, folder) as (ranks, heartbeat):
        found = measured(ranks, os.environ[HOST], heartbeat.beat)
        if ranks.is_first:
            write_json(folder / FOUND, found)


def measured(ranks: Ranks, host: str, beat: Callable[[int, str], None]) -> dict[str, Any]:
    """An all-reduce over all ranks, each pair, and the clock of each host, as `lmworks.launch.links.judge` reads it; collective. `host`:
    the name of this rank's; `beat` is told what begins."""
    hosts: list[str] = [""] * ranks.world
    dist.all_gather_object(hosts, host)
    beat(0, "all-reduce")
    whole = all_reduce_speed(ranks, "fsdp")
    beat(1, "clocks")
    clocks = _clocks(ranks, hosts)
    beat(2, "pairs")
    own = _pairs(ranks, hosts)
    found: list[Any] = [None] * ranks.world
    dist.all_gather_object(found, own)
    pairs = [[*pair, *speed] for one in found for pair, speed in sorted(one.items())]
    return {"backend": dist.get_backend(ranks.group("fsdp")), "hosts": hosts, "all_reduce": whole, "pairs": pairs, "clocks": clocks}


def _pairs(ranks: Ranks, hosts: list[str]) -> dict[tuple[int, int], tuple[float, float]]:
    """Latency in seconds and bytes per second of the pairs in which this rank is the first."""
    device = torch.device(ranks.mesh("fsdp").device_type)
    own, best = ranks.global_rank, dict[tuple[int, int], tuple[float, float]]()
    for _ in range(_PASSES):
        for pairs in rounds_of(hosts):
            ranks.barrier()  # pairs of another round would share links with those of this one
            for pair in pairs:
                if own in pair:
                    first, second = pair
                    latency, rate = pair_speed(second if own == first else first, own == first, device)
                    before = best.get(pair, (float("inf"), 0.0))
                    best[pair] = min(latency, before[0]), max(rate, before[1])
    return {pair: speed for pair, speed in best.items() if pair[0] == own}


def _clocks(ranks: Ranks, hosts: list[str]) -> dict[str, tuple[float, float]]:
    """By how many seconds the clock of each host is ahead of that of the first rank's host, and the error of that."""
    own, found = ranks.global_rank, {hosts[0]: (0.0, 0.0)}
    for host in dict.fromkeys(hosts):
        peer = hosts.index(host)
        if peer and own in (0, peer):
            found[host] = clock_offset(peer if own == 0 else 0, own == 0)
    return found


if __name__ == "__main__":
    os._exit(run_rank(LaunchDir(Path(os.environ[VARIABLE])), int(os.environ["RANK"]), lambda: measure(Path(sys.argv[1]))))
