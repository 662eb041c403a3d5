"""The corpus stage: reads sources and writes clean, deduplicated, decontaminated documents, split into train and validation."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import pyarrow as pa
from rich.console import RenderableType

from lmworks.corpus.contamination import Question
from lmworks.corpus.dedup.advice import advice
from lmworks.corpus.engine.assembling import (
    assemble_report,
    omit_empty_sources,
    remove_partial,
    remove_stale,
    write_manifest,
    write_samples,
)
from lmworks.corpus.engine.dedup_preview import SourceDuplicates, preview_duplicates
from lmworks.corpus.engine.job import Job, hash_referenced_files
from lmworks.corpus.engine.passes.decontamination import EVALUATION, PROTECTED
from lmworks.corpus.engine.passes.reading import missing_facts
from lmworks.corpus.engine.passes.sequence import PASSES
from lmworks.corpus.engine.tables import parquet_writer
from lmworks.corpus.readers import Part, parts, passed_over
from lmworks.corpus.report import Report
from lmworks.errors import Unavailable, UserError, raise_first
from lmworks.files import explain_os_errors, read_json, sha256_file, write_json
from lmworks.masking import mask
from lmworks.progress import bar, console
from lmworks.recipe.schema.corpus import Corpus
from lmworks.recipe.schema.recipe import Recipe


def prepare(
    recipe: Recipe, out: Path, questions: Iterable[Question] = (), folder: Path = Path(), unread: Mapping[str, str] = MappingProxyType({})
) -> Report:
    """Make the corpus of `recipe` in the directory `out`: train/, validation/, decisions/, and the report files.

    `questions` are the evaluation items, which are removed from the training text; `unread` maps evaluation sets that could not be read to
    the reason. `folder` is the folder of the recipe; file names in its steps are relative to it.

    Resumes an interrupted call, repeats tasks whose inputs have changed, and writes the same bytes for any executor (`corpus.executor`,
    `corpus.processes`). Raises UserError for a source that is missing or empty and not `optional`.
    """
    out = Path(out)
    with explain_os_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        remove_partial(out)
        job, missing = plan(recipe, out, questions, folder)
        raise_first(missing_facts(job))
        job.save()
        _mark_lost_outputs(job)
        executor = import_module(f"lmworks.corpus.engine.executors.{recipe.corpus.executor.kind}")
        executor.execute(job, PASSES)
        report = assemble_report(job, missing)
        report.unread, report.advice = dict(unread), list(advice(recipe.corpus))
        report.passed_over = {source.name: said for source in job.sources if (said := passed_over(source))}
        write_samples(job)
        omit_empty_sources(job, report)
        _require_clean(recipe, report)
        remove_stale(job, report, PASSES)
        write_json(out / "report.json", report.as_json())
        write_manifest(job, report)
        if not recipe.corpus.keep_staged:
            shutil.rmtree(job.staging)
            job.save()  # `sample` and `trace` need it
    return report


def preview(recipe: Recipe, out: Path, folder: Path = Path()) -> Iterator[RenderableType]:
    """What `prepare` would do: the parts of each source, the tasks of each pass, and for Slurm its scripts. Writes nothing."""
    from rich.table import Table

    from lmworks.corpus.engine.executors import slurm

    check_sources(recipe.corpus)
    found, missing = _find_parts(recipe.corpus)
    job = Job(recipe, Path(folder), out.resolve(), found, hash_referenced_files(recipe, Path(folder)), "")
    raise_first(missing_facts(job))
    sources = Table("source", "parts", "MB of input", box=None)
    for source in job.sources:
        sources.add_row(source.name, f"{len(found[source.name]):,}", f"{sum(piece.bytes for piece in job.of(source)) / 1e6:,.1f}")
    for name, why in missing.items():
        sources.add_row(name, "missing", why)
    passes = Table("pass", "tasks", box=None)
    for pass_ in PASSES:
        passes.add_row(pass_.name, f"{len(pass_.tasks(job)):,}")
    yield from (sources, "", passes)
    if recipe.corpus.executor.kind == "slurm":
        for pass_ in PASSES:
            if pass_.tasks(job):
                yield f"\n# {job.staging}/slurm/{pass_.name}.sh\n{mask(slurm.batch_script(job, pass_))}"


def find_duplicates(recipe: Recipe, folder: Path = Path()) -> list[SourceDuplicates]:
    """What deduplication would drop, per source. No permanent files are written.

    Runs on this machine, in a directory below $TMPDIR with as much space as the filtered text takes.
    """
    with TemporaryDirectory(prefix="lmworks-duplicates-") as aside, explain_os_errors(Path(aside)):
        return preview_duplicates(plan(recipe, Path(aside), (), folder)[0])


def plan(recipe: Recipe, out: Path, questions: Iterable[Question] = (), folder: Path = Path()) -> tuple[Job, dict[str, str]]:
    """The job, and the optional sources that are not available with the reason. Writes the evaluation texts into the staging folder."""
    check_sources(recipe.corpus)
    _print_warnings(recipe.corpus)
    found, missing = _find_parts(recipe.corpus)
    path = out / "staging" / EVALUATION
    with parquet_writer(path, PROTECTED) as rows:
        left = iter(questions)
        while batch := list(islice(left, 1024)):
            columns = ([one.name for one in batch], [one.text for one in batch], [one.answer for one in batch], [True] * len(batch))
            rows.write_table(pa.table(list(columns), schema=PROTECTED))
    job = Job(recipe, Path(folder), out.resolve(), found, hash_referenced_files(recipe, Path(folder)), sha256_file(path))
    return job, missing


def check_sources(corpus: Corpus) -> None:
    """Raise `UserError` if there are no sources, or two of one name."""
    if not corpus.sources:
        raise UserError("the recipe has no corpus.sources: add one, for example {name: mine, kind: text, path: my-texts/, license: mine}")
    names = [source.name for source in corpus.sources]
    if len(set(names)) < len(names):
        raise UserError(
            f"corpus.sources has two sources called {next(name for name in names if names.count(name) > 1)!r}: give each its own name"
        )


def _print_warnings(corpus: Corpus) -> None:
    for node in corpus.steps:
        for warning in node.warnings(corpus.sources):
            console.print(warning, style="yellow")


def _find_parts(corpus: Corpus) -> tuple[dict[str, list[Part]], dict[str, str]]:
    found: dict[str, list[Part]] = {}
    missing: dict[str, str] = {}
    with bar("find sources", len(corpus.sources)) as progress:
        for source in corpus.sources:
            progress.note(source.name)
            try:
                found[source.name] = parts(source, int(corpus.part_bytes))
            except Unavailable as error:
                if not source.optional:
                    raise UserError(f"{error}; or set optional: true to continue without it") from None
                missing[source.name] = str(error)
            progress.advance()
    if not found:
        raise UserError(f"none of the {len(corpus.sources)} corpus sources is available: {next(iter(missing.values()))}")
    return found, missing


def _mark_lost_outputs(job: Job) -> None:
    """Remove the marker of a written part when one of its files is missing, so that it is written again."""
    for piece in job.pieces:
        marker, counts = (job.path("write", piece, ending) for ending in (".json", ".counts.json"))
        if marker.exists() and not (counts.exists() and all((job.out / name).exists() for name in read_json(counts)["files"])):
            marker.unlink()


def _require_clean(recipe: Recipe, report: Report) -> None:
    node = recipe.corpus.decontaminate
    if node and node.action == "fail" and report.contamination:
        first = report.contamination[0]
        raise UserError(
            f"{len(report.contamination)} training documents contain protected text, the first {first['id']} that of {first['against']}; "
            "see rejected.jsonl, remove them from their sources, or set corpus.decontaminate.action to drop"
        )
