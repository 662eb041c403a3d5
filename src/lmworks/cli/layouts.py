"""`layout: auto` at the commands that start a run: chosen when the number of ranks is known, printed with its reason, passed on."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmworks import machine
from lmworks.terminal import plain

if TYPE_CHECKING:
    from lmworks.recipe.loading.load import Resolved
    from lmworks.recipe.schema.cluster import Cluster


def settled(
    name: str, overrides: Sequence[str], size: str | None, cluster: Cluster | None, ranks: int, per_host: int
) -> tuple[Resolved, list[str]]:
    """The recipe with its layout, and the overrides that give it to whoever loads the same recipe; none if it was not left open."""
    from lmworks.recipe.loading.load import load_recipe

    resolved = load_recipe(name, overrides, size)
    if not resolved.recipe.layout.auto:
        return resolved, []
    from lmworks.plan.automatic import choose_layout, devices_of, layout_of_run

    recipe = resolved.recipe
    assert recipe.run_dir
    found = layout_of_run(Path(recipe.run_dir)) or choose_layout(recipe, devices_of(cluster, ranks, per_host, recipe.threads))
    if os.environ.get("RANK", "0") == "0":
        print(plain(f"layout: {found.why}"), file=sys.stderr)  # scripts go to standard output
    return load_recipe(name, [*overrides, *found.overrides()], size), found.overrides()


def settled_here(name: str, overrides: Sequence[str], size: str | None) -> Resolved:
    """The recipe for this process: one of the ranks that were started, or alone."""
    return settled(name, overrides, size, None, int(os.environ.get("WORLD_SIZE", "1")), machine.ranks_here()[1])[0]
