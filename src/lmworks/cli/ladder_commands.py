"""`lmworks ladder run | fit | predict | score`: a scaling law from a ladder of runs, and its predictions held against later runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption
from lmworks.cli.output import console, note_stage, print_json

if TYPE_CHECKING:
    from lmworks.ladder.predictions import Score

_FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the ladder.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `lmworks ladder`."""
    noun = typer.Typer(no_args_is_help=True, help="Scaling laws: run a ladder, fit a law, predict a larger run, and score the prediction.")
    for command in (run, fit, predict, score):
        noun.command()(command)
    app.add_typer(noun, name="ladder")


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A ladder file: recipe, sizes, horizons (docs/sizing.md).")],
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, help="Runs side by side; they divide the CPU threads, or get a GPU each.")
    ] = 1,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Directory of the ladder; by default runs/ladders/NAME.")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the runs with their states and commands, and run nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a recipe at several sizes and token budgets, and fit a law to the runs.

    Each size is one run at a constant learning rate, from which a decay branches off for every token budget. An interrupted ladder
    continues with the same command.
    """
    from lmworks.ladder.file import resolve
    from lmworks.ladder.run import list_runs, run_ladder
    from lmworks.progress import console as notes

    ladder = resolve(file, out)
    if only_list:
        _list(list_runs(ladder), as_json)
        return
    runs = run_ladder(ladder, jobs, note_stage, lambda line: notes.print(line, soft_wrap=True))
    _fit(ladder.out, runs, as_json)


def _list(runs: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json(runs)
        return
    from rich.table import Table

    table = Table(box=None, header_style="dim")
    for heading in ("run", "tokens", "state"):
        table.add_column(heading, justify="right" if heading == "tokens" else "left")
    for one in runs:
        table.add_row(one["name"], f"{one['tokens']:,}", one["state"])
    console().print(table)


def fit(
    folder: _FolderArgument,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished runs of at least 3 sizes and 3 token budgets.")],
    as_json: JsonOption = False,
) -> None:
    """Fit L(N, D) = E + A / N^alpha + B / D^beta to the held-out bits per byte of finished runs, with bootstrap intervals."""
    _fit(folder, runs, as_json)


def _fit(folder: Path, runs: list[Path], as_json: bool) -> None:
    from lmworks.ladder.run import fit_runs

    law, points = fit_runs(folder, runs)
    rows = [(run, one, law.loss(one.parameters, one.tokens)) for run, one in zip(runs, points, strict=True)]
    if as_json:
        fitted = [{"run": str(run), **vars(one), "fitted": value} for run, one, value in rows]
        print_json({name: getattr(law, name) for name in ("e", "a", "b", "alpha", "beta", "unit")} | {"points": fitted})
        return
    from rich.table import Table

    formula = f"L = {law.e:.3f} + {law.a:.4g} / N^{law.alpha:.3f} + {law.b:.4g} / D^{law.beta:.3f} {law.unit}"
    table = Table(title=formula, title_justify="left")
    for heading in ("run", "parameters", "tokens", "measured", "fitted", "residual"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for run, one, value in rows:
        sizes = f"{one.parameters:,.0f}", f"{one.tokens:,.0f}"
        table.add_row(str(run), *sizes, f"{one.loss:.4f}", f"{value:.4f}", f"{one.loss - value:+.4f}")
    console().print(table)
    console().print(f"next: lmworks ladder predict {folder} RECIPE, before that recipe is run", soft_wrap=True)


def predict(
    folder: _FolderArgument, recipe: RecipeArgument, overrides: SetOption, size: SizeOption = None, as_json: JsonOption = False
) -> None:
    """Predict the held-out loss of a run that has not begun, with its 90% interval, and record the prediction."""
    from lmworks.ladder.predictions import predict as record
    from lmworks.recipe.loading.load import load_recipe

    found = record(folder, load_recipe(recipe, overrides, size))
    if as_json:
        print_json(found.to_json())
        return
    text = f"{found.run_dir}: {found.predicted:.4f} bits per byte, 90% interval {found.low:.4f} to {found.high:.4f}"
    console().print(text, soft_wrap=True)


def score(folder: _FolderArgument, as_json: JsonOption = False) -> None:
    """Compare all predictions with their runs: errors, and how often the intervals held."""
    from lmworks.ladder.predictions import score as compare
    from lmworks.ladder.predictions import summary

    scores = compare(folder)
    if as_json:
        print_json({"scores": [one.to_json() for one in scores], **summary(scores)})
        return
    _print(scores)


def _print(scores: list[Score]) -> None:
    from rich.table import Table

    from lmworks.ladder.predictions import summary

    table = Table(title="Predictions and measurements, bits per byte", title_justify="left")
    for heading in ("run", "predicted", "90% interval", "measured", "error", "inside"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for one in scores:
        measured = ("not finished", "", "")
        if one.error is not None:
            measured = f"{one.measured:.4f}", f"{one.error:+.4f}", "yes" if one.inside else "no"
        table.add_row(one.run_dir, f"{one.predicted:.4f}", f"{one.low:.4f} to {one.high:.4f}", *measured)
    console().print(table)
    found = summary(scores)
    if found["finished"]:
        console().print(
            f"{found['finished']} finished: mean error {found['mean_error']:.4f}, largest {found['largest_error']:.4f}; "
            f"{found['coverage']:.0%} inside their 90% intervals", soft_wrap=True,
        )  # fmt: skip
