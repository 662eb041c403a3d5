"""From some step on the training text comes in another order than before, without a change of the mixture."""

from __future__ import annotations

import math

import numpy as np

from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules._commands import show_batch
from lmworks.watch.rules.unshuffled_data import mixing

_SOURCES, _SHIFT = 0.7, 4.0
_WINDOW = 20  # lines


def _check(evidence: Evidence) -> Finding | None:
    stages = [one for one in mixing(evidence) if len(one.sources) >= 3 * _WINDOW]
    if not stages:
        raise NotJudged("too few lines of train/effective_sources")
    for one in stages:
        levels = [one.sources.part(a, a + 0.1).median for a in np.arange(10) / 10]
        if not levels[0] > 0.9 or min(levels) >= _SOURCES:
            continue
        first = next(number for number, level in enumerate(levels) if level < _SOURCES)
        at = int(one.sources.part(first / 10, (first + 1) / 10).steps[0])
        shift, validation = _shift(evidence.series("train/loss").finite, at), _validation_shift(evidence, at)
        return Finding(
            [
                Measurement("train/effective_sources relative to the mixture's, before", levels[0]),
                Measurement("the same from then on", min(levels), low=_SOURCES, source="1 by the order of lmworks"),
                Measurement(
                    "shift of the level of train/loss, in standard deviations",
                    shift,
                    high=_SHIFT,
                    source="measured: below 3 in healthy runs",
                ),
                Measurement("shift of validation/loss over the same steps, in nats", validation),
            ],
            steps=(at, evidence.step),
            excluded=[Exclusion("unshuffled-data", f"until step {at:,} each step had {levels[0]:.0%} of the mixture's sources")],
            changes=[
                Change(
                    advice=f"roll back to before step {at:,}, and find out what has changed there: {show_batch(evidence, at)}",
                    cost=f"the steps since {at:,}",
                )
            ],
            check_afterwards="train/effective_sources is that of the mixture in every line",
            next_measurement=show_batch(evidence, at),
        )
    return None


def _shift(loss: Series, at: int) -> float:
    before, after = (part.values for part in (loss.between(0, at).part(0.5, 1), loss.between(at, math.inf).part(0, 0.5)))
    if len(before) < _WINDOW or len(after) < _WINDOW:
        return math.nan
    return float(abs(np.median(after) - np.median(before)) / max(before.std() / math.sqrt(len(before)) * 2, 1e-9))


def _validation_shift(evidence: Evidence, at: int) -> float:
    loss = evidence.series("validation/loss").finite
    before, after = loss.between(0, at), loss.between(at, math.inf)
    return after.first - before.last if len(before) and len(after) else math.nan


RULE = Rule(
    "order-changed",
    "From a step on the text comes in another order, though the mixture is the same.",
    "data",
    ("too-good", "not-decreasing"),
    _check,
    "The training loss moves to another level while the held-out loss goes on as before: the model has not changed, the text has. A "
    "change "
    "of the mixture or a phase does this too, but it is in the ledger and the recipe. Reported in marin#1803, where a shuffle left its "
    "order "
    "late in a run of 32B parameters.",
    needs=("train/loss", "train/effective_sources"),
    stages=("pretrain",),
    look_alikes={"unshuffled-data": "from the first step on"},
)
