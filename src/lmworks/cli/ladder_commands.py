"""`lmworks ladder run | fit | predict | score | curve`: laws that are fitted to runs, and their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmworks.cli.options import JsonOption, RecipeArgument, SetOption, SizeOption, console, note_stage, print_json

if TYPE_CHECKING:
    from lmworks.ladder.curve import Curve
    from lmworks.ladder.design import Point
    from lmworks.ladder.predictions import BenchmarkComparison, Score
    from lmworks.plan.laws import DownstreamLaw

_CURVE_ROWS = 12
_NO_SIGNAL = "no signal in the ladder"
_FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the ladder.")]


def register(app: typer.Typer) -> None:
    """Add the commands to `lmworks ladder`."""
    noun = typer.Typer(no_args_is_help=True, help="Scaling laws: run a ladder, fit a law, predict a larger run, and score the prediction.")
    for command in (run, fit, predict, score, curve):
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
    from lmworks.ladder.run import list_runs, resolve, run_ladder
    from lmworks.ui.terminal import console as notes

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
    """Fit L(N, D) = E + (A / N^alpha + B / D^beta)^gamma to the held-out bits per byte of finished runs, with bootstrap intervals.

    A sigmoid of the loss is fitted to each benchmark that all runs have scored at their end.
    """
    _fit(folder, runs, as_json)


def _fit(folder: Path, runs: list[Path], as_json: bool) -> None:
    from lmworks.ladder.downstream import split_benchmarks
    from lmworks.ladder.fit import design_of, doubts, noise_of, residual
    from lmworks.ladder.run import fit_runs

    law, points = fit_runs(folder, runs)
    alone, seeds = noise_of(law, points)
    design = design_of(law, points)
    rows = [(run, one, law.loss(one.parameters, one.tokens)) for run, one in zip(runs, points, strict=True)]
    if as_json:
        fitted = [{"run": str(run), **asdict(one), "fitted": value} for run, one, value in rows]
        benchmarks = [{key: value for key, value in vars(one).items() if key != "samples"} for one in law.benchmarks]
        print_json(
            {name: getattr(law, name) for name in ("e", "a", "b", "alpha", "beta", "gamma", "unit")}
            | {"residual": residual(law, points), "noise": {"run": alone, "seeds": seeds}, "doubts": doubts(law, points)}
            | {"undetermined": list(design.untold)}
            | {"proposed_runs": [{"parameters": size, "tokens": tokens} for size, tokens in design.runs]}
            | {"points": fitted, "benchmarks": benchmarks, "left_out": split_benchmarks(points)[1]}
        )
        return
    from rich.table import Table

    table = Table(title=law.formula, title_justify="left")
    for heading in ("run", "parameters", "tokens", "measured", "fitted", "residual"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for run, one, value in rows:
        sizes = f"{one.parameters:,.0f}", f"{one.tokens:,.0f}"
        table.add_row(str(run), *sizes, f"{one.loss:.4f}", f"{value:.4f}", f"{one.loss - value:+.4f}")
    console().print(table)
    console().print(f"residual {residual(law, points):.2%} (root mean square)", soft_wrap=True)
    if seeds:
        remedy = "more held-out text (corpus.max_validation_bytes, train.validation_bytes_per_domain) and more seeds help"
        console().print(f"noise (standard deviation): {seeds:.2%} between seeds, {alone:.2%} of a run alone; {remedy}", soft_wrap=True)
    for doubt in doubts(law, points):
        console().print(doubt, style="yellow", soft_wrap=True)
    if law.benchmarks:
        _print_benchmarks(law.benchmarks, points)
    for name, why in split_benchmarks(points)[1].items():
        console().print(f"{name} is left out: {why}", soft_wrap=True)
    console().print(f"next: lmworks ladder predict {folder} RECIPE, before that recipe is run", soft_wrap=True)


def _print_benchmarks(laws: Sequence[DownstreamLaw], points: Sequence[Point]) -> None:
    from rich.table import Table

    table = Table(title="score = chance + (ceiling - chance) * sigmoid(slope * (midpoint - loss))", title_justify="left")
    for heading in ("benchmark", "runs", "items", "chance", "scores", "ceiling", "slope", "midpoint", "p", "scores rise as the loss falls"):
        table.add_column(heading, justify="left" if heading in ("benchmark", "scores rise as the loss falls") else "right")
    for law in laws:
        scores = [point.scores[law.name].score for point in points]
        curve = [f"{law.ceiling:.3f}", f"{law.slope:.3g}", f"{law.midpoint:.3f}"] if law.signal else ["", "", ""]
        found = f"{min(scores):.3f} to {max(scores):.3f}"
        shown = "yes" if law.signal else _NO_SIGNAL
        table.add_row(law.name, str(law.runs), f"{law.items:,}", f"{law.chance:.3f}", found, *curve, f"{law.p_value:.3f}", shown)
    console().print(table)


def predict(
    folder: _FolderArgument, recipe: RecipeArgument, overrides: SetOption, size: SizeOption = None, as_json: JsonOption = False
) -> None:
    """Predict the held-out loss and the benchmark scores of a run that has not begun, with 90% intervals, and record the prediction."""
    from lmworks.ladder.predictions import more_weight_decay, not_scored, other_tokenizer, repeated_text
    from lmworks.ladder.predictions import predict as record
    from lmworks.plan.laws import load_law
    from lmworks.recipe.load import load_recipe

    target = load_recipe(recipe, overrides, size)
    found = record(folder, target)
    warnings = load_law(folder).cautions(found.parameters, found.tokens)
    warnings += filter(None, [more_weight_decay(folder, target.recipe), repeated_text(folder, target.recipe)])
    if as_json:
        print_json(found.to_json() | {"warnings": warnings})
        return
    text = f"{found.run_dir}: {found.predicted:.4f} bits per byte, 90% interval {found.low:.4f} to {found.high:.4f}"
    console().print(text, soft_wrap=True)
    for one in found.benchmarks:
        console().print(f"{one.name}: {_predicted(one)} on {one.items:,} items", soft_wrap=True)
    for line in filter(None, (*warnings, other_tokenizer(folder, target.recipe))):
        console().print(line, style="yellow", soft_wrap=True)
    if names := not_scored(found, target.recipe.evaluate):
        text = f"the run does not score {', '.join(names)}: set evaluate.every, or score it later with lmworks evaluate --follow"
        console().print(text, soft_wrap=True)


def _predicted(one: BenchmarkComparison) -> str:
    if one.predicted is None or one.low is None or one.high is None:
        return _NO_SIGNAL
    return f"{one.predicted:.3f}, 90% interval {one.low:.3f} to {one.high:.3f}"


def score(folder: _FolderArgument, as_json: JsonOption = False) -> None:
    """Compare all predictions with their runs: errors of the loss and of benchmark scores, and how often the intervals held."""
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
    _print_summary("", found, 4)
    if not found["benchmarks"]:
        return
    table = Table(title="Predictions and measurements, benchmark scores", title_justify="left")
    for heading in ("run", "benchmark", "items", "predicted", "90% interval", "measured", "error", "inside"):
        table.add_column(heading, justify="left" if heading in ("run", "benchmark") else "right")
    for score in scores:
        for row in score.benchmarks:
            predicted = (_NO_SIGNAL, "") if row.predicted is None else (f"{row.predicted:.3f}", f"{row.low:.3f} to {row.high:.3f}")
            measured = ("not measured" if row.measured is None else f"{row.measured:.3f}", "", "")
            if row.error is not None:
                measured = measured[0], f"{row.error:+.3f}", "yes" if row.inside else "no"
            table.add_row(score.run_dir, row.name, f"{row.items:,}", *predicted, *measured)
    console().print(table)
    for name, of_benchmark in found["benchmarks"].items():
        _print_summary(f"{name}: ", of_benchmark, 3)


def _print_summary(name: str, found: dict[str, Any], digits: int) -> None:
    if found["finished"]:
        mean, largest = (f"{found[which]:.{digits}f}" for which in ("mean_error", "largest_error"))
        text = f"{found['finished']} finished: mean error {mean}, largest {largest}; {found['coverage']:.0%} inside their 90% intervals"
        console().print(f"{name}{text}", soft_wrap=True)


def curve(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="One or two runs of one recipe, at least one with a decay.")],
    overrides: SetOption,
    recipe: Annotated[
        str | None, typer.Option("--for", metavar="RECIPE", help="The recipe to predict; that of the first RUN when omitted.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the loss curve of a recipe under another learning-rate schedule than that of the runs.

    Fits the annealing law L = L0 + A / S1^alpha - C S2 (arXiv:2408.11029) to the validations of finished or active runs, and predicts the
    held-out bits per byte at the validations of the recipe. It may differ from the runs in its schedule, its token budget and its seed.
    """
    from lmworks.ladder.curve import predict_curve
    from lmworks.recipe.load import load_recipe

    found = predict_curve(runs, load_recipe(recipe or runs[0], overrides))
    if as_json:
        print_json(found.to_json())
        return
    _print_curve(found, recipe or str(runs[0]))


