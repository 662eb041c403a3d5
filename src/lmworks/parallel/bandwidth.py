"""Latency and bandwidth between ranks, measured over the process groups of training: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from lmworks.parallel.mesh import Ranks

_LARGE = 4 << 20  # fp32 numbers: 16 MiB, about what one all-gather of FSDP moves
_SMALL_TIMES, _LARGE_TIMES = 20, 4
_PAIR_TIMES = 2  # large messages of a pair in each direction: many pairs are measured


def all_reduce_speed(ranks: Ranks, axis: str) -> tuple[float, float]:
    """Seconds of a minimal all-reduce along an axis, and bytes per second and link of a large one; those of the slowest rank, on all ranks.

    The bytes per second are the bus bandwidth, 2 (n - 1) / n times the bytes over the time: the traffic of each link in a ring, comparable
    with the link for any n.
    """
    device = torch.device(ranks.mesh(axis).device_type)
    n = ranks.size(axis)

    def seconds(count: int, times: int) -> float:
        tensor = torch.ones(count, device=device)
        dist.all_reduce(tensor, group=ranks.group(axis))
        _finish(tensor)
        began = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(tensor, group=ranks.group(axis))
        _finish(tensor)
        slowest = torch.tensor((time.perf_counter() - began) / times, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    latency, large = seconds(1, _SMALL_TIMES), seconds(_LARGE, _LARGE_TIMES)
    return latency, 2 * (n - 1) / n * 4 * _LARGE / large


def pair_speed(peer: int, first: bool, device: torch.device) -> tuple[float, float]:
    """Seconds that a minimal message takes to another rank, and bytes per second of large acknowledged ones in the slower
    direction.

    Called on both ranks of the pair, with `first` on one of them; both return the same.
    """
    small, large = torch.zeros(1, device=device), torch.zeros(_LARGE, device=device)

    def there_and_back() -> None:
        _exchange(small, small, peer, first)

    def one_way(sends: bool) -> Callable[[], None]:
        return lambda: _exchange(large if sends == first else small, small if sends == first else large, peer, first)

    def seconds(work: Callable[[], None], times: int) -> float:
        work()  # connects, and allocates buffers
        _finish(small)
        began = time.perf_counter()
        for _ in range(times):
            work()
        _finish(small)
        return (time.perf_counter() - began) / times

    latency = seconds(there_and_back, _SMALL_TIMES) / 2
    slower = max(seconds(one_way(sends), _PAIR_TIMES) for sends in (True, False))
    found = torch.tensor([latency, slower], dtype=torch.float64)
    if first:  # the clock of one of the two decides
        dist.send(found, peer)
    else:
        dist.recv(found, peer)
    return float(found[0]), 4 * _LARGE / float(found[1])


def clock_offset(peer: int, first: bool) -> tuple[float, float]:
    """Seconds by which the clock of `peer` is ahead of this rank's, and the error of that, at most half of the shortest round trip.

    Each clock is read once in a round trip, whose length is measured on a clock that nobody sets. Called on both ranks, with `first` on the
    one that asks; the other one returns zeros.
    """
    stamp, best = torch.zeros(1, dtype=torch.float64), (0.0, float("inf"))
    for _ in range(_SMALL_TIMES):
        if not first:
            dist.recv(stamp, peer)
            stamp[0] = time.time()
            dist.send(stamp, peer)
            continue
        sent = time.perf_counter()
        dist.send(stamp, peer)
        dist.recv(stamp, peer)
        received = time.time()
        half = (time.perf_counter() - sent) / 2  # the peer read its clock at some time of the round trip, which ends here
        best = min(best, (float(stamp[0]) - received + half, half), key=lambda one: one[1])
    return best if first else (0.0, 0.0)


def _exchange(sent: torch.Tensor, received: torch.Tensor, peer: int, first: bool) -> None:
    if first:
        dist.send(sent, peer)
        dist.recv(received, peer)
    else:
        dist.recv(received, peer)
        dist.send(sent, peer)


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
