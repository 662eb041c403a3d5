"""The page of an ablation: no color without a verdict, and the extremes over seeds within the chart."""

from __future__ import annotations

from typing import Any

import pytest

from lmworks.pages.ablation_page import _charts, _found, _verdict
from lmworks.pages.charts import places


@pytest.mark.parametrize(("verdict", "side"), [
    ("better", "above"), ("worse", "below"), ("higher", "above"), ("lower", "below"), ("no difference shown", ""), ("no verdict", ""),
])  # fmt: skip
def test_only_a_verdict_has_a_color(verdict: str, side: str) -> None:
    one = {"arm": "a", "verdict": verdict, "why": "", "difference": -0.5, "low": -0.75, "high": 0.25}
    row = _verdict(one, places([-1, 1], 0))
    assert row["side"] == side
    assert (row["left"], row["dot"], row["zero"], row["width"]) == pytest.approx((0.125, 0.25, 0.5, 0.5))


def test_the_extremes_over_seeds_are_within_the_chart() -> None:
    curve = {"tokens": [1.0, 2.0, 3.0, 4.0], "mean": [2.0] * 4, "low": [1.5] * 4, "high": [2.5] * 4}
    document: dict[str, Any] = {"measures": {"loss": {"unit": "nats", "curves": {"base": curve}}}}
    (chart,) = _charts(document, {"base": "c0"})
    (line,) = chart.lines
    assert (min(line.lows), max(line.highs)) == (1.5, 2.5) and chart.top is not None and chart.top >= 2.5
    assert chart.view()["spoken"] == "loss: base at last 2."


@pytest.mark.parametrize(("found", "low", "high", "shade"), [
    (0.02, 0.015, 0.03, (0.015, 0.03)), (0.075, 0.07, 0.08, (0.07, 0.08)), (0.075, 0.05, 2.0, (0.05, 0.09)), (0.02, None, None, None),
    (None, 0.18, 0.22, None),
])  # fmt: skip
def test_the_interval_of_an_optimum_beyond_the_arms_is_within_the_chart(
    found: float | None, low: float | None, high: float | None, shade: tuple[float, float] | None
) -> None:  # fmt: skip
    conclusion = {"points": [(0.01, 2.0), (0.04, 1.9)], "best": found, "low": low, "high": high}
    chart = _found(conclusion | {"text": "", "measure": "loss", "what": "rate"})
    assert chart is not None and [mark.step for mark in chart.marks] == ([] if found is None else [found])
    assert chart.shade == (None if shade is None else pytest.approx(shade))
    assert all(chart.steps[0] < at < chart.steps[1] for at in (0.01, 0.04, found or 0.01))
