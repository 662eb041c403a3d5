"""What is read of the records of a run, and the figures that are made of it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from page_runs import STEPS

import written_run
from lmworks.io.files import read_json, write_json
from lmworks.metrics import MetricLog
from lmworks.pages.curves import Curves
from lmworks.pages.overview import comparison, heading, tiles
from lmworks.pages.read_run import read_run
from lmworks.pages.record_files import conform
from lmworks.pages.run_page import write_page
from lmworks.pages.tables import predictions, scores
from lmworks.pages.timeline import timeline
from lmworks.recipe.schema.artifacts import Metrics
from lmworks.recipe.schema.layout import Cluster
from lmworks.run.prediction import measured_mfu
from lmworks.ui.amounts import significant
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
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.write("prediction", stage="tune", figures=figures, source="measured")
    assert {row[0]: row[1:] for row in predictions(read_run(run_dir))["rows"]}["Tuning: time"] == ("1 min 40 s", "not yet", "")


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


def falling(steps: int, spike: int = -1) -> list[float]:
    return [11 - 9 * n / steps + 30 * (n == spike) for n in range(steps)]


def test_the_first_and_the_last_value_are_those_of_steps(tmp_path: Path) -> None:
    """And not means over the many steps for which a point of a long curve stands: a learning rate that ends at 0 was not shown as that."""
    rates = [1e-2 * (1 - n / 1199) for n in range(1200)]
    run = read_run(written_run.write_run(tmp_path / "run", {"train/loss": falling(1200), "optim/learning_rate": rates}))
    curves = Curves(run.pretrain, "pretrain")
    charts = {chart.id: chart.view() for chart in (*curves.loss(), *curves.optimizer())}
    assert charts["pretrain-rate"]["numbers"] == [("learning rate", "0.01", "0", "0.01", "0")]
    assert charts["pretrain-rate"]["legend"][0][-1] == "0" and "learning rate at last 0." in charts["pretrain-rate"]["spoken"]
    assert charts["pretrain-loss"]["numbers"][0][1] == "11"
    assert ", from 11; nats per token" in next(under for label, _, under in tiles(run, None) if label == "Training loss")


def test_a_loss_that_is_not_finite_any_more_is_no_number(tmp_path: Path) -> None:
    losses: dict[str, list[float | None]] = {"late": [3.0] * 50 + [None] * 50, "never": [None] * 100}
    found = {}
    for name, loss in losses.items():
        run = read_run(written_run.write_run(tmp_path / name, {"train/loss": loss, "train/tokens": [1.0] * 100}))
        (chart,) = Curves(run.pretrain, "pretrain").loss()
        found[name] = next(one for one in tiles(run, None) if one[0] == "Training loss"), chart.view()["numbers"][0][1:]
        assert chart.view()["legend"][0][-1] == "not finite" and write_page(tmp_path / name).exists()
    assert found == {
        "late": (("Training loss", "not finite", "since step 51; before that 3 to 3; nats per token"), ("3", "3", "3", "not finite")),
        "never": (("Training loss", "not finite", "since step 1; nats per token"), ("not finite",) * 4),
    }


def test_runs_are_compared_by_what_any_of_them_has_and_none_loses_its_spikes(tmp_path: Path) -> None:
    good = {
        "train/loss": falling(1200, spike=700), "optim/grad_norm": [0.5] * 1200, "perf/tokens_per_second": [1e3] * 1200,
        "validation/bits_per_byte": {600: 2.0}, "validation/prose/bits_per_byte": {600: 2.0}, "eval/sciq/cloze": {600: 0.5},
        "experts/load_cv": [0.1] * 1200, "system/cpu": [0.5] * 1200, "dpo/accuracy": [0.5] * 1200,
    }  # fmt: skip
    dead, other = written_run.write_run(tmp_path / "dead"), written_run.write_run(tmp_path / "good", good)
    page = write_page(dead, others=[other]).read_text(encoding="utf-8")
    drawn = ("loss", "bpb-overall", "bpb-prose", "benchmarks-sciq", "norm", "cv", "speed", "system-cpu")
    assert [name for name in drawn if f'id="pretrain-{name}"' not in page] == [] and "Nothing has been measured" not in page
    curves = Curves(read_run(dead).pretrain, "pretrain", [("good", read_run(other).pretrain)])
    (row,) = curves.loss()[0].view()["numbers"]
    assert row == ("good", "11", significant(min(good["train/loss"]), 4), significant(max(good["train/loss"]), 4), row[2])
    assert [line.name for chart in curves.preferences() for line in chart.lines] == ["good"], "the first of the metrics that one has"


def test_layers_keep_their_spikes_and_gaps(tmp_path: Path) -> None:
    values = [0.1 + (n == 700) if not 300 < n < 600 else None for n in range(1200)]
    run = read_run(written_run.write_run(tmp_path / "run", {f"experts/load_cv/{layer}": values for layer in range(2)}))
    for chart in Curves(run.pretrain, "pretrain").experts():
        for line in chart.lines:
            assert max(line.highs) == 1.1 and [y for _, y in line.points].count(None) == 1, chart.id


def test_a_course_that_is_over_leaves_nothing_on_the_curve_of_the_next(tmp_path: Path) -> None:
    figures = {"perf/tokens_per_second": 100.0, "seconds": 100.0}
    events = [
        {"event": "prediction", "figures": figures, "source": "x"}, {"event": "phase", "step": 0, "phase": "former"},
        {"event": "spike", "step": 90, "action": "skip"}, {"event": "checkpoint", "step": 90, "path": "p"},
        {"event": "prediction_error", "figures": {"seconds": {"measured": 50.0}}},
        {"event": "start_over", "step": 90, "rollbacks": 0, "time": 1.0e9 + 2}, {"event": "start", "steps": 200, "tokens": 204800},
        {"event": "bad_step", "step": 5},
    ]  # fmt: skip
    folder = written_run.write_run(tmp_path / "run", {"train/loss": falling(20)}, events)
    append(
        folder / "follow.jsonl",
        *({"stage": "pretrain", "step": step, "time": 1.0e9 + at, "eval/sciq/cloze": 0.5} for step, at in ((90, 1), (10, 3))),
    )
    part = (run := read_run(folder)).pretrain
    assert [(mark.kind, mark.step) for mark in part.marks] == [("bad", 6)] and part.phases == [] and part.step == 20
    assert part.series["eval/sciq/cloze"].means() == [(10, 0.5)]
    assert {row[0]: row[2] for row in predictions(run)["rows"]}["time"] == "not yet"
    assert [entry["title"] for day in timeline(run)["days"] for entry in day["entries"]].count("Spike") == 1, "the ledger keeps all"


def test_the_head_shows_the_stage_that_trains_now(tmp_path: Path) -> None:
    """That of the base model too, where a run is extended that was tuned before."""
    folder = written_run.write_run(tmp_path / "run", {"train/loss": falling(30), "train/tokens": [1.0] * 30}, stage="tune")
    resumed = {"event": "resume", "time": 1.1e9, "step": 20, "tokens": 20480, "steps": 60, "planned_tokens": 61440}
    written_run.write_run(folder, {"train/loss": falling(20), "train/tokens": [1024.0 * n for n in range(1, 21)]}, [resumed])
    shown = heading(read_run(folder))
    assert (shown["label"], shown["progress"]) == ("Pretraining", "20.5k of 61.4k tokens, step 20 of 60")
    append(folder / "ledger.jsonl", {"event": "start", "stage": "tune", "time": 1.2e9, "steps": 30, "tokens": 30})
    assert heading(read_run(folder))["label"] == "Tuning"


def test_the_objective_of_preferences_is_no_loss_per_token_and_a_comparison_has_its_price(tmp_path: Path) -> None:
    folder = written_run.write_run(tmp_path / "run", {"train/loss": [0.6] * 400, "dpo/margin": [0.1] * 400}, stage="dpo")
    (tile,) = [one for one in tiles(read_run(folder), None) if "loss" in one[0].lower() or one[0] == "Objective"]
    assert tile == ("Objective", "0.6", "mean of the last 2% of steps, from 0.6; what the stage minimizes")
    cluster = Cluster(name="two", tflops=1.0, memory_gib=1.0, dollars_per_device_hour=9.0)
    rows = dict(comparison([read_run(folder)] * 2, cluster)["figures"])
    assert rows["Cost of training"] == ["$10.00"] * 2, "4,000 seconds of one device"


def test_work_that_a_crash_has_lost_was_paid(tmp_path: Path) -> None:
    """Steps 31 to 60 of 10 seconds each were trained twice; of the first time the metrics are cut. The pause before the resume is free."""
    events = [{"event": "resume", "step": 30, "time": 1.0e9 + 5000, "trained_until": 1.0e9 + 600, "ranks": 2}]
    folder = written_run.write_run(tmp_path / "run", {"train/loss": falling(30)}, events)
    append(
        folder / "metrics.jsonl", *({"step": step, "time": 1.0e9 + 5000 + 10 * (step - 30), "train/loss": 1.0} for step in range(31, 61))
    )
    part = read_run(folder).pretrain
    assert (part.seconds, part.device_seconds) == (900, 300 + 300 + 2 * 300)


@pytest.mark.parametrize("at", [15, 25])
@pytest.mark.parametrize("jump", [86_400.0, -86_400.0])
def test_a_clock_that_is_set_is_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float, at: int) -> None:
    """A day forward or back at a step of 30, kept or trained again. A resume after step 20, by the clock as set, repeats steps
    21 to 30 on two ranks."""
    clock, steady = [1.0e9], [50.0]
    monkeypatch.setattr("lmworks.metrics.log.time", SimpleNamespace(time=lambda: clock[0], monotonic=lambda: steady[0]))
    folder = written_run.write_run(tmp_path / "run")

    def train(first: int, last: int) -> None:
        with MetricLog(folder, Metrics(), first) as log:
            for step in range(first, last + 1):
                clock[0] += 10 + jump * (step == at)
                steady[0] += 10
                log.write(step, {"train/loss": 1.0, "train/tokens": 100.0 * step, "perf/step_seconds": 10.0})

    train(1, 30)
    append(folder / "ledger.jsonl", {"event": "finish", "stage": "pretrain", "time": clock[0]})
    part = read_run(folder).pretrain
    assert (part.seconds, part.tokens_per_second) == (300, 10) and part.measured()["seconds"] == 300
    until = clock[0]
    clock[0] += 5000
    steady[0] = 7.0  # after a reboot
    append(folder / "ledger.jsonl", {
        "event": "resume", "stage": "pretrain", "step": 20, "time": clock[0], "trained_until": until,
        "trained_for": 300.0, "reached": 30, "ranks": 2,
    })  # fmt: skip
    train(21, 40)
    part = read_run(folder).pretrain
    assert (part.seconds, part.device_seconds) == (300 + 200, 300 + 2 * 200), "steps 21 to 30 were paid twice"
    assert part.elapsed.last == (40, 500)


def test_the_speed_of_a_run_is_that_of_its_last_process_by_steps(tmp_path: Path) -> None:
    """Here the clock was set back a day after the resume, so that all its lines are earlier than its start."""
    events = [{"event": "resume", "step": 20, "time": 1.0e9 + 86_400, "ranks": 1}]
    speeds = [1.0] * 20 + [1000.0] * 20
    folder = written_run.write_run(tmp_path / "run", {"perf/tokens_per_second": speeds, "train/sequence_length": [64.0] * 40}, events)
    cluster = Cluster(name="one", tflops=1.0, memory_gib=1.0)
    assert "median of 20 metrics lines" in measured_mfu(folder, cluster).source


def test_each_process_has_its_own_lines_and_those_that_it_has_lost(tmp_path: Path) -> None:
    """Steps 1 to 20 on one rank, 21 to 30 on two, 11 to 40 on four, whose checkpoint was older; then a process that wrote nothing."""
    events = [
        {"event": "resume", "step": 20, "time": 3.0, "trained_until": 2.0, "trained_for": 200.0, "reached": 20, "ranks": 2},
        {"event": "resume", "step": 10, "time": 5.0, "trained_until": 4.0, "trained_for": 100.0, "reached": 30, "ranks": 4},
        {"event": "resume", "step": 40, "time": 7.0, "trained_until": 6.0, "trained_for": 300.0, "reached": 40, "ranks": 8},
        {"event": "resume", "step": 40, "time": 8.0, "trained_until": 6.0, "trained_for": 300.0, "reached": 40, "ranks": 16},
    ]
    elapsed = [10.0 * (step if step <= 10 else step - 10 if step <= 40 else step - 40) for step in range(1, 43)]
    part = read_run(written_run.write_run(tmp_path / "run", {"perf/elapsed_seconds": elapsed}, events)).pretrain
    assert (part.seconds, part.device_seconds) == (200 + 100 + 300 + 20, 200 + 2 * 100 + 4 * 300 + 16 * 20)
