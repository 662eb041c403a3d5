"""A rank of the rehearsal in which a host is lost: `python -m lmworks.preflight.host_rank FOLDER` trains a small model on CPUs."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.checkpoint.state import load
from lmworks.io import jsonl
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.launch.rank import run_rank
from lmworks.launch.rank_context import rank_context
from lmworks.preflight.small_model import first_weights, one_step, state_of
from lmworks.recipe.schema.layout import layout_for
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.build import with_optimizer
from lmworks.watch.heartbeat import HOST

RECIPE, VICTIM, LOSSES = "recipe.json", "victim", "losses.jsonl"  # files of the folder
STEPS, SAVE_EVERY = 8, 2


def train(folder: Path) -> None:
    """Train from the newest checkpoint on. The host named in the file VICTIM is lost, once, in the middle."""
    recipe = Recipe.model_validate_json((folder / RECIPE).read_text(encoding="utf-8"))
    options = recipe.checkpoints.model_copy(update={"asynchronous": False, "local": None, "copy_to": None, "keep_every": None})
    with rank_context(recipe, folder) as (ranks, heartbeat):
        model, optimizer = with_optimizer(recipe, first_weights(recipe, ranks.layout))
        model.train()
        checkpoints = Checkpoints(folder / "checkpoints", options, {})
        path, _ = listing.newest_good(folder / "checkpoints")
        first = 0
        if path is not None:
            state = state_of(model, optimizer, values=False)
            load(path, state)
            model.state_loaded(state)
            first = listing.step_of(path)
        ranks.barrier()
        for step in range(first, STEPS):
            heartbeat.beat(step, "update")
            if step == STEPS // 2 + 1:
                _be_lost(folder)
            loss = float(one_step(recipe, model, optimizer, step).loss)
            if ranks.is_first:
                fd = jsonl.open_append(folder / LOSSES)
                jsonl.append(fd, {"step": step, "loss": loss, "ranks": ranks.world, "pid": os.getpid(), **_now()})
                os.close(fd)
            if (step + 1) % SAVE_EVERY == 0:
                checkpoints.save(step + 1, model.without_duplicates(state_of(model, optimizer)), {"step": step + 1})


def _now() -> dict[str, Any]:
    """The time by the clock of this machine that is never set, which no other machine shares, and by the one that may be."""
    return {"machine": socket.gethostname(), "clock": time.monotonic(), "time": time.time()}


def seconds_between(before: dict[str, Any], after: dict[str, Any]) -> float:
    """The time between two lines of LOSSES; the first rank may have moved to another machine."""
    clock = "clock" if before["machine"] == after["machine"] else "time"
    return float(after[clock] - before[clock])


def losses_of(recipe: str) -> list[float]:
    """The losses of the same steps without an interruption, on ranks of one process group."""
    made = Recipe.model_validate_json(recipe)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    model, optimizer = with_optimizer(made, first_weights(made, layout_for(made.layout, world)))
    model.train()
    return [float(one_step(made, model, optimizer, step).loss) for step in range(STEPS)]


def _be_lost(folder: Path) -> None:
    """End the agent and this rank at once, as a machine does that loses its power, if this is the victim and it is still to be lost."""
    victim = folder / VICTIM
    if victim.exists() and victim.read_text(encoding="utf-8").strip() == os.environ[HOST]:
        victim.unlink()
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what the run itself uses stays free
    os._exit(run_rank(LaunchDir(Path(os.environ[VARIABLE])), int(os.environ["RANK"]), lambda: train(Path(sys.argv[1]))))
