"""The held-out loss of a recipe under another learning-rate schedule than that of runs with the same model and data."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from lmworks.errors import UserError
from lmworks.ladder.annealing import PARAMETERS, AnnealingLaw, Areas, fit_annealing, grid_of_decays
from lmworks.ladder.comparable import Course, corpus_of, require_comparable
from lmworks.ladder.fit import BOOTSTRAPS
from lmworks.ladder.points import MEASURE, held_out_text, require_trained
from lmworks.metrics.log import FILE
from lmworks.pages.record_files import lines
from lmworks.recipe.load import Resolved, load_resolved
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.data.mixture import read_changes
from lmworks.ui.terminal import bar

_RATE = "optim/learning_rate"
_LEAST, _LEAST_IN_DECAY = PARAMETERS + 3, 2  # validations
_MOST = 500  # validations of a run that are fitted, or predicted, evenly spread
_CONSTANT = 1e-6  # of S2: below it, the learning rate has not changed
_UNDETERMINED = 16.0  # ratio of the ends of the interval of 1 / (1 - lambda)
_FAR = 3.0  # times the largest S1 of the runs


@dataclass(frozen=True)
class RunFit:
    """A run, and its last validation that was fitted."""

    run_dir: str
    validations: int
    step: int
    tokens: int
    lr_factor: float
    measured: float
    fitted: float


@dataclass(frozen=True)
class CurvePoint:
    """A predicted validation. `lr_factor` is the learning rate as a fraction of the peak; the interval is one of 90%."""

    step: int
    tokens: int
    lr_factor: float
    predicted: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """The predicted validations of a recipe, the last one at its end. `residual` is the root mean square of the residuals of log loss."""

    law: AnnealingLaw
    residual: float
    runs: list[RunFit]
    points: list[CurvePoint]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        law = {name: getattr(self.law.best, name) for name in ("l0", "a", "alpha", "c")} | {"lambda": self.law.decay}
        return {
            "law": law, "residual": self.residual, "correlation": self.law.correlation,
            "runs": [vars(one) for one in self.runs], "points": [vars(one) for one in self.points], "notes": self.notes,
        }  # fmt: skip


def predict_curve(run_dirs: Sequence[Path], target: Resolved, bootstraps: int | None = None) -> Curve:
    """Fit the annealing law to the validations of the runs, and predict those of `target`.

    Raises `UserError` if the runs do not determine the law, or if they and the target differ in more than their schedules.
    """
    runs = [_Run(run_dir) for run_dir in _distinct(run_dirs)]
    _require_comparable(runs, target)
    course = Course.of(target.recipe)
    _require_enough(runs)
    grid = grid_of_decays(max(len(run.lr_factors) for run in runs))
    areas = [Areas.of(run.lr_factors, run.course.after_warmup, run.steps, grid) for run in runs]
    _require_decay(runs, areas)
    count = BOOTSTRAPS if bootstraps is None else bootstraps
    with bar("bootstrap", count) as progress:
        law = fit_annealing(areas, [run.losses for run in runs], grid, bootstraps=count, advance=progress.advance)
    fitted = [law.loss(one) for one in areas]
    residuals = np.concatenate([np.log(run.losses / fit) for run, fit in zip(runs, fitted, strict=True)])
    notes = [f"{run.run_dir}: steps from {run.course.end:,} on are not fitted: {run.course.reason}" for run in runs if run.course.reason]
    if course.reason:
        notes.append(f"the prediction ends at step {course.end:,} of {course.timeline.steps:,}: {course.reason}")
    points, forward = _predict(law, course, grid)
    if forward > _FAR * (largest := max(float(one.forward.max()) for one in areas)):
        notes.append(f"S1 is {forward / largest:.0f} times that of the runs at the end; the interval assumes that the law holds so far")
    low, high = law.decay_interval()
    if 1 - low > _UNDETERMINED * (1 - high):
        notes.append(
            f"the decays of these runs hardly determine lambda ({low:.3g} to {high:.3g}), and so the gain of a decay of another length; "
            "add a run whose decay is of another length, best of that to be predicted"
        )
    described = [run.describe(float(fit[-1])) for run, fit in zip(runs, fitted, strict=True)]
    return Curve(law, float(np.sqrt((residuals**2).mean())), described, points, notes)


class _Run:
    """The validations of a run to which the law is fitted: `steps` and `losses`."""

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir / "resolved.json").is_file():
            raise UserError(f"{run_dir} is not a run directory; make one with: lmworks run RECIPE")
        self.run_dir, self.recipe = run_dir, load_resolved(run_dir / "resolved.json")
        require_trained(run_dir)
        _require_phases(self.recipe, run_dir)
        self.course = Course.of(self.recipe, min((change.step for change in read_changes(run_dir).applied), default=None))
        self._rate_steps, self._rates = array("q"), array("d")
        steps, losses = array("q"), array("d")
        for record in lines(run_dir / FILE):
            step = record.get("step")
            if not isinstance(step, int) or not 0 < step <= self.course.end:
                continue
            rate, loss = _finite(record.get(_RATE)), _finite(record.get(MEASURE))
            if rate is not None:
                self._rate_steps.append(step)
                self._rates.append(rate)
            if loss is not None and loss > 0 and self.course.is_warmed_up(step):
                steps.append(step)
                losses.append(loss)
        kept = _spread(len(steps), _MOST)
        self.steps, self.losses = np.array(steps, np.int64)[kept], np.array(losses, np.float64)[kept]

    @cached_property
    def lr_factors(self) -> np.ndarray:
        """The learning rate of each step as a fraction of the peak: that of the recipe, corrected where another one was recorded, as
        before a change of the schedule on resume and after a spike. A run that branched off from another one has no records before that."""
        found, peak = self.course.lr_factors(), self.recipe.optimizer.learning_rate
        if self._rates and peak:
            at = np.array(self._rate_steps, np.int64) - 1
            difference = np.array(self._rates, np.float64) / peak - found[at]
            found += np.interp(np.arange(len(found)), at, difference, left=0.0, right=0.0)
        return found

    def describe(self, fitted: float) -> RunFit:
        step = int(self.steps[-1])
        tokens, lr_factor = self.course.timeline.tokens_before(step), float(self.lr_factors[step - 1])
        return RunFit(str(self.run_dir), len(self.steps), step, tokens, lr_factor, float(self.losses[-1]), fitted)


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _spread(count: int, most: int) -> np.ndarray:
    """At most so many of `count` positions, evenly spread, the last one among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


