"""`lmworks corpus analyze | sample | trace | diff`: inspect a prepared corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmworks.cli.options import JsonOption, RunArgument, console, print_json
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.destinations import require_file
from lmworks.io.files import write_json
from lmworks.ui.exit_codes import ExitCode

if TYPE_CHECKING:
    from lmworks.corpus.analysis.prepared import PreparedCorpus
    from lmworks.corpus.analysis.trace import Trace
    from lmworks.shards.lineage import DocumentLocation
    from lmworks.tokenizer.tokenizer import Tokenizer

_WhereArgument = Annotated[str, typer.Argument(metavar="RECIPE|RUN", help="A run directory with a corpus, or the recipe that made it.")]


def register(noun: typer.Typer) -> None:
    """Add the commands to `lmworks corpus`."""
    for command in (analyze, sample, trace, diff):
        noun.command()(command)


def corpus_of(where: str) -> Path:
    """The corpus directory of a run, or of the run of a recipe. A corpus directory itself is accepted too."""
    given = Path(where)
    for path in (given / "corpus", given):
        if (path / "report.json").is_file() and (path / "decisions").is_dir():
            return path
    if given.is_dir():
        raise UserError(f"{where} has no corpus; make it with: lmworks corpus prepare RECIPE")
    from lmworks.recipe.load import load_recipe

    run_dir = load_recipe(where, corpus_only=True).recipe.run_dir
    assert run_dir
    if not (Path(run_dir) / "corpus" / "report.json").is_file():
        raise UserError(f"the corpus of {where} is not made yet; make it with: lmworks corpus prepare {where}")
    return Path(run_dir) / "corpus"


def _open(where: str) -> PreparedCorpus:
    from lmworks.corpus.analysis.prepared import PreparedCorpus

    return PreparedCorpus(corpus_of(where))


class _Tokens:
    """Counts tokens. The tokenizer is loaded in the process that uses it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()

    def __getstate__(self) -> dict[str, Path]:
        return {"_directory": self._directory}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from lmworks.tokenizer import load

        return load(self._directory)

    def __call__(self, texts: Sequence[str]) -> list[int]:
        return [len(ids) for ids in self._tokenizer.encode_batch(texts, threads=1)]


