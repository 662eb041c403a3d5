"""Texts for training a classifier: a random sample of a source or of files, or labeled rows.

Training of a quality classifier: from labeled texts to a calibrated classifier with metrics on a test split.

There are two methods for the weights:

- `logistic`: logistic regression, which weights n-grams by how well they separate the two kinds of documents (DCLM, Li et al. 2024).
- `contrastive`: the log-likelihood ratio of each n-gram between good and bad texts, so that a score is a difference of cross-entropies per
  word (Moore and Lewis 2010; DSIR, Xie et al. 2023). It compares what texts consist of instead of what separates them.

The texts are split into 6 tenths for training, 2 for choosing the regularization strength and for calibration, and 2 for testing. The split
is by a hash of the text, so that equal texts stay together and the same texts give the same classifier.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lmworks.corpus import read
from lmworks.corpus.engine.reading_pass import keys
from lmworks.corpus.read.part import Item
from lmworks.corpus.transform.cleaning import clean, comparison_form
from lmworks.corpus.transform.quality import Classifier, calibrate, grams, measure, require_module
from lmworks.corpus.units import Units, units
from lmworks.errors import UserError
from lmworks.recipe.schema.corpus import Source
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import bar

Method = Literal["logistic", "contrastive"]
CHARACTERS = 20_000  # used of each text, so that a book does not count as much as a thousand pages
FEWEST = 50  # documents of each kind
_BATCH_CHARACTERS = 1 << 19
_PENALTIES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)  # inverse strengths of the L2 penalty, on scaled features
_PRIORS = (0.01, 0.1, 1.0, 10.0)  # pseudo-counts, as a fraction of the n-grams of the smaller side


def train(good: Sequence[str], bad: Sequence[str], method: Method = "logistic", ngram: int = 2, bits: int = 20) -> Classifier:
    """Train a classifier of `good` and `bad` texts, with its metrics in `report`.

    Texts that occur on both sides, and repeats, are left out and counted. `UserError` with fewer than 50 texts of a kind.
    """
    texts, labels, removed = _deduplicate(good, bad)
    part = np.array([hashlib.blake2b(comparison_form(text).encode(), digest_size=8).digest()[0] % 10 for text in texts])
    learn, tune, test = part < 6, (part >= 6) & (part < 8), part >= 8
    if min(int((labels[mine] == kind).sum()) for mine in (learn, tune, test) for kind in (True, False)) < 5:
        raise UserError("too few texts of one kind to train, calibrate and test on; give some hundreds of each")
    with bar("hash n-grams", sum(map(len, texts))) as progress:
        rows = _Rows.of(texts, ngram, bits, progress.advance)
    candidates = _logistic if method == "logistic" else _contrastive
    best: tuple[float, Classifier, float] | None = None
    with bar("train", len(_PENALTIES if method == "logistic" else _PRIORS)) as progress:
        for strength, weights in candidates(rows, labels, learn):
            progress.note(f"strength {strength:g}")
            curve, loss = calibrate(rows.mean(weights)[tune], labels[tune])
            if best is None or loss < best[0]:
                best = loss, Classifier(weights.astype(np.float32), ngram, curve, {}), strength
            progress.advance()
    assert best is not None
    _, found, strength = best
    scores = np.concatenate([found.scores(batch) for batch in _batches([texts[place] for place in np.flatnonzero(test)])])
    report = {
        "method": method,
        "strength": strength,
        "ngram": ngram,
        "bits": bits,
        **removed,
        "learnt_from": {"good": int(labels[learn].sum()), "bad": int((~labels[learn]).sum())},
        "calibrated_on": int(tune.sum()),
        "held_out": measure(scores, labels[test]),
    }
    return replace(found, report=report)


def score_texts(classifier: Classifier, texts: Sequence[str]) -> np.ndarray:
    """The score of each text, (N,) float64."""
    with bar("score", sum(map(len, texts))) as progress:
        found = [np.zeros(0)]
        for batch in _batches(texts, progress.advance):
            found.append(classifier.scores(batch))
    return np.concatenate(found)


def _deduplicate(good: Sequence[str], bad: Sequence[str]) -> tuple[list[str], np.ndarray, dict[str, int]]:
    kinds = [{comparison_form(text): text for text in texts} for texts in (good, bad)]
    both = kinds[0].keys() & kinds[1].keys()
    left = [[text[:CHARACTERS] for form, text in kind.items() if form not in both] for kind in kinds]
    for name, texts in zip(("good", "bad"), left, strict=True):
        if len(texts) < FEWEST:
            raise UserError(f"there are only {len(texts)} different {name} texts; give at least {FEWEST} of each kind, better thousands")
    labels = np.repeat([True, False], [len(left[0]), len(left[1])])
    repeats = len(good) + len(bad) - len(kinds[0]) - len(kinds[1])
    return left[0] + left[1], labels, {"repeats_left_out": repeats, "in_both_left_out": len(both)}


def _batches(texts: Sequence[str], advance: Callable[[float], None] = lambda _: None) -> Iterator[Units]:
    start = 0
    while start < len(texts):
        stop, size = start, 0
        while stop < len(texts) and size < _BATCH_CHARACTERS:
            size += len(texts[stop])
            stop += 1
        yield units(texts[start:stop])
        advance(size)
        start = stop


class _Rows:
    """Documents as sparse rows of n-gram counts per bucket."""

    def __init__(self, counts: Any) -> None:
        self.counts = counts  # (N, 2**bits) scipy CSR, float32
        self.totals = np.maximum(np.asarray(counts.sum(axis=1)).ravel(), 1.0)

    @classmethod
    def of(cls, texts: Sequence[str], ngram: int, bits: int, advance: Callable[[float], None]) -> _Rows:
        sparse = require_module("scipy.sparse")
        blocks = []
        for batch in _batches(texts, advance):
            found = list(grams(batch, ngram, bits))
            buckets, owners = (np.concatenate(columns) for columns in zip(*found, strict=True))
            ones = np.ones(len(buckets), np.float32)
            blocks.append(sparse.csr_array((ones, (owners.astype(np.int32), buckets.astype(np.int32))), shape=(batch.documents, 1 << bits)))
            blocks[-1].sum_duplicates()
        return cls(sparse.vstack(blocks, format="csr"))

    def mean(self, weights: np.ndarray) -> np.ndarray:
        """The mean weight of each document's n-grams, (N,)."""
        return np.asarray(self.counts @ weights) / self.totals


