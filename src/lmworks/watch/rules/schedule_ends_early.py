"""The learning rate is near zero long before the stage ends."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_LOW, _LONG = 0.01, 0.12
"""Below a hundredth of the peak, in more than 12% of the steps. A cosine to 0 has 6.4% of its steps there, a linear decay 1%."""
_FLAT = 0.25
"""Progress per step there, relative to the same number of steps before: measured 0.7 to 1.5 on healthy runs, and 0.01 to 0.06 at a
thousandth of the rate."""
_FEWEST = 20  # steps


def _check(evidence: Evidence) -> Finding | None:
    rates = trends.rate(evidence)
    planned = max(evidence.steps, evidence.step)
    if len(rates) < 10 or evidence.step < _FEWEST:
        raise NotJudged("fewer than 10 lines with a learning rate")
    peak_at = int(rates.steps[rates.values.argmax()])
    low = rates.steps[(rates.values < _LOW * rates.values.max()) & (rates.steps > peak_at)]
    if not len(low) or rates.last >= _LOW * rates.values.max():
        return None  # as in a second warm-up
    begin = int(low[0])
    share = (evidence.step - begin + 1) / planned
    if share <= _LONG:
        return None
    progress, where = _progress(evidence, begin)
    found = [
        Measurement("share of the steps with a rate below 1% of its peak", share, high=_LONG, source="a cosine to 0 has 6.4% of them"),
        Measurement(f"fall of {where} per step there, relative to the steps before", progress, low=_FLAT, source="measured: make doctor"),
    ]
    index = trends.schedule_key(evidence, begin)
    return Finding(
        found,
        steps=(begin, evidence.step),
        excluded=[
            Exclusion("learning-rate-too-low", f"the peak rate was {rates.values.max():.3g}, and the loss fell until step {begin}"),
        ],
        changes=[
            Change(
                index,
                '{"kind": "wsd", "warmup": "2%", "decay": "20%", "min_lr_ratio": 0.1}',
                "a schedule that ends with the phase",
                cost=f"roll back to before step {begin} (lmworks ckpt rollback), and train the {evidence.step - begin:,} steps since again",
            ),
        ],
        check_afterwards=f"optim/learning_rate is above {_LOW * rates.values.max():.2g} until the last tenth of the steps",
        next_measurement="validation at step " + f"{begin} and now: --set train.validate_every=5%",
    )


def _progress(evidence: Evidence, begin: int) -> tuple[float, str]:
    """How fast held-out loss, or else training loss, falls behind a step, relative to a stretch before it: of the same length, or half of
    what is before."""
    length = min(evidence.step - begin, begin // 2)
    for name, fewest in (("validation/loss", 3), ("train/loss", 8)):
        series = evidence.series(name).finite
        before, after = series.between(max(begin - length, 0), begin + 1), series.between(begin, math.inf)
        if len(before) >= 2 and len(after) >= fewest:
            former = _fall(before)
            if former > 0:
                return _fall(after) / former, name
    return math.nan, "train/loss"


def _fall(series: Series) -> float:
    return -trends.slope(series.steps, series.values)


RULE = Rule(
    "schedule-ends-early",
    "The learning rate reaches zero long before the stage ends.",
    "optimization",
    ("not-decreasing",),
    _check,
    "Steps at a hundredth of the peak rate or less change nothing that can be measured: their tokens are wasted. It happens where decay or "
    "milestones are counted in steps of another run, where a scheduler advances once per micro-batch (accelerate#2926, "
    "transformers#26827), or where a phase was made longer and its schedule was not.",
    needs=("optim/learning_rate",),
    look_alikes={"learning-rate-too-low": "the rate is low from the first step"},
)
