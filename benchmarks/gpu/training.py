"""Steps of training at the width of 7B and 8B models: time, memory beside the plan's, and what takes the time."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
import torch._dynamo
from gpu.models import TINY, WIDTH_7B, WIDTH_8B, batch_of, build, fresh_memory, recipe_of, seconds, step, the_device, wait
from gpu.runner import Row
from torch import Tensor

from lmworks.host import machine
from lmworks.metrics.system import measure_peak, memory_bytes
from lmworks.model import documents
from lmworks.optim.muon import orthogonalize
from lmworks.optim.optimizer import Optimizer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.plan.counts import flops_per_token
from lmworks.plan.layout import MARGIN
from lmworks.plan.memory import memory
from lmworks.recipe.load import load_cluster
from lmworks.recipe.schema.layout import CHECKPOINTING_POLICIES, Cluster, Layout
from lmworks.recipe.schema.recipe import Recipe
from lmworks.shards.batch import Batch

GIB = 2**30
_CLUSTER = "1xh100"  # by whose precision the plan counts; the memory is that of the device


def eight_layers_of_8b(toy: bool) -> Iterator[Row]:
    """Training at the width of an 8B model by what is recomputed: tokens/s, MFU by our count, memory beside the plan's, kernels by kind."""
    length, micro, rows = (64, 1, 2) if toy else (4096, 2, 4)
    for policy in CHECKPOINTING_POLICIES:
        recipe = recipe_of(TINY if toy else WIDTH_8B, length, rows, f"train.activation_checkpointing={policy}")
        try:
            yield from ({"recomputed": policy} | row for row in _training(recipe, length, micro, rows, random_fill=True))
        except torch.OutOfMemoryError as refusal:
            yield {"recomputed": policy, "out_of_memory": str(refusal)[:200]}


