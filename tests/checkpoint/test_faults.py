"""Checkpoints under damage, full disks, lying disks and SIGKILL (promise 4)."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import Checkpoints, load, newest_good, tensor_files, verify
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.recipe.schema.artifacts import Checkpoints as Options
from rank_pool import FORKS

OLD, NEW = "step-00000001", "step-00000002"


def make_state(value: int, count: int = 500) -> dict[str, Any]:
    return {"model": {"weight": torch.full((count,), float(value)), "bias": torch.full((7,), value, dtype=torch.bfloat16)}, "lr": value / 3}


def value_of(state: dict[str, Any]) -> float:
    """The one step that all tensors hold."""
    values = {float(value) for tensor in state["model"].values() for value in tensor.unique()}
    assert len(values) == 1, "tensors of different steps in one checkpoint"
    assert state["lr"] == next(iter(values)) / 3
    return next(iter(values))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A directory with two good checkpoints."""
    with Checkpoints(tmp_path / "run", Options(), {"model": "a"}) as checkpoints:
        checkpoints.save(1, make_state(1), {"step": 1})
        checkpoints.save(2, make_state(2), {"step": 2})
    return tmp_path / "run"


def assert_falls_back(directory: Path, what: str) -> None:
    """The damaged newest checkpoint is seen by every reader, set aside and reported; the one before it is loaded."""
    assert [row["good"] for row in verify(directory)] == [True, False]
    with pytest.raises(UserError, match="is damaged"):
        load(directory / NEW, make_state(0))
    events: list[tuple[str, dict[str, Any]]] = []
    state = make_state(0)
    with Checkpoints(directory, Options(), {"model": "a"}, report=lambda event, **fields: events.append((event, fields))) as checkpoints:
        assert checkpoints.load_latest(state) == {"step": 1}
        ((path, reason),) = checkpoints.refused
    assert value_of(state) == 1
    assert path == directory / NEW
    assert what in reason
    aside = directory / f"{NEW}.bad-1"
    assert events == [("checkpoint_refused", {"path": str(path), "reason": reason, "renamed": str(aside)})]
    assert aside.is_dir()
    assert not path.exists()


def test_a_flipped_byte_anywhere_is_found(pair):
    files = sorted(one.name for one in (pair / NEW).iterdir())
    assert files == ["data-00000-00000.bin", "manifest.json", "meta.json", "tensors.jsonl.gz"]
    generator = random.Random(1)
    for name in files:
        path = pair / NEW / name
        good = path.read_bytes()
        positions = range(len(good)) if name == "manifest.json" else sorted({0, len(good) - 1, *generator.sample(range(len(good)), 12)})
        for position in positions:
            bad = bytearray(good)
            bad[position] ^= 1 << generator.randrange(8)
            path.write_bytes(bad)
            assert newest_good(pair)[0] == pair / OLD, (name, position)
        assert newest_good(pair)[1][0][1].startswith(name)
        path.write_bytes(good)
    assert newest_good(pair) == (pair / NEW, [])


@pytest.mark.parametrize("name", ["data-00000-00000.bin", "meta.json", "tensors.jsonl.gz", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "append", "remove"])
def test_a_damaged_file_is_said_and_the_run_falls_back(pair, name, damage):
    path = pair / NEW / name
    data = path.read_bytes()
    middle = len(data) // 2
    if damage == "remove":
        path.unlink()
    else:
        flipped = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1:]
        path.write_bytes({"flip": flipped, "truncate": data[:middle], "empty": b"", "append": data + b"\n"}[damage])
    assert_falls_back(pair, name)


@pytest.mark.parametrize("garbage", [b"[]", b"null", b'{"files": 3}', b'{"files": {"a": 1}}', b"\xff\xfe", b'{"files": {}}'])
def test_a_manifest_of_garbage_is_no_manifest(pair, garbage):
    (pair / NEW / "manifest.json").write_bytes(garbage)
    assert_falls_back(pair, "manifest.json")


def test_a_manifest_cannot_point_out_of_its_directory(pair):
    from lmworks.checkpoint import manifest

    files = manifest.entries(pair / NEW)
    out = {**files, f"../{OLD}/meta.json": manifest.Entry(1, "0")}
    (pair / NEW / "manifest.json").write_bytes(manifest.canonical(out))
    assert_falls_back(pair, "manifest.json")


def test_when_none_is_good_all_are_kept_aside(pair):
    for name in (OLD, NEW):
        (pair / name / "manifest.json").unlink()
    with Checkpoints(pair, Options(), {"model": "a"}) as checkpoints:
        assert checkpoints.load_latest(make_state(0)) is None
        assert len(checkpoints.refused) == 2
        checkpoints.save(2, make_state(5), {}, wait=True)
        (pair / NEW / "manifest.json").unlink()
        assert checkpoints.latest_good() is None
    assert sorted(os.listdir(pair)) == [f"{OLD}.bad-1", f"{NEW}.bad-1", f"{NEW}.bad-2"]


