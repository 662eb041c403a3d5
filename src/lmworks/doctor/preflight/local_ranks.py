"""Starts local processes as ranks for the duration of one check."""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lmworks import machine

_TIMEOUT = 180  # seconds


class Lost(RuntimeError):
    """A rank failed or did not respond."""


def run(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """Run `function(*args)` on each rank of a new gloo process group (a single rank has none); returns the results of all ranks.

    `function` must be importable, and its result must consist of arrays and plain values. Raises `Lost` with the last message of a rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, processes = start(function, ranks, Path(folder) / "store", *args)
        found: dict[int, Any] = {}
        deadline = time.monotonic() + _TIMEOUT
        try:
            while len(found) < ranks:
                try:
                    rank, value, failure = answers.get(timeout=1)
                except queue.Empty:
                    _require_alive(found, processes, deadline)
                    continue
                if failure:
                    raise Lost(f"rank {rank}: {failure.strip().splitlines()[-1]}")
                found[rank] = value
        finally:
            end(processes)
    return [found[rank] for rank in range(ranks)]


def _require_alive(found: dict[int, Any], processes: list[BaseProcess], deadline: float) -> None:
    """Raise `Lost` for a rank that has exited or has not responded in time."""
    waited = [rank for rank in range(len(processes)) if rank not in found]
    for rank in waited:
        if processes[rank].exitcode:
            raise Lost(f"rank {rank} ended with code {processes[rank].exitcode}")
    if time.monotonic() > deadline:
        raise Lost(f"ranks {waited} did not answer in {_TIMEOUT} s")


def start(function: Callable[..., Any], ranks: int, store: Path, *args: Any) -> tuple[Any, list[BaseProcess]]:
    """Start the ranks; returns the queue of their answers (rank, value, failure) and the processes.

    They are forks of one process that has imported what they need and holds nothing else: importing torch takes seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([function.__module__, "torch._dynamo"])  # has an effect before the first start only
    answers = context.Queue()
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        process = context.Process(target=_rank, args=(function, rank, ranks, str(store), answers, args), daemon=True)
        process.start()
        processes.append(process)
    return answers, processes


def end(processes: list[BaseProcess]) -> None:
    """Kill the remaining processes."""
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _rank(function: Callable[..., Any], rank: int, ranks: int, store: str, answers: Any, args: tuple[Any, ...]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # remarks of libraries; what goes wrong is answered
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what the run itself uses stays free
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", machine.RANKS_HERE):  # of the launch around us
        os.environ.pop(name, None)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if ranks > 1:
            patience = timedelta(seconds=_TIMEOUT)
            dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=patience)
        answers.put((rank, function(*args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
