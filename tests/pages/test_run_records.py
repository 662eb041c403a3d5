"""What is read of the records of a run, and the figures that are made of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from page_runs import STEPS

from lmworks.io.files import read_json, write_json
from lmworks.pages.curves import Curves
from lmworks.pages.overview import tiles
from lmworks.pages.read_run import read_run
from lmworks.pages.record_files import conform
from lmworks.pages.run_page import write_page
from lmworks.pages.tables import predictions, scores
from lmworks.pages.timeline import timeline
from lmworks.watch.ledger import Ledger


def append(file: Path, *records: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as handle:
        handle.writelines(json.dumps(record) + "\n" for record in records)


def test_of_a_checkpoint_that_was_evaluated_again_the_last_scores_count(run_dir: Path) -> None:
    """In the loop at steps 10 and 20, by a process that follows the run at 20, 30, and at 30 again."""
    name = "eval/sciq/score"
    append(run_dir / "metrics.jsonl", *({"time": 2e9 + step, "step": STEPS + step, name: 0.25} for step in (10, 20)))
    followed = [(20, 0.5), (30, 0.5), (30, 0.75)]
    append(run_dir / "follow.jsonl", *({"stage": "pretrain", "step": STEPS + step, name: value} for step, value in followed))
    points = [(STEPS + 10, 0.25), (STEPS + 20, 0.5), (STEPS + 30, 0.75)]
    assert read_run(run_dir).pretrain.series[name].means() == points


def test_a_resumed_run_is_not_shown_as_stopped_and_its_phases_and_checkpoints_come_once(run_dir: Path) -> None:
    saved = str(run_dir / "checkpoints" / "step-00000050")
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write("stopped", stage="pretrain", step=45, reason="bad steps in a row")
        assert read_run(run_dir).reason == "bad steps in a row"
        ledger.write("resume", stage="pretrain", step=30, tokens=64 * 30)
        ledger.write("phase", stage="pretrain", phase="anneal", step=40, sequence_length=32)
        ledger.write("checkpoint", stage="pretrain", step=50, seconds=0.01, finished=False)  # the save begins
        ledger.write("checkpoint", stage="pretrain", step=50, path=saved, bytes=1000, metric=None, seconds=0.5)
    run = read_run(run_dir)
    assert run.reason == ""
    assert run.pretrain.phases == [(0, "general"), (40, "anneal")]
    assert [mark.step for mark in run.pretrain.marks if mark.kind == "checkpoint"] == [30, 50]


def test_a_run_on_another_machine_runs_as_long_as_it_writes(run_dir: Path) -> None:
    write_json(run_dir / "export" / "stage.json", {"done": False})
    lock = {"pid": os.getpid(), "host": socket.gethostname() + "-other", "since": 0.0}
    (run_dir / "lock").write_text(json.dumps(lock))
    assert read_run(run_dir).state == "running"
    for file in run_dir.glob("*.jsonl"):
        os.utime(file, (time.time() - 3600, time.time() - 3600))
    assert read_run(run_dir).state == "stopped"
    (run_dir / "lock").write_text(json.dumps(lock | {"since": time.time() - 10}))
    assert read_run(run_dir).state == "running"


@pytest.mark.parametrize("record", [
    {"event": "spike", "step": 3, "loss": 10**400, "loss_limit": 1, "grad_norm": 1, "grad_norm_limit": 1, "action": "skip"},
    {"event": "prediction", "figures": {"perf/tokens_per_second": 1e308, "seconds": -1e308}, "source": "x"},
    {"event": "data_starved", "step": 3, "share": 10**400, "steps": 4},
    {"event": "checkpoint", "step": 3, "path": "p", "bytes": [], "seconds": {}},
    {"event": "time", "planned_and_actual": {"a": 5}},
    {"event": "note", "text": "half a pair: \ud83d"},
])  # fmt: skip
def test_any_line_of_a_ledger_can_be_shown(run_dir: Path, record: dict[str, Any]) -> None:
    append(run_dir / "ledger.jsonl", {"time": 2e9} | record)
    run = read_run(run_dir)
    run.events[-1] = record  # as another version of the reader might leave it
    assert timeline(run)["days"][-1]["entries"][-1]["title"]
    assert write_page(run_dir).read_text(encoding="utf-8")


def test_a_damaged_line_hides_none_that_follows(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("ab") as handle:
        handle.write(b'{"step": 61, "time"\n[[[\n')
    append(run_dir / "metrics.jsonl", {"step": 62, "time": 2e9, "train/loss": 1.25}, {"step": 63, "time": 2e9, "train/loss": 1e101})
    assert read_run(run_dir).pretrain.series["train/loss"].last == (62, 1.25)


def test_what_is_of_another_form_or_beyond_all_measure_is_left_out() -> None:
    record = {"n": 1e101, "m": 5, "t": True, "s": "5", "l": [1.0, -1e101, None]}
    assert conform(record, {"n": float, "m": float, "t": float, "s": float, "l": [float]}) == {"m": 5, "l": [1.0]}


def test_predictions_are_compared_with_what_was_measured(run_dir: Path) -> None:
    """Half as fast as predicted; the seconds of tuning alone are not what was predicted of its stage, unless the run has scored them."""
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        figures = {"perf/tokens_per_second": 3000.0, "seconds": 100.0}
        for stage in ("pretrain", "tune"):
            ledger.write("prediction", stage=stage, figures=figures, source="measured")
        ledger.write("start", stage="tune", steps=2, tokens=100)
        ledger.write("finish", stage="tune", step=2, tokens=100)
    (run_dir / "tune").mkdir(exist_ok=True)
    append(run_dir / "tune" / "metrics.jsonl", *({"step": step, "time": 4e9 + 10 * step, "train/loss": 1.0} for step in (1, 2)))
    rows = {row[0]: row[1:] for row in predictions(read_run(run_dir))["rows"]}
    assert rows["tokens per second"] == ("3k", "1.5k", "+100%")
    assert rows["Tuning: time"] == ("1 min 40 s", "not yet", "")
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write("prediction_error", stage="tune", figures={"seconds": {"measured": 50.0, "error": 1.0}})
    rows = {row[0]: row[1:] for row in predictions(read_run(run_dir))["rows"]}
    assert rows["Tuning: time"] == ("1 min 40 s", "50 s", "+100%")


def test_a_score_within_noise_has_neither_color(run_dir: Path) -> None:
    sides = {row["set"]: row["side"] for row in scores(read_run(run_dir))["rows"]}
    assert sides == {"arc-easy/cloze/0-shot": "above", "letter_counting/generate/0-shot": "near"}
    results = read_json(run_dir / "evaluate" / "results.json")
    for model in results["models"].values():
        model["scores"]["arc-easy/cloze/0-shot"]["verdict"] = "below chance"
    write_json(run_dir / "evaluate" / "results.json", results)
    assert [row["side"] for row in scores(read_run(run_dir))["rows"]] == ["below"] * 2 + ["near"] * 2


def test_the_figures_of_a_run_are_medians_and_the_memory_its_peak(run_dir: Path) -> None:
    append(run_dir / "metrics.jsonl", {"step": 61, "time": 2e9, "perf/mfu": 0.9, "perf/tokens_per_second": 9e9, "perf/memory": 9e9})
    found = {label: value for label, value, _ in tiles(read_run(run_dir), None)}
    assert (found["MFU"], found["Tokens per second"], found["Memory"]) == ("31%", "1.5k", "9 GB")


def test_runs_of_one_name_are_told_apart(run_dir: Path, tmp_path: Path) -> None:
    others = [tmp_path / "again", tmp_path / "deeper" / "again"]
    for other in others:
        shutil.copytree(run_dir, other)
    page = write_page(run_dir, others=others).read_text(encoding="utf-8")
    for name in ("trial (trial)", *(f"trial ({other})" for other in others)):
        assert f'<th scope="col">{name}</th>' in page


def test_a_learning_rate_that_is_for_everything_is_drawn_once(run_dir: Path) -> None:
    (run_dir / "tune").mkdir(exist_ok=True)
    rates = [{"optim/learning_rate": 0.01, "optim/adam_learning_rate": adam} for adam in (0.01, 0.02)]
    drawn = []
    for one in rates:
        lines = [json.dumps({"step": step, "time": 4e9 + step} | one) + "\n" for step in (1, 2)]
        (run_dir / "tune" / "metrics.jsonl").write_text("".join(lines))
        (chart,) = Curves(read_run(run_dir).training["tune"], "tune").optimizer()
        drawn.append([line.name for line in chart.lines])
    assert drawn == [["learning rate"], ["matrices", "embeddings, norms"]]
