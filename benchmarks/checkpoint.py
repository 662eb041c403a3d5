"""What saving costs the training: the step that saves, and those that run while it is written, against a step that does not save.

    python benchmarks/checkpoint.py
    python benchmarks/checkpoint.py --ranks 2 --saves 15

The state is 100 MB: weights and two moments of a stack of square matrices, sharded with FSDP2 where there are two ranks. A step is a
forward, a backward and an update, on one thread per rank. Each save is followed by steps until it is on the disk, and by three
quiet ones. Prints medians for lmworks (copy, write, hash, sync, read back and compare) and for torch's own `async_save` (which
does not hash or read back).
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import lmworks  # noqa: F401  # isort: skip  (before torch: it sets how OpenMP waits)
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

from lmworks.checkpoint import Checkpoints
from lmworks.checkpoint import checkpoints as saving
from lmworks.recipe.schema.artifacts import Checkpoints as Options

WIDTH, DEPTH = 1024, 8


class Training:
    """A model, an optimizer with two moments, and a batch."""

    def __init__(self, ranks: int, rows: int) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        if ranks > 1:
            from torch.distributed.fsdp import fully_shard

            for layer in self.model:
                fully_shard(layer)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(rows, WIDTH)

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        moments = {name: self.optimizer.state[parameter] for name, parameter in self.model.named_parameters()}
        tensors = {f"{kind}.{name}": one[kind] for name, one in moments.items() for kind in ("exp_avg", "exp_avg_sq")}
        return {"model": dict(self.model.state_dict()), "optimizer": tensors}


def measure(training: Training, saves: int, save: Callable[[int], Callable[[], bool]]) -> dict[str, float]:
    """Medians in ms: a step that saves, a later one while it is written, a quiet one; the call itself; until it is on the disk."""
    times: dict[str, list[float]] = {"saving": [], "writing": [], "quiet": [], "call": [], "written": []}

    def timed() -> float:
        begin = time.perf_counter()
        training.step()
        return time.perf_counter() - begin

    for number in range(saves + 1):
        first = {kind: len(values) for kind, values in times.items()}
        begin = time.perf_counter()
        is_done = save(number)
        called = time.perf_counter() - begin
        times["call"].append(called)
        times["saving"].append(called + timed())
        while not is_done():
            times["writing"].append(timed())
        times["written"].append(time.perf_counter() - begin)
        times["quiet"] += [timed() for _ in range(3)]
        if number == 0:  # memory is touched for the first time
            for kind, values in times.items():
                del values[first[kind]:]
    return {kind: 1000 * statistics.median(values) if values else float("nan") for kind, values in times.items()}


def agreed(done: bool) -> bool:
    """Ranks go through the same steps: done where all are."""
    if not dist.is_initialized():
        return done
    flag = torch.tensor(int(done))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _one_below() -> None:
    """Under `chrt -r`, which a busy machine needs for a measurement, niceness means nothing: step down there instead."""
    own = os.sched_getparam(0).sched_priority
    os.sched_setscheduler(threading.get_native_id(), os.SCHED_RR, os.sched_param(own - 1))


def work(rank: int, ranks: int, saves: int, rows: int, folder: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    if os.sched_getscheduler(0) == os.SCHED_RR:
        saving.yield_to_training = _one_below  # type: ignore[attr-defined]
    training = Training(ranks, rows)
    for _ in range(3):
        training.step()
    with Checkpoints(Path(folder) / "lmworks", Options(keep_last=1), {}) as checkpoints:

        def ours(number: int) -> Callable[[], bool]:
            checkpoints.save(number, training.state(), {})
            thread = checkpoints._thread
            return lambda: agreed(thread is None or not thread.is_alive())

        rows_of = {"lmworks": measure(training, saves, ours)}
    if ranks > 1:
        import torch.distributed.checkpoint as dcp

        group = dist.new_group(backend="gloo")

        def theirs(number: int) -> Callable[[], bool]:
            future = dcp.async_save(training.state(), checkpoint_id=f"{folder}/dcp-{number % 2}", process_group=group)
            assert isinstance(future, Future)
            return lambda: agreed(future.done())

        rows_of["torch async_save"] = measure(training, saves, theirs)
    if rank == 0:
        for name, found in rows_of.items():
            ratios = " | ".join(f"{found[kind] / found['quiet']:.2f}" for kind in ("saving", "writing"))
            print(f"| {name} | {ranks} | {found['quiet']:.0f} | {found['call']:.0f} | {ratios} | {found['written']:.0f} |", flush=True)
    if ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--rows", type=int, default=4096, help="of the batch: how long a step is")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    print("| | ranks | quiet step ms | save call ms | saving step / quiet | step while writing / quiet | written after ms |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(work, args=(ranks, arguments.saves, arguments.rows, folder), nprocs=ranks)


if __name__ == "__main__":
    main()
