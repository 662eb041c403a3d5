"""Training stands still for its checkpoints."""

from __future__ import annotations

import re

import numpy as np

from lmworks.watch.evidence import Evidence
from lmworks.watch.rule import Change, Exclusion, Finding, Measurement, NotJudged, Rule

_SHARE = 0.1
_FEWEST = 3  # saves


def _check(evidence: Evidence) -> Finding | None:
    stood, times = evidence.series("perf/save_seconds").finite, evidence.series("time").finite
    saves = stood.values[stood.values > 0.02]
    if len(saves) < _FEWEST:
        return None
    resumed = set(evidence.resumes)
    steps, apart = times.steps[1:], np.diff(times.values)
    within = np.array([not any(first <= one < last for one in resumed) for first, last in zip(times.steps[:-1], steps, strict=True)], bool)
    if not within.any():
        raise NotJudged("fewer than two lines with a time")
    total = float(apart[within & (apart > 0)].sum())
    if total <= 0:
        raise NotJudged("the lines have no times")
    share = float(stood.between(int(times.steps[0]) + 1, float("inf")).values.sum()) / total
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
        changes=_changes(evidence, share),
        check_afterwards="the sum of perf/save_seconds is below 2% of the time between two saves",
    )


def _changes(evidence: Evidence, share: float) -> list[Change]:
    found = []
    if evidence.value("checkpoints.asynchronous") is False:
        cost = "memory for a copy of the state while it is written"
        found.append(Change("checkpoints.asynchronous", "true", "write in the background", cost=cost))
    if evidence.value("checkpoints.local") is None:
        cost = "room for two checkpoints there"
        found.append(Change("checkpoints.local", "/local/disk", "save to the local disk of each machine first", cost=cost))
    section = "train" if evidence.stage == "pretrain" else evidence.stage
    text = str(evidence.value(f"{section}.save_every", "10%"))
    number = re.match(r"[0-9.]+", text)
    rarer = f"{float(number[0]) * max(2, round(share / 0.02)):g}{text[number.end() :]}" if number else "10%"
    found.append(Change(f"{section}.save_every", rarer, "save more rarely", cost="more steps are lost by a failure"))
    return found


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
