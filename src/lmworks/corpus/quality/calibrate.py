"""Calibration: maps evidence to probabilities, so that of the documents that score 0.7, 7 in 10 are good."""

from __future__ import annotations

import numpy as np

from lmworks.corpus.quality.classifier import Curve
from lmworks.corpus.quality.library import needed

_FEWEST_GROUPS, _MOST_GROUPS, _FEWEST_IN_GROUP = 10, 20, 50
_TILT = 0.01  # of what is left to 0 and 1: beyond the last groups the curve still rises


def calibrate(evidence: np.ndarray, good: np.ndarray) -> tuple[Curve, float]:
    """The curve that fits these documents, and the log loss of its logistic part, by which classifiers are compared. Both (N,).

    With at least 50 documents in each of 10 groups of like evidence, the logistic curve is bent to the share of good ones in each, made
    to rise (isotonic regression); with fewer documents it is left as it is.
    """
    spread = float(evidence.std()) or 1.0
    model = needed("sklearn.linear_model").LogisticRegression(C=100.0, max_iter=1000)
    model.fit(evidence[:, None] / spread, good)
    logistic = Curve(float(model.coef_[0, 0]) / spread, float(model.intercept_[0]))
    scores = logistic(evidence)
    loss = float(needed("sklearn.metrics").log_loss(good, scores, labels=[False, True]))
    count = min(len(scores) // _FEWEST_IN_GROUP, _MOST_GROUPS)
    if count < _FEWEST_GROUPS:
        return logistic, loss
    groups = np.array_split(np.argsort(scores, kind="stable"), count)
    sizes = np.array([len(group) for group in groups], np.float64)
    xs = np.array([scores[group].mean() for group in groups])
    # two documents that the logistic curve imagines keep a group without a single bad one from being called certain
    shares = np.array([(good[group].sum() + 2 * x) / (len(group) + 2) for group, x in zip(groups, xs, strict=True)])
    ys = needed("sklearn.isotonic").isotonic_regression(shares, sample_weight=sizes)
    firsts = np.flatnonzero(np.append(True, np.diff(ys) > 1e-9))  # pooled groups are one knot
    weights = np.add.reduceat(sizes, firsts)
    xs, ys = np.add.reduceat(xs * sizes, firsts) / weights, ys[firsts]
    inner = np.append(True, np.diff(xs) > 0) & (xs > 0) & (xs < 1)
    ends = float(ys[0] * (1 - _TILT)), float(ys[-1] + (1 - ys[-1]) * _TILT)
    return Curve(logistic.scale, logistic.offset, (0.0, *xs[inner].tolist(), 1.0), (ends[0], *ys[inner].tolist(), ends[1])), loss
