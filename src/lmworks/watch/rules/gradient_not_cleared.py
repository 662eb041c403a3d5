"""Gradients of earlier steps are added to those of this one."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_FEWEST = 30
_POWER = (0.8, 1.2)
_FIT = 0.97
"""The norm is proportional to the number of steps since the process began: power 1 of a line in logarithms, over a factor of ten at least.
Measured on healthy runs: powers of -0.4 to 0.4, and fits below 0.8."""


def _check(evidence: Evidence) -> Finding | None:
    norms = evidence.series("optim/grad_norm").finite
    begin = max([0, *evidence.resumes])
    since = norms.between(begin + 1, math.inf)
    since_steps = (since.steps - begin)[since.values > 0]
    values = since.values[since.values > 0]
    if len(values) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines since the process began")
    x, y = np.log(since_steps), np.log(values)
    if x[-1] - x[0] < math.log(10):
        raise NotJudged("the lines span less than a factor of ten in steps")
    power = trends.slope(x, y)
    fit = float(np.corrcoef(x, y)[0, 1] ** 2) if y.std() > 0 else 0.0
    if not (_POWER[0] <= power <= _POWER[1] and fit > _FIT):
        return None
    loss = evidence.series("train/loss").finite
    fall = loss.between(begin, math.inf).part(0, 0.2).median - loss.part(0.8, 1).median
    return Finding(
        [
            Measurement("power of the steps with which the gradient norm grows", power, high=0.6, source="measured: make doctor"),
            Measurement("share of its variation that this explains", fit, high=0.9, source="measured: make doctor"),
            Measurement("fall of the loss meanwhile", fall, unit="nats"),
        ],
        steps=(int(since.steps[0]), int(since.steps[-1])),
        excluded=[
            Exclusion("learning-rate-too-high", f"the norm is {values[-1] / since_steps[-1]:.3g} times the number of steps, all along")
        ],
        changes=[
            Change("train.deepspeed", "null", "another engine that clears them", cost="resume")
            if evidence.value("train.deepspeed")
            else Change(advice="call optimizer.zero_grad() before each step of the session (train_step with first=True)", cost="resume"),
        ],
        check_afterwards="optim/grad_norm of step 20 after the resume is that of step 2, within a factor of three",
        next_measurement="the same steps on one rank without ZeRO: lmworks preflight compares layouts",
    )


RULE = Rule(
    "gradient-not-cleared",
    "Gradients of earlier steps are added to those of each step.",
    "numerics",
    ("not-decreasing", "spikes"),
    _check,
    "Where gradients are not set to zero between steps, each step's is the sum of all before it, and its norm grows in proportion to the "
    "steps since the process began (DeepSpeed#7837). Clipping and Adam hide the size, but not the direction, which is out of date.",
    needs=("optim/grad_norm",),
    look_alikes={"learning-rate-too-high": "the norm does not follow the step number"},
)
