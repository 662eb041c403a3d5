"""`lmworks data`: what any step, past or future, is trained on."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from lmworks.cli.options import JsonOption, RunArgument
from lmworks.cli.output import console


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    data = typer.Typer(no_args_is_help=True, help="The data order of a run.")
    data.command("batch")(batch)
    app.add_typer(data, name="data")


def batch(
    run: RunArgument,
    step: Annotated[int, typer.Argument(help="Step of pretraining, from 0; it may lie in the past or the future.")],
    as_json: JsonOption = False,
    text: Annotated[int, typer.Option("--text", help="Characters of each sequence to show.")] = 60,
) -> None:
    """Print the batch of a step with the documents it comes from."""
    from lmworks.run.walk import require_run
    from lmworks.shards.batch import Batches
    from lmworks.tokenizer import load

    batches = Batches(require_run(Path(run)), Path(run) / "shards")
    rows, found = batches.documents(step), batches.batch(step)
    tokenizer = load(Path(run) / "tokenizer")
    if as_json:
        print(json.dumps([asdict(row) | {"tokens": tokens.tolist()} for row, tokens in zip(rows, found.tokens, strict=True)]))
        return
    title = f"step {step}: {len(rows)} sequences of {found.tokens.shape[1]} tokens, {found.valid_tokens:,} labels"
    table = Table(title=title, title_justify="left")
    for heading in ("sequence", "source", "epoch", "documents", "begins with"):
        table.add_column(heading, overflow="fold")
    for row, tokens in zip(rows, found.tokens, strict=True):
        documents = "\n".join(f"{span.id} [{span.start}:{span.stop}] {span.origin}" for span in row.documents)
        begin = tokenizer.decode(tokens[: text + 8].tolist())[:text].replace("\n", "\\n")
        table.add_row(f"{row.number}", row.source, str(row.epoch), Text(documents), Text(begin))
    console().print(table)
