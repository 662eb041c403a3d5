"""Whether pretraining has diverged, by the records of a run: a finite loss at the end does not say so, because steps without an update are
skipped and the loss may have risen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks.ui.amounts import significant
from lmworks.watch.ledger import LEDGER, ROLLBACK, read_ledger, since_start_over

_LOST = 0.01  # of the steps: more than these without an update, and more than one, make other training of it
_RISE = 1.05  # ratio of losses at the end and at the first validation; overfitting raises only the held-out loss
_PART = 0.1  # of the steps: over these the training loss is averaged
_HELD_OUT, _TRAINED = "validation/bits_per_byte", "train/loss"


def divergence(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    """Why a run counts as diverged; empty for one that trained regularly. `lines` are those of its metrics (`lmworks.metrics.log.read`).

    It has diverged if more than 1% of its steps, and more than one, made no update (bad steps, and data that rollbacks skip), or if both
    its training loss and its held-out loss end more than 5% above those at its first validation.
    """
    steps = [int(line["step"]) for line in lines if isinstance(line.get("step"), int)]
    if not steps:
        return ""
    first, last = min(steps), max(steps)
    path = run_dir / LEDGER
    lost, bad, back = _without_update(read_ledger(path) if path.exists() else [])
    if lost > max(1, _LOST * (last - first + 1)):
        said = [f"{count:,} {what}{'s' * (count > 1)}" for count, what in ((bad, "bad step"), (back, "rollback")) if count]
        return f"{lost:,} of {last - first + 1:,} steps without an update: {', '.join(said)}"
    held = _values(lines, _HELD_OUT)
    if len(held) < 2:
        return ""
    part = _PART * (last - first)
    early = [value for step, value in _values(lines, _TRAINED) if step <= max(held[0][0], first + part)]
    late = [value for step, value in _values(lines, _TRAINED) if step >= last - part]
    if early and late and sum(late) / len(late) > _RISE * sum(early) / len(early) and held[-1][1] > _RISE * held[0][1]:
        return f"held-out loss of {significant(held[-1][1], 3)} bits/byte at the end, {significant(held[0][1], 3)} at the first validation"
    return ""


def _without_update(events: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """Steps of the course that stands without an update, and the bad steps and rollbacks that led to it."""
    bad, skipped, seen, back = set[int](), set[int](), set[int](), 0
    for event in since_start_over(events, "pretrain"):
        if event.get("stage", "pretrain") != "pretrain":
            continue
        if event["event"] == "bad_step":
            bad.add(int(event["step"]))
            seen.add(int(event["step"]))
        elif event["event"] == ROLLBACK:
            bad = {step for step in bad if step < event["to_step"]}  # later ones are trained again, or skipped
            skipped.update(range(*event["skip"]) if event.get("skip") else ())
            back += 1
    return len(bad | skipped), len(seen), back


def _values(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """Step and value of each line with a finite value of a metric."""
    found = [(line.get("step"), line.get(name)) for line in lines]
    return [(step, float(value)) for step, value in found
            if isinstance(step, int) and isinstance(value, int | float) and math.isfinite(value)]  # fmt: skip
