"""TensorBoard, Weights & Biases, Prometheus: with the real packages where they are installed, and what is said where not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from lmworks.errors import UserError
from lmworks.metrics import MetricLog
from lmworks.metrics import log as sinks
from lmworks.metrics.log import read
from lmworks.recipe.schema.artifacts import Metrics
from lmworks.ui.terminal import Interrupted
from lmworks.watch.heartbeat import Heartbeat, read_beats
from ports import free_port
from tiny_run import STEPS, before_each_step


@pytest.mark.parametrize(("options", "module", "extra"), [
    ({"tensorboard": True}, "tensorboard", "tensorboard"),
    ({"wandb_project": "p"}, "wandb", "wandb"),
    ({"prometheus_port": 9999}, "prometheus_client", "prometheus"),
])
def test_a_missing_package_is_named_with_its_extra(tmp_path, options, module, extra):
    code = f"""
import sys
from pathlib import Path
sys.modules[{module!r}] = None
from lmworks.errors import UserError
from lmworks.metrics import MetricLog
from lmworks.recipe.schema.artifacts import Metrics
try:
    MetricLog(Path({str(tmp_path)!r}), Metrics(**{options!r}))
except UserError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    (setting,) = options
    assert said.stdout == f"metrics.{setting} needs a package that is not installed: pip install 'lmworks[{extra}]'\n", said.stderr


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
    both, lines = offline_values(tiny_copy.run_dir), read(tiny_copy.run_dir)
    assert 0 < len(first) < len(both) == len(lines) and both[: len(first)] == first
    kept = [(line["step"], {name: value for name, value in line.items() if "/" in name}) for line in lines]
    assert [step for step, _ in both] == [step for step, _ in kept] == list(range(1, STEPS + 1))
    assert both == kept


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
