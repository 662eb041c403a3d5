"""Training begins at the full learning rate and is hurt by its first steps."""

from __future__ import annotations

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_SHORTEST = 2.0
"""Steps from the first to 80% of the peak rate. AdamW's second moments know one gradient after the first step."""
_RISE = 0.04
"""Rise of the loss above the first one within the first steps, in nats. Measured with a warm-up: at most 0.02, also at ten times the best
rate; without one 0.06 at ten times the rate, 0.34 at twenty times."""
_MEASURED = "measured: make doctor"


def _check(evidence: Evidence) -> Finding | None:
    loss = evidence.series("train/loss").finite
    if not len(loss) or loss.steps[0] > 1 or len(loss.between(0, 11)) < 4:
        raise NotJudged("no lines of the first steps")
    length = max(6, round(0.02 * max(evidence.steps, evidence.step)))
    early = loss.between(2, 2 + length)
    peak_at, _ = trends.near_peak(evidence)
    rise = float(early.values.max()) - loss.first
    norms = evidence.series("optim/grad_norm").finite
    found = [
        Measurement(
            "steps of warm-up, until 80% of the peak rate", peak_at - 1, low=_SHORTEST, source="GPT-3, Llama 3: 375M to 8,000 steps' worth"
        ),
        Measurement(
            f"rise of train/loss above its first value in the first {length} steps", rise, high=_RISE, source=_MEASURED, unit="nats"
        ),
        Measurement(
            "optim/grad_norm of step 2 over that of step 1",
            trends.at(norms, 2) / max(trends.at(norms, 1), 1e-30),
            high=3.0,
            source=_MEASURED,
        ),
    ]
    if not (found[0].abnormal and found[1].abnormal):
        return None
    tail = loss.part(0.5, 0.8).median
    return Finding(
        found,
        steps=(1, 1 + length),
        excluded=[
            Exclusion(
                "learning-rate-too-high", f"the loss recovers at the same rate of {trends.peak_rate(evidence):.3g}: {tail:.3g} later"
            ),
            Exclusion("init-too-wide", f"the first loss is {loss.first:.3g}"),
        ],
        changes=[
            Change(f"{trends.schedule_key(evidence, 1)}.warmup", "2%", "at least 100 steps of a long run", cost="start again from step 0"),
            Change(
                "optimizer.learning_rate",
                f"{trends.peak_rate(evidence) / 3:.3g}",
                "if the loss rises with a warm-up too",
                cost="start again",
            ),
        ],
        check_afterwards=f"train/loss of steps 2 to {1 + length} stays below that of step 1",
        next_measurement="the same steps with a warm-up: lmworks preflight RECIPE",
    )


RULE = Rule(
    "no-warmup",
    "Training begins at the full learning rate, which its first steps do not bear.",
    "optimization",
    ("spikes", "not-decreasing"),
    _check,
    "The first updates are the least reliable: moments are of one gradient, and the loss is curved. At the full rate they can throw the "
    "weights to where the gradient is larger. A warm-up of 1 to 2% of the steps prevents that at no cost. The damage is in the first few "
    "steps and heals at the same rate, unlike that of a rate that is too high.",
    needs=("train/loss", "optim/learning_rate"),
    stages=("pretrain",),
    look_alikes={"learning-rate-too-high": "lasts until the rate decays", "init-too-wide": "the first loss is above ln V"},
)
