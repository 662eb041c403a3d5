"""The memory of a rank by kind, counted from what its model and its optimizer hold, without a profiler: also at the moment when memory has
run out.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmworks.host import machine
from lmworks.optim.groups import local

if TYPE_CHECKING:
    from lmworks.optim.optimizer import Updates
    from lmworks.parallel.parallel_model import ParallelModel
    from lmworks.train.trainer import Trainer

_STATUS = Path("/proc/self/status")
STATISTICS = {
    "allocated": "allocated_bytes.all.current", "peak_allocated": "allocated_bytes.all.peak", "reserved": "reserved_bytes.all.current",
    "peak_reserved": "reserved_bytes.all.peak", "split_but_free": "inactive_split_bytes.all.current", "alloc_retries": "num_alloc_retries",
    "out_of_memory_errors": "num_ooms",
}  # fmt: skip
"""What is kept of `torch.cuda.memory_stats`: our name, and the key there. All are bytes but the last two, which are counts."""


@dataclass
class Held:
    """What a stage of training holds, as far as it has come: its model, its optimizer, its trainer. `first_step` is the step that this
    process began with, and `before` its sizes (`process_bytes`) before the model was made."""

    model: ParallelModel | None = None
    optimizer: Updates | None = None
    trainer: Trainer | None = None
    first_step: int = 0
    before: dict[str, float] = field(default_factory=lambda: {name: process_bytes(name) for name in ("VmRSS", "VmSize")})


def kept_bytes(held: Held) -> dict[str, float]:
    """Bytes that this rank keeps between two micro-batches, by kind: weights (in fp32), gradients, and optimizer state, with the moving
    average, what elastic weight consolidation holds, and the reference of `grpo`. A storage that two kinds share is counted once."""
    seen: set[int] = set()
    model, optimizer, trainer = held.model, held.optimizer, held.trainer
    parameters = list(model.parameters()) if model is not None else []
    found = {"weights": storage_bytes(parameters, seen)}
    found["gradients"] = storage_bytes((p.grad for p in parameters if p.grad is not None), seen)
    found["optimizer state"] = storage_bytes(optimizer.state_dict().values(), seen) if optimizer is not None else 0.0
    penalty = trainer.penalty if trainer is not None else None
    found["optimizer state"] += storage_bytes(_tensors(vars(penalty).values()), seen) if penalty is not None else 0.0
    reference = getattr(trainer.objective, "reference", None) if trainer is not None else None
    found["optimizer state"] += storage_bytes(reference.average.values(), seen) if reference is not None else 0.0
    return found


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def storage_bytes(tensors: Iterable[Tensor], seen: set[int]) -> float:
    """Bytes of the storages that this rank holds of these tensors, without those that were `seen`."""
    size = 0
    for tensor in tensors:
        part = local(tensor)
        if part.device.type == "meta":
            continue
        if part.is_mkldnn:  # which has no storage
            size += 0 if id(part) in seen else part.numel() * part.element_size()
            seen.add(id(part))
            continue
        storage = part.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            size += storage.nbytes()
    return float(size)


def allocator_statistics(device: torch.device | None) -> dict[str, float]:
    """The figures of the caching allocator of a GPU by the names of `STATISTICS`; empty for a CPU, which has none."""
    if device is None or device.type != "cuda":
        return {}
    return read_statistics(torch.cuda.memory_stats(device))


def read_statistics(given: dict[str, Any]) -> dict[str, float]:
    """The same of a dictionary in the form of `torch.cuda.memory_stats`."""
    return {name: float(given[key]) for name, key in STATISTICS.items() if isinstance(given.get(key), int | float)}


@dataclass(frozen=True)
class InUse:
    """Bytes in use, those of them that were in use before the model was made, and the limit with what it limits."""

    bytes: float
    before: float
    limit: float
    limits: str


def memory_in_use(held: Held) -> InUse:
    """The memory of the GPU; or of this process its address space where `ulimit -v` limits it, else its resident memory and the memory of
    the machine or of its container."""
    device = None if held.model is None else held.model.device
    if device is not None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = float(total - free)
        return InUse(used, max(0.0, used - torch.cuda.memory_reserved(device)), float(total), torch.cuda.get_device_name(device))
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 < limit < machine.memory():
        return InUse(process_bytes("VmSize"), held.before["VmSize"], float(limit), "the address space that ulimit -v allows")
    return InUse(process_bytes("VmRSS"), held.before["VmRSS"], float(machine.memory()), "this machine")


def process_bytes(name: str) -> float:
    """A size of this process from /proc/self/status, such as VmRSS, VmHWM or VmSize, in bytes; resident memory where there is no /proc."""
    with suppress(OSError, StopIteration):
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return 1024.0 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])
    import psutil

    return float(psutil.Process(os.getpid()).memory_info().rss)
