"""The batch is so small that most of a step is noise."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_NOISE = 0.2
"""Standard deviation of train/loss from step to step, in nats. Measured: 0.12 at the batch of the Step Law, 0.25 at two thirds of it, 0.31
at a third, 0.26 to 0.42 at a fifth. Published curves of batches of millions of tokens have 0.01 to 0.02."""
_BATCH = 0.5
"""Batch over that of the Step Law, 0.58 D^0.571 tokens (arXiv:2503.04715)."""


def _check(evidence: Evidence) -> Finding | None:
    loss = evidence.series("train/loss").finite.part(0.2, 1)
    batches = evidence.series("train/batch_tokens").finite
    if len(loss) < 30 or not len(batches):
        raise NotJudged("fewer than 30 lines of loss behind the first fifth")
    tokens, batch = trends.planned_tokens(evidence), batches.part(0.2, 1).median
    law = 0.58 * tokens**0.571
    found = [
        Measurement("noise of train/loss from line to line", trends.noise(loss), high=_NOISE, source="measured: make doctor", unit="nats"),
        Measurement("tokens of a step over those of the Step Law", batch / law, low=_BATCH, source="arXiv:2503.04715"),
    ]
    if not all(one.abnormal for one in found) or math.isnan(law) or trends.starts_from_weights(evidence):
        return None
    phase, length = 0, evidence.series("train/sequence_length").finite.median
    whole = float("nan") if math.isnan(length) else max(1, round(law / length)) * length
    raised = whole if whole > batch else 4 * batch
    clipped = evidence.series("optim/clipped").finite
    if len(clipped):
        found.append(Measurement("share of the steps that were clipped", clipped.mean))
    return Finding(
        found,
        steps=(int(loss.steps[0]), int(loss.steps[-1])),
        excluded=[
            Exclusion(
                "learning-rate-too-high", f"the noise of {trends.noise(loss):.2g} nats is there at every rate, and the mean still falls"
            )
        ],
        changes=[
            Change(
                f"train.phases.{phase}.global_batch_tokens",
                f"{int(raised)} tokens",
                cost="start again: a phase that has begun keeps its batch, and one that is added after it has its own; fewer steps of the "
                "same tokens",
            ),
            Change(
                "optimizer.learning_rate",
                f"{trends.peak_rate(evidence) * (batch / raised) ** 0.5:.3g}",
                "if memory allows no larger batch",
                cost="resume with --allow",
            ),
        ],
        check_afterwards=f"the noise of train/loss is below {_NOISE:g} nats within 30 steps",
        next_measurement="lmworks doctor RUN --probe, which repeats steps with a larger batch",
    )


RULE = Rule(
    "batch-too-small",
    "The batch is so small that most of a step is noise.",
    "optimization",
    ("not-decreasing", "spikes"),
    _check,
    "The gradient of a batch is the mean gradient plus noise that falls with the root of its size. Far below the critical batch, steps "
    "mostly cancel: the loss is noisy, nearly every step is clipped, and its mean falls when the rate decays, which averages over steps. "
    "A batch some times smaller than the law's costs time rather than loss, and is not named.",
    needs=("train/loss", "train/batch_tokens"),
    stages=("pretrain",),
    look_alikes={"learning-rate-too-high": "the noise is small, and weights and scores grow", "bad-batch": "few steps stand out"},
)
