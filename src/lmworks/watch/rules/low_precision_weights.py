"""Updates are lost to rounding: most weights keep their bits in a step."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_UNCHANGED = 0.9
"""Share of the weights that a step near the peak rate leaves as they are. Measured with fp32 weights: 0.23 in the first step, 0.03 to 0.08
later; rows of the embedding whose token did not come yet stay, so the first lines do not count."""
_FALL = 0.02  # nats over the second half


def _check(evidence: Evidence) -> Finding | None:
    unchanged = evidence.series("optim/unchanged_weights").finite
    start, stop = trends.near_peak(evidence, 0.3)
    late = _with_gradient(evidence, unchanged.between(max(start, 0.3 * evidence.step), stop))
    if len(late) < 2:
        raise NotJudged("fewer than 2 lines with optim/unchanged_weights near the peak rate and a gradient")
    loss = evidence.series("train/loss").finite
    fall = loss.part(0.4, 0.6).median - loss.part(0.9, 1).median if len(loss) > 10 else math.nan
    ratio = evidence.series("optim/update_ratio").finite.between(start, stop).median
    found = [
        Measurement("share of the weights that a step leaves bit-equal", late.median, high=_UNCHANGED, source="measured: make doctor"),
        Measurement("fall of train/loss over the second half of the steps", fall, low=_FALL, source="measured: make doctor", unit="nats"),
        Measurement("optim/update_ratio near the peak rate", ratio, low=1e-6, source="half a unit in the last place of fp32: 6e-8"),
    ]
    if not found[0].abnormal:
        return None
    return Finding(
        found,
        steps=(int(late.steps[0]), int(late.steps[-1])),
        excluded=[Exclusion("frozen-gradient", f"the median gradient norm is {evidence.series('optim/grad_norm').median:.3g}")],
        changes=[
            Change(
                "optimizer.learning_rate",
                f"{10 * trends.peak_rate(evidence):.3g}",
                "updates below the last bit of a weight are lost",
                cost="start again, or resume with --allow",
            ),
            Change(advice="keep weights and Adam's moments in fp32; train.precision only sets the type of the products"),
        ],
        check_afterwards="optim/unchanged_weights is below 0.5 at the peak rate",
        next_measurement="lmworks doctor RUN --probe, which compares two checkpoints weight by weight",
    )


def _with_gradient(evidence: Evidence, unchanged: Series) -> Series:
    """Without the lines whose gradient was 0 or not finite: such a step has no update that rounding could lose."""
    norm = evidence.series("optim/grad_norm")
    none = norm.steps[~(np.isfinite(norm.values) & (norm.values > 0))]
    keep = ~np.isin(unchanged.steps, none)
    return Series(unchanged.steps[keep], unchanged.values[keep])


RULE = Rule(
    "low-precision-weights",
    "Updates are lost to rounding: most weights do not change in a step.",
    "numerics",
    ("not-decreasing",),
    _check,
    "A weight changes only if its update exceeds half a unit in its last place. In bf16 that is 0.4% of the weight, above most updates: "
    "training goes well as long as updates are large, and then stops at a plateau (AReaL#1292, Automodel#3444: three times the loss). "
    "lmworks keeps weights and moments in fp32, where only a rate that is far too low does this.",
    needs=("optim/unchanged_weights", "optim/learning_rate"),
    look_alikes={"frozen-gradient": "the gradient is exactly 0", "learning-rate-too-low": "the weights change, by little"},
)
