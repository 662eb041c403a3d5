"""A linear classifier on hashed n-grams, as fastText (Joulin et al. 2016) and DCLM (Li et al. 2024) use for web text.

The evidence of a document is the mean weight of its word n-grams, so it does not depend on the length. A curve fitted on separate
calibration documents maps it to the probability that the document is good. The words are those of `lmworks.corpus.units`, which a batch
hashes once for all steps, so that a document costs one look-up per n-gram.

Assignment of documents to the quality buckets of their source.

Imports of scikit-learn and scipy, which only training and evaluation need.

Calibration: maps classifier outputs to probabilities, so that 7 in 10 documents with a score of 0.7 are good.

Evaluation of quality scores: discrimination, calibration, and what each threshold keeps, with 95% intervals.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.corpus.document import Document
from lmworks.corpus.units import Units, ngrams_of
from lmworks.errors import UserError
from lmworks.io.files import atomic_path, open_regular
from lmworks.recipe.schema.corpus import Source

_FORMAT = "lmworks quality classifier 1"


def grams(units: Units, longest: int, bits: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each length up to `longest`: (bucket of each n-gram, its document), both (G,), within documents only."""
    owners = np.repeat(np.arange(units.documents), np.diff(units.bounds))
    for n, hashes in ngrams_of(units.hashes, range(1, longest + 1)):
        inside = owners[: len(hashes)] == owners[n - 1 :]
        yield (hashes[inside] >> np.uint64(64 - bits)).astype(np.int64), owners[: len(hashes)][inside]


