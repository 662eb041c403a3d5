"""The corpus stage: reads sources and writes clean, deduplicated, decontaminated documents, split into train and validation.

Checks of the sources and the steps of a recipe before anything is read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import pyarrow as pa
from rich.console import RenderableType

from lmworks.corpus.contamination import Question
from lmworks.corpus.dedup.substring import advice
from lmworks.corpus.engine.assembling import (
    assemble_report,
    omit_empty_sources,
    remove_partial,
    remove_stale,
    write_manifest,
    write_samples,
)
from lmworks.corpus.engine.decisions import parquet_writer
from lmworks.corpus.engine.decontamination_pass import EVALUATION, PROTECTED
from lmworks.corpus.engine.dedup_preview import SourceDuplicates, preview_duplicates
from lmworks.corpus.engine.job import Job, hash_referenced_files
from lmworks.corpus.engine.passes import PASSES
from lmworks.corpus.engine.reading_pass import missing_facts
from lmworks.corpus.read import ELSEWHERE, Part, parts, passed_over
from lmworks.corpus.report import Report
from lmworks.corpus.transform.filter_steps import rules_warnings
from lmworks.corpus.transform.rule_table import rules_for
from lmworks.errors import Unavailable, UserError, all_refusals, raise_first
from lmworks.io.files import explain_os_errors, read_json, sha256_file, write_json
from lmworks.io.masking import mask
from lmworks.recipe.schema.corpus import Corpus
from lmworks.recipe.schema.recipe import Recipe
from lmworks.recipe.schema.steps import Rules
from lmworks.ui.terminal import bar, console


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
        executor = import_module(f"lmworks.corpus.engine.{recipe.corpus.executor.kind}_executor")
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

    from lmworks.corpus.engine import slurm_executor

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
                yield f"\n# {job.staging}/slurm/{pass_.name}.sh\n{mask(slurm_executor.batch_script(job, pass_))}"


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
    for rules in corpus.steps:
        for warning in rules_warnings(rules, corpus.sources) if isinstance(rules, Rules) else ():
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


_WHOLE = 1 << 62


def refusals(recipe: Recipe, folder: Path) -> Iterator[UserError]:
    """Everything for which the corpus stage could not begin: sources that are not here, rules, facts and files that the steps need,
    packages, and the executor. `folder` is that of the recipe. Wheels and datasets are not downloaded."""
    from lmworks.corpus.dedup.semantic import embedding
    from lmworks.corpus.engine.job import Job
    from lmworks.corpus.engine.reading_pass import missing_facts

    corpus = recipe.corpus
    if not corpus.sources and not recipe.trains_base:
        return
    yield from all_refusals([partial(check_sources, corpus)])
    yield from map(UserError, faults(recipe))
    yield from missing_facts(Job(recipe, folder, folder, {source.name: () for source in corpus.sources}, {}, ""))
    if corpus.dedup.semantic is not None:
        yield from all_refusals([partial(embedding, corpus.dedup.semantic, folder)])
    if corpus.executor.kind == "slurm" and shutil.which("sbatch") is None:
        yield UserError("corpus.executor kind slurm needs sbatch, which is not on this machine; run this on a login node")


def left_out(recipe: Recipe) -> Iterator[str]:
    """One line per source of which a folder has files that are not read. Of sources that are here."""
    for source in recipe.corpus.sources:
        if source.kind not in ELSEWHERE:
            with suppress(UserError, OSError):
                if said := passed_over(source):
                    yield f"source {source.name}: {said}"


def faults(recipe: Recipe) -> Iterator[str]:
    """One line per fault. A recipe for another machine may name files that do not exist on this one."""
    for source in recipe.corpus.sources:
        try:
            rules_for(source.rules, source.domain, source.language)
        except UserError as error:
            yield f"source {source.name}: {error}"
    read = [source for source in recipe.corpus.sources if source.kind not in ELSEWHERE]
    for source in (*read, *(own.source for own in recipe.evaluate.protect)):
        try:
            parts(source, _WHOLE)
        except Unavailable as error:
            if not getattr(source, "optional", False):
                yield f"{error}; or set optional: true to continue without it"
        except UserError as error:
            yield str(error)
