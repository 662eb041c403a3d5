"""lm-evaluation-harness from the command line: its tasks on one of our models, and our sets as its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmworks.cli.options import JsonOption
from lmworks.cli.output import console, print_json
from lmworks.errors import Unavailable, UserError

if TYPE_CHECKING:
    import torch

    from lmworks.evaluate.harness.running import HarnessOptions

HarnessOption = Annotated[
    str | None,
    typer.Option("--harness", metavar="TASK,...", help="MODEL: tasks of lm-evaluation-harness (`lm-eval ls tasks` lists them)."),
]
IncludeOption = Annotated[
    str | None, typer.Option("--include-path", metavar="DIR", help="--harness: a folder with task files of your own.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-task-code", help="--harness: run the Python code that the task files of --include-path name.")
]
ChatOption = Annotated[bool, typer.Option("--apply-chat-template", help="--harness: ask in the chat template of the model.")]


def evaluate(target: str, options: HarnessOptions, out: Path | None, as_json: bool, device: torch.device) -> None:
    """Run tasks of lm-evaluation-harness on a model, and print or write what it reports."""
    from lmworks.evaluate.harness.report import record, table
    from lmworks.evaluate.harness.running import run
    from lmworks.evaluate.opening import open_model

    opened = open_model(target, device)
    found = run(opened, options)
    results = record(opened, found, out)
    if as_json:
        print_json(results)
    else:
        console().print(table(opened.name, found))


def harness_options(
    tasks: str, include_path: str | None, trusted: bool, chat: bool, shots: int | None, items: int | None, data: str | None, hub: bool
) -> HarnessOptions:  # fmt: skip
    """The options of a run. Raises `UserError` for those that say nothing, and without lm-evaluation-harness."""
    from lmworks.evaluate.harness import require_extra

    require_extra()
    from lmworks.evaluate.harness.running import HarnessOptions
    from lmworks.evaluate.harness.task_data import HUB, PACKAGE

    names = [name for name in map(str.strip, tasks.split(",")) if name]
    if not names:
        raise UserError("--harness names no task; for example: --harness arc_easy,hellaswag")
    if data is not None and hub:
        raise UserError("--data and --hub are two sources of the same rows; keep one of them")
    if data not in (None, PACKAGE) and not Path(str(data)).is_dir():
        raise UserError(f"--data {data} is not a directory; with --harness it is a folder with data, or {PACKAGE}")
    return HarnessOptions(
        names, Path(include_path) if include_path else None, trusted, shots, items, chat, HUB if hub else data
    )  # fmt: skip


def export_harness(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder for the task files (YAML) and their data (JSON lines).")],
    tasks: Annotated[str, typer.Option("--tasks", metavar="SET,...", help="Benchmark sets, and task files that end in .yaml.")],
    form: Annotated[str, typer.Option("--form", metavar="FORM,...", help="cloze, letters, or both.")] = "cloze,letters",
    shots: Annotated[int | None, typer.Option("--shots", help="Worked examples before each question.")] = None,
    items: Annotated[int | None, typer.Option("--items", help="Maximum items per set; all by default.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="DIR", help="A folder with the rows of each set.")] = None,
    hub: Annotated[bool, typer.Option("--hub", help="Read the rows from the Hugging Face hub.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write benchmark sets as tasks of lm-evaluation-harness, so that our scores can be repeated there."""
    from lmworks.cli.evaluate_commands import benchmarks
    from lmworks.evaluate.harness.exporting import FORMS, export

    forms = [one for one in map(str.strip, form.split(",")) if one]
    if wrong := next((one for one in forms if one not in FORMS), None):
        raise UserError(f"--form {wrong}: lm-evaluation-harness scores choices by log-likelihood; the forms are {' and '.join(FORMS)}")
    try:
        written = export(Path(folder), benchmarks(tasks, "auto", shots, data, hub), forms or FORMS, items)
    except Unavailable as reason:
        raise UserError(str(reason)) from None
    if as_json:
        print_json([vars(one) for one in written])
        return
    for one in written:
        console().print(f"{one.task}: {one.items:,} items")
    console().print(f"{Path(folder) / 'README.md'} says how to run them", style="dim")
