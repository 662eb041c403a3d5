"""`lmworks show` and `lmworks plan`: resolve a recipe, and predict its memory, time and cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption, TimeOption, console, print_json, within
from lmworks.errors import UserError
from lmworks.recipe.schema.units import Seconds, Tokens

if TYPE_CHECKING:
    from lmworks.recipe.load import Resolved
    from lmworks.recipe.schema.layout import Cluster
    from lmworks.recipe.schema.recipe import Recipe
    from lmworks.run.refusals import Before, Check


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
        from lmworks.cli import tables as showing
        from lmworks.recipe.checks import phase_refusals

        resolved, note = _as_it_runs(recipe, within(time, overrides), size)
        for refusal in phase_refusals(resolved.recipe):
            raise refusal
        if as_json:
            print_json(showing.recipe_as_json(resolved))
        else:
            console().print(showing.recipe_tree(resolved, changed))
            console().print(showing.phase_positions(resolved))
            _warn(resolved, note)

    app.command()(plan)


_DEFAULT_RECIPE = "dense-125m"  # `DEFAULT_RECIPE` of the plan, which help texts do not wait for


def plan(
    overrides: SetOption,
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="[RECIPE]",
            help=f"A recipe file, or the name of a shipped recipe; by default {_DEFAULT_RECIPE} at the size that fits --time or --money.",
            show_default=False,
        ),
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name; by default this machine.")] = None,
    size: SizeOption = None,
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
    """Predict parameters, FLOPs, memory, mesh layout, time, cost and disk space of a run. --time and --money set its tokens and size."""
    from lmworks.plan.budget import as_plain, fit_time
    from lmworks.plan.laws import load_law
    from lmworks.plan.plan import make_plan, plain
    from lmworks.plan.render import render
    law = load_law(ladder) if ladder else None
    words, size = _budget_overrides(recipe, cluster, time, money, size)
    resolved, note = _as_it_runs(recipe or _DEFAULT_RECIPE, [*overrides, *words], size)
    where = _cluster_of(resolved, cluster)
    if calibrated and mfu is not None:
        raise UserError("--calibrate and --mfu both set the MFU; give one of them")
    choose = resolved.recipe.size == "auto"
    if served is not None and not choose:
        raise UserError("--served-tokens chooses a size; give --size auto and --time or --money with it")
    before, refusals = _before(resolved)
    own = recipe is not None and Path(recipe).exists()  # a shipped recipe is an example, and names files that nobody has
    certain = [error for check, error in refusals if not check.here or (own and cluster is None)]
    rehearsed, measured = None, None
    if calibrated and not resolved.recipe.trains_base and not refusals:
        from lmworks.run.rehearsal import rehearse

        rehearsed = rehearse(resolved, before.data, before.tokenizer)
        measured, source, whole = rehearsed.mfu, rehearsed.how, False
    else:
        measured, source, whole = _mfu(mfu, resolved.recipe, where, calibrated and resolved.recipe.trains_base)
    budget = None
    if note:  # there is a time, and no run has turned it into tokens yet
        tokens = _served(served) if served is not None else 0.0
        assert resolved.recipe.time is not None
        resolved, made, budget = fit_time(
            resolved, where, float(resolved.recipe.time), choose_size=choose, served_tokens=tokens, law=law,
            measured_mfu=measured, measured_source=source, layout_in_mfu=whole,
        )  # fmt: skip
    else:
        try:
            made = make_plan(
                resolved.recipe, resolved.fingerprint, where, measured_mfu=measured, measured_source=source, layout_in_mfu=whole,
                unfit=True, data=before.data, measured=rehearsed.stages if rehearsed is not None and cluster is None else None,
            )  # fmt: skip
        except ValueError:
            if not certain:
                raise
            for refusal in certain[1:]:  # they say why there is no plan
                console().print(str(refusal), style="yellow")
            raise certain[0] from None
    doubtful = [f"on this machine, the run would refuse: {error}" for check, error in refusals if error not in certain]
    notes = [*before.notes, *doubtful] if cluster is None else doubtful
    if as_json:
        value = plain(made)
        value["warnings"] += [*(law.cautions(made.counts.active_computed, made.tokens) if law else []), *notes]
        value["refusals"] = [str(error) for error in certain]
        print_json(value | ({"budget": as_plain(budget)} if budget else {}))
    else:
        console().print(render(made, budget, law))
        for line in filter(None, (note, *notes, *map(str, certain[1:]))):
            console().print(line, style="yellow")
    if certain:
        raise certain[0]
    if made.shortages:
        raise UserError(made.shortages[0])


def _before(resolved: Resolved) -> tuple[Before, list[tuple[Check, UserError]]]:
    """What was read of the data of the recipe, and what its run would refuse."""
    from lmworks.run.refusals import Before, look_ahead
    from lmworks.run.stage_data import EXACT_BYTES
    from lmworks.run.stages import stages_for

    assert resolved.recipe.run_dir
    before = Before(resolved.recipe, Path(resolved.recipe.run_dir), resolved.path.parent, most=EXACT_BYTES)
    return before, list(look_ahead(before, [stage.name for stage in stages_for(resolved.recipe)]))


def _served(text: str) -> float:
    try:
        return float(Tokens.parse(text))
    except ValueError:
        raise UserError(f"--served-tokens {text} is not a number of tokens; write for example --served-tokens 1T or 500B") from None


def _mfu(given: str | None, recipe: Recipe, cluster: Cluster, calibrated: bool) -> tuple[float | None, str, bool]:
    """The MFU that replaces the cluster's, its origin, and whether it contains communication between machines and pipeline bubble."""
    if calibrated:
        from lmworks.plan.counts import flops_per_token
        from lmworks.train.calibrate import calibrate

        return *calibrate(recipe, lambda length: flops_per_token(recipe.model, length).total), False
    if given is None:
        return None, "", True
    try:
        mfu = float(given)
    except ValueError:
        from lmworks.run.prediction import measured_mfu

        found = measured_mfu(Path(given), cluster)
        return found.mfu, found.source, found.with_layout
    if not 0.001 <= mfu <= 1:
        raise UserError(f"--mfu is a number from 0.001 to 1, or a run directory; {given} is neither")
    return mfu, "as given by --mfu", True


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


def _cluster_of(resolved: Resolved, cluster: str | None) -> Cluster:
    from lmworks.plan.automatic import this_machine
    from lmworks.recipe.load import load_cluster

    return load_cluster(cluster, resolved.path.parent) if cluster else this_machine(resolved.recipe.threads)


def _warn(resolved: Resolved, *lines: str | None) -> None:
    """Print these lines, and what is wrong with the sources as far as it is known here."""
    from lmworks.corpus.pipeline import faults

    for line in (*lines, *faults(resolved.recipe)):
        if line:
            console().print(line, style="yellow")


def _as_it_runs(recipe: str, overrides: Sequence[str], size: str | None) -> tuple[Resolved, str]:
    """The recipe, with the numbers that its run was given for its time; and what is to be said where there are none yet."""
    from lmworks.recipe.load import load_recipe
    from lmworks.run.time_budget import recorded_budget
    from lmworks.ui.amounts import days

    resolved = load_recipe(recipe, overrides, size)
    assert resolved.recipe.run_dir
    settled = recorded_budget(resolved, Path(resolved.recipe.run_dir))
    if settled is not None:
        return settled, ""
    assert resolved.recipe.time is not None
    return resolved, (
        f"time is {days(resolved.recipe.time)}: `lmworks run` sets the token budgets by the speed that it measures, and takes data "
        "preparation, evaluation and export out of the time"
    )
