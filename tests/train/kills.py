"""A training process that is killed at random moments and started again until it is done."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lmworks.host import machine
from patience import PATIENCE
from rank_pool import FORKS
from tiny_run import Tiny


def _live(tiny: Tiny, overrides: Sequence[str], told: str) -> None:
    os.environ[machine.VARIABLE] = told
    tiny.pretrain(*overrides)


@dataclass
class Campaign:
    """What the kills hit."""

    kills: int = 0
    in_saves: int = 0
    before_the_first_step: int = 0


def lines(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def train_under_fire(tiny: Tiny, overrides: Sequence[str], kills: int, seed: int) -> Campaign:
    """Run pretraining, killing its process with SIGKILL `kills` times, and then to its end.

    A kill comes some steps into a life, when there is a checkpoint to go on from, or at once, or as soon as a save is seen on the disk,
    each at a random distance: moments that are counted in progress, so that a busy machine gets as far as an idle one.
    """
    chance, campaign = random.Random(seed), Campaign()
    while True:
        process = FORKS.Process(target=_live, args=(tiny, overrides, os.environ[machine.VARIABLE]))
        already = lines(tiny.run_dir)
        process.start()
        last = campaign.kills == kills
        if not last and _wait(tiny, process, already, chance):
            part = any((tiny.run_dir / "checkpoints").glob(".step-*.part"))
            process.kill()
            # the save counts if the kill left it half done
            process.join()
            campaign.kills += 1
            campaign.in_saves += part and any((tiny.run_dir / "checkpoints").glob(".step-*.part"))
            campaign.before_the_first_step += lines(tiny.run_dir) <= already
            continue
        process.join(PATIENCE)
        assert process.exitcode == 0, f"the run ended with {process.exitcode} after {campaign.kills} kills"
        assert campaign.kills == kills, f"the run was over after {campaign.kills} kills; give it more steps"
        return campaign


def _wait(tiny: Tiny, process: multiprocessing.Process, already: int, chance: random.Random) -> bool:
    """Wait for the moment of the kill; False if the process has ended before it."""
    kind = chance.choice(("steps", "steps", "save", "early"))
    # A life that goes on from a checkpoint first writes the lines again that it had written beyond it.
    goal = already + chance.randrange(1, 4) if kind != "early" else 0
    deadline = time.monotonic() + PATIENCE
    if kind == "early":
        time.sleep(chance.uniform(0, 0.4))
    while process.is_alive():
        assert time.monotonic() < deadline, "the run makes no progress"
        found = (tiny.run_dir / "checkpoints").glob(".step-*.part" if kind == "save" else "step-*")
        if kind == "early" or (lines(tiny.run_dir) >= goal and any(found)):
            time.sleep(chance.uniform(0, 0.003 if kind == "save" else 0.02))  # a save of this model takes some 10 ms
            return process.is_alive()
        time.sleep(0.003)  # less would take from a run what it needs to get there
    return False