@dataclass(frozen=True)
class Curve:
    """Maps evidence to a probability: a logistic curve (Platt 1999), corrected by piecewise linear interpolation through (`xs`, `ys`).

    The logistic curve alone is overconfident at both ends. The corrected curve is strictly increasing, so the ranking does not change.
    """

    scale: float
    offset: float
    xs: tuple[float, ...] = (0.0, 1.0)
    ys: tuple[float, ...] = (0.0, 1.0)

    def __call__(self, evidence: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            logistic = 1 / (1 + np.exp(-(self.scale * evidence + self.offset)))
        return np.interp(logistic, self.xs, self.ys)


@dataclass(frozen=True)
class Classifier:
    """`weights` by bucket, (2**bits,) float32, of n-grams of up to `ngram` words; `report` has the metrics on the test split."""

    weights: np.ndarray
    ngram: int
    curve: Curve
    report: dict[str, Any]

    @property
    def bits(self) -> int:
        return len(self.weights).bit_length() - 1

    def evidence(self, units: Units) -> np.ndarray:
        """Mean weight of the n-grams of each document, (D,) float64; 0 for one without words."""
        total, count = np.zeros(units.documents), np.zeros(units.documents)
        for buckets, owners in grams(units, self.ngram, self.bits):
            total += np.bincount(owners, self.weights[buckets], units.documents)
            count += np.bincount(owners, minlength=units.documents)
        return total / np.maximum(count, 1)

    def scores(self, units: Units) -> np.ndarray:
        """Probability that each document is good, (D,) float64; 0 for one without words."""
        return np.where(np.diff(units.bounds) > 0, self.curve(self.evidence(units)), 0.0)

    @property
    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that determines a score."""
        facts = json.dumps([self.ngram, asdict(self.curve)])
        return hashlib.sha256(facts.encode() + np.ascontiguousarray(self.weights, "<f4").tobytes()).hexdigest()

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        from safetensors.numpy import save_file

        about = {"ngram": self.ngram, "curve": asdict(self.curve), "fingerprint": self.fingerprint, "report": self.report}
        with atomic_path(path) as aside:
            save_file({"weights": self.weights}, aside, {"format": _FORMAT, "classifier": json.dumps(about)})

    @classmethod
    def load(cls, path: Path) -> Classifier:
        """Read a classifier file. `UserError` if it is missing, not a classifier, or altered."""
        from safetensors import SafetensorError, safe_open

        again = "make it with: lmworks corpus classifier train"
        try:
            open_regular(path).close()  # a pipe would be waited for
            with safe_open(path, "np") as file:
                about, weights = file.metadata() or {}, file.get_tensor("weights") if "weights" in file.keys() else None  # noqa: SIM118
        except FileNotFoundError:
            raise UserError(f"there is no classifier at {path}; {again}") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is not a safetensors file ({error}); {again}") from None
        if about.get("format") != _FORMAT or weights is None:
            raise UserError(f"{path} is not a quality classifier; {again}")
        facts = json.loads(about["classifier"])
        curve = facts["curve"]
        curve = Curve(curve["scale"], curve["offset"], tuple(curve["xs"]), tuple(curve["ys"]))
        found = cls(weights, facts["ngram"], curve, facts["report"])
        if found.fingerprint != facts["fingerprint"]:
            raise UserError(f"{path} has been altered (its fingerprint differs); copy it again, or {again}")
        return found


def bucket_of(document: Document, source: Source) -> str | None:
    """The name of the bucket with the highest minimum that the document reaches; None if the source has no buckets.

    A document that reaches no minimum, or has no value, belongs to the lowest bucket.
    """
    if not source.buckets:
        return None
    value = document.facts.get(source.bucket_by)
    ranked = sorted(source.buckets, key=lambda bucket: bucket.minimum)
    reached = [bucket for bucket in ranked if isinstance(value, int | float) and value >= bucket.minimum]
    return (reached or ranked)[-1 if reached else 0].name


def require_module(module: str) -> Any:
    """Import a module of the extra `quality`; `UserError` if it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise UserError("training and evaluating a quality classifier needs scikit-learn: pip install 'lmworks[quality]'") from None


_FEWEST_GROUPS, _MOST_GROUPS, _FEWEST_IN_GROUP = 10, 20, 50
_TILT = 0.01  # fraction of the distance to 0 and 1, so that the curve rises beyond the outermost groups


def calibrate(evidence: np.ndarray, good: np.ndarray) -> tuple[Curve, float]:
    """The calibration curve for these documents, and the log loss of its logistic part, by which classifiers are compared. Arguments: (N,).

    With at least 50 documents in each of 10 groups of similar evidence, the logistic curve is corrected by isotonic regression on the
    fraction of good documents per group; with fewer documents it is not.
    """
    spread = float(evidence.std()) or 1.0
    model = require_module("sklearn.linear_model").LogisticRegression(C=100.0, max_iter=1000)
    model.fit(evidence[:, None] / spread, good)
    logistic = Curve(float(model.coef_[0, 0]) / spread, float(model.intercept_[0]))
    scores = logistic(evidence)
    loss = float(require_module("sklearn.metrics").log_loss(good, scores, labels=[False, True]))
    count = min(len(scores) // _FEWEST_IN_GROUP, _MOST_GROUPS)
    if count < _FEWEST_GROUPS:
        return logistic, loss
    groups = np.array_split(np.argsort(scores, kind="stable"), count)
    sizes = np.array([len(group) for group in groups], np.float64)
    xs = np.array([scores[group].mean() for group in groups])
    # two pseudo-documents from the logistic curve keep a group without bad documents below probability 1
    shares = np.array([(good[group].sum() + 2 * x) / (len(group) + 2) for group, x in zip(groups, xs, strict=True)])
    ys = require_module("sklearn.isotonic").isotonic_regression(shares, sample_weight=sizes)
    firsts = np.flatnonzero(np.append(True, np.diff(ys) > 1e-9))  # pooled groups become one knot
    weights = np.add.reduceat(sizes, firsts)
    xs, ys = np.add.reduceat(xs * sizes, firsts) / weights, ys[firsts]
    inner = np.append(True, np.diff(xs) > 0) & (xs > 0) & (xs < 1)
    ends = float(ys[0] * (1 - _TILT)), float(ys[-1] + (1 - ys[-1]) * _TILT)
    return Curve(logistic.scale, logistic.offset, (0.0, *xs[inner].tolist(), 1.0), (ends[0], *ys[inner].tolist(), ends[1])), loss


THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
_BINS = 10
_Z = 1.959963984540054  # two-sided 95% quantile of the normal distribution


def measure(scores: np.ndarray, good: np.ndarray) -> dict[str, Any]:
    """Metrics of scores (N,) in [0, 1] for documents that are `good` (N,) or not; both kinds must occur.

    `auc` is the probability that a good document scores above a bad one, `calibration_error` the mean distance between score and fraction
    of good documents over tenths of the score (ECE, Naeini et al. 2015), `thresholds` the results of filtering at each threshold.
    """
    metrics = require_module("sklearn.metrics")
    positives, negatives = int(good.sum()), int((~good).sum())
    auc = float(metrics.roc_auc_score(good, scores))
    reliability = _reliability(scores, good)
    return {
        "documents": len(scores),
        "good": positives,
        "auc": auc,
        "auc_interval": _auc_interval(auc, positives, negatives),
        "log_loss": float(metrics.log_loss(good, scores, labels=[False, True])),
        "brier": float(metrics.brier_score_loss(good, scores)),
        "calibration_error": sum(one["documents"] * abs(one["mean_score"] - one["good"]) for one in reliability) / len(scores),
        "reliability": reliability,
        "thresholds": [_at(threshold, scores, good) for threshold in THRESHOLDS],
    }


def _at(threshold: float, scores: np.ndarray, good: np.ndarray) -> dict[str, Any]:
    kept = scores >= threshold
    right, all_kept = int((kept & good).sum()), int(kept.sum())
    return {
        "threshold": threshold,
        "kept": all_kept / len(scores),
        "precision": right / all_kept if all_kept else None,
        "precision_interval": _share_interval(right, all_kept),
        "recall": right / int(good.sum()),
        "recall_interval": _share_interval(right, int(good.sum())),
        "bad_kept": int((kept & ~good).sum()) / int((~good).sum()),
    }


def _reliability(scores: np.ndarray, good: np.ndarray) -> list[dict[str, Any]]:
    """For each tenth of the score that contains documents: their number, mean score, and the fraction of good ones."""
    tenth = np.minimum((scores * _BINS).astype(int), _BINS - 1)
    return [
        {"from": number / _BINS, "documents": int(mine.sum()), "mean_score": float(scores[mine].mean()), "good": float(good[mine].mean())}
        for number in range(_BINS)
        if (mine := tenth == number).any()
    ]


def _share_interval(right: int, of: int) -> list[float] | None:
    """Wilson's interval (1927), which is valid near 0 and 1."""
    if not of:
        return None
    found = require_module("scipy.stats").binomtest(right, of).proportion_ci(0.95, method="wilson")
    return [float(found.low), float(found.high)]


def _auc_interval(auc: float, positives: int, negatives: int) -> list[float]:
    """Interval of Hanley and McNeil (Radiology 143, 1982), clipped to [0, 1]."""
    q1, q2 = auc / (2 - auc), 2 * auc * auc / (1 + auc)
    variance = (auc * (1 - auc) + (positives - 1) * (q1 - auc * auc) + (negatives - 1) * (q2 - auc * auc)) / (positives * negatives)
    half = _Z * math.sqrt(max(variance, 0.0))
    return [max(auc - half, 0.0), min(auc + half, 1.0)]
