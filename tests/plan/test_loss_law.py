"""The scaling law, and what is optimal under it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmworks.plan.laws import CHINCHILLA, LossLaw, Tradeoff


@settings(max_examples=30)
@given(flops=st.floats(1e15, 1e25), served=st.sampled_from([0.0, 1e9, 1e12]))
def test_the_tradeoff_is_the_minimum_of_the_total_cost_at_equal_loss(flops: float, served: float) -> None:
    """The boundary of `too_large` on the line 6 N D = flops, against a search over (N, D) of the same loss."""
    sizes = np.geomspace(1e4, 1e12, 2001)
    tradeoff = Tradeoff(CHINCHILLA, None, served)
    size = sizes[np.searchsorted([tradeoff.too_large(n, flops / 6 / n) for n in sizes], True) - 1]
    loss = CHINCHILLA.loss(size, flops / 6 / size)
    rest = loss - CHINCHILLA.e - CHINCHILLA.a / sizes**CHINCHILLA.alpha
    cost = np.where(rest > 0, 6 * sizes * (CHINCHILLA.b / np.maximum(rest, 1e-12)) ** (1 / CHINCHILLA.beta) + 2 * sizes * served, np.inf)
    assert sizes[cost.argmin()] == pytest.approx(size, rel=0.05)
    if not served:
        assert size == pytest.approx(CHINCHILLA.optimal_parameters(flops), rel=0.02)


def test_the_interval_holds_the_spread_of_the_fits_and_of_the_runs() -> None:
    """Fits spread by 0.02 and runs by 3% of 1 around the law: 90% of runs lie within 1.645 sqrt(0.02^2 + 0.03^2)."""
    spread = np.random.default_rng(1).normal(1.0, 0.02, 2000)
    law = LossLaw(1.0, 1e-9, 1e-9, 0.3, 0.35, samples=tuple((e, 1e-9, 1e-9, 0.3, 0.35, 0.03, 1.0) for e in spread))
    interval = law.interval(1e8, 2e9)
    assert interval is not None
    assert np.subtract(interval, 1.0) == pytest.approx([-0.0593, 0.0593], abs=0.003)
    assert LossLaw(0.6, 20.0, 60.0, 0.3, 0.35).interval(1e8, 2e9) is None
