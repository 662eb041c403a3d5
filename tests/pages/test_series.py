"""Long series in bounded memory."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest

from lmworks.pages.run_records import Series


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 17, 1000, 4097])
def test_what_matters_is_kept(count: int) -> None:
    rng = random.Random(count)
    points = [(float(step), rng.gauss(0, 1)) for step in range(1, count + 1)]
    series = Series(most=8)
    for point in points:
        series.add(*point)
    outline = series.outline()
    assert len(outline) <= 4 * 8
    assert outline == sorted(set(outline))  # in order, each once
    assert set(outline) <= set(points)
    assert (outline[0], outline[-1], series.last) == (points[0], points[-1], points[-1])
    assert series.low == min(points, key=lambda p: p[1])
    assert series.high == max(points, key=lambda p: p[1])
    assert {series.low, series.high} <= set(outline)
    if count <= 8:
        assert outline == series.means() == points


def test_buckets_are_even_and_their_means_exact() -> None:
    series = Series(most=8)
    points = [(float(x), math.sin(x)) for x in range(37)]
    for point in points:
        series.add(*point)
    assert series.width == 8
    parts = [points[start : start + 8] for start in range(0, 37, 8)]
    assert series.means() == [
        pytest.approx((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)), abs=1e-12) for part in parts
    ]


def test_ties_and_falling_values() -> None:
    series = Series(most=2)
    for x in range(100):
        series.add(x, -float(x // 10))
    assert (series.low, series.high) == ((90, -9.0), (0, 0.0))


def test_memory_does_not_grow() -> None:
    series = Series(most=100)

    def feed(start: int, stop: int) -> None:
        for x in range(start, stop):
            series.add(float(x), float(x * 7919 % 1009))

    feed(0, 20_000)
    tracemalloc.start()
    feed(20_000, 250_000)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert series.count == 250_000
    assert len(series.outline()) <= 400
    assert grown < 200_000  # 100 buckets; all points would be over 20 MB
