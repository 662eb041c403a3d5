"""The learning rate is too high (DOCTOR: worst near the peak, better in the decay)."""

from __future__ import annotations

import math

from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_LARGEST_RATIO = 1e-2
_SHORTEST = 40  # lines


def _check(evidence: Evidence) -> Finding | None:
    loss, rate = evidence.series("train/loss").finite, evidence.series("optim/learning_rate").finite
    if len(loss) < _SHORTEST:
        raise NotJudged(f"fewer than {_SHORTEST} lines of metrics")
    ratios = evidence.series("optim/update_ratio").finite
    peak = float(rate.values.max())
    at_peak = ratios.between(*_span_above(rate, 0.5 * peak))
    ratio = at_peak.median
    lowest = float(loss.part(0.05, 1).values.min())
    early = loss.part(0.0, 0.1).median
    gained = (early - loss.part(0.4, 0.7).median) / max(early, 1e-9)
    clipped = evidence.series("optim/clipped").finite.part(0.1, 0.8)
    measured = [
        Measurement("optim/update_ratio at the peak rate", ratio, high=_LARGEST_RATIO, source="measured: make doctor"),
        Measurement("share of the loss that was gained until mid-run", gained, low=0.05, source="measured: make doctor"),
        Measurement("share of clipped steps", float(clipped.values.mean()) if len(clipped) else math.nan, high=0.9, source="make doctor"),
    ]
    if not ratio > _LARGEST_RATIO:
        return None
    lower = evidence.number("optimizer.learning_rate") / 10
    return Finding(
        measured, steps=(int(loss.steps[0]), int(loss.steps[-1])),
        excluded=[Exclusion("no-warmup", f"the lowest loss, {lowest:.3g}, is not recovered at the same rate")],
        changes=[Change("optimizer.learning_rate", f"{lower:.3g}", cost="start again from step 0, or roll back to before the loss rose")],
        check_afterwards="optim/update_ratio is below 0.01 at the peak rate",
        next_measurement="lmworks doctor RUN --probe, which repeats a step at a lower rate",
    )  # fmt: skip


def _span_above(rate: Series, limit: float) -> tuple[float, float]:
    steps = rate.steps[rate.values >= limit]
    return (float(steps[0]), float(steps[-1]) + 1) if len(steps) else (0.0, math.inf)


RULE = Rule(
    "learning-rate-too-high", "The learning rate is too high for this model and batch.", "optimization", ("not-decreasing", "spikes"),
    _check,
    "At a rate that is too high, a step moves the weights by more than a hundredth of their norm, beyond the range in which the gradient "
    "says how the loss changes. The loss stalls or rises near the peak of the schedule, and improves when the rate decays.",
    needs=("train/loss", "optim/update_ratio"), stages=("pretrain",),
    look_alikes={
        "no-warmup": "recovers at the same rate", "bad-batch": "one step, and the rows repeat it", "init-too-wide": "is there at step 0",
    },
)  # fmt: skip
