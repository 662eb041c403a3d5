"""`lmworks show` and `lmworks plan`: what a recipe says, and what it would cost."""

from __future__ import annotations

from typing import Annotated

import typer

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption
from lmworks.cli.output import console, print_json


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""

    @app.command()
    def show(
        recipe: RecipeArgument,
        overrides: SetOption,
        size: SizeOption = None,
        changed: Annotated[bool, typer.Option("--changed", help="Leave the defaults out.")] = False,
        as_json: JsonOption = False,
    ) -> None:
        """Print every value of a recipe and where it came from."""
        from lmworks.recipe import show as showing
        from lmworks.recipe.load import load_recipe

        resolved = load_recipe(recipe, overrides, size)
        if as_json:
            print_json(showing.as_json(resolved))
        else:
            console().print(showing.tree(resolved, changed))
            console().print(showing.phases(resolved))

    @app.command()
    def plan(
        recipe: RecipeArgument,
        overrides: SetOption,
        cluster: Annotated[
            str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name; this machine when left out.")
        ] = None,
        size: SizeOption = None,
        calibrated: Annotated[bool, typer.Option("--calibrate", help="Measure the MFU here with a run of half a minute.")] = False,
        mfu: Annotated[float | None, typer.Option("--mfu", min=0.001, max=1.0, help="An MFU that you measured.")] = None,
        as_json: JsonOption = False,
    ) -> None:
        """Parameters, operations, memory, layout, time, cost and disk of a run, before it is paid for."""
        from lmworks.plan.machine import this_machine
        from lmworks.plan.plan import make_plan, plain
        from lmworks.plan.render import render
        from lmworks.recipe.load import load_cluster, load_recipe

        resolved = load_recipe(recipe, overrides, size)
        where = load_cluster(cluster, resolved.path.parent) if cluster else this_machine(resolved.recipe.threads)
        source = "as given by --mfu"
        if calibrated:
            from lmworks.plan.flops import per_token
            from lmworks.train.calibrate import calibrate

            model = resolved.recipe.model
            mfu, source = calibrate(resolved.recipe, lambda length: per_token(model, length).total)
        made = make_plan(resolved.recipe, resolved.fingerprint, where, measured_mfu=mfu, measured_source=source)
        if as_json:
            print_json(plain(made))
        else:
            console().print(render(made))
