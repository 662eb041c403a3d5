"""In which order a save syncs and renames, and what a crash of the machine between any two of these calls leaves behind.

The suite does not wait for the disk (`unsynced.py`). Here each sync and each rename is recorded, with a copy of the directory as a crash at
that moment could leave it: a file has no bytes beyond those that were synced.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import Checkpoints, list_checkpoints, load, newest_good
from lmworks.checkpoint.copy_to import copy_checkpoint
from lmworks.recipe.schema.artifacts import Checkpoints as Options


def state(step: int) -> dict[str, Any]:
    return {"model": {"weight": torch.full((50, 7), float(step)), "bias": torch.full((5,), step)}, "lr": step / 3}


@dataclass
class Disk:
    """What `os.fsync` and renames were called for below a directory."""

    directory: Path
    copies: Path
    calls: list[tuple[str, str]] = field(default_factory=list)
    synced: dict[int, int] = field(default_factory=dict)  # bytes by inode

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        renames = {name: getattr(os, name) for name in ("replace", "rename")}

        def fsync(handle: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            self.synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size
            if path == self.directory or self.directory in path.parents:
                self._note("sync", path)

        def rename(kind: str) -> Any:
            def call(old: Any, new: Any) -> None:
                self._snapshot()  # what is there before it
                renames[kind](old, new)
                if self.directory in Path(new).parents:
                    self._note("rename", Path(new))

            return call

        patch.setattr(os, "fsync", fsync)
        for name in renames:
            patch.setattr(os, name, rename(name))

    def _note(self, what: str, path: Path) -> None:
        self.calls.append((what, str(path.relative_to(self.directory))))
        self._snapshot()

    def _snapshot(self) -> None:
        copy = self.copies / str(len(list(self.copies.iterdir())))
        shutil.copytree(self.directory, copy)
        for path in self.directory.rglob("*"):
            if path.is_file():
                os.truncate(copy / path.relative_to(self.directory), min(self.synced.get(path.stat().st_ino, 0), path.stat().st_size))


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "copies").mkdir()
    return Disk(tmp_path / "checkpoints", tmp_path / "copies")


@pytest.mark.parametrize("asynchronous", [True, False])
def test_everything_is_synced_before_the_name_and_the_manifest_comes_last(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    disk.watch(monkeypatch)
    with Checkpoints(disk.directory, Options(asynchronous=asynchronous), {}) as checkpoints:
        checkpoints.save(100, state(100), {}, wait=True)
    aside = ".step-00000100.part"
    names = sorted(path.name for path in (disk.directory / "step-00000100").iterdir())
    assert names == ["data-00000-00000.bin", "manifest.json", "meta.json", "tensors.jsonl.gz"]
    files = [("sync", f"{aside}/{name}") for name in ("data-00000-00000.bin", "meta.json", "tensors.jsonl.gz", "manifest.json")]
    assert disk.calls == [*files, ("sync", aside), ("rename", "step-00000100"), ("sync", ".")]
    for path in (disk.directory / "step-00000100").iterdir():
        assert disk.synced[path.stat().st_ino] == path.stat().st_size, "synced when it was complete"


@pytest.mark.parametrize("again", [False, True])
def test_a_crash_between_any_two_calls_leaves_a_whole_checkpoint(disk: Disk, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """The one before or the new one, also where the new one replaces another of its step."""
    with monkeypatch.context() as patch:
        disk.watch(patch)
        with Checkpoints(disk.directory, Options(keep_last=1, asynchronous=False), {}) as checkpoints:
            checkpoints.save(1, state(1), {"tokens": 1})
            first = len(list(disk.copies.iterdir()))
            checkpoints.save(1 if again else 2, state(2), {"tokens": 2})
    found = []
    for number in range(first - 1, len(list(disk.copies.iterdir()))):
        left = disk.copies / str(number)
        with Checkpoints(left, Options(keep_last=1), {}) as checkpoints:  # which tidies what the crash has left
            loaded = state(0)
            meta = checkpoints.load_latest(loaded)
            assert meta is not None and not checkpoints.refused, number
            found.append(meta["tokens"])
            assert loaded["lr"] == meta["tokens"] / 3
            assert all(bool((tensor == meta["tokens"]).all()) for tensor in loaded["model"].values())
        assert not [name for name in os.listdir(left) if name.startswith(".")]
    assert found == sorted(found) and set(found) == {1, 2}


def test_a_copy_is_complete_before_it_has_its_name(disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpoints(tmp_path / "run", Options(asynchronous=False), {}) as checkpoints:
        checkpoints.save(100, state(100), {})
    disk.watch(monkeypatch)
    copy_checkpoint(tmp_path / "run" / "step-00000100", str(disk.directory))
    assert [row["step"] for row in list_checkpoints(disk.directory)] == [100]
    named = [number for number, (what, path) in enumerate(disk.calls) if (what, path) == ("rename", "step-00000100")]
    synced = {Path(path).name for what, path in disk.calls[: named[0]] if what == "sync"}
    assert {"data-00000-00000.bin", "meta.json", "tensors.jsonl.gz", "manifest.json"} <= synced
    assert ("sync", ".") in disk.calls[named[0] :]
    for copy in disk.copies.iterdir():
        path, refused = newest_good(copy)
        assert not refused and (path is None or load(path, state(0)) == {})
