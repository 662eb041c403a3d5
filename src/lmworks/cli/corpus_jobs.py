"""`lmworks corpus prepare`, what it would do, and a task of it on another machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli.options import AllowOption, RecipeArgument, SetOption, SizeOption
from lmworks.cli.output import console, print_json
from lmworks.errors import UserError

Walk = Callable[..., None]


def register(noun: typer.Typer, walk: Walk) -> None:
    """Add the commands to `lmworks corpus`; `walk` brings a run up to date to a stage."""

    def prepare(
        recipe: RecipeArgument,
        overrides: SetOption,
        allow: AllowOption,
        size: SizeOption = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the parts, tasks and scripts, and do nothing.")] = False,
        dedup_dry_run: Annotated[
            bool, typer.Option("--dedup-dry-run", help="Print what deduplication would drop, with examples; write nothing.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="With --dedup-dry-run: print JSON for machines.")] = False,
    ) -> None:
        """Make the clean corpus of a recipe."""
        if as_json and not dedup_dry_run:
            raise UserError("--json goes with --dedup-dry-run; what a corpus has become stands in its report.json")
        if dedup_dry_run:
            _duplicates(recipe, overrides, size, as_json)
        elif dry_run:
            _preview(recipe, overrides, size)
        else:
            walk(recipe, overrides, size, allow, "corpus")

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
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", help="The corpus directory of a run in which a job is under way.")],
    name: Annotated[str, typer.Argument(metavar="PASS", help="A pass of the job, such as read.")],
    number: Annotated[int, typer.Argument(metavar="NUMBER", min=0, help="Of the task.")],
    of: Annotated[int, typer.Option("--of", min=1, help="Do tasks NUMBER, NUMBER + N, NUMBER + 2N and so on.")] = 1_000_000_000,
) -> None:
    """Do some tasks of a corpus job; what its executor runs on other machines."""
    from lmworks.corpus.engine.executors.batch_task import run_tasks

    run_tasks(corpus, name, number, of)
