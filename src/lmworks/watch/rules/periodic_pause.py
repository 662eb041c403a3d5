"""Training stands still for a moment at regular intervals, outside of everything that is timed."""

from __future__ import annotations

import numpy as np

from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_FACTOR, _OF_A_STEP = 8.0, 0.05  # a pause: so many times the usual gap, and longer than it by this share of a step
_REGULAR, _WITHIN, _LOST = 0.75, 0.1, 0.05
_FEWEST_PAUSES, _FEWEST = 8, 40
_BUSY = ("perf/save_seconds", "perf/validation_seconds", "perf/evaluation_seconds")


def _check(evidence: Evidence) -> Finding | None:
    gap, seconds = evidence.series("perf/gap_seconds").finite.part(0.02, 1), evidence.series("perf/step_seconds").finite.part(0.02, 1)
    if len(gap) < _FEWEST:
        raise NotJudged(f"fewer than {_FEWEST} lines")
    excess = gap.values - gap.median
    long = (gap.values > _FACTOR * gap.median) & (excess > _OF_A_STEP * seconds.median) & ~_explained(evidence, gap)
    pauses = gap.steps[long]
    if len(pauses) < _FEWEST_PAUSES:
        return None
    period = float(np.median(np.diff(pauses)))
    followed = np.array([bool((abs(pauses - one - period) <= _WITHIN * period).any()) for one in pauses[:-1]])
    # The last one is left out: what follows it lies behind the end.
    regular = float(followed.mean())
    steps = float(gap.steps[-1] - gap.steps[0])
    lost = float(excess[long].sum()) / max(float(excess[long].sum()) + seconds.median * steps, 1e-9)
    length = float(np.median(excess[long]))
    apart = period * seconds.median + length
    if regular <= _REGULAR or abs(evidence.number("metrics.diagnose_every") / apart - 1) <= _WITHIN:
        return None
    # A pause of one rank holds up all, and each rank pauses at a moment of its own.
    of_all = 1 - (1 - lost) ** evidence.ranks
    computed = _computed(evidence, gap, long, length)
    known = next((key for key in ("metrics.detail_every", "stability.recheck_every") if evidence.number(key) == period), None)
    return Finding(
        [
            Measurement(
                "largest share of the time in pauses that nothing explains", of_all, high=_LOST,
                source=f"that of the recorded rank, {lost:.2%}, on each of {evidence.ranks:,} at other moments",
            ),
            Measurement(
                "share of the pauses that another follows after one period", regular, high=_REGULAR,
                source=f"the autocorrelation of the pauses; measured: at most 0.58 in runs without; within {_WITHIN:.0%} of the period",
            ),
            Measurement("period", period, unit="steps"),
            Measurement("length of a pause", length, unit="s"),
            Measurement("share of a pause in which the process computed", computed),
        ],
        steps=(int(pauses[0]), int(pauses[-1])),
        note=of_all <= _LOST,
        excluded=[
            Exclusion("slow-loader", "waiting for data is timed, and not in these pauses"),
            Exclusion("slow-saves", "saves, validations and evaluations are timed, and lines with one are not counted"),
            Exclusion("machine-oversubscribed", "a neighbor that takes the processor has no period in steps"),
        ],
        changes=[
            Change(known, "null", "has this period", "allowed on resume") if known else
            Change(advice="find what runs every so many steps: garbage collection or a hook if the process computes in a pause, "
                          "another rank, a disk or a cron job if it waits; gc.freeze() after the first steps makes collections short"),
        ],
        check_afterwards="perf/gap_seconds over two periods",
        next_measurement="py-spy dump of the process during a pause",
    )  # fmt: skip


def _explained(evidence: Evidence, gap: Series) -> np.ndarray:
    """(N,) bool: lines with a save, a validation, an evaluation or samples, and those that follow one."""
    busy = {int(step) for one in map(evidence.series, _BUSY) for step in one.steps[one.values > 0]}
    if (every := evidence.number("train.sample_every")) > 0:
        busy |= {int(step) for step in gap.steps if step % every == 0}
    at = np.isin(gap.steps, list(busy))
    return np.asarray(at | np.append(False, at[:-1]))


def _computed(evidence: Evidence, gap: Series, long: np.ndarray, length: float) -> float:
    """The processor time of the lines with a pause above that of the others, relative to the pause, between 0 and 1; NaN if it is not
    recorded."""
    cpu = evidence.series("perf/cpu_seconds").finite
    if not np.array_equal(cpu.steps[-len(gap) :], gap.steps):
        return float("nan")
    values = cpu.values[-len(gap) :]
    return float(np.clip((np.median(values[long]) - np.median(values[~long])) / length, 0, 1))


RULE = Rule(
    "periodic-pause",
    "Training pauses at regular intervals.",
    "machine",
    ("slow",),
    _check,
    "The time between two lines that no timer explains is recorded. Pauses with a period are something that happens every so many "
    "steps or seconds: garbage collection, a hook, a cron job. In marin#9205 and torchtitan#148 Python's garbage collection held up "
    "one rank, and with it all others: each of 704 ranks paused for 1.4 s every 270 steps, 0.03% of its time, but at moments of its own, "
    "so that 40% of the steps took 8% longer. Collections at the same steps on all ranks, or objects that the collector skips "
    "(gc.freeze), end it. Below 5% of the time it is a note.",
    needs=("perf/gap_seconds", "perf/step_seconds"),
    look_alikes={
        "slow-loader": "is a wait for data", "slow-saves": "is a wait for checkpoints", "machine-oversubscribed": "has no period",
    },
)  # fmt: skip
