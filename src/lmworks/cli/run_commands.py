"""`lmworks run` and the stages as commands of their own."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from lmworks.cli import corpus_commands, corpus_jobs, tokenizer_commands
from lmworks.cli.options import AllowOption, JsonOption, RecipeArgument, RunArgument, SetOption, SizeOption
from lmworks.cli.output import console, print_json

_HEADINGS = {
    "corpus": "Corpus: raw text to clean documents",
    "tokenizer": "Tokenizer: byte-pair merges and special tokens",
    "shards": "Shards: documents to token files",
    "pretrain": "Pretraining",
    "tune": "Tuning: conversations and tasks",
    "evaluate": "Evaluation",
    "export": "Export",
}


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command("run")(run)
    corpus = typer.Typer(no_args_is_help=True, help=_HEADINGS["corpus"])
    corpus_jobs.register(corpus, _walk)
    corpus_commands.register(corpus)
    app.add_typer(corpus, name="corpus")
    for name, stage, text in (
        ("train", "tokenizer", "Train (or import) the tokenizer."),
        ("build", "shards", "Write the token shards."),
    ):
        noun = typer.Typer(no_args_is_help=True, help=_HEADINGS[stage])
        noun.command(name, help=text)(_stage_command(stage))
        if stage == "tokenizer":
            tokenizer_commands.register(noun)
        app.add_typer(noun, name=stage)
    for stage in ("pretrain", "tune", "evaluate", "export"):
        app.command(stage, help=f"{_HEADINGS[stage]}; does the stages before it first, where they are not done.")(_stage_command(stage))
    checkpoints = typer.Typer(no_args_is_help=True, help="Checkpoints of a run.")
    checkpoints.command("list")(ckpt_list)
    checkpoints.command("verify")(ckpt_verify)
    app.add_typer(checkpoints, name="ckpt")
    app.command("report")(report)


def run(recipe: RecipeArgument, overrides: SetOption, allow: AllowOption, size: SizeOption = None) -> None:
    """Raw text to a model: walks all stages, skips what is done, resumes what broke."""
    _walk(recipe, overrides, size, allow, None)


def _stage_command(stage: str) -> Callable[..., None]:
    def command(recipe: RecipeArgument, overrides: SetOption, allow: AllowOption, size: SizeOption = None) -> None:
        _walk(recipe, overrides, size, allow, stage)

    return command


def _walk(recipe: str, overrides: Sequence[str], size: str | None, allow: Sequence[str], last: str | None) -> None:
    from lmworks.recipe.load import load_recipe
    from lmworks.run.summary import summary
    from lmworks.run.walk import Told, walk

    out = console()
    resolved = load_recipe(recipe, overrides, size=size)

    def tell(told: Told) -> None:
        if told.what == "skip":
            out.print(f"[dim]{_HEADINGS[told.stage]}: done before[/dim]")
        elif told.what == "note":
            out.print(told.printable)
        elif told.what == "begin":
            out.print(f"\n[bold]{_HEADINGS[told.stage]}[/bold]")
        else:
            if told.printable is not None and (last is not None or told.stage != "evaluate"):  # the summary shows the scores
                out.print(told.printable)
            out.print(f"[dim]{told.stage} took {told.seconds:.0f} s[/dim]")

    run_dir = walk(resolved, last=last, allow=allow, tell=tell, resume_command=shlex.join(["lmworks", *sys.argv[1:]]))
    if last is None:
        out.print(summary(run_dir))


def ckpt_list(run: RunArgument, as_json: JsonOption = False) -> None:
    """What is saved: step, size, held-out score, and what is wrong with it; nothing is hashed."""
    from lmworks.checkpoint.listing import list_checkpoints

    _print_rows([row for folder in _checkpoint_folders(run) for row in list_checkpoints(folder)], as_json)


def ckpt_verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Read and hash every byte of every checkpoint; exit code 1 if one is bad."""
    from lmworks.checkpoint.listing import verify

    rows = [row for folder in _checkpoint_folders(run) for row in verify(folder)]
    _print_rows(rows, as_json)
    if any(not row["good"] for row in rows):
        raise typer.Exit(1)


def _checkpoint_folders(run: str) -> list[Path]:
    from lmworks.run.walk import require_run
    from lmworks.train.load import folder

    require_run(Path(run))
    return [folder(Path(run), "base"), folder(Path(run), "tuned")]


def report(run: RunArgument) -> None:
    """Write the run page, one static HTML file, from what the run has recorded so far."""
    from lmworks.doctor.page import write_page

    print(write_page(Path(run)))


def _print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    from rich.table import Table

    if as_json:
        print_json(rows)
        return
    if not rows:
        print("no checkpoints yet")
        return
    table = Table(box=None)
    names = list(dict.fromkeys(name for row in rows for name in row))
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in names))
    console().print(table)
