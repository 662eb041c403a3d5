"""Training stands still for its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from lmworks.io.run_layout import BASE
from lmworks.recipe.schema.artifacts import save_interval
from lmworks.recipe.schema.units import Duration
from lmworks.watch import trends
from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_SHARE = 0.1
_FEWEST = 3  # saves
_WANTED = 0.02
"""Share of the time that saves should take; no interval is advised that is longer than half of the stage or phase."""


def _check(evidence: Evidence) -> Finding | None:
    stood, apart = evidence.series("perf/save_seconds").finite, evidence.line_seconds
    saves = stood.values[stood.values > 0.02]
    if len(saves) < _FEWEST:
        return None
    total, steps = float(apart.finite.values.sum()), np.diff(apart.steps, prepend=0)[np.isfinite(apart.values)].sum()
    if total <= 0:
        raise NotJudged("fewer than two lines with a time")
    share = float(stood.values[np.isin(stood.steps, apart.finite.steps)].sum()) / total
    if not share > _SHARE:
        return None
    written = [event["seconds"] for event in evidence.of("checkpoint") if isinstance(event.get("seconds"), int | float)]
    size = [event["bytes"] for event in evidence.of("checkpoint") if isinstance(event.get("bytes"), int)]
    data = float(evidence.series("perf/data_wait").finite.values.sum()) / total
    return Finding(
        [
            Measurement(
                "share of the time for which training stood still for saves", share, high=_SHARE, source="timers of the run; DOCTOR: 10%"
            ),
            Measurement("median time of a save", float(np.median(saves)), unit="s"),
            *([Measurement("median time to write a checkpoint", float(np.median(written)), unit="s")] if written else []),
            *([Measurement("size of a checkpoint", float(np.median(size)), unit="bytes")] if size else []),
        ],
        steps=(int(stood.steps[0]), int(stood.steps[-1])),
        exact=True,
        excluded=[Exclusion("slow-loader", f"waiting for data takes {data:.1%} of the time")],
        changes=_changes(evidence, share, float(np.median(saves)), total / int(steps)),
        check_afterwards="the sum of perf/save_seconds is below 2% of the time between two saves",
    )


def _changes(evidence: Evidence, share: float, pause: float, step_seconds: float) -> list[Change]:
    found = []
    if evidence.value("checkpoints.asynchronous") is False:
        cost = "memory for a copy of the state while it is written"
        found.append(Change("checkpoints.asynchronous", "true", "write in the background", cost=cost))
    if evidence.value("checkpoints.local") is None:
        cost = "room for two checkpoints there"
        found.append(Change("checkpoints.local", "/local/disk", "save to the local disk of each machine first", cost=cost))
    return [*found, *_rarer(evidence, share, pause, step_seconds)]


def _rarer(evidence: Evidence, share: float, pause: float, step_seconds: float) -> Iterator[Change]:
    """A save is due by steps and by time, whichever comes first; so each interval is raised that is shorter than the wanted one."""
    key, interval, steps, tokens = _interval(evidence)
    stated = evidence.number("train.save_every_time")
    by_time = save_interval(pause, evidence.ranks) if math.isnan(stated) else stated
    by_steps = interval.interval(steps, tokens) * step_seconds
    wanted = min(max(2, round(share / _WANTED)) * min(by_time, by_steps), 0.5 * steps * step_seconds)
    cost = "more steps are lost by a failure"
    if by_steps < wanted:
        number = wanted / step_seconds
        value = {"%": f"{100 * number / steps:.3g}%", "tokens": f"{number * tokens / steps:.0f} tokens"}
        yield Change(key, value.get(interval.unit, f"{number:.0f} steps"), "save more rarely", cost=cost, moves="up")
    if by_time < wanted:
        why = "save more rarely: a save is also due after this time"
        yield Change("train.save_every_time", f"{math.ceil(wanted / 60)} min", why, cost=cost, moves="up")


def _interval(evidence: Evidence) -> tuple[str, Duration, int, int]:
    """The key that sets the steps between saves of the stage, in pretraining of its last phase; its value, and the steps and tokens of
    which it is a share. A phase of its own interval has no other; all stages share that of the recipe."""
    steps, tokens = evidence.steps or evidence.step, trends.planned_tokens(evidence)
    key, phase = "train.save_every", evidence.series("train/phase").last
    if evidence.stage == BASE.stage and math.isfinite(phase) and evidence.value(own := f"train.phases.{phase:.0f}.save_every") is not None:
        key, tokens = own, evidence.number(f"train.phases.{phase:.0f}.tokens")
        steps = int(tokens / evidence.number(f"train.phases.{phase:.0f}.global_batch_tokens"))
    return key, Duration.parse(str(evidence.value(key, "10%"))), max(1, steps), int(tokens) if math.isfinite(tokens) else max(1, steps)


RULE = Rule(
    "slow-saves",
    "Training stands still for its checkpoints.",
    "checkpoints",
    ("slow", "checkpoints"),
    _check,
    "perf/save_seconds is the time for which training stood still for a checkpoint: the copy to host memory, and the write where it is not "
    "in the background or the save before has not ended. It should be a few per cent of the time. Slow network storage and frequent saves "
    "are the usual causes; a save that takes longer than launch.timeout on one rank also ends the others (save-timeout).",
    needs=("perf/save_seconds",),
    look_alikes={"slow-loader": "the time goes into perf/data_wait", "disk-full": "saves fail"},
)
