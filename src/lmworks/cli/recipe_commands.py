"""`lmworks show` and `lmworks plan`: resolve a recipe, and predict its memory, time and cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption, TimeOption, within
from lmworks.cli.output import console, print_json

if TYPE_CHECKING:
    from lmworks.recipe.loading.load import Resolved


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""

    @app.command()
    def show(
        recipe: RecipeArgument,
        overrides: SetOption,
        size: SizeOption = None,
        time: TimeOption = None,
        changed: Annotated[bool, typer.Option("--changed", help="Omit values that are defaults.")] = False,
        as_json: JsonOption = False,
    ) -> None:
        """Print every value of a recipe and its origin. For a started run with a time budget, the resulting token budgets are shown."""
        from lmworks.recipe.loading import show as showing

        resolved, note = _as_it_runs(recipe, within(time, overrides), size)
        if as_json:
            print_json(showing.as_json(resolved))
        else:
            console().print(showing.tree(resolved, changed))
            console().print(showing.phases(resolved))
            _warn(resolved, note)

    @app.command()
    def plan(
        recipe: RecipeArgument,
        overrides: SetOption,
        cluster: Annotated[
            str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name; by default this machine.")
        ] = None,
        size: SizeOption = None,
        time: TimeOption = None,
        calibrated: Annotated[bool, typer.Option("--calibrate", help="Measure the MFU on this machine, in half a minute.")] = False,
        mfu: Annotated[float | None, typer.Option("--mfu", min=0.001, max=1.0, help="MFU to assume, from a measurement of yours.")] = None,
        as_json: JsonOption = False,
    ) -> None:
        """Predict parameters, FLOPs, memory, mesh layout, time, cost and disk space of a run."""
        from lmworks.plan.machine import this_machine
        from lmworks.plan.plan import make_plan, plain
        from lmworks.plan.render import amount, render
        from lmworks.plan.text_shortage import text_shortage
        from lmworks.recipe.loading.load import load_cluster

        resolved, note = _as_it_runs(recipe, within(time, overrides), size)
        where = load_cluster(cluster, resolved.path.parent) if cluster else this_machine(resolved.recipe.threads)
        source = "as given by --mfu"
        if calibrated:
            from lmworks.plan.flops import flops_per_token
            from lmworks.train.calibrate import calibrate

            model = resolved.recipe.model
            mfu, source = calibrate(resolved.recipe, lambda length: flops_per_token(model, length).total)
        made = make_plan(resolved.recipe, resolved.fingerprint, where, measured_mfu=mfu, measured_source=source)
        if as_json:
            print_json(plain(made))
        else:
            console().print(render(made))
            if note and calibrated and resolved.recipe.time is not None:
                most = made.tokens_per_second * resolved.recipe.time
                note += f"; at the speed measured here it is {amount(most)} tokens at most, before the data, evaluation and export"
            short = text_shortage(resolved.recipe, Path(resolved.recipe.run_dir or ""))
            _warn(resolved, note, short)


def _warn(resolved: Resolved, *lines: str | None) -> None:
    """Print these lines, and what is wrong with the sources as far as it is known here."""
    from lmworks.corpus.source_checks import faults

    for line in (*lines, *faults(resolved.recipe)):
        if line:
            console().print(line, style="yellow")


def _as_it_runs(recipe: str, overrides: Sequence[str], size: str | None) -> tuple[Resolved, str]:
    """The recipe, with the numbers that its run was given for its time; and what is to be said where there are none yet."""
    from lmworks.plan.plan import days
    from lmworks.recipe.loading.load import load_recipe
    from lmworks.run.time_budget import recorded_budget

    resolved = load_recipe(recipe, overrides, size)
    assert resolved.recipe.run_dir
    settled = recorded_budget(resolved, Path(resolved.recipe.run_dir))
    if settled is not None:
        return settled, ""
    assert resolved.recipe.time is not None
    return resolved, (
        f"time is {days(resolved.recipe.time)}: the budgets above are proportions, which `lmworks run` scales by the speed that it measures"
    )
