"""Arguments and results of preflight checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lmworks.errors import UserError
from lmworks.recipe.schema.layout import Cluster, Layout, world_size
from lmworks.recipe.schema.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmworks.launch.torchrun import Host
    from lmworks.parallel.mesh import Ranks
    from lmworks.plan.plan import Plan
    from lmworks.shards.batches import Batches


Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class CheckResult:
    """Result of a check. `text` is one line, `advice` the remedy; `figures` are the measurements, by name with unit."""

    result: Status
    text: str
    advice: str = ""
    figures: dict[str, float] = field(default_factory=dict)


class MissingInput(Exception):
    """Raised by a check whose input does not exist yet; `advice` says what creates it."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.advice = advice


@dataclass(frozen=True)
class CheckContext:
    """Arguments of a check: the recipe with its mesh layout, the cluster if one was given, the recipe's name on the command line, and the
    ranks if this process is one of several."""

    recipe: Recipe
    fingerprint: str = ""
    cluster: Cluster | None = None
    name: str = "RECIPE"
    ranks: Ranks | None = None
    hosts: Sequence[Host] = ()  # of the rehearsal in which one is lost
    memory: dict[str, Any] = field(default_factory=dict)  # measurements shared by several checks

    @property
    def run_dir(self) -> Path:
        assert self.recipe.run_dir
        return Path(self.recipe.run_dir)

    @cached_property
    def machine(self) -> Cluster:
        """The given cluster, or this machine; on CPUs with one device per rank of the layout."""
        if self.cluster is not None:
            return self.cluster
        from lmworks.plan.automatic import machine_for

        return machine_for(self.recipe)

    @cached_property
    def plan(self) -> Plan:
        """Raises `UserError` if the layout is invalid or does not fit into memory."""
        from lmworks.plan.plan import make_plan

        return make_plan(self.recipe, self.fingerprint, self.machine)

    @cached_property
    def layout(self) -> Layout:
        """The layout of the running ranks, else that of the recipe, else the plan's choice for the cluster."""
        if self.ranks is not None:
            return self.ranks.layout
        if world_size(self.recipe.layout) > 1 or self.cluster is None:
            return self.recipe.layout
        try:
            return self.plan.phases[0].placed.layout
        except UserError:  # reported by another check
            return self.recipe.layout

    @property
    def shards_dir(self) -> Path:
        return self.run_dir / "shards"

    def need_shards(self) -> None:
        """Raise `MissingInput` unless there are token files."""
        if not (self.shards_dir / "manifest.json").exists():
            raise MissingInput("there are no token files yet", f"lmworks shards build {self.name}, then this again")

    @cached_property
    def batches(self) -> Batches:
        """All batches of the run; `MissingInput` before there are token files."""
        from lmworks.shards.batches import Batches

        self.need_shards()
        return Batches(self.recipe, self.shards_dir)