def _predict(law: AnnealingLaw, course: Course, grid: np.ndarray) -> tuple[list[CurvePoint], float]:
    """The points of a course at its validations, and S1 at its end."""
    timeline, end = course.timeline, course.end
    interval = course.recipe.train.validate_every.interval(timeline.steps, timeline.tokens_before(timeline.steps))
    due = [step for step in range(interval, end, interval) if course.is_warmed_up(step)] + [end]
    steps = np.array(due, np.int64)[_spread(len(due), _MOST)]
    lr_factors = course.lr_factors()
    areas = Areas.of(lr_factors, course.after_warmup, steps, grid)
    values = zip(steps, lr_factors[steps - 1], law.loss(areas), *law.interval(areas), strict=True)
    points = [CurvePoint(int(step), timeline.tokens_before(int(step)), *map(float, rest)) for step, *rest in values]
    return points, float(areas.forward[-1])


def _distinct(run_dirs: Sequence[Path]) -> Sequence[Path]:
    for index, run_dir in enumerate(run_dirs):
        if run_dir.resolve() in [one.resolve() for one in run_dirs[:index]]:
            raise UserError(f"{run_dir} is listed twice; each run counts once")
    return run_dirs


def _require_phases(recipe: Recipe, name: object) -> None:
    if not recipe.train.phases:
        raise UserError(f"{name} has no phases of pretraining, so it has no loss curve; name a recipe with train.phases")


def _require_comparable(runs: Sequence[_Run], target: Resolved) -> None:
    first, text = runs[0], held_out_text(runs[0].run_dir)
    for run in runs[1:]:
        if held_out_text(run.run_dir) != text:
            raise UserError(f"{run.run_dir} is validated on other text than {first.run_dir}; name runs of one corpus")
        require_comparable(first.recipe, run.recipe, str(run.run_dir), str(first.run_dir), True, "name runs of one recipe")
    recipe, name = target.recipe, str(target.path)
    _require_phases(recipe, name)
    if recipe.time is not None and target.path.name != "resolved.json":
        raise UserError(f"{name}: the token budgets depend on time; add --set time=null to take those that are written, or name a run")
    corpus = corpus_of(recipe)
    if corpus is not None and held_out_text(corpus) != text:
        raise UserError(f"{name} is validated on other text than {first.run_dir}; choose another run_dir with --set, or runs of its corpus")
    require_comparable(first.recipe, recipe, name, str(first.run_dir), corpus is not None)


def _require_enough(runs: Sequence[_Run]) -> None:
    found = sum(len(run.steps) for run in runs)
    if found < _LEAST or not all(len(run.steps) for run in runs):
        counts = ", ".join(f"{run.run_dir}: {len(run.steps)}" for run in runs)
        raise UserError(
            f"too few validations after the warm-up ({counts}); the law needs at least {_LEAST}: train with a shorter interval, such as "
            "--set train.validate_every=2%"
        )


def _require_decay(runs: Sequence[_Run], areas: Sequence[Areas]) -> None:
    found = sum(int(np.any(np.abs(one.annealing) > _CONSTANT, axis=1).sum()) for one in areas)
    if found >= _LEAST_IN_DECAY:
        return
    names = ", ".join(str(run.run_dir) for run in runs)
    why = "is constant up to the last validation" if not found else f"has begun to change at {found} validation only"
    raise UserError(
        f"the learning rate {why} in {names}, so the effect of a decay is not determined; add a run of the same recipe whose learning rate "
        "decays, such as one with lr_schedule.kind=wsd, and validate at least twice in the decay"
    )
