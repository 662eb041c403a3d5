"""TensorBoard, W&B, Trackio, MLflow, Prometheus: with the real packages where they are installed, and what is said where not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmworks.errors import UserError
from lmworks.metrics import MetricLog, trackers
from lmworks.metrics import log as sinks
from lmworks.metrics.log import InBackground, read
from lmworks.metrics.names import ELAPSED
from lmworks.metrics.trackers import mlflow_name
from lmworks.recipe.schema.artifacts import Metrics
from lmworks.ui.terminal import Interrupted
from lmworks.watch.heartbeat import Heartbeat, read_beats
from ports import free_port
from tiny_run import STEPS, before_each_step


def test_a_missing_package_is_named_with_its_extra(tmp_path):
    sinks = [
        ({"tensorboard": True}, "tensorboard", "tensorboard"), ({"wandb_project": "p"}, "wandb", "wandb"),
        ({"prometheus_port": 9999}, "prometheus_client", "prometheus"), ({"trackio_project": "p"}, "trackio", "trackio"),
        ({"mlflow_experiment": "p"}, "mlflow", "mlflow"),
    ]  # fmt: skip
    code = f"""
import sys
from pathlib import Path
sys.modules.update(dict.fromkeys({[module for _, module, _ in sinks]!r}))
from lmworks.errors import UserError
from lmworks.metrics import MetricLog
from lmworks.recipe.schema.artifacts import Metrics
for options in {[options for options, _, _ in sinks]!r}:
    try:
        MetricLog(Path({str(tmp_path)!r}), Metrics(**options))
    except UserError as error:
        print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    lines = [
        f"metrics.{setting} needs a package that is not installed: pip install 'lmworks[{extra}]'" for (setting,), _, extra in sinks
    ]
    assert said.stdout.splitlines() == lines, said.stderr


def test_prometheus_shows_the_newest_values(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    with MetricLog(tmp_path, Metrics(prometheus_port=port)) as log:
        log.write(1, {"train/loss": 3.0})
        log.write(2, {"train/loss": 2.5, "validation/en-web/bits_per_byte": 1.5})
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        assert "lmworks_step 2.0" in text
        assert "lmworks_train_loss 2.5" in text
        assert "lmworks_validation_en_web_bits_per_byte 1.5" in text
        assert "# HELP lmworks_train_loss cross-entropy" in text
        with pytest.raises(UserError, match=f"cannot listen on port {port}"):
            MetricLog(tmp_path / "other", Metrics(prometheus_port=port))
    with MetricLog(tmp_path, Metrics(prometheus_port=port), resume_step=3):
        pass


def test_metrics_of_one_name_in_prometheus_are_told_apart(tmp_path: Path) -> None:
    """Two sources that differ in a sign, and two domains without Latin letters: the second of them ended training."""
    pytest.importorskip("prometheus_client")
    port = free_port()
    with MetricLog(tmp_path, Metrics(prometheus_port=port)) as log:
        log.write(1, {"train/loss": 3.0, "train/source/my-docs/loss": 1.0, "train/source/my_docs/loss": 2.0})
        log.write(2, {"validation/日本/loss": 3.0, "validation/中国/loss": 4.0, "train/source/my_docs/loss": 2.5})
        lines = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode().splitlines()
    found = {
        "lmworks_step 2.0", "lmworks_train_loss 3.0",
        'lmworks_train_source_my_docs_loss{metric="train/source/my-docs/loss"} 1.0',
        'lmworks_train_source_my_docs_loss{metric="train/source/my_docs/loss"} 2.5',
        'lmworks_validation____loss{metric="validation/日本/loss"} 3.0', 'lmworks_validation____loss{metric="validation/中国/loss"} 4.0',
    }  # fmt: skip
    assert found <= set(lines), set(lines) ^ found


class Failing:
    """A sink of a package that raises what it likes."""

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError("[red]")


def test_a_sink_that_fails_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sinks, "open_sinks", lambda *_: [Failing()])
    with MetricLog(tmp_path, Metrics()) as log:
        for step in (1, 2):
            log.write(step, {"train/loss": 3.0})
    assert [line["step"] for line in read(tmp_path)] == [1, 2]
    said = "Failing gets no more metrics until the run is started again: ZeroDivisionError: [red]"
    assert " ".join(capsys.readouterr().err.split()) == said


