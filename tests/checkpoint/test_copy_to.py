"""Copies on other storage."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

from lmworks.checkpoint import Checkpoints, load, newest_good
from lmworks.checkpoint import copy_to as copy_to_module
from lmworks.checkpoint.copy_to import copy_checkpoint
from lmworks.errors import UserError
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from patience import PATIENCE


def make_state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"weight": torch.full((100,), value)}}


def run(directory, target, steps=3, resume=False, **options):
    events: list[tuple[str, dict]] = []
    copying = Options(copy_to=str(target), **options)
    with Checkpoints(directory, copying, {}, report=lambda event, **fields: events.append((event, fields))) as checkpoints:
        for step in range(1, steps + 1):
            checkpoints.save(step, make_state(step), {"step": step})
        if resume:
            assert checkpoints.load_latest(make_state(0)) is not None
    return events


def test_finished_checkpoints_are_copied_to_a_directory(tmp_path):
    events = run(tmp_path / "run", tmp_path / "shared/deep", keep_last=1)
    assert [fields["path"][-1] for event, fields in events if event == "checkpoint_copied"] == ["1", "2", "3"]
    assert sorted(path.name for path in (tmp_path / "shared/deep").iterdir()) == [f"step-0000000{step}" for step in (1, 2, 3)]
    path, refused = newest_good(tmp_path / "shared/deep")
    state = make_state(0)
    assert path is not None
    assert not refused
    assert load(path, state) == {"step": 3}
    assert bool((state["model"]["weight"] == 3).all())
    assert not copy_checkpoint(tmp_path / "run/step-00000003", str(tmp_path / "shared/deep")), "it is there already"


def test_finished_checkpoints_are_copied_to_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    run(tmp_path / "run", "memory://bucket/run", steps=2)
    filesystem = fsspec.filesystem("memory")
    for name in ("data-00000-00000.bin", "manifest.json", "meta.json", "tensors.jsonl.gz"):
        assert filesystem.cat_file(f"/bucket/run/step-00000002/{name}") == (tmp_path / "run/step-00000002" / name).read_bytes()
    assert not copy_checkpoint(tmp_path / "run/step-00000002", "memory://bucket/run"), "it is there already"


def test_a_url_of_no_known_kind_is_said_at_the_start(tmp_path):
    pytest.importorskip("fsspec")
    with pytest.raises(UserError, match=r"checkpoints.copy_to: cannot use nowhere://x"):
        Checkpoints(tmp_path, Options(copy_to="nowhere://x"), {})


def test_a_copy_that_differs_is_not_published_and_is_tried_again(tmp_path, monkeypatch):
    copy, spoilt = copy_to_module.shutil.copyfileobj, []

    def spoil(reader, writer, size):
        copy(reader, writer, size)
        if "step-00000001" in reader.name and reader.name.endswith(".bin") and not spoilt:
            spoilt.append(reader.name)
            writer.seek(3)
            writer.write(b"!")

    monkeypatch.setattr(copy_to_module.shutil, "copyfileobj", spoil)
    events = run(tmp_path / "run", tmp_path / "shared", steps=2)
    assert "its hash differs" in next(fields["reason"] for event, fields in events if event == "checkpoint_copy_failed")
    copied = [fields["path"][-1] for event, fields in events if event == "checkpoint_copied"]
    assert sorted(copied) == ["1", "2"]
    assert not list((tmp_path / "shared").glob(".*"))


# Copies the one checkpoint of a run, and is killed when half of its files are there.
_KILLED = """
import os, signal, sys
from pathlib import Path
from lmworks.checkpoint import copy_to
honest, count = os.fsync, []
def kill(fd):
    honest(fd)
    count.append(fd)
    if len(count) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
os.fsync = kill
copy_to.copy_checkpoint(Path(sys.argv[1]), sys.argv[2])
"""


def test_a_run_that_was_killed_in_the_copy_finishes_it_at_the_next_start(tmp_path):
    with Checkpoints(tmp_path / "run", Options(), {}) as checkpoints:
        checkpoints.save(1, make_state(1), {"step": 1})
    far = tmp_path / "far"
    done = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "run/step-00000001"), str(far)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in far.iterdir()] == [".step-00000001.part"] and newest_good(far) == (None, [])
    for expected in (["checkpoint_copied"], []):
        assert [event for event, _ in run(tmp_path / "run", far, steps=0, resume=True)] == expected
        assert [path.name for path in far.iterdir()] == ["step-00000001"] and newest_good(far) == (far / "step-00000001", [])


def test_training_goes_on_and_nothing_waiting_is_pruned(tmp_path, monkeypatch):
    gate, copy = threading.Event(), copy_to_module.copy_checkpoint

    def slow(*arguments):
        gate.wait(PATIENCE)
        return copy(*arguments)

    monkeypatch.setattr(copy_to_module, "copy_checkpoint", slow)
    checkpoints = Checkpoints(tmp_path / "run", Options(keep_last=1, copy_to=str(tmp_path / "shared")), {})
    for step in (1, 2, 3):
        checkpoints.save(step, make_state(step), {}, wait=True)
    assert len(list((tmp_path / "run").iterdir())) == 3
    assert all(one.daemon for one in threading.enumerate() if one.name == "checkpoint-mirror"), "a copy that hangs lets the process end"
    gate.set()
    checkpoints.close()
    assert len(list((tmp_path / "shared").iterdir())) == 3
