"""TensorBoard, Weights & Biases, Prometheus: with the real packages where they are installed, and what is said where not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request

import pytest

from lmworks.errors import UserError
from lmworks.metrics import MetricLog
from lmworks.recipe.schema.metrics import Metrics


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
from lmworks.recipe.schema.metrics import Metrics
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


@pytest.mark.slow  # wandb and what it pulls in are installed for it alone
def test_weights_and_biases_goes_on_in_the_same_run(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed (extra: wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for resume in (0, 2):
        with MetricLog(tmp_path, Metrics(wandb_project="lmworks-test"), resume_step=resume) as log:
            for step in range(resume, resume + 3):
                log.write(step, {"train/loss": 1.0})
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1]
    assert len([name for name in os.listdir(tmp_path / "wandb") if name.startswith("offline-run")]) == 2
