"""Downstream scaling laws: planted curves are found, intervals hold, chance is told from a signal, and files are checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmworks.errors import UserError
from lmworks.ladder.design import BenchmarkScore, Point
from lmworks.ladder.downstream import fit_downstream, split_benchmarks
from lmworks.ladder.predictions import read, score, summary
from lmworks.plan.laws import DownstreamLaw, LossLaw, load_law, save_law, sigmoid_score

LOSSES = np.linspace(1.2, 0.8, 9)
TARGET = 0.72
NAME = "arc-easy/cloze-0-shot"
CHANCE, SLOPE, MIDPOINT = 0.25, 10.0, 0.85


def points(scores: np.ndarray, items: int = 200, name: str = NAME) -> list[Point]:
    pairs = zip(LOSSES, scores, strict=True)
    return [Point(1e6, 1e7, float(loss), {name: BenchmarkScore(float(one), items, CHANCE)}) for loss, one in pairs]


def planted(loss: Any, ceiling: float = 1.0) -> np.ndarray:
    return sigmoid_score(loss, CHANCE, ceiling, SLOPE, MIDPOINT)


def drawn(items: int, seed: int, ceiling: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).binomial(items, planted(LOSSES, ceiling)) / items


def fit(of: list[Point], bootstraps: int = 0) -> DownstreamLaw:
    (law,) = fit_downstream(of, bootstraps=bootstraps)
    return law


def test_a_curve_without_noise_is_found() -> None:
    law = fit(points(planted(LOSSES)))
    assert (law.name, law.items, law.runs, law.chance, law.signal) == (NAME, 200, 9, CHANCE, True)
    assert (law.ceiling, law.slope, law.midpoint) == pytest.approx((1.0, SLOPE, MIDPOINT), rel=1e-3)
    assert law.score(0.5) == pytest.approx(float(planted(0.5)), abs=1e-3)
    lower = fit(points(planted(LOSSES, 0.7)))
    assert lower.ceiling < 0.8 and lower.score(TARGET) == pytest.approx(float(planted(TARGET, 0.7)), abs=0.02)


def test_intervals_of_90_percent_hold_about_as_often() -> None:
    """20 ladders of 9 runs, half of them with a ceiling of 0.8. The target has a loss that none of them has reached, known to 1%; its score
    is of 200 items. Fewer than 14 hits have a probability of 0.2% at 90% coverage. Wide intervals hold too, so their width is bounded: the
    binomial noise alone makes it 0.09. Without that noise and that of the loss, the interval has to hold the curve itself as often."""
    hits, hits_of_curve, widths = 0, 0, []
    for seed in range(20):
        random, ceiling = np.random.default_rng(1000 + seed), (1.0, 0.8)[seed % 2]
        law = fit(points(drawn(200, seed, ceiling)), bootstraps=12)
        found = law.predict(TARGET * np.exp(0.01 * random.standard_normal(1000)), 200)
        assert found is not None and found[1] <= found[0] <= found[2]
        actual = random.binomial(200, planted(TARGET * np.exp(0.01 * random.standard_normal()), ceiling)) / 200
        hits += found[1] <= actual <= found[2]
        widths.append(found[2] - found[1])
        of_curve = law.predict(np.full(1000, TARGET), 10**6)
        assert of_curve is not None
        hits_of_curve += of_curve[1] <= planted(TARGET, ceiling) <= of_curve[2]
    assert hits >= 14 and hits_of_curve >= 14
    assert 0.09 < float(np.mean(widths)) < 0.35


def test_the_interval_contains_the_noise_of_the_items_and_of_the_loss_and_of_the_runs() -> None:
    """Around a known curve, as standard deviations: sqrt(p (1 - p) / n), slope of the curve times that of the loss, and `spread`."""

    def half(items: int, loss_noise: float, spread: float) -> float:
        law = DownstreamLaw(NAME, CHANCE, 1.0, SLOPE, MIDPOINT, 200, 9, 0.01, True, ((1.0, SLOPE, MIDPOINT, spread),))
        losses = MIDPOINT + loss_noise * np.random.default_rng(3).standard_normal(20_000)
        found = law.predict(losses, items)
        assert found is not None and found[0] == pytest.approx(0.625, abs=0.003)
        return (found[2] - found[1]) / 2

    binomial, of_loss = (0.625 * 0.375 / 100) ** 0.5, 0.75 * SLOPE / 4 * 0.02
    assert half(100, 0.0, 0.0) == pytest.approx(1.645 * binomial, abs=0.006)
    assert half(10**6, 0.02, 0.0) == pytest.approx(1.645 * of_loss, abs=0.003)
    assert half(10**6, 0.0, 0.05) == pytest.approx(1.645 * 0.05, abs=0.003)
    assert half(100, 0.02, 0.05) == pytest.approx(1.645 * (binomial**2 + of_loss**2 + 0.05**2) ** 0.5, abs=0.008)


def test_a_benchmark_at_chance_is_told_and_gets_no_number() -> None:
    """20 ladders at chance: more than 4 signals have a probability of 0.3% at a level of 5%."""
    random = np.random.default_rng(0)
    laws = [fit(points(random.binomial(200, CHANCE, len(LOSSES)) / 200), bootstraps=2) for _ in range(20)]
    silent = [law for law in laws if not law.signal]
    assert len(silent) >= 16 and all(law.predict(np.full(10, TARGET), 200) is None and not law.samples for law in silent)
    assert not fit(points(np.full(len(LOSSES), 0.3))).signal, "equal scores"
    assert not fit(points(planted(LOSSES)[::-1])).signal, "scores that fall with the loss"
    assert not fit(points(np.linspace(0.02, 0.2, len(LOSSES)))).signal, "no curve that begins at chance describes scores below it"


def test_one_bad_run_moves_the_curve_little() -> None:
    scores = planted(LOSSES)
    scores[4] += 0.3  # without the Huber loss, the prediction is 0.21 too low
    assert fit(points(scores, 1000)).score(TARGET) == pytest.approx(float(planted(TARGET)), abs=0.04)


def test_a_benchmark_that_not_all_runs_have_scored_alike_is_left_out() -> None:
    of = points(planted(LOSSES))
    other = points(planted(LOSSES), name="piqa/cloze-0-shot")
    mixed = [Point(1e6, 1e7, one.loss, {**one.scores, **two.scores}) for one, two in zip(of, other, strict=True)]
    assert split_benchmarks(mixed) == ([NAME, "piqa/cloze-0-shot"], {})
    mixed[2] = of[2]
    mixed[4] = Point(1e6, 1e7, of[4].loss, {**mixed[4].scores, NAME: BenchmarkScore(0.5, 50, CHANCE)})
    names, left_out = split_benchmarks(mixed)
    assert not names and fit_downstream(mixed) == ()
    assert left_out["piqa/cloze-0-shot"].startswith("8 of 9 runs have scored it behind their last step; ")
    assert left_out["piqa/cloze-0-shot"].endswith("lmworks evaluate --follow RUN --tasks piqa")
    assert "not scored it on the same items (of 50 to 200)" in left_out[NAME]
    (certain,) = split_benchmarks([Point(1e6, 1e7, 1.0, {NAME: BenchmarkScore(1.0, 50, 1.0)})])[1].values()
    assert "every item has one choice" in certain


LAW = DownstreamLaw(NAME, CHANCE, 1.0, SLOPE, MIDPOINT, 200, 9, 0.001, True, ((1.0, SLOPE, MIDPOINT, 0.01), (0.9, 9.0, 0.86, 0.0)))
LOSS_LAW = LossLaw(0.5, 30.0, 90.0, 0.33, 0.35, "bits per byte", "9 runs", ((0.5, 30.0, 90.0, 0.33, 0.35, 0.01, 1.0),), (LAW,))


def test_a_law_file_is_read_as_written_and_older_ones_have_no_benchmarks_and_no_gamma(tmp_path: Path) -> None:
    save_law(LOSS_LAW, tmp_path / "law.json")
    assert load_law(tmp_path) == LOSS_LAW
    tree = json.loads((tmp_path / "law.json").read_text(encoding="utf-8"))
    del tree["benchmarks"], tree["gamma"]
    tree["samples"] = [one[:6] for one in tree["samples"]]
    (tmp_path / "law.json").write_text(json.dumps(tree), encoding="utf-8")
    old = load_law(tmp_path)
    assert old.benchmarks == () and old.interval(1e8, 2e9) == LOSS_LAW.interval(1e8, 2e9)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "[red]x/y"), ("name", "\x1b[2J/y"), ("name", "a/" + "b" * 1000), ("name", "../a/b"), ("chance", 1.0), ("chance", -1),
        ("ceiling", 1e9), ("slope", float("nan")), ("slope", 1e300), ("midpoint", float("inf")), ("items", 0), ("items", 10**30),
        ("items", 2.5), ("p_value", "x"), ("signal", "maybe"), ("samples", [[1, 2, 3]]), ("samples", [[1, 2, 3, 1e308]]), ("more", 1),
    ],
)  # fmt: skip
def test_a_hostile_law_file_is_refused(key: str, value: object, tmp_path: Path) -> None:
    save_law(LOSS_LAW, tmp_path / "law.json")
    tree = json.loads((tmp_path / "law.json").read_text(encoding="utf-8"))
    tree["benchmarks"][0][key] = value
    (tmp_path / "law.json").write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(UserError, match=rf"law.json is not a fitted law: benchmarks: 0: {key}") as refused:
        load_law(tmp_path)
    assert "\n" not in str(refused.value) and "\x1b" not in str(refused.value)


def write_prediction(folder: Path, **more: object) -> None:
    """A line as `lmworks ladder predict` writes it; without `more`, as it wrote it before there were benchmarks."""
    record: dict[str, object] = {
        "time": 1.0, "run_dir": str(folder / "run"), "recipe": "0", "parameters": 10, "tokens": 20, "predicted": 1.0, "low": 0.9,
        "high": 1.1, "level": 0.9, "unit": "bits per byte", "law": "0", "before": "", **more,
    }  # fmt: skip
    text = json.dumps(record | {"hash": hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()})
    (folder / "predictions.jsonl").write_text(text + "\n", encoding="utf-8")


def test_a_prediction_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    write_prediction(tmp_path)
    (found,) = score(tmp_path)
    assert (found.predicted, found.measured, found.benchmarks) == (1.0, None, ())
    assert summary([found])["benchmarks"] == {}


ROW = {"name": NAME, "items": 200, "predicted": 0.5, "low": 0.4, "high": 0.6}


@pytest.mark.parametrize(
    "more",
    [{"benchmarks": [ROW | {key: value}]} for key, value in (("name", "[red]a/b"), ("items", -1), ("predicted", 7), ("low", "x"))]
    + [{"benchmarks": 3}, {"benchmarks": [{}]}, {"benchmarks": [ROW] * 2000}, {"predicted": "x"}, {"tokens": None}],
)
def test_a_hostile_prediction_is_refused(more: dict[str, object], tmp_path: Path) -> None:
    write_prediction(tmp_path, benchmarks=[ROW, ROW | {"predicted": None, "low": None, "high": None}])
    assert len(read(tmp_path)) == 1
    write_prediction(tmp_path, **more)
    with pytest.raises(UserError, match="restore the file as it was written"):
        read(tmp_path)