class Hanging:
    """A sink whose server does not answer until `answers` is set."""

    def __init__(self) -> None:
        self.answers, self.told = threading.Event(), list[str]()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: (self.answers.wait(30), self.told.append(name))


def test_a_sink_that_hangs_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MLflow held a step for minutes when its server was gone, and W&B the end of a run for as long as the network was."""
    monkeypatch.setattr(sinks, "_MOST_WAITING", 4)
    monkeypatch.setattr(sinks, "_LONGEST_END", 0.1)
    slow, full = Hanging(), Hanging()
    opened = [InBackground("slow", lambda: slow), InBackground("full", lambda: full)]
    monkeypatch.setattr(sinks, "open_sinks", lambda *_: [*opened])
    begun = time.monotonic()
    with MetricLog(tmp_path, Metrics()) as log:
        for step in range(3):
            log.write(step, {"train/loss": 3.0})
        slow.answers.set()
        for step in range(3, 9):
            while not opened[0]._calls.empty() and time.monotonic() - begun < 10:
                time.sleep(0.001)
            log.write(step, {"train/loss": 3.0})
        slow.answers.clear()
    assert time.monotonic() - begun < 10 and [line["step"] for line in read(tmp_path)] == [*range(9)]
    assert " ".join(capsys.readouterr().err.split()).split(" until the run is started again: ") == [
        "full gets no more metrics", "it does not answer, and 4 steps wait for it slow gets no more metrics",
        "it did not take the last metrics within 0 s",
    ]  # fmt: skip
    slow.answers.set()
    full.answers.set()


def test_a_sink_that_cannot_be_opened_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """W&B without an API key ended training with a traceback."""
    last = SimpleNamespace(write=lambda *_: None, flush=lambda: None, close=lambda: 1 / 0)
    opened = [InBackground("W&B", lambda: 1 / 0), InBackground("MLflow", lambda: last)]  # type: ignore[arg-type,return-value]
    monkeypatch.setattr(sinks, "open_sinks", lambda *_: [*opened])
    with MetricLog(tmp_path, Metrics()) as log:
        log.write(1, {"train/loss": 3.0})
    assert [line["step"] for line in read(tmp_path)] == [1]
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("gets no more metrics until the run is started again: ZeroDivisionError") == 2
    assert said.startswith("W&B") and "MLflow" in said


def test_tensorboard_has_each_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, steps in ((0, range(6)), (4, range(4, 8))):
        with MetricLog(tmp_path, Metrics(tensorboard=True), resume_step=resume) as log:
            for step in steps:
                log.write(step, {"train/loss": float(step + resume)})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert curve == [(step, step if step < 4 else step + 4) for step in range(8)]


def offline_values(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and values of every line that W&B has kept in the files of its offline runs, in the order in which they were made.

    Such a file is a log of LevelDB: after a header of 7 bytes, blocks of 32 KiB with records of checksum, length, type and content.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    found, block = [], 1 << 15
    for path in sorted((run_dir / "wandb").glob("offline-run-*/*.wandb")):
        data, at, content = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if block - at % block < 7:  # too little for another record: filled up with zeros
                at += block - at % block
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            content, at = content + data[at + 7 : at + 7 + length], at + 7 + length
            if kind in (1, 4):  # whole, or the last piece
                record, content = Record.FromString(content), b""
                if record.WhichOneof("record_type") == "history":
                    items = {item.key or "/".join(item.nested_key): float(item.value_json) for item in record.history.item}
                    found.append((int(items["step"]), {name: items[name] for name in items if "/" in name}))
    return found


def sent(line: dict[str, Any]) -> dict[str, float]:
    """What sinks are given of a line of metrics.jsonl."""
    return {name: value for name, value in line.items() if "/" in name and name != ELAPSED}


@pytest.mark.slow  # wandb and what it pulls in are installed for it alone
def test_weights_and_biases_goes_on_in_the_same_run(tiny_copy, monkeypatch):
    """Stopped by Ctrl-C and resumed: one run, with each step of metrics.jsonl once, and its values."""
    pytest.importorskip("wandb", reason="wandb is not installed (extra: wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    options = ("metrics.wandb_project=lmworks-test",)
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 9 else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*options)
    first, begun = offline_values(tiny_copy.run_dir), (tiny_copy.run_dir / "wandb_id").read_text()
    tiny_copy.pretrain(*options)
    assert (tiny_copy.run_dir / "wandb_id").read_text() == begun
    both, lines, begun_at = offline_values(tiny_copy.run_dir), read(tiny_copy.run_dir), time.monotonic()
    while len(both) < len(lines) and time.monotonic() - begun_at < 20:  # W&B ends its file a moment after it has finished
        time.sleep(0.1)
        both = offline_values(tiny_copy.run_dir)
    assert 0 < len(first) < len(both) == len(lines) and both[: len(first)] == first
    kept = [(line["step"], sent(line)) for line in lines]
    assert [step for step, _ in both] == [step for step, _ in kept] == list(range(1, STEPS + 1))
    assert both == kept


@pytest.mark.slow
def test_weights_and_biases_without_a_key_asks_nobody_and_training_goes_on(tiny_copy, tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed (extra: wandb)")
    wandb.teardown()  # its settings are those of the first run of a process
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    tiny_copy.pretrain("metrics.wandb_project=lmworks-test")
    said = "W&B gets no more metrics until the run is started again: there is no API key: run wandb login, or set WANDB_MODE=offline"
    assert said in " ".join(capfd.readouterr().err.split())
    assert len(read(tiny_copy.run_dir)) == STEPS


def in_trackio(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and values of every line in the only database of a folder, by step."""
    (path,) = folder.glob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT step, metrics FROM metrics ORDER BY step, id").fetchall()
        assert len(connection.execute("SELECT DISTINCT run_id, run_name FROM metrics").fetchall()) == 1
    return [(step, json.loads(values)) for step, values in found]


