"""Long series in bounded memory: what a chart can show of millions of points, kept in one pass."""

from __future__ import annotations

from dataclasses import dataclass

Point = tuple[float, float]


@dataclass(slots=True)
class Bucket:
    """A stretch of neighboring points: its ends, its extremes, its mean."""

    first: Point
    last: Point
    low: Point
    high: Point
    sum_x: float
    sum_y: float
    count: int

    @property
    def mean(self) -> Point:
        return self.sum_x / self.count, self.sum_y / self.count

    def extend(self, after: Bucket) -> None:
        """Take in the bucket that follows."""
        self.last = after.last
        if after.low[1] < self.low[1]:
            self.low = after.low
        if after.high[1] > self.high[1]:
            self.high = after.high
        self.sum_x += after.sum_x
        self.sum_y += after.sum_y
        self.count += after.count


class Series:
    """Points with rising x, of which at most `most` buckets are kept (an even number, at least 2).

    Each bucket covers `width` points. Whenever they are all used, neighbors are merged and the width doubles, so that nothing
    need be known about the length. As in M4 (Jugel et al., VLDB 2014) a bucket keeps its first, lowest, highest and last point,
    so a line through them looks like the line through all points, and no spike is lost.
    """

    def __init__(self, most: int = 500) -> None:
        assert most >= 2 and most % 2 == 0
        self.most, self.width, self.count = most, 1, 0
        self._buckets: list[Bucket] = []

    def add(self, x: float, y: float) -> None:
        self.count += 1
        point = (x, y)
        buckets = self._buckets
        if buckets and buckets[-1].count < self.width:
            bucket = buckets[-1]
            bucket.last = point
            if y < bucket.low[1]:
                bucket.low = point
            elif y > bucket.high[1]:
                bucket.high = point
            bucket.sum_x += x
            bucket.sum_y += y
            bucket.count += 1
            return
        if len(buckets) == self.most:
            for bucket, after in zip(buckets[::2], buckets[1::2], strict=True):
                bucket.extend(after)
            del buckets[1::2]
            self.width *= 2
        buckets.append(Bucket(point, point, point, point, x, y, 1))

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def last(self) -> Point:
        return self._buckets[-1].last

    @property
    def low(self) -> Point:
        """The lowest of all points, the first of them where there are more."""
        return min((bucket.low for bucket in self._buckets), key=lambda point: point[1])

    @property
    def high(self) -> Point:
        """The highest of all points, the first of them where there are more."""
        return max((bucket.high for bucket in self._buckets), key=lambda point: point[1])

    def outline(self) -> list[Point]:
        """At most 4 points of each bucket, in order: what to draw."""
        return [point for b in self._buckets for point in sorted({b.first, b.low, b.high, b.last})]

    def means(self) -> list[Point]:
        """One point of each bucket: what to smooth and to read out."""
        return [bucket.mean for bucket in self._buckets]

    def spans(self) -> list[tuple[float, float]]:
        """Lowest and highest value of each bucket, beside `means`."""
        return [(bucket.low[1], bucket.high[1]) for bucket in self._buckets]

    def median(self) -> float:
        """Of the buckets' means; of the points themselves while there are few."""
        values = sorted(y for _, y in self.means())
        return values[len(values) // 2]
