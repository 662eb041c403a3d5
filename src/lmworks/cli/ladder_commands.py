"""`lmworks ladder fit | predict | score`: a scaling law from finished runs, and its predictions held against later runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption
from lmworks.cli.output import console, print_json

if TYPE_CHECKING:
    from lmworks.ladder.predictions import Score

_FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the ladder.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `lmworks ladder`."""
    noun = typer.Typer(no_args_is_help=True, help="Scaling laws: fit finished runs, predict a larger run, and score the prediction.")
    for command in (fit, predict, score):
        noun.command()(command)
    app.add_typer(noun, name="ladder")


def fit(
    folder: _FolderArgument,
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Finished runs of at least 3 sizes and 3 token budgets.")],
    as_json: JsonOption = False,
) -> None:
    """Fit L(N, D) = E + A / N^alpha + B / D^beta to the held-out bits per byte of finished runs, with bootstrap intervals."""
    from lmworks.ladder.fit import BOOTSTRAPS, fit_law
    from lmworks.ladder.points import UNIT, read_points
    from lmworks.ladder.predictions import save_settings
    from lmworks.plan.loss_law import LAW_FILE, save_law
    from lmworks.progress import bar

    points = read_points(runs)
    with bar("bootstrap", BOOTSTRAPS) as progress:
        law = fit_law(points, UNIT, f"fitted to {len(points)} runs", bootstraps=BOOTSTRAPS, advance=progress.advance)
    folder.mkdir(parents=True, exist_ok=True)
    save_settings(folder, runs)
    save_law(law, folder / LAW_FILE)
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