def analyze(
    where: _WhereArgument,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="Folder of a tokenizer; by default the run's own, if it has one.")
    ] = None,
    parts: Annotated[int, typer.Option("--parts", min=1, help="Parts of each source whose texts are analyzed.")] = 4,
    page: Annotated[Path | None, typer.Option("--page", help="Path of the page; by default corpus.html in the run directory.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Analyze a corpus before and after filtering: tokens, languages, lengths, quality, perplexity, duplicates. Writes an HTML page."""
    from lmworks.cli.tables import analysis_tables
    from lmworks.corpus.analysis.analyze import analyze as measure
    from lmworks.pages.corpus_page import write_corpus_page

    out = corpus_of(where)
    folder = tokenizer or (out.parent / "tokenizer" if (out.parent / "tokenizer" / "tokenizer.json").is_file() else None)
    place = page or out.parent / "corpus.html"
    require_file(place, "--page")
    found = measure(out, _Tokens(folder) if folder else None, parts, machine.cores())
    write_json(out / "analysis.json", found)
    write_corpus_page(place, found)
    if as_json:
        print_json(found)
        return
    for table in analysis_tables(found):
        console().print(table)
    console().print(f"page: {place}")


def sample(
    where: _WhereArgument,
    source: Annotated[str | None, typer.Option("--source", help="Only documents of this source.")] = None,
    fate: Annotated[
        str | None,
        typer.Option("--fate", help="Only this outcome: train, validation, quarantine, max_bytes, or the step or pass that dropped it."),
    ] = None,
    reason: Annotated[str | None, typer.Option("--reason", help="Only documents dropped for this reason.")] = None,
    bucket: Annotated[str | None, typer.Option("--bucket", help="Only documents in this quality bucket.")] = None,
    count: Annotated[int, typer.Option("-n", min=1, max=10_000, help="Number of documents.")] = 5,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draw.")] = 0,
    characters: Annotated[int, typer.Option("--characters", min=0, help="Characters shown of each text.")] = 400,
    as_json: JsonOption = False,
) -> None:
    """Show random documents, kept or dropped; the text of a dropped document is read from its source again."""
    from lmworks.corpus.analysis.prepared import SampleFilter
    from lmworks.corpus.analysis.prepared import sample as draw

    drawn = draw(_open(where), SampleFilter(source, fate, reason, bucket), count, seed)
    if as_json:
        print_json([{**one.decision, "output": one.output, "text": one.text} for one in drawn])
        return
    from lmworks.cli.tables import document

    for one in drawn:
        console().print(document(one, characters))


def trace(
    run: RunArgument,
    document: Annotated[
        str | None, typer.Argument(metavar="[ID|SOURCE:TOKEN]", help="A document id, or the document at a token position.")
    ] = None,
    step: Annotated[int | None, typer.Option("--step", min=0, help="A step of pretraining, instead of a document.")] = None,
    sequence: Annotated[int, typer.Option("--sequence", min=0, help="Sequence of that step, from 0.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Trace a document from its row in the source through every decision to its tokens; each step is repeated."""
    from lmworks.corpus.analysis.trace import trace as follow

    corpus = _open(run)
    shards = corpus.out.parent / "shards"
    found = []
    for identity in _asked(run, shards, document, step, sequence):
        one = follow(corpus, identity)
        found.append((one, _place(shards, one)))
    if as_json:
        print_json([{**asdict(one), "shard": asdict(place) if place else None} for one, place in found])
        return
    from lmworks.cli.tables import way

    for one, place in found:
        console().print(way(one, place))


def _asked(run: str, shards: Path, document: str | None, step: int | None, sequence: int) -> list[str]:
    """Ids of the selected documents."""
    if (document is None) == (step is None):
        raise UserError("name a document, as SOURCE/PART/NUMBER or SOURCE:TOKEN, or a --step with its --sequence")
    if document is not None:
        source, colon, token = document.rpartition(":")
        if not colon or not token.isdecimal():
            return [document]
        from lmworks.shards.lineage import document_at

        return [document_at(shards, source, int(token)).id]
    assert step is not None
    from lmworks.api.runs import Run

    rows = Run(run).batch(step).documents
    if sequence >= len(rows):
        raise UserError(f"step {step:,} has {len(rows):,} sequences, numbered from 0; there is no sequence {sequence:,}")
    return list(dict.fromkeys(span.id for span in rows[sequence].documents))


def _place(shards: Path, found: Trace) -> DocumentLocation | None:
    """Positions of a document's tokens in the shards, if there are shards and the document was kept."""
    from lmworks.shards.lineage import find_document
    from lmworks.shards.manifest import MANIFEST

    if found.kept is None or not (shards / MANIFEST).is_file():
        return None
    split, output, _ = found.kept.split("/")
    return find_document(shards, found.id, output, "train" if split == "train" else "validation")


def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="A run directory with a corpus, or its recipe.")],
    other: Annotated[str, typer.Argument(metavar="B", help="Another run directory or recipe.")],
    as_json: JsonOption = False,
) -> None:
    """Compare two corpora: documents that B has gained, lost, moved or changed relative to A, and why. Exit code 1 if they differ."""
    from lmworks.corpus.analysis.diff import as_json as plain
    from lmworks.corpus.analysis.diff import diff as compare
    from lmworks.corpus.analysis.diff import differs

    found = compare(_open(one), _open(other))
    if as_json:
        print_json(plain(found))
    else:
        from lmworks.cli.tables import difference_table

        console().print(difference_table(found))
    if differs(found):
        raise typer.Exit(ExitCode.FAILED)