def _logistic(rows: _Rows, labels: np.ndarray, learn: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Features are scaled to equal magnitude first; otherwise only the most frequent words would have an effect under the penalty."""
    linear = require_module("sklearn.linear_model")
    means = rows.counts[learn].multiply(1 / rows.totals[learn, None].astype(np.float32)).tocsr()
    spread = np.sqrt(np.asarray(means.multiply(means).mean(axis=0)).ravel())
    scale = np.divide(1, spread, out=np.zeros_like(spread), where=spread > 0)
    standard = means.multiply(scale[None, :]).tocsr()
    model = linear.LogisticRegression(solver="lbfgs", warm_start=True, max_iter=300, tol=1e-4)
    for strength in _PENALTIES:
        model.set_params(C=strength)
        model.fit(standard, labels[learn])
        yield strength, model.coef_[0] * scale


def _contrastive(rows: _Rows, labels: np.ndarray, learn: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Log-odds with the pooled counts as prior (Monroe et al. 2008): n-grams that are unknown or equally frequent on both sides have weight
    0.
    """
    good = np.asarray(rows.counts[learn & labels].sum(axis=0)).ravel().astype(np.float64)
    bad = np.asarray(rows.counts[learn & ~labels].sum(axis=0)).ravel().astype(np.float64)
    pooled = (good + bad) / (good.sum() + bad.sum())
    known = pooled > 0
    for strength in _PRIORS:
        prior = strength * min(good.sum(), bad.sum())
        weights = np.zeros(len(pooled))
        odds = [np.log((side[known] + prior * pooled[known]) / (side.sum() + prior)) for side in (good, bad)]
        weights[known] = odds[0] - odds[1]
        yield strength, weights


_PART_BYTES = 16_000_000
_MOST_BYTES = 16_000_000
_SPARE = 4  # documents read per document taken, so that the sample is not a single stretch of a file
_YES, _NO = {"true", "yes", "good", "positive", "hq", "1"}, {"false", "no", "bad", "negative", "lq", "0"}


def sample(name: str, most: int, seed: int, recipe: Recipe | None = None, text_key: str = "text") -> list[str]:
    """At most `most` texts of a source of the recipe, or of a file, folder or glob, normalized as by the step `clean`.

    Parts are read in an order keyed by the seed until there are several times as many documents as requested, of which a keyed hash draws
    the sample: the same for the same files, without reading all of a large source. Only the start of long texts is kept.
    """
    source = _source(name, recipe, text_key)
    found = [(key, text) for key, text, _ in _keyed_sample(source, most, seed)]
    return [text for _, text in sorted(found)[:most]]


def labeled(path: str, label_key: str, minimum: float | None, most: int, seed: int, text_key: str = "text") -> tuple[list[str], list[str]]:
    """(good, bad) texts of the rows at `path` (jsonl or parquet), at most `most` in all.

    A label is true or false, a word for it, or a number. Numbers other than 0 and 1 need `minimum`, the smallest good value.
    """
    source = _source(path, None, text_key).model_copy(update={"fact_keys": (label_key,)})
    if source.kind not in ("jsonl", "parquet"):
        raise UserError(f"{path} cannot contain labels; give a .jsonl or .parquet file with the columns {text_key} and {label_key}")
    chosen = sorted(_keyed_sample(source, most, seed), key=lambda one: one[:2])[:most]
    good: list[str] = []
    bad: list[str] = []
    for _, text, item in chosen:
        if label_key not in item.facts:
            raise UserError(f"{item.origin} has no {label_key!r}; name the column of the labels with --label-key")
        (good if _is_good(item.facts[label_key], minimum, item.origin) else bad).append(text)
    return good, bad


def _is_good(label: object, minimum: float | None, origin: str) -> bool:
    if minimum is not None and isinstance(label, int | float):
        return label >= minimum
    word = str(label).strip().lower().removesuffix(".0")
    if word in _YES | _NO:
        return word in _YES
    if isinstance(label, int | float):
        raise UserError(f"{origin} has the score {label:g}; give the smallest good score with --minimum")
    raise UserError(f"{origin} has the label {label!r}; labels are true or false, good or bad, or numbers")


def _source(name: str, recipe: Recipe | None, text_key: str) -> Source:
    for source in recipe.corpus.sources if recipe else ():
        if source.name == name:
            return source
    inner = name.lower().removesuffix(".gz").removesuffix(".zst")
    kind = "jsonl" if inner.endswith((".jsonl", ".ndjson", ".json")) else "parquet" if inner.endswith(".parquet") else "text"
    if Path(name).is_dir():
        held = {path.suffix for path in Path(name).rglob("*") if path.is_file()}
        kind = "parquet" if ".parquet" in held else "jsonl" if {".jsonl", ".ndjson"} & held else "text"
    elif kind == "text" and not any(mark in name for mark in "*?[") and "://" not in name and not Path(name).exists():
        known = ", ".join(source.name for source in recipe.corpus.sources) if recipe else "no recipe was given"
        raise UserError(f"{name} is neither a file, folder or glob nor a source of the recipe ({known})")
    return Source.model_validate({"name": "texts", "kind": kind, "path": name, "text_key": text_key, "license": "not used for training"})


def _keyed_sample(source: Source, most: int, seed: int) -> list[tuple[int, str, Item]]:
    """(key, text, item) of enough documents, by parts in keyed order."""
    parts = read.parts(source, _PART_BYTES)
    order = np.argsort(keys([str(number) for number in range(len(parts))], seed, f"classifier/parts/{source.name}"), kind="stable")
    found: list[tuple[int, str, Item]] = []
    with bar(f"sample {source.name}", min(len(parts), most)) as progress:
        for number in order.tolist():
            items = list(_documents(source, parts[number]))
            drawn = keys([item.origin for item in items], seed, "classifier/documents").tolist()
            found += [(key, clean(item.text[:CHARACTERS]), item) for key, item in zip(drawn, items, strict=True)]
            progress.advance()
            if len(found) >= most * _SPARE:
                break
    return [one for one in found if one[1].strip()]


def _documents(source: Source, part: read.Part) -> Iterator[Item]:
    return (item for item in read.read(source, part, _MOST_BYTES) if item.reason is None)
