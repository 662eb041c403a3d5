"""A few batches of bad rows: steps whose own loss is far above that of the steps around them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence, Series, ratio
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule
from lmworks.watch.rules._commands import find_rows, skip_steps

_RISE, _CLEAR, _ROWS = 0.3, 10.0, 19.0
"""A step stands out by 0.3 nats, by ten times the noise of the lines, and by 19 nats over all of its rows. A row of random tokens is about
5 nats above the others; single odd rows are in every corpus, and raised the loss of batches of 8 rows by 1.0 nats, of 2 rows by 4."""
_BEGIN = 0.1
"""Share of the steps that are not judged: the loss falls steeply."""
_REMAINS = 0.2
"""Share of the rise that is left in the lines behind it. 0.01 to 0.05 behind bad rows, whose step is left out or clipped; 0.9 behind one
step at thirty times the rate, which has hurt the weights."""
_LONGEST, _MOST = 16, 4
"""Bad rows lie together: so many steps, in so few places. An operator that fails now and then is not in them."""
_NORM = 3.0
_BEFORE, _AFTER = 2.0, 5.0
"""Gradient norms of the steps before and after, over the median: rows have no effect before they are read, and none behind them if their
update was left out or clipped. At most 1.4 and 1.5 around planted rows; 1.9 to 2.6 and 13 to 70 around two spikes that came from the
weights (AdamW, early, in all sources at once) and were gone two steps later."""


def _check(evidence: Evidence) -> Finding | None:
    loss = evidence.series("train/loss").finite
    events = {
        int(event["step"]) + 1: float(event["loss"])
        for event in evidence.of("spike")
        if isinstance(event.get("step"), int) and isinstance(event.get("loss"), int | float) and math.isfinite(event["loss"])
    }
    whole = _with(loss, events)  # lines of steps that a roll-back has undone are gone, their events are not
    if len(whole) < 20:
        raise NotJudged("fewer than 20 lines of loss")
    level = trends.running_median(whole.values, 2 * _LONGEST + 9)
    rows = ratio(evidence.series("train/batch_tokens").median, evidence.series("train/sequence_length").median)
    limit = max(_RISE, _CLEAR * trends.noise(loss), _ROWS / rows if rows > 0 else 0.0)
    out = (whole.values - level > limit) & (whole.steps > max(20, _BEGIN * evidence.steps))
    blocks = _blocks(whole.steps[out])
    if not blocks or len(blocks) > _MOST or max(last - first for first, last in blocks) >= _LONGEST or out.mean() > 0.2:
        return None
    first, last = max(blocks, key=lambda one: float((whole.values - level)[(whole.steps >= one[0]) & (whole.steps <= one[1])].max()))
    inside = (whole.steps >= first) & (whole.steps <= last)
    rise = float((whole.values - level)[inside].max())
    behind = whole.between(last + 1, last + 5)
    remains = (behind.median - trends.at(Series(whole.steps, level), first)) / rise if len(behind) else math.nan
    if not remains < _REMAINS:
        return None
    norms = _with(evidence.series("optim/grad_norm").finite, _norms(evidence))
    usual = norms.between(first - 40, first).median
    norm = ratio(max(norms.between(first, last + 1).values.tolist(), default=math.nan), usual)
    before, after = (ratio(norms.between(*one).median, usual) for one in ((first - 1, first), (last + 1, last + 2)))
    if before > _BEFORE or after > _AFTER:
        return None
    saved = sorted(name for name in evidence.files.names() if name.startswith("bad_batches/"))
    back = sum(first - 1 <= event.get("step", -1) <= last for event in evidence.of("rollback"))
    return Finding(
        [
            Measurement(
                "rise of the loss of the step above the steps around it", rise, high=limit, source="measured: make doctor", unit="nats"
            ),
            Measurement("gradient norm of the step over the median before it", norm, high=_NORM, source="measured: make doctor"),
            Measurement("gradient norm of the step before it over the median", before, high=_BEFORE, source="measured: make doctor"),
            Measurement("gradient norm of the step after it over the median", after, high=_AFTER, source="measured: make doctor"),
            Measurement("share of the rise that is left behind it", remains, high=_REMAINS, source="measured: make doctor"),
        ],
        steps=(first, last),
        where=", ".join(saved[:5]),
        excluded=[
            Exclusion("learning-rate-too-high", f"{remains:.0%} of the rise is left in the next steps: the weights are sound"),
            Exclusion(
                "operator-overflow", f"{sum(stop - start + 1 for start, stop in blocks)} of {len(whole)} steps, in {len(blocks)} places"
            ),
            Exclusion("silent-corruption", "their gradients are those of their loss" if norm > 1 else "the step after is sound"),
        ],
        changes=[
            Change(
                advice=f"look at the rows of step {first}: {find_rows(evidence, first)}; take their source or documents out",
                cost="the corpus and the shards of that source; the run goes on meanwhile",
            ),
            Change(
                advice=f"skip them: {skip_steps(evidence, first, last)}",
                cost=f"the steps since the checkpoint before {first}"
                + (f"; {back} roll-backs have skipped some of them already" if back else ""),
            ),
        ],
        check_afterwards=f"the run passes step {last} without a spike",
        next_measurement=f"lmworks doctor {evidence.files.label} --probe, which computes the loss of the rows of step {first} again",
    )


def _with(series: Series, more: dict[int, float]) -> Series:
    values = dict(zip(series.steps.tolist(), series.values.tolist(), strict=True)) | more
    steps = sorted(values)
    return Series(np.array(steps, np.int64), np.array([values[step] for step in steps], float))


def _norms(evidence: Evidence) -> dict[int, float]:
    return {
        int(event["step"]) + 1: float(event["grad_norm"])
        for event in evidence.of("spike")
        if isinstance(event.get("step"), int) and isinstance(event.get("grad_norm"), int | float) and math.isfinite(event["grad_norm"])
    }


def _blocks(steps: np.ndarray) -> Sequence[tuple[int, int]]:
    """Steps that lie together, as pairs of first and last."""
    found: list[tuple[int, int]] = []
    for step in steps.tolist():
        if found and step - found[-1][1] <= 3:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return found


RULE = Rule(
    "bad-batch",
    "A few batches contain bad rows.",
    "numerics",
    ("spikes", "not-finite"),
    _check,
    "Rows of control bytes, of another encoding, or of one token over and over have a loss far above the others', and a large gradient. "
    "The update of such a step is left out (stability.spike) or clipped, so the steps behind it are sound: that tells bad rows from "
    "weights that are hurt, whose loss comes back slowly. The batch is a function of the step, so the same rows spike again after a "
    "roll-back unless they are skipped.",
    needs=("train/loss",),
    stages=("pretrain", "tune"),
    look_alikes={
        "learning-rate-too-high": "the loss comes back over many steps",
        "silent-corruption": "the same rows are sound the second time",
        "operator-overflow": "every batch, or batches at regular distances",
    },
    outranks=("learning-rate-too-high",),
)
