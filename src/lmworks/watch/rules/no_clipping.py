"""Gradients are not clipped, and some of them are many times larger than the others."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules._commands import REPLAYED, find_rows

_FACTOR = 10.0
_SHARE, _FEWEST = 0.01, 3
"""Steps whose gradient norm is above ten times the median. Measured on healthy runs: at most 2 of 200, and 50 times in single steps of
batches of 64 tokens."""


def _check(evidence: Evidence) -> Finding | None:
    if evidence.number("optimizer.max_grad_norm") != 0:
        return None
    norms = evidence.series("optim/grad_norm").finite.part(0.05, 1)
    if len(norms) < 20:
        raise NotJudged("fewer than 20 lines with a gradient norm")
    usual = trends.running_median(norms.values, 41)
    large = norms.values > _FACTOR * np.maximum(usual, 1e-30)
    steps = norms.steps[large]
    found = [
        Measurement("optimizer.max_grad_norm", 0.0, low=1e-9, source="GPT-3, Llama 3, OLMo 2: 1.0"),
        Measurement(
            "share of the steps with a gradient above ten times the median",
            float(large.mean()),
            high=_SHARE,
            source="measured: make doctor",
        ),
        Measurement("largest gradient norm over the median", float((norms.values / np.maximum(usual, 1e-30)).max())),
    ]
    if large.sum() < _FEWEST or not found[1].abnormal:
        return None
    loss = evidence.series("train/loss").finite
    rises = [loss.between(step + 1, step + 6).median - loss.between(step - 10, step).median for step in steps[:200]]
    rises = [one for one in rises if not math.isnan(one)]
    if rises:
        found.append(Measurement("rise of train/loss behind such a step, median", float(np.median(rises)), unit="nats"))
    skipped = len(evidence.of("spike"))
    largest = int(norms.steps[norms.values.argmax()])
    return Finding(
        found,
        steps=(int(steps[0]), int(steps[-1])),
        excluded=[
            Exclusion("learning-rate-too-high", f"{len(steps)} single steps of {len(norms)} have such gradients, and the others do not")
        ],
        changes=[
            Change(
                "optimizer.max_grad_norm",
                f"{max(0.1, float(f'{2 * np.median(norms.values):.1g}')):g}",
                "twice the median norm, or 1.0",
                cost=f"resume; to undo the damage, roll back to before step {int(steps[0])}",
            ),
        ],
        check_afterwards=f"optim/clipped is 1 in about {large.mean():.1%} of the steps, and train/loss does not rise behind them "
        f"(stability.spike has left out {skipped} steps so far)",
        next_measurement=f"the rows of step {largest}, whose gradient is the largest: {find_rows(evidence, largest)}"
        if evidence.stage in REPLAYED
        else "train/loss behind each of these steps: train.log_every=1 steps",
    )


RULE = Rule(
    "no-clipping",
    "Gradients are not clipped, and some are many times larger than the others.",
    "optimization",
    ("spikes",),
    _check,
    "The gradient of some rows is ten or a hundred times that of the others. Clipping to a global norm keeps their direction and bounds "
    "their effect; without it one such step undoes many, and inflates AdamW's second moments so that the steps behind it are too small.",
    needs=("train/loss", "optim/grad_norm"),
    look_alikes={
        "learning-rate-too-high": "all steps near the peak are bad",
        "bad-batch": "few steps, and their own loss is far above the others'",
    },
    outranks=("learning-rate-too-high", "attention-logits-growing"),
)
