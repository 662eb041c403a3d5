"""The noise floor of a measure: the standard deviation of one run's value over seeds, pooled over arms.

Values are arrays (arms, seeds). Two floors are estimated, each with its degrees of freedom:

    unpaired    residuals after the mean of each arm:               K (S - 1) degrees of freedom
    paired      residuals after the means of each arm and each seed: (K - 1) (S - 1)

The paired one holds where a seed fixes the data order in all arms: what a data order adds to all arms alike cancels in differences.

A floor takes all arms to vary alike. Verdicts rest on it only where an earlier ablation is named (`noise`); otherwise each difference is
judged by the spread of its two arms (`contrast`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmworks.ablate.statistics.student import f_upper

_LIKE = 0.001  # level of the F test of like spread


@dataclass(frozen=True)
class Noise:
    """Standard deviation of one run's value, estimated with `df` degrees of freedom. With 0 there is no estimate."""

    sd: float
    df: float

    def to_json(self) -> dict[str, float | None]:
        return {"sd": self.sd if self.df else None, "df": self.df}

    @classmethod
    def from_json(cls, value: Any) -> Noise:
        sd, df = value.get("sd"), value.get("df", 0)
        return cls(float(sd), float(df)) if df and sd is not None else UNKNOWN


UNKNOWN = Noise(math.nan, 0)


def paired(values: np.ndarray) -> Noise:
    """Residual standard deviation of arm + seed."""
    arms, seeds = values.shape
    df = (arms - 1) * (seeds - 1)
    if df < 1:
        return UNKNOWN
    residuals = values - values.mean(axis=1, keepdims=True) - values.mean(axis=0, keepdims=True) + values.mean()
    return Noise(math.sqrt(float((residuals**2).sum()) / df), df)


def unpaired(values: np.ndarray) -> Noise:
    """Standard deviation over seeds, pooled over arms."""
    arms, seeds = values.shape
    df = arms * (seeds - 1)
    if df < 1:
        return UNKNOWN
    return Noise(math.sqrt(float(((values - values.mean(axis=1, keepdims=True)) ** 2).sum()) / df), df)


def pooled(noises: Iterable[Noise]) -> Noise:
    """One estimate of several, weighted by their degrees of freedom."""
    known = [one for one in noises if one.df]
    df = sum(one.df for one in known)
    return Noise(math.sqrt(sum(one.df * one.sd**2 for one in known) / df), df) if df else UNKNOWN


def with_earlier(here: Noise, earlier: Noise) -> Noise:
    """The floor of these runs and that of earlier ones; these alone where their spread is larger (F test at 0.1%)."""
    if (
        here.df
        and earlier.df
        and here.sd > earlier.sd
        and (not earlier.sd or f_upper(here.sd**2 / earlier.sd**2, here.df, earlier.df) < _LIKE)
    ):
        return here
    return pooled([here, earlier])


def own_df(arms: int, seeds: int, is_paired: bool) -> int:
    """Degrees of freedom of the noise floor of so many arms and seeds."""
    return ((arms - 1) if is_paired else arms) * (seeds - 1)
