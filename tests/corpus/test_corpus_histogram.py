"""Histograms add up in any order and give quantiles within their width."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmworks.corpus.histogram import QUANTILES, Histogram

NUMBERS = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60)


def of(values: list[float]) -> Histogram:
    made = Histogram()
    made.add(values)
    return made


@given(NUMBERS, NUMBERS, NUMBERS)
def test_parts_add_up_to_the_whole_in_any_order(a: list[float], b: list[float], c: list[float]) -> None:
    whole = of([*a, *b, *c])
    for order in ((a, b, c), (c, a, b)):
        merged = Histogram()
        for part in order:
            merged.merge(Histogram.from_json(json.loads(json.dumps(of(part).as_json()))))
        assert merged.as_json() == whole.as_json()
    assert whole.count == sum(map(math.isfinite, [*a, *b, *c]))


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=200))
@example([1.732483220394904e-151])
def test_every_value_lies_in_a_bin(values: list[float]) -> None:
    bins = of(values).as_json()["bins"]
    for value in values:
        nothing = abs(value) < 2.0**-501
        assert any(low <= (0.0 if nothing else value) <= high for low, high, _ in bins)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e9])
def test_quantiles_are_within_a_bin_of_the_true_ones(scale: float) -> None:
    values = np.random.default_rng(3).lognormal(0, 2, 20_000) * scale
    made = of(values.tolist())
    for share in QUANTILES:
        true = float(np.quantile(values, share, method="inverted_cdf"))
        assert abs(made.quantile(share) / true - 1) < 1 / 32


def test_the_ends_are_exact() -> None:
    made = of([3.0, -7.5, 0.0, float("nan"), float("inf")])
    assert (made.count, made.least, made.most) == (3, -7.5, 3.0)
    assert made.quantile(0.5) == 0.0
    assert of([]).as_json() == {"count": 0}
