"""The numbers that rules share: they are robust to outliers and to the interval of the lines, and exact where they recompute."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lmworks.watch import trends
from lmworks.watch.evidence import Evidence, Series
from lmworks.watch.run_files import open_run
from written_run import budget, healthy, write_run


def evidence(folder: Path, values: list[float], **more: object) -> Evidence:
    return Evidence(open_run(write_run(folder, {"optim/learning_rate": values}, **more)))  # type: ignore[arg-type]


def test_a_slope_ignores_outliers_and_the_number_of_points() -> None:
    x = np.arange(1000.0)
    y = 3 - 0.01 * x
    y[::10] += 50
    assert trends.slope(x, y) == pytest.approx(-0.01, rel=1e-6)
    assert trends.slope(x[:2], np.array([1.0, 3.0])) == 2.0
    assert math.isnan(trends.slope(x[:1], y[:1])) and math.isnan(trends.slope(np.zeros(3), np.ones(3)))


def test_noise_is_that_of_the_lines_and_not_the_trend() -> None:
    draw = np.random.default_rng(0)
    steps = np.arange(2000)
    falling = Series(steps, 5 - 0.002 * steps + 0.1 * draw.standard_normal(2000))
    assert trends.noise(falling) == pytest.approx(0.1, rel=0.1)
    assert abs(trends.autocorrelation(draw.standard_normal(2000))) < 0.1
    assert trends.autocorrelation(np.sin(steps / 50)) > 0.9 and math.isnan(trends.autocorrelation(np.ones(10)))


def test_a_running_median_keeps_length_and_drops_spikes() -> None:
    values = np.ones(20)
    values[7], values[12] = 100, np.nan
    assert (trends.running_median(values, 5) == 1).all() and len(trends.running_median(np.zeros(0), 5)) == 0
    assert np.isnan(trends.running_median(np.full(3, np.nan), 3)).all()


def test_an_integral_is_the_same_from_every_line_and_from_every_tenth() -> None:
    every = Series(np.arange(1, 201), np.full(200, 0.02))
    tenth = Series(np.arange(10, 201, 10), np.full(20, 0.02))
    assert trends.integral(every) == pytest.approx(4.0) and trends.integral(tenth) == pytest.approx(4.0)
    assert trends.integral(tenth, 100) == pytest.approx(0.02 * 101) and trends.integral(tenth, 500) == 0.0


def test_the_peak_of_the_rate_and_the_steps_near_it(tmp_path: Path) -> None:
    found = evidence(tmp_path, [0.25, 0.5, 1.0, 1.0, 1.0, 0.9, 0.5, 0.1])
    assert trends.peak_rate(found) == 1.0 and trends.near_peak(found) == (3, 7.0) and trends.decay_begins(found) == 7
    assert trends.decay_begins(evidence(tmp_path / "constant", [1.0] * 5)) == 6


def test_the_recipe_prescribes_the_rate_of_every_step(tmp_path: Path) -> None:
    found = evidence(tmp_path, [0.01] * 100, overrides=["train.phases.0.tokens=102400 tokens"])
    planned = trends.planned_rates(found, np.arange(1, 101))
    assert planned is not None and planned[:2] == pytest.approx([0.005, 0.01]) and planned[79] == pytest.approx(0.01)
    assert planned[80] < 0.009 and planned[-1] == pytest.approx(0.001)
    assert trends.schedule_key(found, 50) == "train.phases.0.lr_schedule" and trends.rate_key(found) == "optimizer.learning_rate"
    (tmp_path / "resolved.json").write_text('{"train": {"phases": [{"name": 3}]}}')
    assert trends.planned_rates(Evidence(open_run(tmp_path)), np.arange(5)) is None


@pytest.mark.parametrize("every", [1, 10, 100])
def test_the_path_of_the_weights_is_the_same_from_few_lines(every: int, tmp_path: Path) -> None:
    metrics = healthy(1000)
    steps = [step for step in range(1, 1001) if step % every == 0]
    ratios = [0.6 * rate for rate in metrics["optim/learning_rate"]]  # proportional to the rate, 0.006 at its peak
    lines = {
        "optim/learning_rate": [metrics["optim/learning_rate"][step - 1] for step in steps],
        "optim/update_ratio": [ratios[step - 1] for step in steps],
    }
    found = Evidence(open_run(write_run(tmp_path, lines, overrides=[budget(1000)], steps=steps)))
    assert trends.path(found) == pytest.approx(sum(ratios), rel=0.02)
    assert math.isnan(trends.path(evidence(tmp_path / "none", [0.01] * 5)))
