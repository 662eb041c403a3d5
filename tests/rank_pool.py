"""Processes that play ranks: started once for all tests, since importing torch takes seconds and a test's own work less.

Rank 0 is a new interpreter. The others are forks of one server that has imported torch, so they have another hash seed than rank 0: a set
of strings has another order there, as between the ranks of a real run.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from patience import PATIENCE
from unsynced import do_not_wait_for_the_disk

FORKS = mp.get_context("forkserver")  # of the environment of whoever was the first to fork
FORKS.set_forkserver_preload(
    ["lmworks.run.runner", "lmworks.train.pretrain", "lmworks.checkpoint.tensor_files", "torch._dynamo", "torch.distributed.fsdp", "pytest"]
)


def _serve(rank: int, jobs: Any, results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "64"
    gc.disable()  # it is collected after each job
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import _redistribute, debug

    torch.set_num_threads(1)
    do_not_wait_for_the_disk()
    frozen = False
    while (job := jobs.get()) is not None:
        if not frozen:
            gc.freeze()  # what is imported stays: 300,000 objects to look at in each collection below, a fifth of what tests of ranks cost
            frozen = True
        function, world, store, seconds, args, told = job
        os.environ["LMWORKS_MACHINE"] = told
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
            )
            results.put((rank, function(*args), None, _threads()))
        except BaseException:
            results.put((rank, None, traceback.format_exc(), _threads()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _redistribute.clear_redistribute_planner_cache()  # plans of one world name its groups, and meshes of the next are equal
            _redistribute._gen_transform_infos.cache_clear()
            debug._clear_sharding_prop_cache()  # nor the meshes that its operations gave their results
            gc.collect()  # a group's threads end with the last object that knows it, and models are cycles
            _forget_groups()


def _forget_groups() -> None:
    """Let the groups of meshes end that something still knows, as C++ knows the stages of a pipeline: each has 50 threads, and after four
    tests the ranks had to be started anew, which was a third of what tests of ranks cost."""
    from torch.distributed.device_mesh import DeviceMesh

    for mesh in gc.get_objects():
        if isinstance(mesh, DeviceMesh):
            getattr(mesh, "_pg_registry", {}).clear()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


_MOST_THREADS = 200  # of a rank: each group of an earlier world that something still knows has three, which wake a hundred times a second


class RankPool:
    """`run(function, world, *args)` calls `function(*args)` on ranks 0 .. world - 1 of a new gloo world and returns what each returned.

    `function` must be importable (a function of a test module) and results picklable: numpy arrays or plain values rather than tensors.
    What is said of the machine here (`LMWORKS_MACHINE`) is said there. An exception on a rank is raised here with the rank's traceback;
    after it, and after a time-out, the processes are started anew.
    """

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Any]] = []
        self._results: Any = self._context.Queue()
        self._folder = tempfile.TemporaryDirectory()
        self._number = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, seconds: float = PATIENCE) -> list[Any]:
        while len(self._workers) < world:
            jobs = self._context.Queue()
            context = FORKS if self._workers else self._context
            process = context.Process(target=_serve, args=(len(self._workers), jobs, self._results), daemon=True)
            process.start()
            self._workers.append((process, jobs))
        self._number += 1
        store = str(Path(self._folder.name) / f"store-{self._number}")
        for _, jobs in self._workers[:world]:
            jobs.put((function, world, store, seconds, args, os.environ.get("LMWORKS_MACHINE", "")))
        found: dict[int, Any] = {}
        failures: dict[int, str] = {}
        most = 0
        while len(found) + len(failures) < world:
            try:
                # a rank that fails leaves the others waiting in a collective until their time-out: do not wait for them
                rank, value, failure, threads = self._results.get(timeout=3 if failures else seconds + 60)
            except queue.Empty:
                break
            most = max(most, threads)
            if failure:
                failures[rank] = failure
            else:
                found[rank] = value
        if failures or len(found) < world:
            self.close()
            told = "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items()))
            raise AssertionError(told or f"ranks {sorted(set(range(world)) - set(found))} did not answer in {seconds} s")
        if most > _MOST_THREADS:
            self.close()
        return [found[rank] for rank in range(world)]

    def close(self) -> None:
        """End the processes; the next `run` starts others."""
        if self._workers:
            for process, _ in self._workers:
                process.kill()
            self._workers.clear()
            self._results = self._context.Queue()
