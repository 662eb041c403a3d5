"""A stage was resumed without the moments of its optimizer."""

from __future__ import annotations

import math

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_BEFORE, _AFTER = 20, 8  # lines that are compared
_CLEAR = 6.0  # standard deviations of the difference of two medians
_MEASURED = "measured: resumed runs with and without moments (benchmarks/doctor)"


def _check(evidence: Evidence) -> Finding | None:
    reset = {event["step"]: event for event in evidence.of("optimizer_reset") if isinstance(event.get("step"), int)}
    lost = [step for step in evidence.resumes if step in reset]
    if lost:
        return _named(evidence, lost[-1])
    if not evidence.resumes:
        return None
    if not len(evidence.series("train/loss").finite):
        raise NotJudged("no train/loss")
    return next((found for step in evidence.resumes if (found := _suspected(evidence, step))), None)


def _named(evidence: Evidence, step: int) -> Finding:
    rise, error = _rise(evidence, step)
    return Finding(
        [Measurement("checkpoints resumed with zero moments", 1, high=0, source="optimizer_reset in the ledger"), *_measured(rise, error)],
        steps=(step, step + _length(evidence)),
        exact=True,
        excluded=[Exclusion("schedule-changed", "the ledger has an optimizer_reset of this very step")],
        changes=_changes(evidence, step),
        check_afterwards=_afterwards(evidence, step),
    )


def _suspected(evidence: Evidence, step: int) -> Finding | None:
    """A bump of the loss behind a resume that nothing else explains: one signal, so never sure."""
    if any(event["event"] in ("phase", "recipe_changed") and event.get("step", step) == step for event in evidence.events):
        return None
    rise, error = _rise(evidence, step)
    later = evidence.series("train/loss").finite.between(step + 2 * _length(evidence), step + 4 * _length(evidence)).median
    before = evidence.series("train/loss").finite.between(0, step + 1).part(0, 1).values[-_BEFORE:]
    if not rise > _CLEAR * error or not later < float(sum(before)) / len(before) + rise / 2:
        return None
    return Finding(
        _measured(rise, error),
        steps=(step, step + _length(evidence)),
        changes=_changes(evidence, step),
        next_measurement="lmworks doctor RUN --probe, which reads the moments of the checkpoint that was resumed from",
        check_afterwards=_afterwards(evidence, step),
    )


def _rise(evidence: Evidence, step: int) -> tuple[float, float]:
    """The rise of the median loss over a resume, and the standard error of this difference; NaN with too few lines."""
    loss = evidence.series("train/loss").finite
    before, after = loss.between(0, step + 1), loss.between(step + 1, step + 1 + _length(evidence))
    if len(before) < 8 or len(after) < 3:
        return math.nan, math.nan
    left, right = before.values[-_BEFORE:], after.values[:_AFTER]
    error = 1.25 * trends.noise(loss) * math.sqrt(1 / len(left) + 1 / len(right))  # of medians
    return float(sorted(right)[len(right) // 2] - sorted(left)[len(left) // 2]), error


def _measured(rise: float, error: float) -> list[Measurement]:
    return (
        []
        if math.isnan(rise)
        else [Measurement("rise of the loss over the resume", rise, high=_CLEAR * error, source=_MEASURED, unit="nats")]
    )


def _length(evidence: Evidence) -> int:
    """The steps in which AdamW's second moments fill up again."""
    betas = evidence.value("optimizer.betas", [0.9, 0.95])
    return min(2000, max(10, round(1 / (1 - float(betas[1])))))


def _changes(evidence: Evidence, step: int) -> list[Change]:
    back = f"lmworks ckpt rollback {evidence.files.label} STEP"
    return [
        Change(
            advice=f"if a checkpoint from before step {step} is kept, resume from it: {back}", cost=f"the steps since it, {step} at most"
        ),
        Change(advice="else go on: the moments fill up again by themselves", cost=f"some {_length(evidence)} steps of less progress"),
    ]


def _afterwards(evidence: Evidence, step: int) -> str:
    return f"train/loss is back at its level of before step {step} by step {step + 2 * _length(evidence)}"


RULE = Rule(
    "optimizer-state-lost",
    "The stage was resumed without the state of its optimizer.",
    "checkpoints",
    ("resume",),
    _check,
    "AdamW divides each gradient by the root of its second moment, and Muon adds up a momentum. With zero moments the first updates have "
    "full size in directions that one batch suggests: the loss rises at the step of the resume and recovers in about 1 / (1 - beta2) "
    "steps. lmworks saves all state; lmworks ckpt reset-optimizer, and weights that are imported, leave it behind.",
    needs=("train/loss",),
    look_alikes={
        "schedule-changed": "the recorded rate jumps at the resume",
        "data-position-lost": "the loss falls below its trend, and rows repeat",
    },
)
