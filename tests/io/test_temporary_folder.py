"""A temporary folder goes at its end, and at the next use of its place if its process was killed before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from lmworks.io import files
from lmworks.io.files import temporary_folder
from rank_pool import FORKS


def _hold(parent: Path) -> None:
    with temporary_folder(parent, ".made-") as folder:
        (folder / "run" / "checkpoints").mkdir(parents=True)
        (parent / "ready").touch()
        signal.pause()


def test_what_a_killed_process_leaves_is_removed_and_what_a_living_one_has_is_not(tmp_path: Path) -> None:
    process = FORKS.Process(target=_hold, args=(tmp_path,))
    process.start()
    while not (tmp_path / "ready").exists():
        assert process.is_alive()
        time.sleep(0.005)
    (held,) = tmp_path.glob(".made-*")
    (tmp_path / "made-by-hand").mkdir()
    with temporary_folder(tmp_path, ".made-") as folder:
        assert folder.is_dir() and (held / "run").is_dir(), "a process has it"
    assert not folder.exists()
    process.kill()
    process.join()
    assert held.exists()
    with temporary_folder(tmp_path, ".made-"):
        assert not held.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"ready", "made-by-hand"}


def test_a_folder_that_is_being_made_is_left_alone(tmp_path: Path) -> None:
    """Its lock is a file in it, which is not there at first; after a minute the process that made it was killed."""
    fresh, old = tmp_path / ".made-fresh", tmp_path / ".made-old"
    for folder in (fresh, old):
        folder.mkdir()
    os.utime(old, times=(time.time() - files._FRESH - 1,) * 2)
    with temporary_folder(tmp_path, ".made-"):
        assert fresh.exists() and not old.exists()
