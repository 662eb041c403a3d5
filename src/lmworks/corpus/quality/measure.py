"""Evaluation of quality scores: discrimination, calibration, and what each threshold keeps, with 95% intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lmworks.corpus.quality.library import require_module

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
