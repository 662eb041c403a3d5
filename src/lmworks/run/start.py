"""Starts a run: chooses the mesh layout of `layout: auto`, runs the stages, and prints what happens.

`lmworks run`, the commands of the stages and `Recipe.run` in Python start here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.run_layout import MODEL_STAGES
from lmworks.recipe.keys import nearest_or_all
from lmworks.ui.terminal import Terminal, plain

if TYPE_CHECKING:
    from lmworks.recipe.load import Resolved
    from lmworks.recipe.schema.layout import Cluster
    from lmworks.recipe.schema.recipe import Recipe
    from lmworks.run.runner import StageEvent

HEADINGS = {
    "corpus": "Corpus: raw text to clean documents",
    "tokenizer": "Tokenizer: byte-pair merges and special tokens",
    "shards": "Shards: documents to token files",
    **{stage.stage: stage.title for stage in MODEL_STAGES},
    "evaluate": "Evaluation",
    "export": "Export",
}
"""The stages of a run in their order, with their headings."""


def require_stage(name: str | None, what: str) -> None:
    """Raise `UserError` if there is no stage of this name; `what` is the option that gave it."""
    if name is not None and name not in HEADINGS:
        raise UserError(f"{what} {name[:100]!r} is not a stage; {nearest_or_all(name, list(HEADINGS))}")


def choose_mesh(resolved: Resolved, cluster: Cluster | None, ranks: int, per_host: int) -> tuple[Resolved, list[str]]:
    """The recipe with its mesh layout, and the overrides that give it to whoever loads the same recipe; none if it was not left open. The
    choice is printed on stderr with its reason."""
    recipe = resolved.recipe
    if not recipe.layout.auto:
        return resolved, []
    from lmworks.plan.automatic import choose_layout, devices_of, layout_of_run

    assert recipe.run_dir
    found = layout_of_run(Path(recipe.run_dir)) or choose_layout(recipe, devices_of(cluster, ranks, per_host, recipe.threads))
    if os.environ.get("RANK", "0") == "0":
        print(plain(f"layout: {found.why}"), file=sys.stderr)  # scripts go to standard output
    return resolved.overridden(found.overrides()), found.overrides()


def choose_mesh_here(resolved: Resolved) -> Resolved:
    """The recipe with its mesh layout for this process: one of the ranks that were started, or alone."""
    return choose_mesh(resolved, None, int(os.environ.get("WORLD_SIZE", "1")), machine.ranks_here()[1])[0]


def ranks_of_run(recipe: Recipe) -> int:
    """The number of ranks that a run has begun with on a machine like this one; 1 where the recipe has a layout of its own, or there are
    too few devices here."""
    from lmworks.plan.automatic import layout_of_run
    from lmworks.recipe.schema.layout import Layout, world_size

    assert recipe.run_dir
    found = layout_of_run(Path(recipe.run_dir)) if recipe.layout == Layout() else None
    if found is None or (ranks := world_size(found.layout)) == 1:
        return 1
    import torch

    return ranks if ranks <= (torch.cuda.device_count() or machine.cores()) else 1


def start_run(resolved: Resolved, out: Terminal, *, last: str | None, allow: Sequence[str], resume_command: str) -> Path:
    """Run the stages of a recipe up to and including `last`, and print what happens to `out`; returns the run directory. See
    `lmworks.run.runner.run_stages`."""
    from lmworks.run.prediction import summary
    from lmworks.run.runner import run_stages

    if last != "corpus":
        resolved = choose_mesh_here(resolved)
    run_dir = run_stages(resolved, last=last, allow=allow, on_event=_printing(out, last), resume_command=resume_command)
    if last is None:
        out.print(summary(run_dir))
    return run_dir


def _printing(out: Terminal, last: str | None) -> Callable[[StageEvent], None]:
    def on_event(event: StageEvent) -> None:
        if event.kind == "skip":
            out.print(f"{HEADINGS[event.stage]}: done before", style="dim")
        elif event.kind == "note":
            out.print(event.printable)
        elif event.kind == "begin":
            out.print(f"\n{HEADINGS[event.stage]}", style="bold")
            if event.printable is not None:
                out.print(event.printable, soft_wrap=True)
        else:
            if event.printable is not None and (last is not None or event.stage != "evaluate"):  # the summary shows the scores
                out.print(event.printable)
            out.print(f"{event.stage} took {event.seconds:.0f} s", style="dim")

    return on_event
