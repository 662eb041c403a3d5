"""Tails and power, against scipy."""

from __future__ import annotations

from typing import Any

import pytest

from late import Late
from lmworks.ablate import welch

stats: Any = Late("scipy.stats")


@pytest.mark.parametrize("df", [1, 2, 4, 7.3, 30, 300])
def test_tails_and_quantiles(df: float) -> None:
    for t in (0.1, 1.0, 3.0, 12.0):
        assert welch.t_two_sided(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-9)
    for alpha in (0.05, 0.003):
        assert welch.t_critical(alpha, df) == pytest.approx(stats.t.isf(alpha / 2, df), rel=1e-6)
    assert welch.f_upper(2.5, 3, df) == pytest.approx(stats.f.sf(2.5, 3, df), rel=1e-9)


@pytest.mark.parametrize("df", [2, 4, 7.3, 30])
@pytest.mark.parametrize("alpha", [0.05, 0.01])
def test_power(df: float, alpha: float) -> None:
    critical = stats.t.isf(alpha / 2, df)
    for shift in (0.5, 1.5, 3.0):
        expected = stats.nct.sf(critical, df, shift) + stats.nct.cdf(-critical, df, shift)
        assert welch.t_power(shift, df, alpha) == pytest.approx(expected, abs=1e-6)
    found = welch.root(lambda shift: welch.t_power(shift, df, alpha) - 0.8)
    assert welch.t_power(found, df, alpha) == pytest.approx(0.8, abs=1e-9)
