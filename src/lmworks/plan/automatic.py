"""`layout: auto`: one layout for all phases of a run, chosen by the plan before any rank starts and kept from then on.

Without a cluster file, this machine is the cluster: its devices, and their measured matrix-multiply peak.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.host.devices import find_gpu, has_bf16
from lmworks.metrics.system import measure_peak
from lmworks.plan.layout import (
    Shares,
    automatic,
    describe,
    devices,
    explain_shortage,
    place,
    suggest_fit,
    undividable,
)
from lmworks.plan.memory import GIB
from lmworks.plan.stages import stages_as_phases
from lmworks.recipe.load import load_resolved
from lmworks.recipe.schema.layout import Cluster, Layout, world_size
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
    found = this_machine(recipe.threads)
    return _with_ranks(found, world_size(recipe.layout)) if found.on_cpu else found


def _with_ranks(host: Cluster, ranks: int) -> Cluster:
    """A measured machine with so many ranks: each on a GPU of its own, or all on the cores and in the memory of its CPU."""
    parts = ranks if host.on_cpu else 1
    return host.model_copy(update={"devices_per_node": ranks, "memory_gib": host.memory_gib / parts, "tflops": host.tflops / parts})


def _cluster(name: str, count: int, memory: int, device: torch.device) -> Cluster:
    gpu = find_gpu(name) if device.type == "cuda" else None
    return Cluster(
        name="this machine",
        watts_per_device=gpu.watts if gpu is not None else 0.0,
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


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, the micro-batch that fits with it, and why it is this one."""

    layout: Layout
    micro_batch_size: int
    why: str

    def overrides(self) -> list[str]:
        """The overrides that give a recipe this layout."""
        return [*self.layout.overrides(), f"train.micro_batch_sequences={self.micro_batch_size}"]


def choose_layout(recipe: Recipe, cluster: Cluster) -> LayoutChoice:
    """Choose the layout, a function of recipe and devices alone. Raises `UserError` if no layout fits all phases."""
    recipe = stages_as_phases(recipe)
    if not recipe.train.phases:
        raise UserError("layout: auto: the recipe trains nothing; leave layout out")
    phase, *others = sorted(recipe.train.phases, key=lambda phase: -phase.sequence_length)
    chosen, leanest = automatic(recipe, cluster, phase, recipe.layout.zero, others)
    if chosen is None:
        if leanest is None and (fault := undividable(recipe, cluster, phase)):
            raise UserError(f"layout: auto: {fault}")
        undivided = f"no layout divides the steps of all phases over {devices(cluster):,} devices"
        reason = explain_shortage(leanest, cluster) if leanest else undivided
        raise UserError(f"layout: auto: {reason}; {suggest_fit(recipe, cluster, phase, recipe.layout.zero, others)}")
    needs = max(place(recipe, cluster, chosen.layout, one).memory.total for one in recipe.train.phases)
    why = (
        f"{describe(chosen.layout)}: the smallest pipeline, context, tensor and expert parallelism with which every phase fits "
        f"{devices(cluster):,} x {cluster.device} ({needs / GIB:.1f} of {cluster.memory_gib:g} GiB)"
    )
    return LayoutChoice(chosen.layout, chosen.micro_batch_size, why)


def layout_of_run(run_dir: Path) -> LayoutChoice | None:
    """The layout of a run that has begun; all its axes except the data axis are kept when it resumes on another number of ranks."""
    path = run_dir / "resolved.json"
    try:
        if not path.exists() or not listing.has_checkpoints(run_dir / "checkpoints"):
            return None
    except OSError:  # no folder can have this name, or nobody may look into it; the run says so
        return None
    recipe = load_resolved(path)
    assert recipe.train.micro_batch_sequences
    return LayoutChoice(recipe.layout, recipe.train.micro_batch_sequences, f"{describe(recipe.layout)}: as the run began")


def ranks_here(recipe: Recipe) -> tuple[int, str]:
    """The fewest ranks that train fastest on this machine, and of how many devices: its GPUs, or else the cores of its CPU, which share
    data only: what tensor, pipeline and context parallelism exchange takes longer than a core saves. Eight sequences take two rounds on
    seven ranks, and on four."""
    found, phases = this_machine(recipe.threads), stages_as_phases(recipe).train.phases
    most, device = (machine.cores(), "CPU cores") if found.on_cpu else (found.devices_per_node, f"GPUs ({found.device})")
    best, least = 1, math.inf
    for ranks in range(most, 1, -1):
        with suppress(UserError):
            layout = choose_layout(recipe, _with_ranks(found, ranks)).layout
            if found.on_cpu and layout.tp * layout.pp * layout.cp > 1:
                continue
            shares = [Shares.of(phase, layout) for phase in phases]
            rounds = [int(phase.tokens) / one.sequences * one.largest for phase, one in zip(phases, shares, strict=True)]
            took = sum(rounds) * shares[0].ranks / ranks
            if took <= least:
                best, least = ranks, took
            if not any(one.idle for one in shares):
                break  # fewer take longer
    return best, f"{best} of {most} {device}"


def devices_of(cluster: Cluster | None, ranks: int, per_host: int, threads: int | None) -> Cluster:
    """The devices of `ranks` ranks, `per_host` on each host: like those of the cluster, or of this machine if none is given."""
    found = cluster or _with_ranks(this_machine(threads), per_host)
    return found.model_copy(update={"nodes": -(-ranks // per_host), "devices_per_node": per_host})
