"""The corpus stage: sources in, clean, deduplicated, decontaminated documents out, split into train and validation.

Pass 1 reads and judges each source and writes survivors aside (`staging`). Between the passes only hashes are compared: exact
duplicates, near duplicates, held-out choice. Pass 2 looks at the training text for what is held out. Pass 3 writes. Memory grows with
the number of documents, not text.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lmworks.corpus.contamination import Gate, Match
from lmworks.corpus.drawing import hold_out
from lmworks.corpus.items import EXCERPT, Reading, Unavailable
from lmworks.corpus.minhash import duplicates
from lmworks.corpus.readers import reading
from lmworks.corpus.report import Report, Samples, SourceReport
from lmworks.corpus.staging import SCHEMA, Staged, Stager, writing
from lmworks.corpus.steps import Context, make
from lmworks.corpus.units import units
from lmworks.documents import part_path
from lmworks.errors import UserError
from lmworks.files import explain_os_errors, write_json
from lmworks.progress import bar
from lmworks.recipe.corpus import Corpus, Source
from lmworks.recipe.recipe import Recipe

_MOST_PASSAGES = 1000
_MOST_BOILERPLATE = 50


def prepare(recipe: Recipe, out: Path, evaluation_texts: Iterable[str] = (), folder: Path = Path()) -> Report:
    """Make the corpus of `recipe` in the directory `out` (train/, validation/, report.json, rejected.jsonl, quarantine.jsonl).

    `folder` is where the recipe lies; files that its steps name are relative to it.

    Starts clean whatever is there, and gives the same bytes each time. Raises UserError for a source that is missing or empty and not
    `optional`.
    """
    corpus = recipe.corpus
    if not corpus.sources:
        raise UserError("the recipe has no corpus.sources: add one, for example {name: mine, kind: text, path: my-texts/, licence: mine}")
    names = [source.name for source in corpus.sources]
    if len(set(names)) < len(names):
        raise UserError(
            f"corpus.sources has two sources called {next(name for name in names if names.count(name) > 1)!r}: give each its own name"
        )
    report, quarantine, rejected = Report(), Samples(), Samples()
    with explain_os_errors(out):
        for old in ("train", "validation", "staging"):
            shutil.rmtree(out / old, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
        try:
            readings = _find(corpus, report)
            staged = _stage(recipe, readings, folder, out / "staging", report, quarantine, rejected)
            plan = _Plan.make(recipe, staged)
            matches = _decontaminate(corpus, staged, plan, evaluation_texts, report)
            _write(staged, plan, matches, out, report, rejected)
        finally:
            quarantine.write(out / "quarantine.jsonl")
            rejected.write(out / "rejected.jsonl")
            shutil.rmtree(out / "staging", ignore_errors=True)
        write_json(out / "report.json", report.as_json())
    return report


def _find(corpus: Corpus, report: Report) -> list[tuple[Source, Reading]]:
    found = []
    with bar("find sources", len(corpus.sources)) as progress:
        for source in corpus.sources:
            progress.note(source.name)
            try:
                found.append((source, reading(source, int(corpus.max_document))))
            except Unavailable as error:
                if not source.optional:
                    raise UserError(f"{error}; or set optional: true to go on without it") from None
                report.missing[source.name] = str(error)
            progress.advance()
    if not found:
        raise UserError(f"none of the {len(corpus.sources)} corpus sources can be had: {next(iter(report.missing.values()))}")
    return found


def _stage(
    recipe: Recipe,
    readings: list[tuple[Source, Reading]],
    folder: Path,
    staging: Path,
    report: Report,
    quarantine: Samples,
    rejected: Samples,
) -> list[Staged]:
    totals = [one.total for _, one in readings]
    whole = None if None in totals else sum(total for total in totals if total is not None)
    staged = []
    with bar("read and filter", whole) as progress:
        for source, one in readings:
            progress.note(source.name)
            counts = SourceReport.of(source)
            steps = [make(node, Context(source, recipe.seed, folder)) for node in recipe.corpus.steps]
            path = staging / f"{source.name}.parquet"
            result = Stager(source, steps, recipe.corpus, recipe.seed, path, counts, quarantine, rejected).run(one, progress)
            if result.ids:
                report.sources.append(counts)
                staged.append(result)
                continue
            why = _emptiness(counts)
            if not source.optional:
                raise UserError(f"source {source.name}: {why}")
            report.missing[source.name] = why
    if not staged:
        raise UserError("no corpus source has a usable document; see quarantine.jsonl and rejected.jsonl in the corpus directory")
    return staged


def _emptiness(counts: SourceReport) -> str:
    lost = {**counts.quarantined, **counts.dropped}
    if not lost:
        return "is empty: it has no documents; check its path, include and layout"
    reasons = ", ".join(f"{reason} {count.documents}" for reason, count in lost.items())
    where = "quarantine.jsonl" if not counts.dropped else "rejected.jsonl"
    return (
        f"none of its {counts.came.documents} documents is usable ({reasons}); see {where} in the corpus directory, or choose other rules"
    )


@dataclass(frozen=True)
class _Plan:
    """Per source: why each document is dropped (None if it is not), of which it is a copy, and which are held out."""

    reasons: list[list[str | None]]
    copies_of: list[list[str | None]]
    held_out: list[np.ndarray]

    @classmethod
    def make(cls, recipe: Recipe, staged: list[Staged]) -> _Plan:
        corpus = recipe.corpus
        ids = [identity for one in staged for identity in one.ids]
        reasons: list[str | None] = [None] * len(ids)
        copies: list[str | None] = [None] * len(ids)
        if corpus.dedup.exact:
            digests = np.concatenate([one.digests for one in staged])
            _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
            for document in np.flatnonzero(first[inverse] != np.arange(len(ids))).tolist():
                reasons[document], copies[document] = "duplicate", ids[first[inverse[document]]]
        if corpus.dedup.minhash:
            alive = np.array([document for document, reason in enumerate(reasons) if reason is None])
            parts = [one.signatures for one in staged if one.signatures is not None]
            originals = duplicates(np.concatenate(parts)[alive], corpus.dedup.minhash.bands or 32, corpus.dedup.minhash.threshold)
            for place in np.flatnonzero(originals != np.arange(len(alive))).tolist():
                reasons[alive[place]], copies[alive[place]] = "near_duplicate", ids[alive[originals[place]]]
        plan = cls([], [], [])
        start = 0
        for one in staged:
            span = slice(start, start := start + len(one.ids))
            free = [place for place, reason in enumerate(reasons[span]) if reason is None]
            held = np.zeros(len(one.ids), dtype=bool)
            held[free] = hold_out(
                [one.ids[place] for place in free], one.sizes[free], recipe.seed, corpus.validation_fraction, int(corpus.validation_bytes)
            )
            plan.reasons.append(reasons[span])
            plan.copies_of.append(copies[span])
            plan.held_out.append(held)
        return plan


def _texts(one: Staged) -> Iterator[tuple[int, list[str]]]:
    """As `_row_groups`, the texts only."""
    for start, rows in _row_groups(one):
        yield start, rows.column("text").to_pylist()


def _decontaminate(
    corpus: Corpus, staged: list[Staged], plan: _Plan, evaluation_texts: Iterable[str], report: Report
) -> list[dict[int, Match]]:
    """Per source the training documents to drop, by their number in it."""
    if not corpus.decontaminate:
        return [{} for _ in staged]
    gate = Gate(corpus.decontaminate.ngram)
    for one, held in zip(staged, plan.held_out, strict=True):
        for start, texts in _texts(one):
            chosen = [place for place in range(len(texts)) if held[start + place]]
            gate.protect([one.ids[start + place] for place in chosen], [texts[place] for place in chosen], evaluation=False)
    batch: list[str] = []
    count = 0
    for text in evaluation_texts:
        batch.append(text)
        if len(batch) == 1024:
            gate.protect([f"evaluation/{count + place}" for place in range(len(batch))], batch, evaluation=True)
            count, batch = count + len(batch), []
    gate.protect([f"evaluation/{count + place}" for place in range(len(batch))], batch, evaluation=True)
    report.protected_texts, report.trivial_evaluation_texts = len(gate.names), gate.trivial
    numbers: list[tuple[int, int]] = []
    with bar("decontaminate", sum(int(one.sizes.sum()) for one in staged)) as progress:
        for index, one in enumerate(staged):
            progress.note(one.source.name)
            for start, texts in _texts(one):
                places = [
                    place
                    for place in range(len(texts))
                    if plan.reasons[index][start + place] is None and not plan.held_out[index][start + place]
                ]
                gate.scan(units([texts[place] for place in places]))
                numbers += [(index, start + place) for place in places]
                progress.advance(int(one.sizes[start : start + len(texts)].sum()))
    found: list[dict[int, Match]] = [{} for _ in staged]
    suspects = {numbers[number]: number for number in gate.suspects()}
    for (index, document), text in _chosen_texts(staged, set(suspects)):
        if match := gate.judge(suspects[index, document], units([text])):
            found[index][document] = match
    common = gate.boilerplate(_MOST_BOILERPLATE)
    examples = dict(_chosen_texts(staged, {numbers[run.example.document] for run in common}))
    for run in common:
        passage = examples[numbers[run.example.document]][run.example.start : run.example.end]
        report.boilerplate.append({"documents": run.documents, "against": run.example.against, "passage": passage})
    return found


def _chosen_texts(staged: list[Staged], wanted: set[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], str]]:
    """((source, document), text) of those wanted."""
    for index in sorted({index for index, _ in wanted}):
        for start, texts in _texts(staged[index]):
            yield from (((index, start + place), text) for place, text in enumerate(texts) if (index, start + place) in wanted)


def _write(staged: list[Staged], plan: _Plan, matches: list[dict[int, Match]], out: Path, report: Report, rejected: Samples) -> None:
    with bar("write corpus", sum(int(one.sizes.sum()) for one in staged)) as progress:
        for index, one in enumerate(staged):
            progress.note(one.source.name)
            paths = [part_path(out, split, one.source.name, 0) for split in ("train", "validation")]
            with writing(paths[0]) as train, writing(paths[1]) as validation:
                for start, rows in _row_groups(one):
                    learnt, held = _sort_out(index, start, rows, plan, matches[index], report, rejected)
                    _append(train, rows, learnt)
                    _append(validation, rows, held)
                    progress.advance(int(one.sizes[start : start + rows.num_rows].sum()))
            counts = report.sources[index]
            if not counts.validation.documents:
                paths[1].unlink()
            if not counts.train.documents:
                raise UserError(
                    f"source {one.source.name}: nothing is left to train on of its {counts.came.documents} documents; see rejected.jsonl"
                )


def _row_groups(one: Staged) -> Iterator[tuple[int, pa.Table]]:
    """(number of the first document, documents) of a staged source, a row group at a time."""
    start = 0
    file = pq.ParquetFile(one.path)
    for group in range(file.num_row_groups):
        rows = file.read_row_group(group)
        yield start, rows
        start += rows.num_rows


def _sort_out(
    index: int, start: int, rows: pa.Table, plan: _Plan, matches: dict[int, Match], report: Report, rejected: Samples
) -> tuple[list[int], list[int]]:
    """Which rows go to train and which to validation; the others are counted and, some of them, shown."""
    counts = report.sources[index]
    learnt: list[int] = []
    held: list[int] = []
    for place, (identity, text, origin) in enumerate(
        zip(*(rows.column(name).to_pylist() for name in ("id", "text", "origin")), strict=True)
    ):
        size = len(text.encode())
        reason, match = plan.reasons[index][start + place], matches.get(start + place)
        if reason is not None:
            counts.drop(reason, size)
            rejected.add(counts.name, reason, identity, origin, text, copy_of=plan.copies_of[index][start + place])
        elif match is not None:
            passage = text[match.start : match.end][:EXCERPT]
            counts.drop("contaminated", size)
            rejected.add(counts.name, "contaminated", identity, origin, text, against=match.against, passage=passage)
            if len(report.contamination) < _MOST_PASSAGES:
                report.contamination.append({"id": identity, "against": match.against, "passage": passage})
        elif plan.held_out[index][start + place]:
            counts.validation.add(size)
            held.append(place)
        else:
            counts.train.add(size)
            learnt.append(place)
    return learnt, held


def _append(out: pq.ParquetWriter, rows: pa.Table, places: list[int]) -> None:
    if places:
        out.write_table(rows.take(places).cast(SCHEMA))
