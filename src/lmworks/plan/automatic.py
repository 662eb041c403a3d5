"""`layout: auto`: one layout for all phases of a run, chosen by the plan before any rank starts and kept from then on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmworks.checkpoint import listing
from lmworks.errors import UserError
from lmworks.plan.layout import automatic, describe, devices, explain_shortage, place, suggest_fit, undividable
from lmworks.plan.machine import this_machine
from lmworks.plan.memory import GIB
from lmworks.plan.stage_phases import stages_as_phases
from lmworks.recipe.loading.load import load_resolved
from lmworks.recipe.schema.cluster import Cluster
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.recipe import Recipe


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, the micro-batch that fits with it, and why it is this one."""

    layout: Layout
    micro_batch_size: int
    why: str

    def overrides(self) -> list[str]:
        """The overrides that give a recipe this layout."""
        return [*self.layout.overrides(), f"train.micro_batch_size={self.micro_batch_size}"]


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
    if not path.exists() or not listing.begun(run_dir / "checkpoints"):
        return None
    recipe = load_resolved(path)
    assert recipe.train.micro_batch_size
    return LayoutChoice(recipe.layout, recipe.train.micro_batch_size, f"{describe(recipe.layout)}: as the run began")


def devices_of(cluster: Cluster | None, ranks: int, per_host: int, threads: int | None) -> Cluster:
    """The devices of `ranks` ranks, `per_host` on each host: like those of the cluster, or of this machine if none is given.

    Ranks on CPUs share the memory of their host.
    """
    found = cluster or this_machine(threads)
    memory = found.memory_gib / per_host if cluster is None and found.on_cpu else found.memory_gib
    return found.model_copy(update={"nodes": -(-ranks // per_host), "devices_per_node": per_host, "memory_gib": memory})
