"""Quality of a measure as an early signal: whether it can rank arms at this size, from its values along training.

Curves are arrays (arms, seeds, points) at equal fractions of the budget.

    monotonicity         Spearman's rho of value and point (toward better), mean over arms and seeds        FineTasks: at least 0.5
    signal to noise      (largest - smallest arm mean) / standard deviation of a run's value over seeds
    arms told apart      F test of equal arms against the noise over seeds                                  p at most 5%
    to checkpoints       the same signal over the deviation of a run's last points from their line          at least 2
    above chance         some arm's score is shown to be above what guessing gets (`chance`)
    rank consistency     Kendall's tau-b of the order of the arms: half of training against the end,        at least 0.5 each
                         and mean over pairs of seeds

Sources: Signal and Noise (arXiv:2508.13144), DataDecide (arXiv:2504.11393), FineTasks (Hugging Face 2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np

from lmworks.ablate.contrast import paired, unpaired
from lmworks.ablate.welch import f_upper

MONOTONE, SEPARATE, SIGNAL, CONSISTENT = 0.5, 0.05, 2.0, 0.5
_LAST = 5  # points that say how much a run wavers


@dataclass(frozen=True)
class Quality:
    """What was found; None where it could not be measured."""

    monotonicity: float | None
    signal_to_noise: float | None
    p_of_equal_arms: float | None
    signal_to_checkpoints: float | None
    above_chance: bool | None
    rank_halves: float | None
    rank_seeds: float | None

    @property
    def reasons(self) -> list[str]:
        """Why the measure is not to be trusted at this size; empty if it is."""
        return list(self._reasons())

    def _reasons(self) -> Iterator[str]:
        if self.monotonicity is not None and self.monotonicity < MONOTONE:
            yield f"it does not improve steadily with training (Spearman {self.monotonicity:.2f}, below {MONOTONE:g})"
        if self.above_chance is False:
            yield "no arm is shown to be above chance"
        if self.p_of_equal_arms is None:
            yield "noise over seeds was not measured"
        elif self.p_of_equal_arms > SEPARATE:
            yield f"the arms cannot be told apart from noise over seeds (F test, p = {self.p_of_equal_arms:.2f})"
        if self.signal_to_checkpoints is not None and self.signal_to_checkpoints < SIGNAL:
            yield f"the arms differ by {self.signal_to_checkpoints:.1f} times the wavering of the last checkpoints (below {SIGNAL:g})"
        if self.rank_halves is not None and self.rank_halves < CONSISTENT:
            yield f"the order of the arms at half of training is another (Kendall {self.rank_halves:.2f}, below {CONSISTENT:g})"
        if self.rank_seeds is not None and self.rank_seeds < CONSISTENT:
            yield f"seeds disagree about the order of the arms (Kendall {self.rank_seeds:.2f}, below {CONSISTENT:g})"

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"trust": not self.reasons, "reasons": self.reasons}


def quality(
    curves: np.ndarray, lower_is_better: bool, is_paired: bool, above_chance: bool | None = None, final: np.ndarray | None = None
) -> Quality:
    """The quality of a measure from its curves (arms, seeds, points) and its `final` values (arms, seeds), by default their last points.
    Paired: a seed gives all arms the same data order. `above_chance` is None where there is no chance level."""
    sign = -1.0 if lower_is_better else 1.0
    good = sign * curves
    arms, seeds, points = good.shape
    final = good[:, :, -1] if final is None else sign * final
    spread = float(np.ptp(final.mean(axis=1))) if arms > 1 else math.nan
    over_seeds = math.sqrt(float(final.var(axis=1, ddof=1).mean())) if seeds > 1 else math.nan
    last = min(_LAST, points)
    wavering = _around_lines(good[:, :, -last:]) if last >= 4 else math.nan
    rho = [spearman(np.arange(points), run) for arm in good for run in arm] if points > 2 else []
    pairs = [kendall(final[:, one], final[:, other]) for one, other in combinations(range(seeds), 2)] if arms > 1 else []
    return Quality(
        monotonicity=float(np.mean(rho)) if rho else None,
        signal_to_noise=_ratio(spread, over_seeds),
        p_of_equal_arms=_p_of_equal_arms(final, is_paired),
        signal_to_checkpoints=_ratio(spread, wavering),
        above_chance=above_chance,
        rank_halves=kendall(good[:, :, (points - 1) // 2].mean(axis=1), final.mean(axis=1)) if arms > 1 and points > 2 else None,
        rank_seeds=float(np.mean(pairs)) if pairs else None,
    )


def _p_of_equal_arms(final: np.ndarray, is_paired: bool) -> float | None:
    """P value of equal arms, by the analysis of variance of the final values (arms, seeds)."""
    arms, seeds = final.shape
    noise = paired(final) if is_paired else unpaired(final)
    if arms < 2 or not noise.df or not noise.sd:
        return None
    return f_upper(seeds * float(final.mean(axis=1).var(ddof=1)) / noise.sd**2, arms - 1, noise.df)


def _ratio(signal: float, noise: float) -> float | None:
    if not math.isfinite(signal) or not math.isfinite(noise):
        return None
    return signal / noise if noise else 0.0 if not signal else math.inf


def _around_lines(curves: np.ndarray) -> float:
    """Standard deviation around the straight line through each curve, pooled."""
    points = curves.shape[-1]
    x = np.arange(points) - (points - 1) / 2
    centered = curves - curves.mean(axis=-1, keepdims=True)
    residuals = centered - (centered * x).sum(axis=-1, keepdims=True) / (x * x).sum() * x
    return math.sqrt(float((residuals**2).sum()) / (curves.shape[0] * curves.shape[1] * (points - 2)))


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's rank correlation; 0 where one does not vary."""
    return _correlation("spearmanr", one, other)


def kendall(one: np.ndarray, other: np.ndarray) -> float:
    """Kendall's tau-b; 0 where one does not vary."""
    return _correlation("kendalltau", one, other)


def _correlation(name: str, one: np.ndarray, other: np.ndarray) -> float:
    from scipy import stats

    return float(getattr(stats, name)(one, other).statistic) if np.ptp(one) and np.ptp(other) else 0.0
