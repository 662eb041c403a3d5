"""`lmworks corpus analyze`: statistics of a corpus before and after processing, per source, domain and language.

Documents, bytes, languages, lengths and duplicates are counted over all documents, from the decisions. Words, tokens and perplexity need
texts, including those of dropped documents, which are read again from the sources. They are measured on some parts of each source.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.analysis.measuring import CountTokens, Tally, measure_part, reference_model, unpack_id
from lmworks.corpus.analysis.prepared import PreparedCorpus
from lmworks.corpus.engine.job import Piece
from lmworks.corpus.engine.step_runner import Count
from lmworks.corpus.histogram import Histogram
from lmworks.host.pool import map_unordered
from lmworks.io import jsonl
from lmworks.ui.terminal import bar

_MIN_BYTES_PER_PROCESS = 8_000_000  # bytes of input
_MOST_COPIED = 20
_EXAMPLES, _EXAMPLE_LENGTH = 3, 280  # dropped documents shown per reason, and characters of each


def analyze(out: Path, count_tokens: CountTokens | None = None, most_parts: int = 4, processes: int = 1) -> dict[str, Any]:
    """Statistics of the corpus in `out`, as JSON: `whole`, `sources`, `domains`, `statistics`, `copied`, `examples`, `reference_model`,
    `missing`, `unread`.

    Texts are read from at most `most_parts` parts of each source, evenly spaced. Memory: one batch of texts per process, and 8 bytes per
    duplicate. Raises UserError if the corpus is not finished.
    """
    corpus = PreparedCorpus(out)
    chosen = {str(piece) for source in corpus.job.sources for piece in _evenly_spaced_parts(corpus, source.name, most_parts)}
    sizes = {str(piece): piece.bytes if str(piece) in chosen else 0 for piece in corpus.pieces}
    work = [(corpus.out, piece.source.name, piece.number, str(piece) in chosen, count_tokens) for piece in corpus.pieces]
    workers = min(processes, sum(sizes.values()) // _MIN_BYTES_PER_PROCESS + 1)
    tallies = {source.name: Tally() for source in corpus.job.sources}
    unread: dict[str, str] = {}
    with bar("analyze", sum(sizes.values()) or None) as progress:
        began, documents = time.monotonic(), 0
        for (_, name, number, *_), (tally, why) in map_unordered(workers, measure_part, work):
            tallies[name].merge(tally)
            if why:
                unread[name] = why
            documents += tally.read.texts.documents
            progress.note(f"{documents / max(time.monotonic() - began, 1e-3):,.0f} documents/s")
            progress.advance(sizes[f"{name}/{number:05d}"])
    return _as_json(corpus, tallies) | {"unread": unread, "tokenizer": count_tokens is not None}


def _evenly_spaced_parts(corpus: PreparedCorpus, name: str, most: int) -> list[Piece]:
    """At most `most` parts of a source, evenly spaced."""
    pieces = [piece for piece in corpus.pieces if piece.source.name == name]
    count = min(most, len(pieces))
    return [pieces[place * len(pieces) // count] for place in range(count)]


def _as_json(corpus: PreparedCorpus, tallies: Mapping[str, Tally]) -> dict[str, Any]:
    for found in corpus.report["sources"]:
        tally = tallies[found["name"]]  # the decisions hold the bytes that were read; the report those that were written
        tally.train.count, tally.validation = Count(**found["train"]), Count(**found["validation"])
    whole, domains = Tally(), {source.domain: Tally() for source in corpus.job.sources}
    for source in corpus.job.sources:
        whole.merge(tallies[source.name])
        domains[source.domain].merge(tallies[source.name])
    about = {source.name: {key: getattr(source, key) for key in ("name", "domain", "language", "license")} for source in corpus.job.sources}
    statistics = {name: _statistics(corpus, name) for name in tallies}
    model = reference_model(corpus.out)
    return {
        "name": corpus.job.recipe.name,
        "whole": whole.as_json(),
        "sources": [{**about[name], **tally.as_json(), "statistics": statistics[name]} for name, tally in tallies.items()],
        "domains": {name: tally.as_json() for name, tally in sorted(domains.items())},
        "statistics": _summed(statistics.values()),
        "copied": _copied(corpus, whole),
        "examples": _examples(corpus.out),
        "reference": {"bytes": model.bytes, "documents": model.documents},
        "missing": corpus.report["missing"],
    }


def _examples(out: Path) -> list[dict[str, str]]:
    """The beginnings of some dropped documents: for each reason the first ones, from different sources where possible."""
    kept: dict[str, list[dict[str, str]]] = {}
    for line in jsonl.read(out / "rejected.jsonl"):
        found = kept.setdefault(str(line.get("reason")), [])
        if len(found) < _EXAMPLES or line.get("source") not in {one["source"] for one in found}:
            text = " ".join(str(line.get("text", ""))[: 2 * _EXAMPLE_LENGTH].split())[:_EXAMPLE_LENGTH]
            one = {"reason": str(line.get("reason")), "source": str(line.get("source")), "id": str(line.get("id")), "text": text}
            same = next((n for n, other in enumerate(found) if [o["source"] for o in found].count(other["source"]) > 1), None)
            if len(found) < _EXAMPLES:
                found.append(one)
            elif same is not None:
                found[same] = one
    return [one for found in kept.values() for one in found]


def _statistics(corpus: PreparedCorpus, name: str) -> dict[str, Any]:
    """The distributions of the facts that the steps measured: over all documents that were read, and over training documents."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): value for key, value in corpus.report["statistics"].items() if key.startswith(prefix)}


def _summed(statistics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The distributions added over all sources."""
    found: dict[str, dict[str, Histogram]] = {}
    for of_source in statistics:
        for fact, sides in of_source.items():
            for side, value in sides.items():
                found.setdefault(fact, {}).setdefault(side, Histogram()).merge(Histogram.from_json(value))
    return {fact: {side: one.as_json() for side, one in sides.items()} for fact, sides in sorted(found.items())}


def _copied(corpus: PreparedCorpus, whole: Tally) -> dict[str, Any]:
    """How many copies documents have, and the documents with the most copies."""
    values, counts = np.unique(np.concatenate([np.zeros(0, np.uint64), *whole.copied]), return_counts=True)
    sizes, documents = np.unique(counts, return_counts=True)
    first = np.lexsort((values, -counts))[:_MOST_COPIED]
    return {
        "documents": len(values),
        "copies": {str(size): documents for size, documents in zip(sizes.tolist(), documents.tolist(), strict=True)},
        "most": [{"id": unpack_id(corpus, int(values[place])), "copies": int(counts[place])} for place in first],
    }
