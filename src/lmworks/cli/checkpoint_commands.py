"""`lmworks ckpt`: list, verify, compare, prune, roll back and average checkpoints."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from lmworks.cli.options import JsonOption, RunArgument, console, print_json
from lmworks.errors import UserError
from lmworks.io.run_layout import BASE, MODEL_STAGES, MODELS
from lmworks.ui.amounts import short_size
from lmworks.ui.exit_codes import ExitCode

ModelOption = Annotated[str, typer.Option("--model", help=f"Whose checkpoints to use: {', '.join(MODELS)}.")]
_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    noun = typer.Typer(no_args_is_help=True, help="Checkpoints of a run: list, verify, compare, prune, roll back, average.")
    for name, command in (
        ("list", list_), ("show", show), ("verify", verify), ("diff", diff), ("prune", prune), ("reset-optimizer", reset_optimizer),
        ("rollback", rollback), ("average", average),
    ):  # fmt: skip
        noun.command(name)(command)
    app.add_typer(noun, name="ckpt")


def list_(run: RunArgument, as_json: JsonOption = False) -> None:
    """List checkpoints with step, size, validation score, time and problems, without verifying hashes."""
    from lmworks.checkpoint.listing import list_checkpoints

    _print_rows([row for folder in _folders(run) for row in list_checkpoints(folder)], as_json)


def show(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Argument(metavar="[STEP]", help="Step of the checkpoint; by default the newest.", show_default=False)
    ] = None,
    model: ModelOption = BASE.model,
    as_json: JsonOption = False,
) -> None:
    """Show the metadata of a checkpoint, and the resolved recipe that it was trained with."""
    import yaml

    from lmworks.checkpoint.listing import describe, read_meta
    from lmworks.recipe.former import translated
    from lmworks.recipe.keys import flatten
    from lmworks.run.checkpoint_commands import find

    path = find(Path(run), model, step)
    row = describe(path)
    if row["problem"]:
        raise UserError(f"{path} cannot be read ({row['problem']}); lmworks ckpt verify {run} says what is wrong")
    document = read_meta(path)
    recipe = translated(document.get("recipe"))
    if as_json:
        print_json(row | {"meta": document["meta"], "recipe": recipe})
        return
    out = console()
    for name, value in row.items():
        if value is not None:
            out.out(f"{name}: {_text(name, value)}")
    for name, value in flatten(document["meta"]).items():
        if name not in row:
            out.out(f"{name}: {_text(name, value)}")
    out.out("\n" + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).rstrip() if recipe else "it has no recipe")


def verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Verify the hash of every file of every checkpoint; exit code 1 if one is damaged."""
    from lmworks.checkpoint.listing import verify

    rows = [row for folder in _folders(run) for row in verify(folder)]
    _print_rows(rows, as_json)
    if any(not row["good"] for row in rows):
        raise typer.Exit(ExitCode.FAILED)


