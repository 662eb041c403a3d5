"""Training of a quality classifier: from labeled texts to a calibrated classifier with metrics on a test split.

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
from typing import Any, Literal

import numpy as np

from lmworks.corpus.cleaning import comparison_form
from lmworks.corpus.quality.calibrate import calibrate
from lmworks.corpus.quality.classifier import Classifier, grams
from lmworks.corpus.quality.library import require_module
from lmworks.corpus.quality.measure import measure
from lmworks.corpus.units import Units, units
from lmworks.errors import UserError
from lmworks.progress import bar

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


