"""`lmworks preflight`: check machines, storage, data and layout before a run."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("preflight")(preflight)


def preflight(
    recipe: RecipeArgument,
    overrides: SetOption,
    size: SizeOption = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name, with its mesh layout; by default this machine.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check machines, disks, data, first batches, layout, checkpoints and export. Changes nothing; exit code 1 if a check fails."""
    from lmworks.cli.layouts import settled, settled_here
    from lmworks.doctor.preflight import checks
    from lmworks.doctor.preflight.check_result import CheckContext
    from lmworks.parallel.process_group import destroy_ranks, init_ranks, is_launched
    from lmworks.plan.layout import devices
    from lmworks.plan.stage_phases import stages_as_phases
    from lmworks.recipe.loading.load import load_cluster, load_recipe

    where = load_cluster(cluster, load_recipe(recipe, overrides, size).path.parent) if cluster else None
    if where and where.layout:
        overrides = [*overrides, *where.layout.overrides()]
    if where and not is_launched():
        resolved, _ = settled(recipe, overrides, size, where, devices(where), where.devices_per_node)
    else:
        resolved = settled_here(recipe, overrides, size)
    here = resolved.recipe
    ranks = init_ranks(here.layout, float(here.launch.timeout), here.threads) if is_launched() else None
    if ranks is not None:
        here = here.model_copy(update={"layout": ranks.layout})
    context = CheckContext(stages_as_phases(here), resolved.fingerprint, where, recipe, ranks)
    if ranks is not None and not ranks.is_first:
        checks.follow(context)
        destroy_ranks()
        return
    out = console()

    def begin(number: int, check: checks.Check) -> None:
        if not as_json and out.is_terminal:
            out.print(f"{number:2} {check.title} ...", style="dim", end="\r")

    def end(answer: checks.Answer) -> None:
        if as_json:
            return
        found = answer.finding
        mark, title = (f"{found.result:<4}", _STYLES[found.result]), (answer.check.title, "bold")
        out.print(Text.assemble(f"{answer.number:2} ", mark, f" {answer.seconds:5.1f} s  ", title, f": {found.text}"))
        if found.advice:
            out.print(Text.assemble(f"{'':15}", ("do:", "bold"), f" {found.advice}"))

    answers = checks.preflight(context, begin, end)
    failed = [answer for answer in answers if answer.finding.result == "fail"]
    if as_json:
        print_json([answer.plain() for answer in answers])
    else:
        took = sum(answer.seconds for answer in answers)
        out.print(f"{len(answers)} checks in {took:.0f} s: " + (f"{len(failed)} failed" if failed else "none failed"))
    if ranks is not None:
        destroy_ranks()
        if failed:  # any other code would have the launcher start the ranks again
            raise UserError(f"{len(failed)} of {len(answers)} checks failed; see what to do above")
    if failed:
        raise typer.Exit(1)