def in_mlflow(folder: Path) -> list[tuple[int, dict[str, float]]]:
    """Step and last values of every line in the only run of a store."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=folder.as_uri())
    (run,) = client.search_runs([one.experiment_id for one in client.search_experiments() if one.name == "lmworks-test"])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    found: dict[int, dict[str, float]] = {}
    for name in run.data.metrics:
        for metric in client.get_metric_history(run.info.run_id, name):
            found.setdefault(metric.step, {})[name] = metric.value
    return sorted(found.items())


@pytest.mark.slow  # trackio and mlflow and what they pull in are installed for it alone
@pytest.mark.parametrize(("key", "package", "values", "folder"), [
    ("metrics.trackio_project", "trackio", in_trackio, "trackio"), ("metrics.mlflow_experiment", "mlflow", in_mlflow, "mlflow"),
])
def test_a_local_store_goes_on_in_the_same_run(tiny_copy, monkeypatch, capfd, key, package, values, folder):
    """Stopped by Ctrl-C, killed after lines that no checkpoint has, and resumed: one run with each step of metrics.jsonl and its values, in
    the run directory, although no connection can be made."""
    pytest.importorskip(package, reason=f"{package} is not installed (extra: {package})")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: (_ for _ in ()).throw(AssertionError("it connects to something")))
    options = (f"{key}=lmworks-test", "train.save_every=100%")
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 9 else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*options)
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: (_ for _ in ()).throw(RuntimeError("dies")) if step == 15 else None)
        with pytest.raises(RuntimeError, match="dies"):
            tiny_copy.pretrain(*options)
    assert len(values(tiny_copy.run_dir / folder) if folder == "trackio" else read(tiny_copy.run_dir)) > 9
    tiny_copy.pretrain(*options)
    kept = [(line["step"], sent(line)) for line in read(tiny_copy.run_dir)]
    assert [step for step, _ in kept] == list(range(1, STEPS + 1))
    found = values(tiny_copy.run_dir / folder)
    assert [step for step, _ in found] == [step for step, _ in kept]
    named = mlflow_name if package == "mlflow" else str
    assert all(one[named(name)] == pytest.approx(line[name]) for (_, one), (_, line) in zip(found, kept, strict=True) for name in line)
    assert "Trackio" not in capfd.readouterr().out


class Recorded:
    """A package in place of the real one, that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: (self.lines.append((name, (given, named))), self)[1]


