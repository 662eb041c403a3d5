"""Promise 3 on ranks: a run whose rank is killed goes on by itself, bit for bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from lmworks.launch import places
from lmworks.launch.folder import Folder
from lmworks.launch.torchrun import Sizes
from lmworks.watch.heartbeat import read_beats
from lmworks.watch.ledger import read_ledger
from tiny_run import STEPS, Tiny, checkpoint, curve, same_bits

OPTIONS = ("model.dropout=0.1", "train.save_every=3 steps", "stability.spike=null", "launch.timeout=60 s")


def launch(run: Tiny, ranks: str) -> int:
    options = [f"run_dir={run.run_dir}", *OPTIONS]
    work = ["pretrain", str(run.recipe), *(word for option in options for word in ("--set", option))]
    return places.local(run.resolve(*OPTIONS).recipe, run.run_dir, Sizes.parse(ranks), work).run()


def kill(run_dir: Path, rank: int, step: int) -> None:
    """SIGKILL the rank as soon as it is at the step."""
    while True:
        for beat in read_beats(Folder.of(run_dir).beats):
            if beat.rank == rank and beat.step >= step:
                os.kill(beat.pid, signal.SIGKILL)
                return
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_ends_with_the_same_bits(tiny: Tiny, tmp_path: Path) -> None:
    undisturbed, hit = tiny.copy(tmp_path / "undisturbed"), tiny.copy(tmp_path / "hit")
    assert launch(undisturbed, "2") == 0
    threading.Thread(target=kill, args=(hit.run_dir, 1, 10), daemon=True).start()
    assert launch(hit, "2") == 0
    (restart,) = [event for event in read_ledger(hit.run_dir / "ledger.jsonl") if event["event"] == "restart"]
    assert restart["ranks"] == [1] and "ended without a word" in restart["reason"]
    assert [line["step"] for line in curve(hit.run_dir)] == list(range(1, STEPS + 1))
    assert curve(hit.run_dir) == curve(undisturbed.run_dir)
    assert same_bits(checkpoint(hit.run_dir), checkpoint(undisturbed.run_dir)) == []
