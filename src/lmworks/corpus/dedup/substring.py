"""Passages that occur more than once, within a document and across documents (Lee et al. 2022, arXiv:2107.06499).

A run of `length` units (words, or characters in languages without spaces) that occurred earlier is cut. The result equals that of comparing
all runs with all others, without holding them in memory. First, each text yields a few anchors, chosen by winnowing (Schleimer, Wilkerson
and Aiken 2003): the k-gram with the smallest hash in every run of `length` units, so that equal runs have an equal anchor. Runs are then
compared only near anchors that occur more than once.

Advice on deduplication settings: what they find, and which settings suit the kinds of text in the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lmworks.corpus.units import Units, ngrams
from lmworks.recipe.schema.corpus import Corpus, Minhash

_NONE = np.uint64(0xFFFFFFFFFFFFFFFF)


def anchors(batch: Units, length: int) -> np.ndarray:
    """(A, 3) int64 rows of (document, first unit of the anchor, its hash), in order."""
    k = length // 2
    grams = ngrams(batch.hashes, k)
    documents = np.repeat(np.arange(batch.documents), np.diff(batch.bounds))[: len(grams)]
    ends = batch.bounds[documents + 1]
    places = np.arange(len(grams))
    grams = np.where(places + k <= ends, grams, _NONE)  # spans two documents
    window = length - k + 1
    least = _sliding(grams, window, np.minimum)
    least = np.where(places[: len(least)] + length <= ends[: len(least)], least, np.uint64(0))  # no run of `length` units begins here
    padded = np.concatenate((np.zeros(window - 1, np.uint64), least, np.zeros(window - 1, np.uint64)))
    chosen = np.flatnonzero((_sliding(padded, window, np.maximum)[: len(grams)] == grams) & (grams != _NONE))
    rows = np.empty((len(chosen), 3), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = documents[chosen], chosen - batch.bounds[documents[chosen]], grams[chosen].view(np.int64)
    return rows


def _sliding(values: np.ndarray, window: int, of: np.ufunc) -> np.ndarray:
    """(N - window + 1,) minimum or maximum of each `window` successive values, by doubling."""
    width = 1
    while width < window:
        step = min(width, window - width)
        values = of(values[: max(len(values) - step, 0)], values[step:])
        width += step
    return values


def repeated_values(hashes: np.ndarray) -> np.ndarray:
    """The values that occur more than once, ascending, without repeats."""
    ranked = np.sort(hashes)
    same = ranked[1:] == ranked[:-1]
    again = ranked[1:][same]
    return again[np.concatenate((np.ones(min(len(again), 1), dtype=bool), again[1:] != again[:-1]))]


def candidate_runs(batch: Units, length: int, common: np.ndarray) -> np.ndarray:
    """(R, 3) int64 rows of (document, first unit, hash) of all runs that contain one of the anchors in `common`, in order."""
    found = anchors(batch, length)
    places = np.minimum(np.searchsorted(common, found[:, 2]), max(len(common) - 1, 0))
    found = found[common[places] == found[:, 2]] if len(common) else found[:0]
    k = length // 2
    grams = ngrams(batch.hashes, length)
    edges = np.zeros(len(batch.hashes) + 1, dtype=np.int64)
    begin = batch.bounds[found[:, 0]] + found[:, 1]
    np.add.at(edges, np.maximum(begin - (length - k), batch.bounds[found[:, 0]]), 1)
    np.add.at(edges, begin + 1, -1)
    chosen = np.flatnonzero(np.cumsum(edges)[: len(grams)] > 0)
    documents = np.searchsorted(batch.bounds, chosen, side="right") - 1
    inside = chosen + length <= batch.bounds[documents + 1]
    chosen, documents = chosen[inside], documents[inside]
    rows = np.empty((len(chosen), 3), dtype=np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = documents, chosen - batch.bounds[documents], grams[chosen].view(np.int64)
    return rows


def occurred_earlier(hashes: np.ndarray) -> np.ndarray:
    """(R,) bool: the runs, given in the order of priority, that occurred earlier."""
    order = np.argsort(hashes, kind="stable")
    again = np.zeros(len(hashes), dtype=bool)
    again[order[1:]] = hashes[order[1:]] == hashes[order[:-1]]
    return again


def repeats_within(batch: Units, document: int, length: int) -> np.ndarray:
    """The units of one document where a run begins that occurred earlier in the document."""
    hashes = batch.hashes_of(document)
    return np.flatnonzero(occurred_earlier(ngrams(hashes, length))) if len(hashes) > length else np.zeros(0, dtype=np.int64)


def cut_runs(text: str, starts: np.ndarray, places: Sequence[int] | np.ndarray, length: int) -> tuple[str, float]:
    """(the text without the runs of `length` units that begin at `places`, fraction of its units that is left).

    `starts` are the code points where its units begin. Text between the last unit of a passage and the next unit is cut too, except for a
    line end.
    """
    gone = np.zeros(len(starts) + 1, dtype=np.int64)
    np.add.at(gone, np.asarray(places), 1)
    np.add.at(gone, np.asarray(places) + length, -1)
    out = np.cumsum(gone)[:-1] > 0
    edges = np.flatnonzero(np.diff(np.concatenate(([False], out, [False])).astype(np.int8)))
    kept, at = [], 0
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        begin, end = int(starts[first]), int(starts[last]) if last < len(starts) else len(text)
        before = text[at:begin]
        kept.append(before)
        if "\n" in text[begin:end] and before and not before.endswith("\n"):
            kept.append("\n")
        at = end
    kept.append(text[at:])
    return "".join(kept).strip("\n"), 1 - out.mean() if len(out) else 1.0


def changed_words(node: Minhash) -> int:
    """The number of words of which one may differ in a long copy that is still found: (1 - 1/words)^n of its n-grams are unchanged."""
    same = 2 * node.threshold / (1 + node.threshold)
    return round(1 / (1 - same ** (1 / node.ngram_words)))


def advice(corpus: Corpus) -> Iterator[str]:
    """Lines that say what is found, and for which sources other settings are usual."""
    dedup = corpus.dedup
    if dedup.minhash:
        found = f"near-duplicates: copies in which up to one word in {changed_words(dedup.minhash)} differs (threshold "
        yield found + f"{dedup.minhash.threshold:g}) are dropped, others are kept; docs/quality.md lists thresholds by kind of text"
    web = [source.name for source in corpus.sources if source.domain == "web"]
    if web and dedup.minhash and dedup.minhash.threshold > 0.7:
        yield f"{', '.join(web)}: web pages are copied with more changes; dedup.minhash.threshold: 0.6 is usual"
    if web and not dedup.substring:
        yield f"{', '.join(web)}: passages that pages share are kept; dedup.substring: {{}} cuts them"
    code = [source.name for source in corpus.sources if source.domain == "code" and source.dedup.threshold is None]
    if code and dedup.minhash and dedup.minhash.threshold < 0.7:
        yield f"{', '.join(code)}: files of one project are similar without being copies; set dedup: {{threshold: 0.85}} on the source"
