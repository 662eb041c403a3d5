"""`lmworks tokenizer`: evaluate a tokenizer, measure drift, and choose a vocabulary size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lmworks.cli.options import JsonOption, RunArgument
from lmworks.cli.output import console, print_json

_SIZES = (4096, 8192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072, 151_552)


def register(noun: typer.Typer) -> None:
    """Add the commands to `lmworks tokenizer`."""
    noun.command("eval")(evaluate)
    noun.command("drift")(drift)
    noun.command("sizes")(sizes)


def evaluate(
    run: RunArgument,
    against: Annotated[
        list[Path],
        typer.Option("--against", help="A tokenizer.json to compare with; may be repeated.", default_factory=list, show_default=False),
    ],
    as_json: JsonOption = False,
) -> None:
    """Evaluate the tokenizer per domain and language: fertility, split words, bytes per token, round trip; optionally against others."""
    from lmworks.tokenizer import load
    from lmworks.tokenizer.evaluate import evaluate, table

    tokenizers = {"this": load(Path(run) / "tokenizer")} | {str(path): path for path in against}
    rows = evaluate(tokenizers, Path(run) / "corpus" / "validation")
    print_json(rows) if as_json else console().print(table(rows))


def drift(
    run: RunArgument,
    add: Annotated[list[str], typer.Option("--add", help="A source to treat as new; may be repeated.")],
    as_json: JsonOption = False,
) -> None:
    """Measure drift: train tokenizers with and without a source and compare fertility on the others. Changes nothing in the run."""
    from lmworks.run.run_dir import require_run
    from lmworks.tokenizer.drift import drift, table

    rows = drift(require_run(Path(run)), Path(run) / "corpus", add)
    print_json(rows) if as_json else console().print(table(rows))


def sizes(
    run: RunArgument,
    size: Annotated[
        list[int], typer.Option("--size", help="Vocabulary size; repeatable.", default_factory=lambda: list(_SIZES), show_default=False)
    ],
    train_to: Annotated[
        int | None, typer.Option("--train-to", help="First train a tokenizer of this vocabulary size, to compare larger sizes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare vocabulary sizes for the planned model: embedding parameters and FLOPs against fertility. Changes nothing in the run."""
    import tempfile

    from lmworks.plan.vocabulary import compare_sizes, table
    from lmworks.run.run_dir import require_run
    from lmworks.tokenizer.sample import source_weights
    from lmworks.tokenizer.sizes import evaluate_sizes
    from lmworks.tokenizer.train import train

    recipe, corpus, folder = require_run(Path(run)), Path(run) / "corpus", Path(run) / "tokenizer"
    length = int(recipe.train.phases[0].sequence_length) if recipe.train.phases else 2048
    with tempfile.TemporaryDirectory() as temporary:
        if train_to:
            options = recipe.tokenizer.model_copy(update={"vocab_size": train_to, "path": None})
            folder = Path(temporary)
            train(recipe.model_copy(update={"tokenizer": options}), corpus, folder)
        rows = compare_sizes(recipe.model, length, evaluate_sizes(folder, corpus / "validation", size, source_weights(recipe, corpus)))
    print_json(rows) if as_json else console().print(table(rows))