def _print_curve(found: Curve, name: str) -> None:
    from rich.table import Table

    law, end = found.law.best, found.points[-1]
    table = Table(title="Fitted runs, bits per byte at their last validation", title_justify="left")
    for heading in ("run", "validations", "tokens", "learning rate", "measured", "fitted"):
        table.add_column(heading, justify="left" if heading == "run" else "right")
    for run in found.runs:
        rate = f"{run.lr_factor:.1%}"
        table.add_row(run.run_dir, f"{run.validations:,}", f"{run.tokens:,}", rate, f"{run.measured:.4f}", f"{run.fitted:.4f}")
    console().print(table)
    formula = f"L = {law.l0:.4g} + {law.a:.4g} / S1^{law.alpha:.3f} - {law.c:.4g} S2, lambda {found.law.decay:.4g}"
    console().print(f"{formula}; residual {found.residual:.2%} (root mean square)", soft_wrap=True)
    table = Table(title=f"{name}, predicted bits per byte", title_justify="left")
    for heading in ("tokens", "learning rate", "predicted", "90% interval"):
        table.add_column(heading, justify="right")
    every = -(-len(found.points) // _CURVE_ROWS)
    for point in found.points[::-1][::every][::-1]:
        table.add_row(f"{point.tokens:,}", f"{point.lr_factor:.1%}", f"{point.predicted:.4f}", f"{point.low:.4f} to {point.high:.4f}")
    console().print(table)
    for note in found.notes:
        console().print(note, style="yellow", soft_wrap=True)
    for run in found.runs:
        difference = f"{end.predicted - run.measured:+.4f} ({end.low - run.measured:+.4f} to {end.high - run.measured:+.4f})"
        console().print(f"at the end against {run.run_dir} at {run.tokens:,} tokens: {difference}", soft_wrap=True)
