"""Values, curves and items of measures from the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmworks.ablate.measures import Measure, above_chance, needs_evaluation, read_run

BITS = Measure("validation/bits_per_byte", "bits/byte", "lower")
LOSS = Measure("train/loss", "nats/token", "lower")
SCORE = Measure("evaluation/sums", "", "higher", has_items=True)


def write(run_dir: Path, lines: list[dict[str, object]]) -> Path:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def test_validations_count_at_the_end_and_steps_over_the_last_tenth(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [{"step": step, "train/tokens": 10 * step, "train/loss": 100.0 - step} for step in range(1, 41)]
    lines[19]["validation/bits_per_byte"], lines[39]["validation/bits_per_byte"] = 3.0, 2.0
    found = read_run(write(tmp_path / "run", lines), [BITS, LOSS])
    assert found.values == {"validation/bits_per_byte": 2.0, "train/loss": pytest.approx(61.5)}, "steps 37 to 40"
    assert (found.curves[BITS.name].tokens, found.curves[BITS.name].values) == ([200.0, 400.0], [3.0, 2.0])


def test_a_run_that_diverged_has_no_value(tmp_path: Path) -> None:
    lines: list[dict[str, object]] = [{"step": 1, "validation/bits_per_byte": 3.0}, {"step": 2, "validation/bits_per_byte": None}]
    assert read_run(write(tmp_path / "run", lines), [BITS]).values == {}


def test_scores_and_their_items(tmp_path: Path) -> None:
    run, folder = write(tmp_path / "run", [{"step": 1}]), tmp_path / "run" / "evaluate"
    folder.mkdir()
    right = {f"sums/{number}": number % 4 != 0 for number in range(40)}
    record = {"score": 0.75, "baseline": 0.25, "set": "sums", "chosen": True}
    name = "sums/generate/0-shot"
    model = {"bits_per_byte": {"overall": {"bits_per_byte": 2.5}}, "scores": {name: record}}
    records = [{"score": name, "id": item, "correct": value} for item, value in right.items()]
    (folder / "outcomes-base.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (folder / "results.json").write_text(json.dumps({"models": {"base": model}}))
    overall = Measure("evaluation/bits_per_byte", "bits/byte", "lower")
    found = read_run(run, [SCORE, overall])
    assert needs_evaluation([SCORE]) and not needs_evaluation([BITS])
    assert found.values == {SCORE.name: 0.75, overall.name: 2.5}
    assert len(found.items[SCORE.name]) == 40 and sum(found.items[SCORE.name].values()) == 30
    assert above_chance([found], SCORE) is True
    found.baselines[SCORE.name] = 0.7
    assert above_chance([found], SCORE) is False, "the interval reaches below"
    assert above_chance([found], BITS) is None
