"""The loss curve has each step once, whatever happened to the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lmworks.errors import UserError
from lmworks.metrics import METRICS, MetricLog, describe, read
from lmworks.metrics.names import ELAPSED
from lmworks.recipe.schema.artifacts import Metrics


def curve(run_dir):
    return [(line["step"], line["train/loss"]) for line in read(run_dir) if "train/loss" in line]


def test_lines_have_step_time_and_values(tmp_path):
    with MetricLog(tmp_path / "run", Metrics()) as log:
        log.write(0, {"train/loss": 2.5, "train/perplexity": 12.2})
        log.write(0, {"validation/code/bits_per_byte": 1.25})
        log.write(1, {"train/loss": float("nan")})
    lines = read(tmp_path / "run")
    assert [{key: value for key, value in line.items() if key not in ("time", ELAPSED)} for line in lines] == [
        {"step": 0, "train/loss": 2.5, "train/perplexity": 12.2},
        {"step": 0, "validation/code/bits_per_byte": 1.25},
        {"step": 1, "train/loss": None},
    ]
    assert all(isinstance(line["time"], float) and 0 <= line[ELAPSED] < 60 for line in lines)


def test_a_resumed_run_has_each_step_once(tmp_path):
    with MetricLog(tmp_path, Metrics()) as log:
        for step in range(10):
            log.write(step, {"train/loss": float(step)})
            log.write(step, {"validation/loss": 1.0})
    with open(tmp_path / "metrics.jsonl", "ab") as handle:
        handle.write(b'{"step":10,"train/lo')
    with MetricLog(tmp_path, Metrics(), resume_step=6) as log:
        assert log.dropped == 8
        for step in range(6, 9):
            log.write(step, {"train/loss": float(step)})
    assert curve(tmp_path) == [(step, float(step)) for step in range(9)]
    with MetricLog(tmp_path, Metrics()) as log:
        assert log.dropped == 15
    assert read(tmp_path) == []


def test_a_run_that_goes_back_has_each_step_at_most_once(tmp_path):
    with MetricLog(tmp_path, Metrics()) as log:
        for step in range(10):
            log.write(step, {"train/loss": float(step)})
        log.rewind(6)
        for step in (8, 9):
            log.write(step, {"train/loss": -1.0})
    assert curve(tmp_path) == [*((step, float(step)) for step in range(6)), (8, -1.0), (9, -1.0)]


def test_every_sink_goes_back_and_is_synced_with_the_log(tmp_path, monkeypatch):
    called = []

    class Watched:
        def __getattr__(self, name):
            return lambda *given: called.append((name, *given))

    monkeypatch.setattr("lmworks.metrics.log.open_sinks", lambda *given: [Watched(), Watched()])
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    with MetricLog(tmp_path, Metrics()) as log:
        log.write(3, {"train/loss": 1.0})
        log.rewind(4)
        synced.clear()
        log.flush()
        assert synced == [(tmp_path / "metrics.jsonl").stat().st_size]
    expected = [("write", 3, {"train/loss": 1.0}), ("rewind", 4), ("flush",), ("flush",), ("close",)]
    assert called == [one for one in expected for _ in range(2)]


def test_a_killed_run_has_every_line_that_was_written(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from lmworks.metrics import MetricLog
from lmworks.recipe.schema.artifacts import Metrics
log = MetricLog(Path({str(tmp_path)!r}), Metrics())
for step in range(100):
    log.write(step, {{"train/loss": float(step)}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert curve(tmp_path) == [(step, float(step)) for step in range(100)]


def test_a_second_name_for_one_thing_is_refused(tmp_path):
    with MetricLog(tmp_path, Metrics()) as log, pytest.raises(KeyError, match="'train/los' is no metric"):
        log.write(0, {"train/los": 1.0})


def test_every_metric_of_the_specification_has_a_name_a_unit_and_a_meaning():
    wanted = [
        "train/loss", "train/perplexity", "experts/load_cv/3", "optim/learning_rate", "optim/grad_norm", "optim/loss_scale",
        "perf/tokens_per_second", "perf/mfu", "perf/memory", "perf/data_wait", "system/gpu_temp", "system/power",
        "validation/zh/bits_per_byte",
    ]
    for name in wanted:
        assert describe(name).meaning
    assert describe("validation/zh/bits_per_byte").unit == "bits/byte"
    assert describe("train/loss").unit == "nats/token"
    assert all(metric.meaning and name == metric.name for name, metric in METRICS.items())
    for name in ("validation//loss", "validation/a/b/loss", "validation/{domain}/losses", "train/loss2"):
        with pytest.raises(KeyError):
            describe(name)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux only")
def test_lines_wait_for_room_on_a_full_disk(tmp_path):
    log = MetricLog(tmp_path, Metrics())
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._fd)
    os.close(full)
    log.write(0, {"train/loss": 1.0})
    log.write(1, {"train/loss": 2.0})
    log.rewind(1)  # what waits is rewound too
    with pytest.raises(UserError, match="is full"):
        log.flush()
    with open(log.path, "ab") as room:
        os.dup2(room.fileno(), log._fd)
    log.close()
    assert [line["step"] for line in read(tmp_path)] == [0]
