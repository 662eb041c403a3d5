"""`lmworks advise`: whether to prompt, tune, continue or train, with costs and reasons.

`lmworks preflight`: check machines, storage, data and layout before a run.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption, console, print_json
from lmworks.errors import UserError
from lmworks.recipe.scaling_laws import parse_size
from lmworks.recipe.schema.units import Seconds, Tokens
from lmworks.ui.exit_codes import ExitCode
from lmworks.ui.terminal import plain

_NEXT = {
    "prompt": "write an evaluation of your own (docs/evaluation.md), and compare prompts by it",
    "tune": "start a recipe from the base model: start_from, and tune.data with your examples (docs/existing-models.md)",
    "continue": "start a recipe from the base model: start_from, and phases with your text and general text (docs/existing-models.md)",
    "train": "lmworks plan --time T --cluster C",
}


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("advise")(advise)


def advise(
    need: Annotated[
        str, typer.Option("--need", metavar="NEED", help="What is missing: form, facts, knowledge, skill, language, or own (own weights).")
    ],
    examples: Annotated[int, typer.Option("--examples", min=0, help="Labeled examples or conversations that you have.")] = 0,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N", help="Distinct tokens of text that you have, such as 300M.")] = "0",
    base: Annotated[str, typer.Option("--base", metavar="N", help="Active parameters of the base model that you would take.")] = "8B",
    time: Annotated[
        str | None, typer.Option("--time", metavar="T", help="Time that the cluster is available; 7d without --money.", show_default=False)
    ] = None,
    money: Annotated[
        float | None, typer.Option("--money", metavar="DOLLARS", min=0.01, help="The same as --time, as the price of the cluster.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--price", metavar="DOLLARS", min=0.0001, help="Price per device-hour; by default that of the cluster."),
    ] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name; by default this machine.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Advise whether to prompt an existing model, tune it, continue its pretraining, or train one, with costs and reasons."""
    from lmworks.plan.advice import NEEDS, Situation
    from lmworks.plan.advice import advise as options_for
    from lmworks.plan.automatic import this_machine
    from lmworks.plan.budget import seconds_for_money
    from lmworks.recipe.load import load_cluster

    if need not in NEEDS:
        raise UserError(f"--need {need!r} is not known; it is one of: {'; '.join(f'{name} ({text})' for name, text in NEEDS.items())}")
    if time is not None and money is not None:
        raise UserError("--time and --money both set the time; give one of them")
    try:
        own, size = int(Tokens.parse(tokens)) if tokens != "0" else 0, parse_size(base)
        seconds = float(Seconds.parse(time or "7d"))
    except ValueError as error:
        raise UserError(str(error)) from None
    where = load_cluster(cluster) if cluster else this_machine()
    if price is not None:
        where = where.model_copy(update={"dollars_per_device_hour": price})
    if money is not None:
        if not where.dollars_per_device_hour:
            raise UserError(f"--money: {where.name} has no price; give --price per device-hour, or --time")
        seconds = seconds_for_money(money, where)
    situation = Situation(need, examples, own, size, seconds, where, _trained(where, seconds))
    options = options_for(situation)
    if as_json:
        found = [asdict(option) for option in options]
        print_json({"need": need, "dollars_per_device_hour": where.dollars_per_device_hour, "options": found})
        return
    _print(options, where.name, bool(where.dollars_per_device_hour))


def _trained(where: Any, seconds: float) -> Any:
    """What `lmworks plan` answers for the same time and cluster, or why nothing fits."""
    from lmworks.plan.advice import Trained
    from lmworks.plan.budget import default_plan

    try:
        found = default_plan(where, seconds)
    except UserError as error:
        return str(error)
    return Trained(found.counts.active, found.tokens, found.seconds)


def _print(options: list[Any], where: str, priced: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from lmworks.ui.amounts import amount, days

    table = Table(title=f"Ways to a model, with the training cost on {where}", title_justify="left", box=None, header_style="dim")
    for heading in ("way", "verdict", "training", "cost", "reason"):
        table.add_column(heading)
    for one in options:
        took = days(one.seconds) if one.seconds else "none"
        hours = f"{amount(one.device_hours)} device-hours"
        cost = f"${one.dollars:,.{0 if one.dollars >= 100 else 2}f} ({hours})" if one.dollars else hours if one.seconds else ""
        style = "bold" if one.verdict == "advised" else None
        table.add_row(one.route, one.verdict, took, cost, Text(one.reason), style=style)
    console().print(table)
    if not priced:
        console().print(f"{where} has no price, so the cost is in device-hours: give --price per device-hour", soft_wrap=True)
    advised = next(one for one in options if one.verdict == "advised")
    console().print(f"next: {_NEXT[advised.route]}", soft_wrap=True)


_STYLES = {"ok": "green", "warn": "yellow", "fail": "red", "skip": "dim"}


def register_preflight(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("preflight")(preflight)


def preflight(
    recipe: RecipeArgument,
    overrides: SetOption,
    size: SizeOption = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name, with its mesh layout; by default this machine.")
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", metavar="FILE", help="Host file, or local: lose one of three hosts in a small run."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check machines, disks, data, first batches, layout, checkpoints and export; exit code 1 if a check fails.

    Changes nothing of a run, and keeps the results in its folder if it has one (preflight.json), for lmworks doctor and lmworks bundle.
    """
    from lmworks.launch.torchrun import read_hosts
    from lmworks.parallel.process_group import destroy_ranks, init_ranks, is_launched
    from lmworks.plan.layout import devices
    from lmworks.plan.stages import stages_as_phases
    from lmworks.preflight import checks
    from lmworks.preflight.check_result import CheckContext
    from lmworks.preflight.hosts import LOCAL, local_hosts
    from lmworks.recipe.load import load_cluster, load_recipe
    from lmworks.run.start import choose_mesh, choose_mesh_here

    where = load_cluster(cluster, load_recipe(recipe, overrides, size).path.parent) if cluster else None
    if where and where.layout:
        overrides = [*overrides, *where.layout.overrides()]
    if where and not is_launched():
        resolved, _ = choose_mesh(load_recipe(recipe, overrides, size), where, devices(where), where.devices_per_node)
    else:
        resolved = choose_mesh_here(load_recipe(recipe, overrides, size))
    here = resolved.recipe
    ranks = init_ranks(here.layout, float(here.launch.timeout), here.threads) if is_launched() else None
    if ranks is not None:
        here = here.model_copy(update={"layout": ranks.layout})
    chosen = [] if hosts is None else local_hosts() if hosts == LOCAL else read_hosts(Path(hosts))
    context = CheckContext(stages_as_phases(here), resolved.fingerprint, where, recipe, ranks, chosen)
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
    try:
        checks.keep(answers, context.run_dir)
    except (UserError, OSError) as error:
        print(plain(f"the results are not kept with the run: {error}"), file=sys.stderr)
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
        raise typer.Exit(ExitCode.FAILED)
