"""Values, curves and items of measures from the files of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lmworks.ablate.measures import Measure, needs_evaluation, read_run
from lmworks.metrics.log import read
from tiny_run import BRIEF, Tiny

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


def test_needles_have_the_chance_level_of_their_run(tmp_path: Path) -> None:
    needle = Measure("needle/accuracy", "", "higher")
    lines: list[dict[str, object]] = [{"step": step, "needle/accuracy": 0.2, "needle/chance": 0.25} for step in (1, 2)]
    found = read_run(write(tmp_path / "run", lines), [needle])
    assert needle.has_chance and found.baselines == {needle.name: 0.25} and found.counts == {}
    assert not Measure("needle/chance", "", "").has_chance


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
    assert (found.counts, found.baselines) == ({SCORE.name: 40}, {SCORE.name: 0.25})
    assert SCORE.has_chance and not BITS.has_chance
    (folder / "outcomes-base.jsonl").write_text("".join(json.dumps(one | {"asked": "other"}) + "\n" for one in records))
    assert not read_run(run, [SCORE]).items[SCORE.name].keys() & found.items[SCORE.name].keys(), "other rows under the same ids"
    assert found.curves == {}, "nothing was measured in this form during training"


def test_a_score_during_training_has_items_chance_and_a_curve(tiny_copy: Tiny, tmp_path: Path) -> None:
    """A real run with a benchmark of its own: 10 of 12 items every 4 steps, all 12 in the evaluation stage."""
    words = ("red", "green", "blue", "grey")
    rows = [{"question": f"Which word is first in {number}?", "choices": words, "answer": words[number % 4]} for number in range(12)]
    (tmp_path / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "colors.yaml").write_text("file: colors.jsonl\nchoices: choices\n")
    asked = (f"evaluate.benchmarks=[{tmp_path / 'colors.yaml'}]", "evaluate.every=4 steps", "evaluate.every_items=10", "tune=null")
    tiny_copy.walk(*asked, *BRIEF, last="evaluate", allow=["evaluate.benchmarks"])
    during = Measure("eval/colors/cloze-0-shot", "", "higher", has_items=True)
    after = Measure("evaluation/colors", "", "higher", has_items=True)
    found = read_run(tiny_copy.run_dir, [during, after, BITS])
    lines = [line for line in read(tiny_copy.run_dir) if during.name in line]
    assert [line["step"] for line in lines] == [4, 7]
    assert found.counts == {during.name: 10, after.name: 12} and found.baselines == {during.name: 0.25, after.name: 0.25}
    assert found.curves[during.name].values == [line[during.name] for line in lines] and found.values[during.name] == lines[-1][during.name]
    assert found.curves[after.name] == found.curves[during.name], "the same form, on the sample"
    results = json.loads((tiny_copy.run_dir / "evaluate" / "results.json").read_text())["models"]["base"]["scores"]
    assert found.values[after.name] == results["colors/cloze/0-shot"]["score"] == sum(found.items[after.name].values()) / 12
