"""`lmworks show` and `lmworks plan`: resolve a recipe, and predict its memory, time and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli import completion
from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption, TimeOption, ToOption, console, print_json, within
from lmworks.errors import UserError, raise_first
from lmworks.recipe.schema.units import Seconds, Tokens
from lmworks.run.start import require_stage


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
        from lmworks.api.planning import settled_budget
        from lmworks.cli import tables as showing
        from lmworks.corpus.pipeline import faults
        from lmworks.recipe.checks import phase_refusals
        from lmworks.recipe.load import load_recipe

        resolved, note = settled_budget(load_recipe(recipe, within(time, overrides), size))
        if not note:  # the budgets are those of a run, not proportions
            raise_first(phase_refusals(resolved.recipe))
        growing, found = showing.growing_batches(resolved), list(faults(resolved.recipe))
        if as_json:
            print_json(showing.recipe_as_json(resolved, changed) | {"growing_batches": growing, "note": note, "faults": found})
        else:
            console().print(showing.recipe_tree(resolved, changed))
            console().print(showing.phase_positions(resolved))
            for line in growing:
                console().print(line)
            for line in filter(None, (note, *found)):
                console().print(line, style="yellow")

    app.command()(plan)


_DEFAULT_RECIPE = "dense-125m"  # `DEFAULT_RECIPE` of the plan, which help texts do not wait for


def plan(
    overrides: SetOption,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            autocompletion=completion.recipes,
            help=f"A recipe file, or the name of a shipped recipe; by default {_DEFAULT_RECIPE} at the size that fits --time or --money.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="C", autocompletion=completion.clusters, help="A cluster file or name, or 8xh100; by default this machine."
        ),
    ] = None,
    size: SizeOption = None,
    last: ToOption = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="T", help="Time of pretraining, such as 3d; the tokens are scaled to fill it.")
    ] = None,
    money: Annotated[
        float | None, typer.Option("--money", metavar="DOLLARS", min=0.01, help="The same as --time, as the price of the cluster.")
    ] = None,
    served: Annotated[
        str | None,
        typer.Option("--served-tokens", metavar="N", help="Tokens to be served, such as 1T: a smaller model, trained for longer, is best."),
    ] = None,
    ladder: Annotated[
        Path | None, typer.Option("--ladder", metavar="DIR", help="Folder of a fitted ladder of runs, for the predicted loss.")
    ] = None,
    calibrated: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the speed on this machine: half a minute of pretraining, or a few steps of every stage of a run without it.",
        ),
    ] = False,
    mfu: Annotated[
        str | None, typer.Option("--mfu", metavar="X|RUN", help="MFU to assume, or the run directory in which it was measured.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict parameters, FLOPs, memory, mesh layout, time, cost and disk space of a run, up to a stage with --to. --time and --money set
    its tokens and size."""
    from lmworks.api.planning import predict
    from lmworks.plan.laws import load_law
    from lmworks.plan.render import render
    from lmworks.recipe.load import load_recipe

    require_stage(last, "--to")
    law = load_law(ladder) if ladder else None
    words, size = _budget_overrides(recipe, cluster, time, money, size)
    resolved = load_recipe(recipe or _DEFAULT_RECIPE, [*overrides, *words], size)
    if calibrated and mfu is not None:
        raise UserError("--calibrate and --mfu both set the MFU; give one of them")
    if served is not None and resolved.recipe.size != "auto":
        raise UserError("--served-tokens chooses a size; give --size auto and --time or --money with it")
    found = predict(
        resolved, cluster, mfu=mfu, calibrate=calibrated, law=law, served_tokens=_served(served) if served is not None else 0.0,
        shipped=recipe is None or not Path(recipe).exists(), last=last,
    )  # fmt: skip
    if as_json:
        print_json(found.to_json())
    else:
        console().print(render(found.plan, found.budget, found.law))
        for line in filter(None, (found.note, *found.warnings, *map(str, found.refusals[1:]))):
            console().print(line, style="yellow")
    for error in found.refusals:
        raise error
    if found.plan.shortages:
        raise UserError(found.plan.shortages[0])


def _served(text: str) -> float:
    try:
        return float(Tokens.parse(text))
    except ValueError:
        raise UserError(f"--served-tokens {text} is not a number of tokens; write for example --served-tokens 1T or 500B") from None


def _budget_overrides(
    recipe: str | None, cluster: str | None, time: str | None, money: float | None, size: str | None
) -> tuple[list[str], str | None]:
    """`--time` and `--money` as an override of the recipe's time; and the size, which is open where neither it nor a recipe is given."""
    from lmworks.plan.budget import seconds_for_money
    from lmworks.recipe.load import load_cluster

    if time is not None and money is not None:
        raise UserError("--time and --money both set the time; give one of them")
    if money is not None:
        if cluster is None:
            raise UserError("--money needs the price of a cluster; name one with --cluster, such as --cluster 8xh100")
        time = Seconds(seconds_for_money(money, load_cluster(cluster))).text()
    if recipe is None:
        if time is None:
            raise UserError("name a recipe, or give --time or --money to find a size: lmworks plan --time 3d --cluster 8xh100")
        size = size or "auto"
    return within(time, []), size
