"""This machine as a cluster: its devices, and their measured matrix-multiply peak."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmworks import machine
from lmworks.metrics.system import measure_peak
from lmworks.precision import has_bf16
from lmworks.recipe.schema.cluster import Cluster
from lmworks.recipe.schema.layout import world_size
from lmworks.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    import torch


def this_machine(threads: int | None = None) -> Cluster:
    """A cluster of this machine's accelerators, or of its CPU. The peak is measured in about a second, not looked up."""
    import torch

    if torch.cuda.is_available():
        name, count = torch.cuda.get_device_name(), torch.cuda.device_count()
        return _cluster(name, count, torch.cuda.get_device_properties(0).total_memory, torch.device("cuda"))
    before = torch.get_num_threads()
    if threads:
        torch.set_num_threads(min(threads, machine.cores()))  # a recipe for a larger machine may be planned here
    try:
        return _cluster(f"{torch.get_num_threads()} CPU threads", 1, machine.memory(), torch.device("cpu"))
    finally:
        torch.set_num_threads(before)


def machine_for(recipe: Recipe) -> Cluster:
    """This machine with one device for each rank of the recipe's layout: ranks on CPUs share its cores and memory."""
    found, ranks = this_machine(recipe.threads), world_size(recipe.layout)
    if not found.on_cpu or ranks == 1:
        return found
    return found.model_copy(update={"devices_per_node": ranks, "memory_gib": found.memory_gib / ranks, "tflops": found.tflops / ranks})


def _cluster(name: str, count: int, memory: int, device: torch.device) -> Cluster:
    return Cluster(
        name="this machine",
        devices_per_node=count,
        device=name,
        tflops=round(measure_peak() / 1e12, 3),
        bf16=has_bf16(device),
        memory_gib=round(memory / 2**30, 1),
        mfu=0.25 if device.type == "cpu" else 0.4,
        mfu_source="assumed share of the peak"
        + ("; small batches and other programs can make it several times less" if device.type == "cpu" else "")
        + "; --calibrate measures it",
    )
