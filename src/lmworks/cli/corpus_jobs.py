"""`lmworks corpus prepare`, its dry runs, and the command that runs one of its tasks on another machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli.options import AllowOption, RecipeArgument, SetOption, SizeOption
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

RunStages = Callable[..., None]


def register(noun: typer.Typer, run_stages: RunStages) -> None:
    """Add the commands to `lmworks corpus`; `run_stages` brings a run up to date, up to a stage."""

    def prepare(
        recipe: RecipeArgument,
        overrides: SetOption,
        allow: AllowOption,
        size: SizeOption = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the parts, tasks and scripts, and run nothing.")] = False,
        dedup_dry_run: Annotated[
            bool, typer.Option("--dedup-dry-run", help="Print what deduplication would drop, with examples; write nothing.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="With --dedup-dry-run: print JSON.")] = False,
    ) -> None:
        """Prepare the corpus of a recipe: read, clean, filter, deduplicate and decontaminate its sources."""
        if as_json and not dedup_dry_run:
            raise UserError("--json needs --dedup-dry-run; the results of a finished corpus are in its report.json")
        if dedup_dry_run:
            _duplicates(recipe, overrides, size, as_json)
        elif dry_run:
            _preview(recipe, overrides, size)
        else:
            run_stages(recipe, overrides, size, allow, "corpus")

    noun.command()(prepare)
    noun.command(hidden=True)(task)


def _preview(recipe: str, overrides: list[str], size: str | None) -> None:
    from lmworks.corpus.pipeline import preview
    from lmworks.recipe.loading.load import load_recipe

    resolved = load_recipe(recipe, overrides, size, corpus_only=True)
    assert resolved.recipe.run_dir
    for one in preview(resolved.recipe, Path(resolved.recipe.run_dir) / "corpus", resolved.path.parent):
        console().print(one, soft_wrap=True)


def _duplicates(recipe: str, overrides: list[str], size: str | None, as_json: bool) -> None:
    from lmworks.cli.corpus_tables import duplicate_tables
    from lmworks.corpus.pipeline import find_duplicates
    from lmworks.recipe.loading.load import load_recipe

    resolved = load_recipe(recipe, overrides, size, corpus_only=True)
    found = find_duplicates(resolved.recipe, resolved.path.parent)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    for one in duplicate_tables(found):
        console().print(one)


def task(
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", help="Corpus directory of a run with a running job.")],
    name: Annotated[str, typer.Argument(metavar="PASS", help="A pass of the job, such as read.")],
    number: Annotated[int, typer.Argument(metavar="NUMBER", min=0, help="Number of the task.")],
    of: Annotated[int, typer.Option("--of", min=1, help="Run tasks NUMBER, NUMBER + N, NUMBER + 2N and so on.")] = 1_000_000_000,
) -> None:
    """Run some tasks of a corpus job; its executor runs this command on other machines."""
    from lmworks.corpus.engine.executors.batch_task import run_tasks

    run_tasks(corpus, name, number, of)
