"""`lmworks data`: the batch of any step, epochs per source, mixture changes, verification, import and cache of token files.

`lmworks tokenizer`: evaluate a tokenizer, measure drift, choose a vocabulary size, and convert one of another form.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from lmworks.cli.options import JsonOption, RunArgument, console, print_json

if TYPE_CHECKING:
    from lmworks.shards.batches import Batches


_PIPED = 140  # columns of a table that folds its texts


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    text = "Training data of a run: batches, epochs, conversations, mixture changes, verification, import."
    data = typer.Typer(no_args_is_help=True, help=text)
    for name, command in (
        ("batch", batch), ("plan", plan), ("conversations", conversations), ("mixture", mixture), ("verify", verify), ("import", import_),
        ("cache", cache),
    ):  # fmt: skip
        data.command(name)(command)
    app.add_typer(data, name="data")


def batch(
    run: RunArgument,
    step: Annotated[int, typer.Argument(help="Step of pretraining, from 0; past or future.")],
    as_json: JsonOption = False,
    text: Annotated[int, typer.Option("--text", help="Characters shown of each sequence.")] = 60,
) -> None:
    """Print the batch of a step and the documents that its sequences come from."""
    from lmworks.api.runs import Run

    found = Run(run).batch(step)
    if as_json:
        print(json.dumps(found.to_json()))
        return
    count, length = found.tokens.shape
    title = f"step {step}: {count} sequences of {length} tokens, {found.batch.valid_tokens:,} labels"
    title += " (left out by a rollback)" if found.left_out else ""
    table = Table(title=title, title_justify="left")
    for heading in ("sequence", "source", "epoch", "documents", "begins with"):
        table.add_column(heading, overflow="fold")
    for number, row in enumerate(found.documents):
        documents = "\n".join(f"{span.id} [{span.start}:{span.stop}] {span.origin}" for span in row.documents)
        begin = found.text(number, text + 8)[:text].replace("\n", "\\n")
        table.add_row(f"{row.number}", row.source, str(row.epoch), Text(documents), Text(begin))
    console(piped=_PIPED).print(table)


def conversations(
    run: RunArgument,
    name: Annotated[str | None, typer.Option("--set", metavar="NAME", help="Only this set of tune.data.")] = None,
    count: Annotated[int, typer.Option("--count", min=1, help="Conversations shown of each set.")] = 3,
    as_json: JsonOption = False,
) -> None:
    """Print conversations of the tuning data as the model reads them, with what is trained marked, and the counts of each set."""
    from lmworks.io.files import read_json
    from lmworks.tokenizer import load
    from lmworks.train.data.chat import conversations as shown_of
    from lmworks.train.data.chat import described

    data = Path(run) / "tune" / "data"
    shown = list(shown_of(data, lambda: load(Path(run) / "tokenizer"), name, count))
    sets = {one: body for one, body in read_json(data / "manifest.json")["data"].items() if name in (None, one)}
    if as_json:
        print_json({"sets": sets, "conversations": [asdict(one) for one in shown]})
        return
    terminal = console()
    for one, body in sets.items():
        terminal.print(Text(described(one, body), style="bold"), soft_wrap=True)
        for found in (each for each in shown if each.name == one):
            terminal.print(Text(f"conversation {found.number}: {found.tokens:,} tokens, {found.trained:,} trained", style="dim"))
            text = Text()
            for piece, trained in found.pieces:
                text.append(f"⟦{piece}⟧" if trained else piece, style="green" if trained else "")
            terminal.print(text, soft_wrap=True)


def plan(run: RunArgument, as_json: JsonOption = False) -> None:
    """Show the epochs of each source per phase and in total, what phases share, and what packing truncates or pads."""
    from lmworks.api.runs import Run
    from lmworks.shards.order import epoch_warnings
    from lmworks.watch.batch_growth import describe

    batches = Run(run).batches()
    order, limit = batches.order, batches.recipe.shards.warn_epochs
    shared, lost = batches.shared_documents(), batches.waste()
    if as_json:
        print_json({
            "shares": [asdict(share) | {"epochs": share.epochs} for share in order.shares()],
            "batch_growths": [asdict(one) for one in batches.growths],
            "readings": order.epochs_by_source(),
            "shared_documents": [{"before": before, "after": after, "id": span.id} for before, after, span in shared],
            "waste": [{"source": source, "sequence_length": length, **asdict(one)} for (source, length), one in lost.items()],
            "warnings": list(epoch_warnings(order, limit)),
        })
        return
    _print_shares(batches)
    for line in describe(batches.recipe.train.phases, batches.growths):
        console().print(line)
    table = Table(title=f"Packing ({batches.recipe.shards.packing} is used)", title_justify="left", box=None)
    for heading in ("source", "length", "cut by concatenate", "padding of best_fit"):
        table.add_column(heading, justify="left" if heading == "source" else "right")
    for (source, length), one in lost.items():
        table.add_row(source, f"{length:,}", f"{one.cut:.1%} of the documents that fit", f"{one.padding:.2%} of the tokens")
    console().print(table)
    console().print(f"{len(shared)} documents are read in part by two phases" + "".join(f"\n  {span.id} {a}, {b}" for a, b, span in shared))


def mixture(
    run: RunArgument,
    weights: Annotated[
        list[str], typer.Option("--set", metavar="SOURCE=WEIGHT", help="Weight of a source; name every source of the new mixture.")
    ],
    at: Annotated[
        int | None, typer.Option("--at", metavar="STEP", help="First step with the new mixture; by default the next one.")
    ] = None,
) -> None:
    """Override the mixture of a started run, until the end of the phase or its next planned change."""
    from lmworks.api.runs import Run
    from lmworks.shards.order import MixtureOverride
    from lmworks.train.data.mixture import next_step, request_change, validate_change

    step = next_step(Path(run)) if at is None else at
    change = MixtureOverride(step, validate_change(Path(run), step, weights))
    batches = Run(run).batches(change)
    _print_shares(batches)
    if request_change(Path(run), change):
        console().print(f"requested from step {step:,} on; the running process applies it before it reads its next batch")
    else:
        console().print(f"requested from step {step:,} on; it is applied when the run resumes")


def verify(run: RunArgument) -> None:
    """Verify the hash of every token file."""
    from lmworks.shards.manifest import verify

    verify(Path(run) / "shards")
    console().print("all files match their hashes")


def cache(
    run: RunArgument,
    steps: Annotated[
        int | None, typer.Option("--steps", metavar="N", min=1, help="Steps; by default shards.cache.prefetch.", show_default=False)
    ] = None,
    status: Annotated[Path | None, typer.Option("--follow", hidden=True, help="Continue, and write the steps to this file.")] = None,
) -> None:
    """Read the data of the next steps into the cache of this machine (shards.cache), before ranks start here."""
    from lmworks.run.fill_cache import CacheFiller, follow

    if status is not None:
        for _ in follow(Path(run), status):
            pass
    found = CacheFiller(Path(run)).fill(steps)
    console().print(f"the cache has the data of {found.past - found.first:,} steps from step {found.first:,} on")


def import_(
    kind: Annotated[str, typer.Argument(metavar="FORMAT", help="megatron, datatrove, nanotron or olmo.")],
    path: Annotated[Path, typer.Argument(help="A token file, or a folder of token files.")],
    tokenizer: Annotated[Path, typer.Option("--tokenizer", help="Folder of the tokenizer that encoded them, in the format of lmworks.")],
    name: Annotated[str, typer.Option("--name", help="Name of the source in mixtures.")],
    out: Annotated[Path | None, typer.Option("--out", help="Output folder; by default imported/NAME.")] = None,
    domain: Annotated[str, typer.Option("--domain", help="Domain of the text, for reports.")] = "imported",
    language: Annotated[str, typer.Option("--language", help="Language of the text, if it has only one.")] = "",
    dtype: Annotated[str | None, typer.Option("--dtype", help="uint16 or uint32, if the files do not record it.")] = None,
    eos: Annotated[int | None, typer.Option("--eos", help="End-of-document token, if it is not the tokenizer's.")] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Number of processes.")] = 1,
) -> None:
    """Import token files of another tool as a source; a recipe then names the output folder under shards.imported."""
    import re
    from typing import cast, get_args

    from lmworks.errors import UserError
    from lmworks.io.files import explain_os_errors
    from lmworks.shards.import_tokens import Format, import_tokens
    from lmworks.shards.manifest import SOURCE_NAME

    if kind not in get_args(Format):
        raise UserError(f"{kind!r} cannot be imported; the formats are: {', '.join(get_args(Format))}")
    if not re.fullmatch(SOURCE_NAME, name):
        raise UserError(f"--name {name!r}: letters, digits, dots, dashes and underscores, a letter or digit first")
    place = out or Path("imported") / name
    options = {"domain": domain, "language": language, "dtype": dtype, "eos": eos, "threads": threads}
    with explain_os_errors(place):
        made = import_tokens(cast(Format, kind), path, tokenizer, name, place, **options)  # type: ignore[arg-type]
    train = made.manifest.source(name).train
    console().print(f"{train.documents:,} documents, {train.tokens:,} tokens in {len(train.shards)} files below {place}")
    console().print(f"{made.closed:,} documents got an end-of-document token, {made.empty:,} empty ones were skipped; first texts:")
    for text in made.begins:
        console().print(Text("  " + text.replace("\n", "\\n")))
    console().print(f"in the recipe: shards: {{imported: {{{name}: {place.resolve()}}}}}, and the tokenizer's folder as tokenizer.path")


def _print_shares(batches: Batches) -> None:
    from lmworks.shards.order import epoch_warnings

    table = Table(title="What each phase reads", title_justify="left", box=None)
    for heading in ("phase", "source", "tokens of the source", "reads", "times"):
        table.add_column(heading, justify="left" if heading in ("phase", "source") else "right")
    for share in batches.order.shares():
        length = batches.order.length_of(share.phase)
        table.add_row(share.phase, share.source, f"{share.start:,} to {share.stop:,}", f"{share.planned * length:,}", f"{share.epochs:.2f}")
    for source, times in batches.order.epochs_by_source().items():
        table.add_row("all phases", source, "", "", f"{times:.2f}", style="bold")
    console().print(table)
    for line in epoch_warnings(batches.order, batches.recipe.shards.warn_epochs):
        console().print(f"warning: {line}", style="yellow")


_SIZES = (4096, 8192, 16_384, 32_768, 49_152, 65_536, 98_304, 131_072, 151_552)


def register_tokenizer(noun: typer.Typer) -> None:
    """Add the commands to `lmworks tokenizer`."""
    noun.command("eval")(evaluate)
    noun.command("drift")(drift)
    noun.command("sizes")(sizes)
    noun.command("convert")(convert)


def convert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a model with tokenizer.model, spiece.model or tekken.json.")],
) -> None:
    """Write tokenizer.json into the folder of a model whose tokenizer is one of SentencePiece, or Mistral's tekken.json."""
    from lmworks.tokenizer.convert import convert

    console().print(f"wrote {convert(folder)}", markup=False)


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
    from lmworks.tokenizer.train import drift, table

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

    from lmworks.plan.counts import compare_vocabularies, table
    from lmworks.run.run_dir import require_run
    from lmworks.tokenizer.evaluate import source_weights
    from lmworks.tokenizer.train import evaluate_sizes, train

    recipe, corpus, folder = require_run(Path(run)), Path(run) / "corpus", Path(run) / "tokenizer"
    length = int(recipe.train.phases[0].sequence_length) if recipe.train.phases else 2048
    with tempfile.TemporaryDirectory() as temporary:
        if train_to:
            options = recipe.tokenizer.model_copy(update={"vocab_size": train_to, "path": None})
            folder = Path(temporary)
            train(recipe.model_copy(update={"tokenizer": options}), corpus, folder)
        rows = compare_vocabularies(
            recipe.model, length, evaluate_sizes(folder, corpus / "validation", size, source_weights(recipe, corpus))
        )
    print_json(rows) if as_json else console().print(table(rows))
