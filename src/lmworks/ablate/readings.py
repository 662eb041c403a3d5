"""The values of measures in a finished run, with their curves and, for scores, their items and what guessing gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmworks import jsonl
from lmworks.ablate.measures import BITS, EVALUATION, IN_TRAINING, NEEDLE, Measure, needs_evaluation
from lmworks.evaluate.references import OVERALL
from lmworks.files import explain_damage, read_json
from lmworks.metrics.log import read

_EACH_STEP = ("train/", "optim/", "perf/", "experts/", "layers/", "system/")
_TAIL = 0.1  # of the steps: over these a metric of every step is averaged


@dataclass(frozen=True)
class Curve:
    """A measure along training, each point behind so many tokens."""

    tokens: list[float]
    values: list[float]


@dataclass(frozen=True)
class Reading:
    """What a run has measured, by measure. For scores, `counts` holds the number of items, `items` right (1) or wrong (0) by item if they
    were recorded, and `baselines` what guessing gets."""

    values: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    items: dict[str, dict[str, float]] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)


def read_run(run_dir: Path, measures: Sequence[Measure]) -> Reading:
    """The measures of a run, as far as it has written them. Values that are not finite are left out."""
    reading = Reading()
    lines = read(run_dir)
    for measure in measures:
        if not measure.name.startswith(EVALUATION):
            _read_metric(lines, measure, reading)
    if needs_evaluation(measures):
        _read_evaluation(run_dir / "evaluate", measures, lines, reading)
    return reading


def _read_metric(lines: Sequence[Mapping[str, Any]], measure: Measure, reading: Reading) -> None:
    name = measure.name
    points = _points(lines, name)
    if not points:
        return
    last = max(line.get("step", 0) for line in lines)
    reading.curves[name] = _curve(points)
    tail = [value for step, _, value in points if step > (1 - _TAIL) * last] if name.startswith(_EACH_STEP) else []
    # A validation counts only if it is of the end: a run that diverged before has no value.
    if tail:
        reading.values[name] = float(np.mean(tail))
    elif not name.startswith(_EACH_STEP) and points[-1][0] == last:
        reading.values[name] = points[-1][2]
    if measure.has_chance:
        beside = NEEDLE if name.startswith(NEEDLE) else f"{name.rpartition('/')[0]}/"
        if chance := _points(lines, f"{beside}chance"):
            reading.baselines[name] = chance[-1][2]
        if items := _points(lines, f"{beside}items"):
            reading.counts[name] = int(items[-1][2])


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[int, float, float]]:
    """Step, tokens and value of each line with a finite value of a metric."""
    found, tokens = [], 0.0
    for line in lines:
        tokens = float(line.get("train/tokens") or tokens)
        value = line.get(name)
        if isinstance(value, int | float) and math.isfinite(value):
            found.append((int(line["step"]), tokens, float(value)))
    return found


def _curve(points: Sequence[tuple[int, float, float]]) -> Curve:
    return Curve([at for _, at, _ in points], [value for _, _, value in points])


def _read_evaluation(folder: Path, measures: Sequence[Measure], lines: Sequence[Mapping[str, Any]], reading: Reading) -> None:
    path = folder / "results.json"
    if not path.exists():
        return
    with explain_damage(path, "delete it and run the same command again"):
        model = read_json(path)["models"]["base"]
        bits = {name: record[BITS] for name, record in model[BITS].items()}
        scores = model.get("scores", {})
    outcomes = _outcomes(folder)
    for measure in measures:
        if not measure.name.startswith(EVALUATION):
            continue
        rest = measure.name.removeprefix(EVALUATION)
        if not measure.has_items:
            domain = rest.removesuffix(BITS).rstrip("/") or OVERALL
            if domain in bits:
                reading.values[measure.name] = float(bits[domain])
        elif (score := _score_of(rest, scores)) is not None:
            reading.values[measure.name] = float(scores[score]["score"])
            reading.baselines[measure.name] = float(scores[score].get("baseline") or 0)
            reading.items[measure.name] = outcomes.get(score, {})
            reading.counts[measure.name] = int(scores[score].get("n") or len(reading.items[measure.name]))
            if points := _points(lines, _in_training(score)):
                reading.curves[measure.name] = _curve(points)


def _score_of(name: str, scores: Mapping[str, Any]) -> str | None:
    """The score of this name; of a set that is scored in several forms, the one that was chosen for the model."""
    return (
        name
        if name in scores
        else next((one for one, record in scores.items() if record.get("set") == name and record.get("chosen")), None)
    )


def _in_training(score: str) -> str:
    """The metric of a score (SET/FORM/SHOTS-shot) during training, in the same form on a smaller sample."""
    name, _, form = score.partition("/")
    return f"{IN_TRAINING}{name}/{form.replace('/', '-')}"


def _outcomes(folder: Path) -> dict[str, dict[str, float]]:
    """Right (1) or wrong (0) per item, by score."""
    found: dict[str, dict[str, float]] = {}
    for line in jsonl.read(folder / "outcomes-base.jsonl"):
        with explain_damage(folder / "outcomes-base.jsonl"):
            found.setdefault(line["score"], {})[line["id"]] = float(line["correct"])
    return found
