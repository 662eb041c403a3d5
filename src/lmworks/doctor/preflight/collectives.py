"""Measures the network between ranks and compares it with the plan and the cluster file."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from lmworks.doctor.preflight.check_result import CheckContext, CheckResult
from lmworks.parallel.mesh import Ranks
from lmworks.plan.amounts import size
from lmworks.recipe.schema.layout import world_size

_LARGE = 4 << 20  # fp32 numbers
_SMALL_TIMES, _LARGE_TIMES = 20, 4
_SHARE_OF_NETWORK = 0.5  # of the stated bandwidth; less indicates a wrong route or a bad cable
_SHARE_OF_STEP = 0.5  # of a step for gradient communication; less can overlap with the backward pass


def measured(context: CheckContext) -> CheckResult:
    """Latency and bus bandwidth of an all-reduce along every axis with more than one rank; collective.

    Bus bandwidth is 2 (n - 1) / n times the bytes over the time: the traffic of each link in a ring, comparable with the link for any n.
    """
    ranks = context.ranks
    if ranks is None:
        wanted = world_size(context.layout)
        if wanted == 1:
            return CheckResult("skip", "there is only one rank")
        launch = f"lmworks launch local {context.name} --to preflight"
        return CheckResult("skip", f"this is one process, and the layout has {wanted:,} ranks", launch)
    figures: dict[str, float] = {}
    texts = []
    slowest = float("inf")
    for axis in ("tp", "cp", "pp", "fsdp", "dp_replicate", "ep"):
        if ranks.size(axis) == 1:
            continue
        latency, bandwidth = _measure(ranks, axis)
        figures |= {f"{axis}/latency_seconds": latency, f"{axis}/bytes_per_second": bandwidth}
        texts.append(f"{axis} of {ranks.size(axis)}: {1e6 * latency:,.0f} us, {size(bandwidth)}/s")
        if axis in ("fsdp", "dp_replicate"):
            slowest = min(slowest, bandwidth)
    if not texts:
        return CheckResult("skip", "there is only one rank")
    text = "; ".join(texts)
    link = context.machine.network_gbps / 8 * 1e9
    if link and slowest < _SHARE_OF_NETWORK * link:
        advice = "look for a wrong interface (NCCL_SOCKET_IFNAME, NCCL_IB_HCA), a slow node or a bad cable"
        return CheckResult("warn", f"{text}; the cluster states {size(link)}/s", advice, figures)
    if slowest < float("inf"):
        plan = context.plan
        travel = 2 * plan.counts.total / ranks.size("tp") / ranks.size("pp") * 4 / slowest  # fp32: gradients reduced, weights gathered
        step = plan.seconds / plan.steps
        figures |= {"gradient_seconds": travel, "step_seconds": step}
        text += f"; gradient communication takes {travel:.2g} s of a step of {step:.2g} s"
        if travel > _SHARE_OF_STEP * step:
            return CheckResult("warn", text, "use a larger batch, layout.dp_replicate across slow links, or a faster network", figures)
    return CheckResult("ok", text, figures=figures)


def _measure(ranks: Ranks, axis: str) -> tuple[float, float]:
    """Seconds of a minimal all-reduce, and bytes per second and link of a large one; those of the slowest rank, on all ranks."""
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


def _finish(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
