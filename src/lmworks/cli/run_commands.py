"""`lmworks run`, one command per stage, and commands on finished runs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli import checkpoint_commands, corpus_commands, data_commands, evaluate_commands, launch_commands
from lmworks.cli.options import (
    AllowOption,
    JsonOption,
    RecipeArgument,
    RunArgument,
    SetOption,
    SizeOption,
    TimeOption,
    ToOption,
    console,
    print_json,
    within,
)
from lmworks.io.run_layout import BASE, MODEL_STAGES
from lmworks.run.start import HEADINGS, require_stage, start_run

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="Location of the copy: s3://bucket/folder, or a directory.")]

def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("run")(run)
    corpus = typer.Typer(no_args_is_help=True, help=HEADINGS["corpus"])
    corpus_commands.register_prepare(corpus, _run_stages)
    corpus_commands.register(corpus)
    app.add_typer(corpus, name="corpus")
    for name, stage, text in (
        ("train", "tokenizer", "Train (or import) the tokenizer."),
        ("build", "shards", "Write the token shards."),
    ):
        noun = typer.Typer(no_args_is_help=True, help=HEADINGS[stage])
        noun.command(name, help=text)(_stage_command(stage))
        if stage == "tokenizer":
            data_commands.register_tokenizer(noun)
        app.add_typer(noun, name=stage)
    for stage in (*(one.stage for one in MODEL_STAGES), "export"):
        app.command(stage, help=f"{HEADINGS[stage]}; runs the stages before it first if they are not done.")(_stage_command(stage))
    evaluate_commands.register(app, _run_stages)
    checkpoint_commands.register(app)
    app.command("report")(report)
    app.command("replay")(replay)
    app.command("copy")(copy)
    app.command("restore")(restore)


def run(
    recipe: RecipeArgument, overrides: SetOption, allow: AllowOption, size: SizeOption = None, time: TimeOption = None,
    last: ToOption = None,
) -> None:  # fmt: skip
    """Run all stages of a recipe, from raw text to an exported model; stages that are done are skipped, others are resumed or repeated."""
    require_stage(last, "--to")
    _run_stages(recipe, within(time, overrides), size, allow, last)


def _stage_command(stage: str) -> Callable[..., None]:
    def command(recipe: RecipeArgument, overrides: SetOption, allow: AllowOption, size: SizeOption = None, time: TimeOption = None) -> None:
        _run_stages(recipe, within(time, overrides), size, allow, stage)

    return command


def _run_stages(recipe: str, overrides: Sequence[str], size: str | None, allow: Sequence[str], last: str | None) -> None:
    from lmworks.recipe.load import load_recipe

    resolved = load_recipe(recipe, overrides, size, corpus_only=last == "corpus")
    if last != "corpus" and "RANK" not in os.environ and not any(key.startswith("layout") for key in allow):
        from lmworks.run.start import ranks_of_run

        if (ranks := ranks_of_run(resolved.recipe)) > 1:
            launch_commands.launch_again(recipe, overrides, size, allow, last, ranks)
    start_run(resolved, console(), last=last, allow=allow, resume_command=_resume_command())


def _resume_command() -> str:
    """The command that resumes the run, as the user typed it, also if a launcher has started this process as a rank."""
    from lmworks.launch.launch_dir import COMMAND

    return os.environ.get(COMMAND) or shlex.join(["lmworks", *sys.argv[1:]])


def replay(
    run: RunArgument,
    step: Annotated[int | None, typer.Argument(help="Step of the saved batch; by default the newest.", show_default=False)] = None,
    at: Annotated[
        int | None, typer.Option("--checkpoint", metavar="STEP", help="Checkpoint to use; by default the newest at or before that step.")
    ] = None,
    model: checkpoint_commands.ModelOption = BASE.model,
    as_json: JsonOption = False,
) -> None:
    """Run a saved bad batch through a checkpoint again: loss, gradients, and the first operator with a non-finite result.

    Batches of pretraining can be replayed, and those of tuning without LoRA.
    """
    from lmworks.run.replay import replay

    found = replay(Path(run), model, step, at)
    if as_json:
        print_json(found)
        return
    out = console()
    out.print(f"the batch of step {found['step']} through {found['checkpoint']}")
    out.print(f"loss {found['loss']:.4f} nats per token, gradient norm {found['grad_norm']:.4g}")
    out.print(f"first non-finite result: {found['first']}" if found["first"] else "all results are finite", soft_wrap=True)
    for one in found["sequences"]:
        out.print(f"  sequence {one['sequence']}: loss {one['loss']:.4f}")
    for one in found["gradients"]:
        out.print(f"  gradient of {one['parameter']}: norm {one['grad_norm']:.4g}")


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="A run directory; with several, the page compares the runs.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="A cluster file or name, for price and power per device.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write the page instead, as for a run that can only be read.")
    ] = None,
) -> None:
    """Write the run page RUN/report.html, one static HTML file; with several runs, RUN/comparison.html."""
    from lmworks.pages.run_page import write_page
    from lmworks.recipe.load import load_cluster

    page = write_page(Path(runs[0]), load_cluster(cluster) if cluster else None, [Path(run) for run in runs[1:]], out)
    console().out(str(page))


def copy(run: RunArgument, url: UrlArgument) -> None:
    """Copy corpus, shards and newest checkpoints of a run to object storage or a directory; equal files are not sent again."""
    from lmworks.run.copy import copy_run

    copy_run(Path(run), url, console().print)


def restore(url: UrlArgument, run: Annotated[str, typer.Argument(metavar="RUN", help="The run directory to create.")]) -> None:
    """Restore a run directory from a copy made by `lmworks copy` or `checkpoints.copy_to`; the next `lmworks run` resumes it."""
    from lmworks.run.copy import restore_run

    restore_run(url, Path(run), console().print)
