"""Adds up the counts of all parts into the report, and removes files that do not belong to the job."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lmworks.corpus.engine.decisions import row_groups
from lmworks.corpus.engine.decontamination_pass import enabled
from lmworks.corpus.engine.job import Job, Pass
from lmworks.corpus.engine.step_runner import ContaminatedItems, Samples
from lmworks.corpus.engine.writing_pass import MOST_PASSAGES, decisions_path, outputs
from lmworks.corpus.histogram import Histogram
from lmworks.corpus.read.part import printable
from lmworks.corpus.report import Report, SourceReport
from lmworks.errors import UserError
from lmworks.io.files import read_json, write_json, write_text
from lmworks.io.masking import mask
from lmworks.recipe.schema.corpus import Source

_ADVICE = {
    "null_text": "set text_key to the column that holds the text; quarantine.jsonl in the corpus directory has the first rows",
    "enormous": "by default each file is one document of at most corpus.max_document_bytes bytes: raise that limit, "
    "or set document_format: lines",
    **dict.fromkeys(
        ("too_many_words", "gopher_too_many_words"),
        "by default each file is one document, and the rules of prose drop more than 100,000 words, such as a book: set rules: other "
        "for this source to keep it whole, or document_format: lines to make each line a document",
    ),
}
_LINES = {"quarantine": "quarantine.jsonl", "rejected": "rejected.jsonl"}


def write_samples(job: Job, passes: tuple[str, ...] = ("read", "write")) -> None:
    """Write quarantine.jsonl and rejected.jsonl: the first few documents per reason, in order."""
    for kind, name in _LINES.items():
        samples = Samples()
        for pass_ in passes:
            for piece in job.pieces:
                samples.merge(read_json(job.path(pass_, piece, ".counts.json")).get(kind, ()))
        write_text(job.out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples.rows))


def require_documents(job: Job) -> None:
    """Raise UserError if a source that is not optional, or the whole corpus, has no usable document."""
    empty = _empty_sources(job)
    needed = [source for source in job.sources if source.name in empty and not source.optional]
    if needed or len(empty) == len(job.sources):
        write_samples(job, ("read",))
    if needed:
        raise UserError(f"source {_placed(needed[0])}: {empty[needed[0].name]}")
    if len(empty) == len(job.sources):
        raise UserError("no corpus source has a usable document; see quarantine.jsonl and rejected.jsonl in the corpus directory")


def _empty_sources(job: Job) -> dict[str, str]:
    """The sources without a usable document, each with the reason."""
    found = {}
    for report in _reports_after_reading(job):
        lost = {**report.quarantined, **report.dropped}
        came = report.came.documents + sum(step.added.documents for step in report.steps)
        if sum(one.documents for one in lost.values()) + report.not_drawn.documents < came:
            continue
        if not lost:
            found[report.name] = "has no documents; check its path, include and document_format"
            continue
        reasons = ", ".join(f"{reason} {one.documents}" for reason, one in lost.items())
        most = max(lost, key=lambda reason: lost[reason].documents)
        where = f"see {'rejected' if report.dropped else 'quarantine'}.jsonl in the corpus directory"
        where += ", or choose other rules" if report.dropped else ""
        where = _first_damage(job, report.name) if most == "damaged_file" else _ADVICE.get(most, where)
        if outside := [file.path for part in job.parts[report.name] for file in part.files if file.leads_out]:
            where = f"{printable(outside[0])} is a link to {printable(os.path.realpath(outside[0]))}, outside of the path of the source: "
            where += "name the target as a source, or copy it there"
        found[report.name] = f"none of its {report.came.documents} documents is usable ({reasons}); {where}"
    return found


def _first_damage(job: Job, source: str) -> str:
    """The first file of a source that is damaged or no file of its kind, and why. Samples of other reasons are text of the user."""
    counts = (read_json(job.path("read", piece, ".counts.json")) for piece in job.pieces if piece.source.name == source)
    rows = (row for one in counts for row in one["quarantine"] if row["reason"] == "damaged_file")
    return next(mask(f"{row['origin']}: {row['text']}") for row in rows)


def _reports_after_reading(job: Job) -> Iterator[SourceReport]:
    """The counts of the pass `read`, per source."""
    for source in job.sources:
        report = SourceReport.of(source, len(job.parts[source.name]))
        for piece in job.of(source):
            report.add_read(read_json(job.path("read", piece, ".counts.json")))
        yield report


def assemble_report(job: Job, missing: dict[str, str]) -> Report:
    """The report of a finished job. `missing` maps sources that are not available to the reason."""
    report = Report(missing={**missing, **_empty_sources(job)})
    measured: dict[str, dict[str, Histogram]] = {}
    touched: dict[str, ContaminatedItems] = {}
    for source_report, source in zip(_reports_after_reading(job), job.sources, strict=True):
        if source.name in report.missing:
            continue
        for piece in job.of(source):
            counts = read_json(job.path("write", piece, ".counts.json"))
            source_report.add_written(counts)
            report.contamination += counts["contamination"][: MOST_PASSAGES - len(report.contamination)]
            _measure(measured, source, counts["statistics"])
            for name, one in counts["touched"].items():
                touched.setdefault(name, ContaminatedItems()).add(one["documents"], one["items"])
        report.sources.append(source_report)
    report.statistics = {name: {split: one.as_json() for split, one in kinds.items()} for name, kinds in sorted(measured.items())}
    report.bytes_per_document = read_json(job.path("resolve_duplicates", "all", ".found.json"))["bytes_per_document"]
    if enabled(job):
        found = read_json(job.path("common_ngrams", "all", ".found.json"))
        report.widespread, report.exempt, report.shared = found["widespread"], found["exempt"], found["shared"]
        for name in sorted({*found["protected"], *found["trivial"]}):
            one = touched.get(name, ContaminatedItems())
            report.protected[name] = {
                "items": found["protected"].get(name, 0),
                "trivial": found["trivial"].get(name, 0),
                "found": len(one.items),
                "documents": one.documents,
            }
    return report


def _measure(measured: dict[str, dict[str, Histogram]], source: Source, statistics: dict[str, Any]) -> None:
    for name, kinds in statistics.items():
        for kind, value in kinds.items():
            measured.setdefault(f"{source.name}/{name}", {}).setdefault(kind, Histogram()).merge(Histogram.from_json(value))


def write_manifest(job: Job, report: Report) -> None:
    """Write manifest.json: each file of train/ and validation/ with its hash."""
    pieces = [piece for piece in job.pieces if piece.source.name not in report.missing]
    files = [read_json(job.path("write", piece, ".counts.json"))["files"] for piece in pieces]
    write_json(job.out / "manifest.json", {"files": {name: found[name] for found in files for name in sorted(found)}})


def omit_empty_sources(job: Job, report: Report) -> None:
    """Record optional sources without training documents as missing. Raise UserError for a source that is not optional."""
    sources = {source.name: source for source in job.sources}
    came = {one.name: one.came.documents for one in report.sources if not one.train.documents}
    empty = {}
    for name, documents in came.items():
        fates, copied = _fates(job, sources[name])
        gone = ", ".join(f"{what} {count:,}" for what, count in fates.most_common())
        empty[name] = f"none of its {documents:,} documents is left to train on ({gone}{_whose(copied)})"
        if not sources[name].optional:
            raise UserError(f"source {_placed(sources[name])}: {empty[name]}; {_remedy(job, name, copied)}")
    report.missing |= empty
    report.sources = [source for source in report.sources if source.name not in empty]
    if not report.sources:
        raise UserError("no corpus source has documents left to train on; see rejected.jsonl in the corpus directory")


def _fates(job: Job, source: Source) -> tuple[Counter[str], Counter[str]]:
    """How often each reason removed a document of a source, and how many were copies of documents of which source."""
    fates, copied = Counter[str](), Counter[str]()
    for piece in job.of(source):
        for _, rows in row_groups(decisions_path(job, piece), ["fate", "reason", "copy_of"]):
            for fate, reason, original in zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True):
                fates["held out" if fate == "validation" else (reason or fate).replace("_", " ")] += 1
                if original:
                    copied[original.partition("/")[0]] += 1
    return fates, copied


def _whose(copied: Counter[str]) -> str:
    return "; copies of documents in " + ", ".join(f"{name} {count:,}" for name, count in copied.most_common()) if copied else ""


def _placed(source: Source) -> str:
    return f"{source.name} ({mask(source.path)})" if source.path else source.name


def _remedy(job: Job, name: str, copied: Counter[str]) -> str:
    keep = f"set corpus.dedup.priority: [{name}] to keep its copies instead of those, " if set(copied) - {name} else ""
    return f"{keep}set optional: true to continue without it, or see {job.out / 'rejected.jsonl'}"


def remove_stale(job: Job, report: Report, passes: Sequence[Pass]) -> None:
    """Remove files of parts, sources and buckets that the job does not have, and of sources recorded as missing."""
    pieces = [piece for piece in job.pieces if piece.source.name not in report.missing]
    expected = {path for piece in pieces for path in (*outputs(job, piece), decisions_path(job, piece))}
    for folder in ("train", "validation", "decisions"):
        _remove_unexpected(job.out / folder, expected)
    names = {str(piece) for piece in job.pieces}
    for pass_ in passes:
        for path in list((job.staging / pass_.name).glob("*/*")):  # SOURCE/PART.*: files of tasks that work on a part
            if f"{path.parent.name}/{path.name.partition('.')[0]}" not in names:
                path.unlink()


def _remove_unexpected(folder: Path, expected: set[Path]) -> None:
    for path in list(folder.rglob("*")):
        if path.is_file() and path not in expected:
            path.unlink()
    for path in sorted(folder.glob("*"), reverse=True):
        if path.is_dir() and not any(path.iterdir()):
            shutil.rmtree(path)


def remove_partial(out: Path) -> None:
    """Remove files that were left half-written by killed processes."""
    for path in list(out.rglob(".*.part")):
        path.unlink(missing_ok=True)