def diff(
    run: RunArgument,
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="[STEP STEP]", help="Two checkpoints; by default the newest two.", show_default=False)
    ] = None,
    model: ModelOption = BASE.model,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints: the change of each tensor relative to its norm, largest first."""
    from lmworks.checkpoint.listing import directories
    from lmworks.checkpoint.rewrite import diff
    from lmworks.recipe.keys import flatten
    from lmworks.run.checkpoint_commands import find, require_own_weights

    newest = find(Path(run), model)
    if steps is None or not steps:
        paths = directories(newest.parent)[-2:]
    else:
        paths = [find(Path(run), model, step) for step in steps]
    if len(paths) != 2:
        raise UserError(f"diff needs two checkpoints, not {len(paths)}: lmworks ckpt diff RUN STEP STEP")
    for path in paths:
        require_own_weights(path)
    try:
        found = diff(*paths)
    except (OSError, ValueError, KeyError) as error:
        if gone := [path.name for path in paths if not path.exists()]:
            raise UserError(f"the run has removed {gone[0]} meanwhile; compare others, or set checkpoints.keep_last to more") from None
        raise UserError(f"a checkpoint cannot be read ({error}); lmworks ckpt verify {run} says what is wrong") from None
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(f"step {found['steps'][0]} to {found['steps'][1]}")
    before, after = ({key: values[side] for key, values in found["meta"].items()} for side in (0, 1))
    before, after = flatten(before), flatten(after)
    for key in {**before, **after}:
        if before.get(key) != after.get(key):
            out.out(f"{key}: {_text(key, before.get(key))} -> {_text(key, after.get(key))}")
    for key, (old, new) in found["recipe"].items():
        out.out(f"recipe {key}: {_text(key, old)} -> {_text(key, new)}")
    for where in ("only_before", "only_after"):
        for name in found[where]:
            out.print(f"{where.replace('_', ' ')}: {name}")
    rows = found["tensors"]
    _print_rows(rows[:_SHOWN], False)
    if len(rows) > _SHOWN:
        out.print(f"and {len(rows) - _SHOWN} more (--json shows all)")


def prune(
    run: RunArgument,
    keep_last: Annotated[int | None, typer.Option("--keep-last", min=1, help="Overrides checkpoints.keep_last of the recipe.")] = None,
    keep_every: Annotated[str | None, typer.Option("--keep-every", help="Overrides checkpoints.keep_every: 1000 steps, 10B, 5%.")] = None,
    set_aside: Annotated[
        bool, typer.Option("--set-aside", help="Also delete checkpoints that were set aside: damaged, rolled back or replaced.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted, and delete nothing.")] = False,
    model: ModelOption = BASE.model,
    as_json: JsonOption = False,
) -> None:
    """Delete the checkpoints that the recipe does not keep; the newest good one is always kept."""
    from lmworks.recipe.schema.units import Duration
    from lmworks.run.checkpoint_commands import prune
    from lmworks.run.run_dir import require_run

    changes: dict[str, Any] = {"keep_last": keep_last} if keep_last else {}
    if keep_every:
        try:
            changes["keep_every"] = Duration.parse(keep_every)
        except ValueError as error:
            raise UserError(f"--keep-every: {error}") from None
    options = require_run(Path(run)).checkpoints.model_copy(update=changes)
    done = prune(Path(run), model, options, set_aside, dry_run)
    if as_json:
        print_json(done)
        return
    names = [f"step {step}" for step in done["steps"]] + done["set_aside"]
    console().out(f"{'would delete' if dry_run else 'deleted'}: {', '.join(names)}" if names else "nothing to delete")


def reset_optimizer(
    run: RunArgument,
    step: Annotated[int | None, typer.Option("--step", help="Step of the checkpoint; by default the newest.")] = None,
    model: ModelOption = BASE.model,
    as_json: JsonOption = False,
) -> None:
    """Replace a checkpoint by one with zero optimizer state; the old one is kept under another name."""
    from lmworks.run.checkpoint_commands import reset_optimizer

    done = reset_optimizer(Path(run), model, step)
    if as_json:
        print_json(done)
        return
    console().out(f"the optimizer state of step {done['step']} is reset; the old checkpoint is kept as {done['kept']}")
    if "note" in done:
        console().out(done["note"])


def rollback(
    run: RunArgument,
    to_step: Annotated[int, typer.Argument(metavar="STEP", help="Step of the checkpoint to resume from.")],
    skip: Annotated[
        str | None, typer.Option("--skip-steps", metavar="N|A:B", help="Skip the next N batches, or batches A to B - 1, counted from 0.")
    ] = None,
    model: ModelOption = BASE.model,
    as_json: JsonOption = False,
) -> None:
    """Resume the next run from an earlier checkpoint; later ones are set aside, not deleted."""
    from lmworks.run.checkpoint_commands import rollback
    from lmworks.watch.ledger import skipped_steps

    done = rollback(Path(run), model, to_step, _window(skip, to_step))
    if as_json:
        print_json(done)
        return
    console().out(f"the next run resumes from step {to_step}{skipped_steps(done['skip'])}")
    if done["set_aside"]:
        console().out(f"set aside: {', '.join(done['set_aside'])}")
    if done["again"]:
        console().out(f"will be repeated: {', '.join(done['again'])}")


def average(
    run: RunArgument,
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", help="Steps of two or more checkpoints.")],
    to: Annotated[Path, typer.Option("--to", metavar="RUN", help="The run directory to create.")],
    weight: Annotated[
        list[float],
        typer.Option("--weight", help="Relative weight, one per step; by default all are equal.", default_factory=list, show_default=False),
    ],
    model: ModelOption = BASE.model,
    as_json: JsonOption = False,
) -> None:
    """Average the weights of checkpoints into a new run, which can be evaluated, exported and served."""
    from lmworks.run.checkpoint_commands import average

    weights = list(weight) or [1.0] * len(steps)
    if len(steps) < 2 or len(set(steps)) != len(steps):
        raise UserError("an average takes two different steps or more: lmworks ckpt average RUN STEP STEP --to NEWRUN")
    if len(weights) != len(steps) or any(not 0 < one < float("inf") for one in weights):
        raise UserError(f"--weight: one positive number for each of the {len(steps)} steps, or none at all")
    made = average(Path(run), model, steps, weights, to)
    print_json({"path": str(made), "steps": steps, "weights": weights}) if as_json else console().out(str(made))


def _window(text: str | None, to_step: int) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        first, _, last = text.partition(":")
        return (int(first), int(last)) if last else (to_step, to_step + int(first))
    except ValueError:
        raise UserError(f"--skip-steps: {text!r} is neither a number of steps nor a window such as 100:120") from None


def _folders(run: str) -> list[Path]:
    from lmworks.run.run_dir import require_run
    require_run(Path(run))
    return [Path(run) / stage.checkpoints for stage in MODEL_STAGES]


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    from rich.table import Table

    if as_json:
        print_json(rows)
        return
    if not rows:
        console().out("no checkpoints yet")
        return
    table = Table(box=None)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else _text(name, row[name]) for name in names))
    console().print(table)


def _text(name: str, value: Any) -> str:
    """A value as people read it: a time of day, a size with its unit, a number with separators."""
    if value is None or value == {} or value == []:
        return "none"
    if name == "time":
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S")
    if name == "bytes":
        return short_size(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if name == "tokens" else str(value)
    if isinstance(value, float) and abs(value) < 1e6:
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
