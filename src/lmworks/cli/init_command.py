"""`lmworks init`: look at a folder of files, and write a recipe for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli.options import JsonOption, console, print_json
from lmworks.errors import UserError
from lmworks.recipe.schema.units import Seconds

_SHOWN = 12  # kinds of files that are not used, named one by one


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command("init")(init)


def init(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder with documents, conversations, preferences, a base model.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The recipe to write; by default NAME.yaml here.", show_default=False),
    ] = None,
    start_from: Annotated[
        str | None, typer.Option("--start-from", metavar="MODEL", help="Base model: a Hugging Face folder, a GGUF file or a run.")
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="T", help="Time of the whole run; by default 30 minutes on a CPU, 12 hours on GPUs.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="C", help="Machines to choose sizes for, such as 8xh100; by default this one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at the files of a folder, and write a commented recipe that trains on them. Nothing is overwritten or sent."""
    from lmworks.init.propose import propose
    from lmworks.init.write import one_line, shell, write_new
    from lmworks.io.destinations import require_new
    from lmworks.ui.amounts import amount, size

    try:
        seconds = None if time is None else float(Seconds.parse(time))
    except ValueError as error:
        raise UserError(f"--time: {error}") from None
    if output is not None:
        require_new(output, "--output")
    made = propose(folder, start_from, seconds, cluster, lambda name: str(output or f"{name}.yaml"))
    path = output or Path(f"{made.name}.yaml")
    write_new(path, made.text)
    seen = made.survey
    if as_json:
        rows = [{key: value for key, value in vars(one).items() if key not in ("texts", "lengths")} for one in made.found]
        unused = [{"reason": reason, "count": count, "first": seen.named[reason]} for reason, count in seen.unused.most_common()]
        value = {"recipe": str(path), "files": seen.count, "bytes": seen.bytes, "used": rows, "models": seen.models, "not_used": unused}
        print_json(json.loads(json.dumps(value).encode("utf-8", "backslashreplace")) | {"notes": made.notes})
        return
    out = console()
    out.print(f"{one_line(folder)}: {seen.count:,} files, {size(seen.bytes)}", markup=False)
    for one in made.found:
        what = f"{one.use} ({one.kind}): {one_line(one.path)}: {one.files:,} {'files' if one.files > 1 else 'file'}, {size(one.bytes)}"
        about = f", about {amount(one.rows)} rows" if one.use != "documents" else f", {size(one.text_bytes)} of text, {one.language}"
        out.print(f"  {what}{about}. {'. '.join(filter(None, (one.why, *one.notes)))}", markup=False, soft_wrap=True)
    for model in seen.models:
        out.print(f"  model: {one_line(model)}", markup=False, soft_wrap=True)
    listed = seen.unused.most_common()
    for reason, count in listed[:_SHOWN]:
        out.print(f"  not used: {one_line(reason)}: {count:,}, first {one_line(seen.named[reason])}", style="yellow", soft_wrap=True)
    if rest := sum(count for _, count in listed[_SHOWN:]):
        out.print(f"  not used: {rest:,} others of {len(listed) - _SHOWN:,} kinds; --json lists them", style="yellow")
    for note in made.notes:
        out.print(f"  {one_line(note)}", style="yellow", soft_wrap=True)
    argument = shell(str(path))
    out.print(f"wrote {path}; next: lmworks plan {argument}, then lmworks run {argument}", markup=False, soft_wrap=True)
