"""A rank with a toy for a trainer: it adds up over the ranks, saves now and then, and breaks when it is told to.

`python -m toy_rank RUN_DIR STEPS`. RUN_DIR/recipe.json is the recipe; RUN_DIR/fault-RANK.json is {rank, step, kind, once}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lmworks.errors import UserError
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.launch.rank import run_rank
from lmworks.launch.rank_context import rank_context
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import Interrupted, Preempted
from lmworks.watch.ledger import Ledger
from lmworks.watch.stop_signals import graceful_stop

SAVE_EVERY = 5


def ignore_requests(folder: Path, seconds: float = 10.0) -> None:
    """Whoever opens, writes or dates a file in this folder waits, as for a file server that does not answer."""
    until = time.monotonic() + seconds

    def held(honest: Callable[..., Any], file: Any, *rest: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else str(file)
        if path.startswith(str(folder)):
            time.sleep(max(0.0, until - time.monotonic()))
        return honest(file, *rest, **options)

    for name in ("open", "pwrite", "write", "utime"):
        setattr(os, name, partial(held, getattr(os, name)))


def fail(run_dir: Path, rank: int, step: int) -> None:
    path = run_dir / f"fault-{rank}.json"
    fault = json.loads(path.read_text()) if path.exists() else {}
    if fault.get("step") != step:
        return
    if fault["once"]:
        path.unlink()
    if fault["kind"] == "error":
        raise ArithmeticError("the toy is broken")
    if fault["kind"] == "unanswered":
        ignore_requests(run_dir / "launch" / "heartbeats")
    elif fault["kind"] in ("hang", "mute"):
        if fault["kind"] == "mute":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(1000)
    else:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}[fault["kind"]])


def train(run_dir: Path, steps: int) -> None:
    recipe = Recipe.model_validate_json((run_dir / "recipe.json").read_text())
    saved = run_dir / "saved"
    fail(run_dir, int(os.environ["RANK"]), -1)
    with rank_context(recipe, run_dir) as (ranks, heartbeat), graceful_stop() as stop:
        first = int(saved.read_text()) if saved.exists() else 0
        rank, size = dist.get_rank(), dist.get_world_size()
        for step in range(first, steps):
            heartbeat.beat(step, "data")
            fail(run_dir, rank, step)
            time.sleep(0.05)
            heartbeat.beat(step, "update")
            total = ranks.all_reduce(torch.tensor([1.0, float(stop.requested), float(stop.preempted)]), "loss")
            if rank == 0:
                with Ledger(run_dir / "ledger.jsonl") as ledger:
                    ledger.write("step", step=step, ranks=int(total[0]))
            if (step + 1) % SAVE_EVERY == 0 or total[1]:
                heartbeat.beat(step, "save")
                if rank == 0:
                    saved.write_text(str(step + 1))
                    with Ledger(run_dir / "ledger.jsonl") as ledger:
                        ledger.write("checkpoint", step=step + 1)
            if total[1]:
                dist.barrier()
                # A rank that has not had the signal yet leaves as the others do.
                raise (Preempted if total[2] else Interrupted)(f"saved at step {step + 1}")
        assert size == int(total[0])


def work() -> None:
    try:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    except UserError as error:
        print(f"error: {error}")
        sys.exit(2)
    except Preempted:
        sys.exit(75)
    except Interrupted:
        sys.exit(130)


if __name__ == "__main__":
    os._exit(run_rank(LaunchDir(Path(os.environ[VARIABLE])), int(os.environ["RANK"]), work))
