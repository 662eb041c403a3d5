"""The head grows while the rate falls."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_HEAD, _Z = 1.25, 1.3
"""Growth in the steps whose rate is below half of its peak. Measured on healthy runs from 80% on: at most 1.22 and 1.17."""


def _check(evidence: Evidence) -> Finding | None:
    head, z = evidence.series("optim/head_norm").finite, evidence.series("train/z_loss").finite
    begin = trends.decay_begins(evidence, 0.5)
    late_head, late_z = head.between(begin, math.inf), z.between(begin, math.inf)
    if len(late_head) < 2:
        raise NotJudged("fewer than 2 lines with optim/head_norm in the decay of the rate")
    grown = late_head.last / max(trends.at(head, begin), 1e-30)
    grown_z = late_z.part(0.8, 1).median / max(z.between(0, begin + 1).part(0.9, 1).median, 1e-30) if len(late_z) > 1 else math.nan
    found = [
        Measurement("optim/head_norm now over that at the begin of the decay", grown, high=_HEAD, source="measured: make doctor"),
        Measurement("train/z_loss now over that at the begin of the decay", grown_z, high=_Z, source="measured: make doctor"),
    ]
    rising = trends.slope(late_head.steps, np.log(np.maximum(late_head.values, 1e-30))) > 0
    if not all(one.abnormal for one in found) or not rising or trends.starts_from_weights(evidence):
        return None
    weight = evidence.number("model.z_loss_weight")
    return Finding(
        found,
        steps=(begin, evidence.step),
        excluded=[Exclusion("learning-rate-too-high", f"it grows while the rate falls to {trends.rate(evidence).last:.3g}")],
        changes=[
            Change(
                "model.z_loss_weight",
                f"{max(1e-4, 3 * weight if weight > 0 else 0):.0e}",
                "keep the log-partition near 0",
                cost=f"roll back to the checkpoint before step {begin}, and train the decay again with --allow model.z_loss_weight",
            )
        ],
        check_afterwards="train/z_loss falls within 100 steps, and optim/head_norm no longer rises",
        next_measurement="optim/head_norm in more lines: --set metrics.detail_every=1%",
    )


RULE = Rule(
    "head-norm-growing",
    "The norm of the head grows while the learning rate falls.",
    "optimization",
    ("spikes",),
    _check,
    "The loss does not depend on a constant that is added to all logits, so the head and the log-partition can drift. Late in the decay, "
    "at a low rate, this ended the runs of marin's 8B and 32B models in divergence; a small weight on the squared log-partition (z-loss) "
    "holds it.",
    needs=("optim/head_norm", "optim/learning_rate"),
    look_alikes={"learning-rate-too-high": "near the peak of the rate"},
)
