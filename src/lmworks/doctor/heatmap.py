"""A heat map of layers over steps, as a few paths: one for each of some levels."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lmworks.doctor.charts import Axis, Grid
from lmworks.doctor.formatting import compact, significant
from lmworks.doctor.series import Point

LEVELS = 12


@dataclass
class Heatmap:
    """`rows` maps a row's name to its points, from the top down. Charts with the same `group` share their cursor."""

    id: str
    title: str
    hint: str
    rows: dict[str, list[Point]]
    steps: tuple[float, float]
    group: str = "pretrain"

    def view(self) -> dict[str, Any]:
        """What the template needs. Colours end at the 98th percentile, so that a bad beginning does not bleach the rest."""
        values = sorted(y for points in self.rows.values() for _, y in points)
        top = values[int(0.98 * (len(values) - 1))] or 1.0
        x = Axis(*self.steps)
        height = 1000 / len(self.rows)
        paths: list[list[str]] = [[] for _ in range(LEVELS)]
        for row, points in enumerate(self.rows.values()):
            edges = _edges([x.place(at) for at, _ in points])
            levels = [min(LEVELS - 1, int(LEVELS * min(1.0, max(0.0, y / top)))) for _, y in points]
            start = 0
            for at in range(1, len(points) + 1):
                if at == len(points) or levels[at] != levels[start]:
                    left, right = 1000 * edges[start], 1000 * edges[at]
                    paths[levels[start]].append(f"M{left:.1f} {row * height:.1f}H{right:.1f}V{(row + 1) * height:.1f}H{left:.1f}z")
                    start = at
        often = max(1, -(-len(self.rows) // 12))
        return {
            "chart": self,
            "spoken": f"{self.title}: {len(self.rows)} layers over {self.steps[1]:,.0f} steps, "
            f"between {significant(values[0], 3)} and {significant(values[-1], 3)}.",
            "paths": [(level, "".join(parts)) for level, parts in enumerate(paths) if parts],
            "ticks": [(x.place(tick), compact(tick)) for tick in x.ticks(6)],
            "rows": [((n + 0.5) / len(self.rows), name) for n, name in enumerate(self.rows) if n % often == 0],
            "top": significant(top, 2),
            "levels": range(LEVELS),
        }

    def data(self, grid: Grid) -> dict[str, Any]:
        """What the script needs to read values out."""
        return {
            "group": self.group,
            "steps": self.steps,
            "shown": "number",
            "rows": list(self.rows),
            "lines": [[*grid.line(points), "plain", 0] for points in self.rows.values()],
        }


def _edges(centers: list[float]) -> list[float]:
    """Where one column ends and the next begins: half-way."""
    inner = [(a + b) / 2 for a, b in pairwise(centers)]
    return [max(0.0, centers[0] - 0.01) if len(centers) == 1 else 0.0, *inner, 1.0]
