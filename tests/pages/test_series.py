"""Long series in bounded memory."""

from __future__ import annotations

import math
import random
import tracemalloc

import pytest

from lmworks.pages.charts import line_of
from lmworks.pages.run_records import Series


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 16, 17, 1000, 4097])
def test_what_matters_is_kept(count: int) -> None:
    rng = random.Random(count)
    points = [(float(step), rng.gauss(0, 1)) for step in range(1, count + 1)]
    series = Series(most=8)
    for point in points:
        series.add(*point)
    assert len(series.buckets) <= 8
    assert (series.first, series.last) == (points[0], points[-1])
    ends = [point for bucket in series.buckets for point in (bucket.first, bucket.last)]
    assert ends == sorted(ends) and set(ends) <= set(points)
    assert series.low == min(points, key=lambda p: p[1])
    assert series.high == max(points, key=lambda p: p[1])
    if count <= 8:
        assert series.means() == points


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
    assert len(series.buckets) <= 100
    assert grown < 200_000  # 100 buckets; all points would be over 20 MB


def test_a_line_keeps_its_spikes_and_where_it_was_not_finite() -> None:
    """However many points a bucket has merged."""
    series = Series(most=8)
    for x in range(10_000):
        if x in (4321, 4322, 9999):
            series.interrupt(x)
        else:
            series.add(x, 100.0 if x == 1234 else 1.0 + x % 2)
    line = line_of(series, "loss", "c0")
    assert max(line.highs) == 100.0 and min(line.lows) == 1.0
    gaps = [x for x, y in line.points if y is None]
    assert len(gaps) == 2 and abs(gaps[0] - 4321) <= series.width and gaps[1] >= 9998
    xs = [x for x, _ in line.points]
    assert xs == sorted(set(xs)) and line.spans is not None and len(line.spans) == len(xs)
    assert line.ranges is not None and [line.ranges[xs.index(x)] for x in gaps] == [(4321, 4322), (9999, 9999)]
    assert (line.first, line.last) == (1.0, None), "as recorded, and not means"


def test_a_long_gap_is_one_wherever_it_lies() -> None:
    """At the start, in the middle, at the end, and where there is nothing else; a value of before it is not drawn in it."""
    for first, last in ((0, 400), (300, 701), (500, 1000), (0, 1000)):
        series = Series(most=8)
        for x in range(1, 1001):
            series.interrupt(x) if first < x <= last else series.add(x, float(x))
        line = line_of(series, "loss", "c0")
        assert line.ranges is not None
        found = [(line.ranges[n], x) for n, (x, y) in enumerate(line.points) if y is None]
        assert [stretch for stretch, _ in found] == [(first + 1, last)]
        assert not [x for x, y in line.points if y is not None and first < x <= last]
        xs = [x for x, _ in line.points]
        assert xs == sorted(set(xs)) and (line.first is None, line.last is None) == (first == 0, last == 1000)
        assert series.reach == (1, 1000)