def test_trackers_are_told_every_line_and_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With packages that only record: the real ones are in the slow test above."""
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    trackio, client = Recorded(), Recorded()
    storage = SimpleNamespace(SQLiteStorage=SimpleNamespace(get_project_db_path=lambda project: tmp_path / "none.db"))
    entities = SimpleNamespace(Metric=lambda name, value, time, step: (name, value, step))
    client.info = SimpleNamespace(run_id="id-1", experiment_id="0")  # type: ignore[attr-defined]
    client.experiment_id = "0"  # type: ignore[attr-defined]
    opened: list[str] = []
    for name, module in {
        "trackio": trackio, "trackio.utils": SimpleNamespace(), "trackio.sqlite_storage": storage,
        "mlflow": SimpleNamespace(MlflowClient=lambda tracking_uri: (opened.append(tracking_uri), client)[1]), "mlflow.entities": entities,
        "mlflow.exceptions": SimpleNamespace(MlflowException=type("MlflowException", (Exception,), {})),
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    for resume in (0, 2):
        with MetricLog(tmp_path, Metrics(trackio_project="p", mlflow_experiment="e"), resume_step=resume) as log:
            log.write(1 + resume, {"train/loss": 3.0})
    assert [one for one in trackio.lines if one[0] == "log"] == [
        ("log", (({"train/loss": 3.0},), {"step": 1})), ("log", (({"train/loss": 3.0},), {"step": 3})),
    ]  # fmt: skip
    assert [name for name, _ in trackio.lines] == ["init", "log", "finish"] * 2
    database = tmp_path / "trackio" / "p.db"
    storage.SQLiteStorage.get_project_db_path = lambda project: database
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE metrics (run_name TEXT, step INTEGER)")
        both = [(name, step) for name in (tmp_path.name, "other") for step in range(6)]
        connection.executemany("INSERT INTO metrics VALUES (?, ?)", both)

    def steps(name: str) -> list[int]:
        with contextlib.closing(sqlite3.connect(database)) as connection:
            return [step for (step,) in connection.execute("SELECT step FROM metrics WHERE run_name = ? ORDER BY step", (name,))]

    with MetricLog(tmp_path, Metrics(trackio_project="p"), resume_step=4):
        pass
    assert steps(tmp_path.name) == [0, 1, 2, 3], "steps that are run again replace the old ones"
    with MetricLog(tmp_path, Metrics(trackio_project="p"), resume_step=4) as log:
        log.rewind(2)
    assert steps(tmp_path.name) == [0, 1] and steps("other") == [*range(6)]
    assert trackio.lines[0][1][1]["resume"] == "allow" and tmp_path / "trackio" == storage.TRACKIO_DIR  # type: ignore[attr-defined]
    assert [one[1][0] for one in client.lines if one[0] == "log_batch"] == [("id-1", [("train/loss", 3.0, step)]) for step in (1, 3)]
    assert [name for name, _ in client.lines].count("create_run") == 1 and [name for name, _ in client.lines].count("set_terminated") == 2
    assert opened == [(tmp_path / "mlflow").as_uri()] * 2
    with MetricLog(tmp_path, Metrics(mlflow_experiment="e"), resume_step=4) as log:
        log.write(5, {**{f"layers/{layer}/grad_norm": 1.0 for layer in range(1500)}, "validation/c++/loss": 2.0})
    batches = [one[1][0][1] for one in client.lines if one[0] == "log_batch"][2:]
    assert [len(batch) for batch in batches] == [1000, 501], "MLflow takes no more at a time"
    assert batches[1][-1] == ("validation/c_2b__2b_.loss", 2.0, 5), "MLflow refuses + in a name"


def test_trackio_prints_its_warnings_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("* Created new run: run", "* Trackio warning: no connection"):
        trackers._print_warning(text)
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err == "* Trackio warning: no connection\n"


def test_heartbeats_are_read_no_more_often_than_ranks_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often Prometheus asks: 8,192 ranks have as many files on a shared file system. The silence of a rank grows meanwhile."""
    heartbeat, clock, read = Heartbeat(tmp_path, 3), [1000.0], []
    heartbeat.share()
    monkeypatch.setattr(sinks, "read_beats", lambda folder: [*read_beats(folder)] * 8192 if not read.append(folder) else [])
    now = SimpleNamespace(monotonic=lambda: clock[0], time=lambda: heartbeat._last.seen + clock[0] - 1000)
    monkeypatch.setattr(sinks, "time", now)
    live = sinks._Live(pytest.importorskip("prometheus_client.core").GaugeMetricFamily, tmp_path, tmp_path)
    silent = []
    for clock[0] in (1000, 1005, 1015, 1017):
        (_, ranks) = live.collect()
        silent.append(next(iter(ranks.samples)).value)
    heartbeat.end("left")
    assert len(read) == 2 and silent == pytest.approx([0, 5, 15, 17], abs=0.01)
