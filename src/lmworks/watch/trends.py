"""Numbers that several rules need of a series: levels, slopes, steps near the peak rate, the rate that the recipe prescribes.

All of them are robust to single outliers, and to lines that are written at every step or at every hundredth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmworks.errors import UserError
from lmworks.recipe import scaling_laws
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.model import Model
from lmworks.recipe.schema.train import Phase
from lmworks.recipe.timeline import Schedules, Timeline
from lmworks.watch.batch_growth import growths
from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.rule import NotJudged

_MOST_POINTS = 300
"""Of a Theil-Sen slope, which compares all pairs: 45,000 of them take a few milliseconds."""
_MOST_AROUND = 100


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The Theil-Sen slope of y over x, the median over pairs of points; NaN with fewer than two different x."""
    if len(x) > _MOST_POINTS:
        chosen = np.linspace(0, len(x) - 1, _MOST_POINTS).astype(int)
        x, y = x[chosen], y[chosen]
    first, second = np.triu_indices(len(x), 1)
    run, rise = (x[second] - x[first]).astype(float), y[second] - y[first]
    keep = run != 0
    return float(np.median(rise[keep] / run[keep])) if keep.any() else math.nan


def running_median(values: np.ndarray, width: int) -> np.ndarray:
    """The median of the `width` values around each one, fewer at the two ends; NaN where all of them are NaN. Of wide windows, at most
    `_MOST_AROUND` values in equal distances: a long run has windows of thousands."""
    if not len(values):
        return np.zeros(0)
    half = max(width, 1) // 2
    padded = np.concatenate([np.full(half, np.nan), values.astype(float), np.full(half, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)[:, :: 1 + 2 * half // _MOST_AROUND]
    known = ~np.isnan(windows).all(1)
    found = np.full(len(values), np.nan)
    found[known] = np.nanmedian(windows[known], 1)
    return found


def binned(series: Series, bins: int = 60) -> np.ndarray:
    """The medians of the finite values in equal groups of consecutive lines, at most `bins`, without the noise of single lines."""
    return np.array([np.median(group) for group in np.array_split(series.finite.values, bins) if len(group)])


def spread(values: np.ndarray) -> float:
    """The median absolute deviation from the median, times 1.4826: the standard deviation where values are normal. NaN without any."""
    values = values[np.isfinite(values)]
    return float(1.4826 * np.median(np.abs(values - np.median(values)))) if len(values) else math.nan


def noise(series: Series) -> float:
    """The standard deviation of what changes from one line to the next, which no trend enlarges; NaN with fewer than two values."""
    return spread(np.diff(series.finite.values)) / math.sqrt(2) if len(series.finite) > 1 else math.nan


def autocorrelation(values: np.ndarray, lag: int = 1) -> float:
    """Of values around their mean; NaN if they are too few or all equal."""
    values = values[np.isfinite(values)]
    if len(values) < lag + 3:
        return math.nan
    apart = values - values.mean()
    total = float(apart @ apart)
    return float(apart[lag:] @ apart[:-lag]) / total if total > 0 else math.nan


def integral(series: Series, start: float = 0, stop: float = math.inf) -> float:
    """The sum of a metric over all steps, from lines at some of them: each stands for the steps up to the next. 0 without any."""
    part = series.finite.between(start, stop)
    if not len(part):
        return 0.0
    gaps = np.diff(part.steps, prepend=min(part.steps[0] - 1, max(start, 0)))
    return float(part.values @ gaps)


def at(series: Series, step: int) -> float:
    """The value of the line that is nearest to a step; NaN without any."""
    finite = series.finite
    return float(finite.values[np.abs(finite.steps - step).argmin()]) if len(finite) else math.nan


def rate(evidence: Evidence) -> Series:
    """The learning rate of the lines: the matrices' under Muon."""
    return evidence.series("optim/learning_rate").finite


def peak_rate(evidence: Evidence) -> float:
    """The highest recorded rate; NaN without any."""
    values = rate(evidence).values
    return float(values.max()) if len(values) else math.nan


def near_peak(evidence: Evidence, share: float = 0.8) -> tuple[int, float]:
    """From the first step whose rate is at least `share` of the highest to before the one behind the last of them; all steps without
    recorded rates."""
    found = rate(evidence)
    steps = found.steps[found.values >= share * peak_rate(evidence)] if len(found) else found.steps
    return (int(steps[0]), float(steps[-1]) + 1) if len(steps) else (0, math.inf)


def decay_begins(evidence: Evidence, share: float = 0.8) -> int:
    """The first step behind the last whose rate is at least `share` of the highest; one behind the last step if the rate never decays."""
    _, stop = near_peak(evidence, share)
    return int(stop) if math.isfinite(stop) else evidence.step + 1


def rate_key(evidence: Evidence) -> str:
    """The key of the recipe that sets the peak rate of the stage."""
    return "optimizer.learning_rate" if evidence.stage == "pretrain" else f"{evidence.stage}.learning_rate"


def schedule_key(evidence: Evidence, step: int) -> str:
    """The key of the recipe with the schedule that a step belongs to."""
    if evidence.stage != "pretrain":
        return f"{evidence.stage}.lr_schedule"
    timeline = _timeline(evidence)
    index = timeline.phase_of(min(max(step - 1, 0), timeline.steps - 1)) if timeline else 0
    return f"train.phases.{index}.lr_schedule"


def planned_rates(evidence: Evidence, steps: np.ndarray) -> np.ndarray | None:
    """The learning rates that the recipe prescribes for the lines of these steps (a line of step s is of the s-th update): a function of
    the step alone. None for stages after pretraining, whose tokens depend on their data, and for a recipe that cannot be read."""
    timeline, peak = _timeline(evidence), evidence.number("optimizer.learning_rate")
    if timeline is None or math.isnan(peak):
        return None
    try:
        schedules = Schedules(_phases(evidence), [phase.steps for phase in timeline.phases], timeline.tokens_before)
    except (UserError, AssertionError):
        return None
    last = timeline.steps - 1
    return np.array([peak * schedules.lr_factor(min(max(int(step) - 1, 0), last)) for step in steps])


def _phases(evidence: Evidence) -> list[Phase]:
    return [Phase.model_validate(phase) for phase in evidence.value("train.phases", [])]


def _timeline(evidence: Evidence) -> Timeline | None:
    if evidence.stage != "pretrain":
        return None
    try:
        return Timeline(_phases(evidence), growths(evidence.events))
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError):  # a recipe of another version, or none
        return None


@dataclass(frozen=True)
class ModelFacts:
    """What the recipe says of a model before its first step. `parameters`: all trained ones; `hidden`: those outside of embedding and head;
    `initial_norm`: the expected global norm of the weights; `initializer_range`; `loss`: ln V, that of a uniform guess."""

    parameters: int
    hidden: int
    initial_norm: float
    initializer_range: float
    loss: float


def model_facts(evidence: Evidence) -> ModelFacts:
    """Raises `NotJudged` if the recipe's model cannot be read."""
    try:
        model = Model.model_validate(evidence.value("model"))
        found = list(parameters(model))
        assert model.vocab_size and model.num_hidden_layers
    except (ValueError, TypeError, AssertionError):
        raise NotJudged("the recipe's model cannot be read") from None
    std = model.initializer_range
    squares = sum(one.size * (1.0 if one.component == "norms" else std * std) for one in found)
    hidden = sum(one.size for one in found if one.component not in ("embedding", "head"))
    return ModelFacts(sum(one.size for one in found), hidden, math.sqrt(squares), std, math.log(model.vocab_size))


def starts_from_weights(evidence: Evidence) -> bool:
    """Whether the stage starts from trained weights: any stage after pretraining, and pretraining with `start_from`."""
    return evidence.stage != "pretrain" or bool(evidence.value("start_from"))


def planned_tokens(evidence: Evidence) -> float:
    """The tokens that the stage is planned for; NaN if the ledger does not say."""
    planned = [event.get("planned_tokens", event.get("tokens")) for event in evidence.of("start", "resume")]
    known = [float(one) for one in planned if isinstance(one, int | float) and one > 1]
    return known[-1] if known else math.nan


def rate_of_law(evidence: Evidence) -> float:
    """The peak rate of the Step Law (arXiv:2503.04715) for the model and the planned tokens; NaN where it does not apply: other stages,
    trained weights, Muon with spectral scale."""
    tokens = planned_tokens(evidence)
    spectral = evidence.value("optimizer.kind") == "muon" and evidence.value("optimizer.update_scale") == "spectral"
    if starts_from_weights(evidence) or spectral or math.isnan(tokens):
        return math.nan
    return scaling_laws.peak_learning_rate(max(1, model_facts(evidence).hidden), int(tokens))


def path(evidence: Evidence, done: bool = False) -> float:
    """The length of the path of the weights over all planned steps (those that are done, if `done`), relative to their norm: the sum of
    `optim/update_ratio` over the steps. It is written at few of them, so it is taken as proportional to the learning rate, by the median
    over its lines, and summed over the rates of all steps. NaN without a line whose rate is at least a tenth of the peak."""
    ratios, rates = evidence.series("optim/update_ratio").finite, rate(evidence)
    found = [
        value / now
        for step, value in zip(ratios.steps.tolist(), ratios.values.tolist(), strict=True)
        if (now := at(rates.between(step, step + 1), step)) >= 0.1 * peak_rate(evidence) and now > 0
    ]
    last = evidence.step if done else max(evidence.steps, evidence.step)
    steps = np.unique(np.linspace(1, max(last, 1), 400).astype(int))
    planned = planned_rates(evidence, steps)
    mean = float(planned.mean()) if planned is not None else float(np.interp(steps, rates.steps, rates.values).mean()) if len(rates) else 0
    return float(np.median(found)) * mean * last if found else math.nan


def highest(evidence: Evidence, pattern: str, start: float = 0, stop: float = math.inf) -> float:
    """The highest finite value of the metrics of a pattern, such as `layers/{layer}/activation_rms`; NaN without any."""
    found = [part.values.max() for one in evidence.per(pattern).values() if len(part := one.finite.between(start, stop))]
    return float(max(found)) if found else math.nan