def test_a_disk_that_returns_other_bytes_is_caught_before_the_checkpoint_counts(pair, monkeypatch):
    sync = os.fsync

    def lying(fd: int) -> None:
        sync(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        if path.suffix == ".bin":
            with open(path, "r+b") as handle:
                handle.seek(100)
                handle.write(b"\x55")

    monkeypatch.setattr(os, "fsync", lying)
    checkpoints = Checkpoints(pair, Options(), {"model": "a"})
    checkpoints.save(3, make_state(3), {})
    with pytest.raises(UserError, match=r"read back differs from what was written.*step-00000002, is intact"):
        checkpoints.close()
    assert sorted(os.listdir(pair)) == [OLD, NEW]


def assert_survives_a_failed_save(directory: Path, count: int, match: str) -> None:
    """A save of `count` floats fails; its error comes with the next call, the old ones are whole, and nothing is left over."""
    for asynchronous in (True, False):
        checkpoints = Checkpoints(directory, Options(keep_last=3, asynchronous=asynchronous), {"model": "a"})
        with pytest.raises(UserError, match=match) as caught:
            checkpoints.save(3, make_state(3, count), {}, wait=True)
        assert "\n" not in str(caught.value)
        assert f"{NEW}, is intact" in str(caught.value)
        assert sorted(os.listdir(directory)) == [OLD, NEW]
        assert [row["good"] for row in verify(directory)] == [True, True]
        checkpoints.save(4, make_state(4, 20), {})
        checkpoints.close()
        shutil.rmtree(directory / "step-00000004")


@contextmanager
def small_disk(path: Path, size: str):
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root; the limit on file sizes below tests the same path")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_ends_with_a_message_and_an_intact_checkpoint(tmp_path):
    with small_disk(tmp_path / "disk", "2m") as disk:
        directory = disk / "checkpoints"
        with Checkpoints(directory, Options(keep_last=3), {"model": "a"}) as checkpoints:
            checkpoints.save(1, make_state(1, 100_000), {})
            checkpoints.save(2, make_state(2, 100_000), {})
        # 400 KB each: a third of 2 MB does not fit any more.
        assert_survives_a_failed_save(directory, 500_000, r"the disk of .* is full \([\d.]+ MB free\).*free some space")
        checkpoints = Checkpoints(directory, Options(), {"model": "a"})
        checkpoints.save(3, make_state(3, 500_000), {})
        with pytest.raises(UserError, match="is full"):
            checkpoints.save(4, make_state(4), {})
        checkpoints.close()


def test_a_save_that_does_not_fit_writes_nothing(pair, monkeypatch):
    """It fails before it has filled what is left of the disk, which other programs need."""
    monkeypatch.setattr(machine, "free_disk", lambda path: 1000)
    monkeypatch.setattr(tensor_files, "write_slices", lambda *given: pytest.fail("written"))
    with pytest.raises(UserError, match=r"is full \(0.0 MB free\)"):
        Checkpoints(pair, Options(asynchronous=False), {"model": "a"}).save(3, make_state(3), {})
    assert sorted(os.listdir(pair)) == [OLD, NEW]


def test_a_limit_on_file_sizes_ends_the_same_way(pair):
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        assert_survives_a_failed_save(pair, 50_000, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_an_unwritable_directory_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file/checkpoints", Options(asynchronous=False), {})
    with pytest.raises(UserError, match=r"step 1 was not saved: Not a directory in .*there is no earlier checkpoint"):
        checkpoints.save(1, make_state(1), {})


def _save_for_ever(directory: Path, told: Connection) -> None:
    """Tells the step that it begins with, and each step once it is saved."""
    torch.set_num_threads(1)
    done = lambda event, **fields: event == "checkpoint" and told.send(fields["step"])  # noqa: E731
    checkpoints = Checkpoints(directory, Options(keep_last=2), {"model": "a"}, report=done)
    state = make_state(0, 300_000)
    meta = checkpoints.load_latest(state)
    assert not checkpoints.refused, checkpoints.refused
    step = 0 if meta is None else meta["step"]
    told.send(step)
    while True:
        step += 1
        for tensor in state["model"].values():
            tensor.fill_(step % 250)
        state["lr"] = (step % 250) / 3
        checkpoints.save(step, state, {"step": step})


def kill_and_check(directory: Path, kills: int, seed: int) -> None:
    """Kill a process that does nothing but save; whatever moment it was, the newest checkpoint is whole and none went backwards."""
    generator, last, torn = random.Random(seed), 0, 0
    for _ in range(kills):
        here, there = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_save_for_ever, args=(directory, there), daemon=True)
        process.start()
        there.close()
        assert here.recv() == last
        told = [here.recv()]
        time.sleep(generator.uniform(0, 0.15))
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                told.append(here.recv())
        torn += any(name.endswith(".part") for name in os.listdir(directory))
        path, refused = newest_good(directory)
        assert path is not None
        assert not refused
        state = make_state(0, 300_000)
        step = load(path, state)["step"]
        assert value_of(state) == step % 250
        assert step >= max(last + 1, *told), "a checkpoint that was reported was lost"
        last = step
    assert torn, "no kill fell inside a save, so this showed nothing"


def test_a_kill_inside_a_save_costs_nothing_that_was_saved(tmp_path):
    kill_and_check(tmp_path, kills=6, seed=1)


@pytest.mark.slow
def test_fifty_kills_inside_saves(tmp_path):
    kill_and_check(tmp_path, kills=50, seed=2)