def layers_of_7b(toy: bool) -> Iterator[Row]:
    """As many layers of a 7B model as fit by the plan, with initial weights as a run draws them; fewer if more do not fit."""
    length, micro, rows = (64, 1, 2) if toy else (4096, 2, 4)
    model, whole = (TINY, 2) if toy else (WIDTH_7B, 32)

    def recipe(layers: int) -> Recipe:
        return recipe_of(model, length, rows, f"model.num_hidden_layers={layers}", "train.activation_checkpointing=full")

    cluster = with_memory(load_cluster(_CLUSTER), the_device())
    fit = layers_that_fit(whole, cluster, lambda layers: memory(recipe(layers), cluster, Layout(), length, micro, rows // micro).total)
    yield {"layers": whole, "fit": fit, "device_gib": cluster.memory_gib}
    for layers in sorted({fit, fit * 3 // 4, fit // 2} - {0}, reverse=True):
        try:
            yield from ({"layers": layers} | row for row in _training(recipe(layers), length, micro, rows))
            return
        except torch.OutOfMemoryError as refusal:
            yield {"layers": layers, "out_of_memory": str(refusal)[:200]}
    raise AssertionError("no number of layers fits")


def with_memory(cluster: Cluster, device: torch.device) -> Cluster:
    """The cluster with devices that have the memory of this one."""
    size = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine.memory()
    return cluster.model_copy(update={"memory_gib": size / GIB})


def layers_that_fit(whole: int, cluster: Cluster, need: Callable[[int], float]) -> int:
    """The largest number of layers, at most all of them, of which the plan says that they fit. `need`: their bytes."""
    return bisect_right(range(1, whole + 1), (1 - MARGIN) * cluster.memory_gib * GIB, key=need)


def _training(recipe: Recipe, length: int, micro: int, rows: int, random_fill: bool = False) -> Iterator[Row]:
    device, peak = the_device(), measure_peak()
    torch._dynamo.reset()
    fresh_memory(device)
    began = time.perf_counter()
    model, optimizer = build(recipe, device, random_fill)
    wait(device)
    yield {"parameters": sum(one.numel() for one in model.parameters()), "build_seconds": time.perf_counter() - began}
    row, one_step = timed_steps(model, optimizer, batch_of(recipe, rows, length, documents=2), micro)
    row["mfu"] = row["tokens_per_second"] * flops_per_token(recipe.model, length).total / peak
    planned = memory(recipe, with_memory(load_cluster(_CLUSTER), device), Layout(), length, micro, rows // micro).total
    yield row | {"peak_tflops": peak / 1e12, "micro_batch_size": micro, "planned_gib": planned / GIB}
    yield {"kernels": kernels(one_step, device)}
    optimizer.zero_grad()
    took = _orthogonalization(optimizer, device)
    yield {"orthogonalization_seconds": took, "share_of_step": took / row["step_seconds"]}


def timed_steps(model: ParallelModel, optimizer: Optimizer, batch: Batch, micro: int, ranks: int = 1) -> tuple[Row, Callable[[], float]]:
    """Three steps to warm up and the median of five; and a function that takes one more. `ranks`: as in `step`."""

    def one_step() -> float:
        begin = time.perf_counter()
        step(model, optimizer, batch, micro, ranks=ranks)
        wait(model.device)
        return time.perf_counter() - begin

    warm = sum(one_step() for _ in range(3))
    took = statistics.median(one_step() for _ in range(5))
    return {"warm_seconds": warm, "step_seconds": took, "tokens_per_second": batch.tokens.size / took,
            "memory_gib": memory_bytes() / GIB}, one_step  # fmt: skip


def _orthogonalization(optimizer: Optimizer, device: torch.device) -> float:
    """Seconds of Newton-Schulz in a step, stack by stack as Muon has them."""
    muon = optimizer.muon
    shapes = Counter(shape for bucket in [*muon._shared, *muon._alone] for shape in bucket.stacks)
    total = 0.0
    for shape, count in shapes.items():
        stack = torch.randn(shape, device=device).to(muon.dtype)
        total += count * seconds(lambda stack=stack: orthogonalize(stack, muon.steps), device, rounds=5)  # type: ignore[misc]
    return total


def documents_per_row(toy: bool) -> Iterator[Row]:
    """A step by the number of documents in a row, beside rows for which no boundaries are given, and so no mask."""
    device = the_device()
    length, micro, rows = (64, 1, 2) if toy else (8192, 1, 2)
    recipe = recipe_of(TINY if toy else [*WIDTH_8B, "model.num_hidden_layers=4"], length, rows)
    model, optimizer = build(recipe, device, random_fill=True)
    without = 0.0
    for count in (None, 1, 4, 16, 64):
        batch = batch_of(recipe, rows, length, documents=min(count or 1, length // 2))
        with patch.object(documents, "from_cu_seqlens", documents.from_cu_seqlens if count else _unbounded):
            row, _ = timed_steps(model, optimizer, batch, micro)
        without = without or row["step_seconds"]
        yield {"documents": count, "beside_no_mask": row["step_seconds"] / without} | row


_from_cu_seqlens = documents.from_cu_seqlens


def _unbounded(shape: tuple[int, int], _: Tensor | None, window: int | None, device: torch.device) -> documents.Documents:
    return _from_cu_seqlens(shape, None, window, device)


_KINDS = (("attention", ("flash", "fmha", "flex", "attention", "sdpa")), ("product", ("gemm", "mm", "matmul", "cutlass", "nvjet", "wgmma")),
          ("copy", ("memcpy", "memset", "copy", "clone")), ("collective", ("nccl",)), ("fused", ("triton",)))  # fmt: skip


def kernels(work: Callable[[], object], device: torch.device) -> Row:
    """The device's time in one call, by kind of kernel and for the twelve that take most, in milliseconds."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as found:
        work()
        wait(device)
    kinds: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = {}
    launched = 0
    for one in found.key_averages():
        spent = (one.self_device_time_total if cuda else one.self_cpu_time_total) / 1e3
        if cuda and one.device_type != torch.autograd.DeviceType.CUDA:
            continue
        launched += one.count
        by_name[one.key[:90]] = spent
        kinds[next((kind for kind, parts in _KINDS if any(part in one.key.lower() for part in parts)), "other")] += spent
    most = sorted(by_name.items(), key=lambda pair: -pair[1])[:12]
    return {"launched": launched, "milliseconds": dict(kinds), "most": dict(most)}
