"""`lmworks bundle`: one archive of a run for a bug report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from lmworks.cli.options import JsonOption, RunArgument, console, print_json
from lmworks.errors import UserError

if TYPE_CHECKING:
    from lmworks.bundle.archive import Bundle


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("bundle")(bundle)


def bundle(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write; one that exists is not overwritten.")] = Path(
        "lmworks-bundle.zip"
    ),
    list_only: Annotated[bool, typer.Option("--list", help="Show what the archive would contain, and write nothing.")] = False,
    names: Annotated[bool, typer.Option("--names", help="Also show what each pseudonym stands for; this is not in the archive.")] = False,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Run the checks of lmworks preflight now, which take minutes; without, the last ones.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Write the archive without asking.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write one archive of a run, of at most 20 MB, for a bug report or a colleague: no texts, no secrets, no names.

    Shows the files first, and asks. lmworks doctor reads the archive as it reads the run.
    """
    from lmworks.bundle.archive import collect
    from lmworks.io.destinations import require_new

    if not list_only:
        require_new(out)
    found = collect(Path(run), _preflight(Path(run)) if preflight else None)
    written = None if list_only else out
    if not as_json:
        _print(found, names)
    if written is not None and not yes and not _confirmed(written):
        written = None
    size = found.write(written) if written is not None else len(found.archive())
    if as_json:
        print_json({
            "file": str(written) if written else None, "bytes": size, "omitted": dict(found.omitted),
            "members": [{"name": one.name, "bytes": one.size, "note": one.note} for one in found.members],
            "names": dict(found.pseudonyms) if names else None,
        })  # fmt: skip
    elif written is not None:
        console().print(f"{written} has {size:,} bytes; read it with: lmworks doctor {written}", soft_wrap=True)
    else:
        console().print(f"the archive would have {size:,} bytes; nothing was written", soft_wrap=True)


def _print(found: Bundle, names: bool) -> None:
    table = Table(box=None, header_style="dim")
    table.add_column("file")
    table.add_column("bytes", justify="right")
    table.add_column("")
    for one in found.members:
        table.add_row(one.name, f"{one.size:,}", one.note)
    for name, reason in found.omitted.items():
        table.add_row(Text(name, "dim"), "", Text(f"left out: {reason}", "dim"))
    console().print(table)
    for pseudonym, text in found.pseudonyms.items() if names else ():
        console().print(Text.assemble((f"{pseudonym:12} ", "dim"), text), soft_wrap=True)


def _confirmed(out: Path) -> bool:
    if not sys.stdin.isatty():
        raise UserError(f"bundle asks before it writes {out}: give --yes, or --list to look at the files only")
    return typer.confirm(f"write {out}?", default=True, err=True)


def _preflight(run_dir: Path) -> dict[str, Any]:
    from lmworks.plan.stages import stages_as_phases
    from lmworks.preflight import checks
    from lmworks.preflight.check_result import CheckContext
    from lmworks.recipe.load import load_recipe
    from lmworks.run.start import choose_mesh_here

    resolved = choose_mesh_here(load_recipe(str(run_dir)))
    context = CheckContext(stages_as_phases(resolved.recipe), resolved.fingerprint, None, str(run_dir), None)
    return checks.document(checks.preflight(context, lambda number, check: None, lambda answer: None))
