"""Calibration: maps classifier outputs to probabilities, so that 7 in 10 documents with a score of 0.7 are good."""

from __future__ import annotations

import numpy as np

from lmworks.corpus.quality.classifier import Curve
from lmworks.corpus.quality.library import require_module

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
