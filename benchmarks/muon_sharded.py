"""Muon's step on sharded matrices: gloo ranks of one thread each against one process of one thread, on the same matrices.

    python benchmarks/muon_sharded.py [--ranks 2] [--rounds 8]

Arms, in turns round by round, while the ranks that have nothing to do wait: one process with all matrices; the ranks with FSDP's shards of
them; the ranks with copies (DDP), where each rank does its share of the work for all; and copies of which each rank does all by itself.
Times are medians over rounds of the slowest rank. `waiting` is the share of the step in which the first rank had nothing to do but wait
for an exchange: what overlapping leaves of communication, and of ranks that are late. Two ranks that divide the work and lose nothing
take 0.5 of one process.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lmworks.optim.groups import Group
from lmworks.optim.muon import Muon

# Six layers 512 wide with grouped heads, the last three with sixteen experts instead of the dense part.
LAYER = {"query": (512, 512), "key": (128, 512), "out": (512, 512)}
DENSE = {"up": (1408, 512), "down": (512, 1408)}
SPARSE = {"experts.up": (16, 192, 512), "experts.down": (16, 512, 192)}
SHAPES = {f"layers.{i}.{name}": shape for i in range(6) for name, shape in {**LAYER, **(DENSE if i < 3 else SPARSE)}.items()}


class Waited:
    """Counts the seconds spent in `wait` of the exchanges."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._exchange = dist.all_to_all_single
        dist.all_to_all_single = self._start  # type: ignore[assignment]

    def _start(self, *args: Any, **options: Any) -> Any:
        work, counter = self._exchange(*args, **options), self

        class Timed:
            def wait(self) -> None:
                began = time.perf_counter()
                work.wait()
                counter.seconds += time.perf_counter() - began

        return Timed()


def parameters(place: Callable[[nn.Module], object]) -> dict[str, nn.Parameter]:
    """The matrices with gradients, placed."""
    made: dict[str, nn.Parameter] = {}
    for name, shape in SHAPES.items():
        generator = torch.Generator().manual_seed(len(made))
        module, gradient = nn.Module(), nn.Module()
        module.matrix = nn.Parameter(torch.randn(shape, generator=generator))
        gradient.matrix = nn.Parameter(torch.randn(shape, generator=generator))
        place(module)
        place(gradient)
        made[name] = module.matrix
        made[name].grad = gradient.matrix.detach()
    return made


def rank(number: int, ranks: int, rounds: int, store: str) -> None:
    """Measure every arm as the number-th of the ranks; the first prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=number, world_size=ranks)
    shard, copies = init_device_mesh("cpu", (ranks,)), init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("dp", "fsdp"))
    arms = {
        "one process": lambda module: None,
        f"{ranks} ranks, sharded": lambda module: fully_shard(module, mesh=shard),
        f"{ranks} ranks, copies": lambda module: fully_shard(module, mesh=copies),
        f"{ranks} ranks, each all": lambda module: None,
    }
    optimizers = {name: Muon([Group("muon", 0.01, 0.1, 1.0, parameters(place))]) for name, place in arms.items()}
    waited = Waited()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    waiting: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 2):
        for name, muon in optimizers.items():
            dist.barrier()
            waited.seconds, began = 0.0, time.perf_counter()
            if number == 0 or name != "one process":
                muon.step()
            took = torch.tensor(time.perf_counter() - began)
            share = waited.seconds / took.item()
            dist.all_reduce(took, dist.ReduceOp.MAX)
            seconds[name].append(took.item())
            waiting[name].append(share)
    if number == 0:
        report({name: times[2:] for name, times in seconds.items()}, {name: shares[2:] for name, shares in waiting.items()})
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], waiting: dict[str, list[float]]) -> None:
    """Print the table."""
    elements = sum(math.prod(shape) for shape in SHAPES.values())
    alone = statistics.median(seconds["one process"])
    print(f"{len(SHAPES)} parameters, {elements / 1e6:.1f}M elements")
    print("| arm | milliseconds | of one process | waiting |\n|---|---|---|---|")
    for name, times in seconds.items():
        took = statistics.median(times)
        print(f"| {name} | {1000 * took:.0f} | {took / alone:.2f} | {100 * statistics.median(waiting[name]):.0f}% |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        torch.multiprocessing.spawn(rank, (arguments.ranks, arguments.rounds, store), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
