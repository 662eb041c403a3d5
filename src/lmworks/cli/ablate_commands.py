"""`lmworks ablate`: compare variants of a recipe over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli import completion
from lmworks.cli.options import JsonOption, console, note_stage, print_json
from lmworks.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("ablate")(ablate)


def ablate(
    file: Annotated[
        str, typer.Argument(metavar="FILE", autocompletion=completion.ablations, help="An ablation file, or the name of a shipped one.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Directory of the ablation; by default runs/ablations/NAME.")
    ] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", metavar="N", min=1, help="Runs side by side; they divide the CPU threads, or get a GPU each.")
    ] = 1,
    index: Annotated[
        str | None,
        typer.Option(
            "--index", metavar="I/N", help="Run only every N-th run from the I-th on, counted from 0, as one job of a Slurm array."
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the runs with their states and commands, and run nothing.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables as Markdown.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run an ablation: every arm with every seed, then a verdict for every difference. The same command resumes it."""
    from lmworks.ablate.ablate import Options, list_runs, open_experiment, parse_index, run_ablation
    from lmworks.ablate.document import markdown, printable
    from lmworks.pages.ablation_page import FILE
    from lmworks.ui.terminal import console as notes

    if as_json and as_markdown:
        raise UserError("--json and --markdown: choose one")
    options = Options(out, jobs, parse_index(index) if index is not None else None)
    terminal = console()
    if only_list:
        rows = list_runs(open_experiment(file, options), options)
        if as_json:
            print_json(rows)
            return
        for row in rows:
            terminal.print(
                f"{row['index']}  {row['state']:<5}  {row['arm']}, seed {row['seed']}:  {' '.join(row['command'])}", soft_wrap=True
            )
        ranks = max((row["ranks"] for row in rows), default=1)
        if ranks > 1:
            terminal.print(f"{ranks} ranks of a run are started by lmworks launch local, on the machine that the run is on", soft_wrap=True)
        if index is None and len(rows) > 1:
            terminal.print(f"as a Slurm array: --array=0-{len(rows) - 1}, and --index $SLURM_ARRAY_TASK_ID/{len(rows)}", soft_wrap=True)
        return

    document, place, failure = run_ablation(file, options, note_stage, lambda line: notes.print(line, soft_wrap=True))
    if as_json:
        print_json(document)
    elif as_markdown:
        terminal.out(markdown(document))
    else:
        terminal.print(printable(document))
        terminal.print(f"\npage: {place / FILE}", soft_wrap=True)
    if failure is not None:
        raise failure
