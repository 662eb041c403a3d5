"""`lmworks profile`: where the memory, the time and the data of a training step go, beside the plan."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli import completion
from lmworks.cli.options import JsonOption, SetOption, SizeOption, console, print_json


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(profile)


def profile(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE|RUN",
            autocompletion=completion.recipes,
            show_default=False,
            help="A recipe, with random weights; or a run directory, with its data and newest weights, which are only read.",
        ),
    ],
    overrides: SetOption,
    size: SizeOption = None,
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="S", help="pretrain, tune, dpo or grpo; by default the latest of a run, else the first."),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option("--phase", metavar="P", help="Phase of pretraining; by default that of the newest weights, else the first."),
    ] = None,
    warm_up: Annotated[int, typer.Option("--warm-up", metavar="N", min=0, max=1000, help="Steps before those that are timed.")] = 5,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=10_000, help="Steps that are timed.")] = 20,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Also write a trace of one step, for chrome://tracing or ui.perfetto.dev."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure where the memory, the time and the data of a training step go, beside the plan, and name the key of the largest item of each.
    Changes nothing in a run."""
    import os

    from lmworks.errors import UserError
    from lmworks.io.destinations import require_file
    from lmworks.profile.render import render, render_out_of_memory
    from lmworks.profile.report import from_plain
    from lmworks.profile.run import OutOfMemory
    from lmworks.profile.run import profile as measure
    from lmworks.profile.spawn import run_ranks
    from lmworks.profile.target import open_target
    from lmworks.recipe.schema.layout import world_size

    if trace is not None:
        if not trace.absolute().parent.is_dir():
            raise UserError(f"--trace {trace}: the folder does not exist; give a file in one that does")
        require_file(trace, "--trace")
    opened = open_target(target, overrides, size, stage, phase)
    ranks = world_size(opened.recipe.layout)
    if ranks > 1 and "RANK" not in os.environ:
        words = [word for word in sys.argv[1:] if word not in ("--json", "--debug")]
        found = from_plain(json.loads(run_ranks([*words, "--json"], ranks)))
    else:
        try:
            made = measure(opened, warm_up, steps, trace)
        except OutOfMemory as error:
            print_json(error.record) if as_json else console().print(render_out_of_memory(error.record))
            raise
        if made is None:
            return
        found = made
    if as_json:
        print_json(found.plain())
    else:
        console().print(render(found))
        if trace is not None:
            console().print(f"trace of one step: {trace}; open it in ui.perfetto.dev", soft_wrap=True)
