"""Measures along training: on one grid for the quality of a measure, and with their spread over seeds for the page."""

from __future__ import annotations

from typing import Any

import numpy as np

from lmworks.ablate.measures import EVALUATION, Measure
from lmworks.ablate.readings import Curve
from lmworks.ablate.results import Results
from lmworks.ablate.run_set import Arm

_QUALITY_POINTS, _PAGE_POINTS = 20, 200


def aligned(results: Results, measure: Measure, arms: list[Arm], seeds: list[int]) -> np.ndarray:
    """Curves (arms, seeds, points) at equal fractions of the budget; the final value alone where a measure has no curve.

    The last point is the final value, unless that is of the evaluation stage, whose score is of more items than its curve.
    """
    final = results.table(measure, arms, seeds)
    curves = [_curve(results, measure, arm, seed) for arm in arms for seed in seeds]
    points = min(_QUALITY_POINTS, *(len(curve.values) if curve else 1 for curve in curves))
    if points < 3:
        return final[:, :, None]
    found = np.array([_on(np.linspace(curve.tokens[0], curve.tokens[-1], points), curve) for curve in curves if curve])
    found = found.reshape(len(arms), len(seeds), points)
    if not measure.name.startswith(EVALUATION):
        found[:, :, -1] = final
    return found


def spread(results: Results, measure: Measure, arms: list[Arm], seeds: list[int]) -> dict[str, Any]:
    """Mean and extremes over seeds along training, by arm."""
    found = {}
    for arm in arms:
        curves = [curve for seed in seeds if (curve := _curve(results, measure, arm, seed)) is not None]
        if curves:
            grid = np.array(curves[0].tokens)
            grid = np.linspace(grid[0], grid[-1], _PAGE_POINTS) if len(grid) > _PAGE_POINTS else grid
            y = np.array([_on(grid, curve) for curve in curves])
            sides = {"mean": y.mean(axis=0), "low": y.min(axis=0), "high": y.max(axis=0)}
            found[arm.name] = {"tokens": grid.tolist(), **{name: values.tolist() for name, values in sides.items()}}
    return found


def _curve(results: Results, measure: Measure, arm: Arm, seed: int) -> Curve | None:
    reading = results.reading(arm, seed)
    return None if reading is None else reading.curves.get(measure.name)


def _on(grid: np.ndarray, curve: Curve) -> np.ndarray:
    return np.interp(grid, curve.tokens, curve.values)
