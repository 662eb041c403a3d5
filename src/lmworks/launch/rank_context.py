"""The context in which a rank works: it joins the others, writes heartbeats, and reports failures."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from lmworks.errors import UserError
from lmworks.interrupt import Interrupted
from lmworks.launch.folder import VARIABLE, Folder
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.process_group import init_ranks, is_launched
from lmworks.progress import console
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.diagnosis import classify_error, diagnose_failure
from lmworks.watch.heartbeat import Heartbeat, entered_collectives, read_beats
from lmworks.watch.ledger import Ledger

_LOOK = 0.5  # seconds
_LAST_WORDS = 2.0  # seconds that a rank has to end by itself once another has failed


@contextmanager
def rank_context(recipe: Recipe, run_dir: Path) -> Iterator[tuple[Ranks, Heartbeat]]:
    """Within the block this process is a rank of `recipe.layout`; one that nobody launched is alone. The group of the ranks stays, for
    the next block.

    If the last world of this run broke, the first rank writes an event `restart` to the ledger, with what the ranks had left behind: the
    ranks and hosts at fault, the step, and the reason. When one rank fails, the others end within seconds instead of waiting for it in a
    collective. Raises `UserError` when the world has broken `launch.max_restarts` times in a row without a new checkpoint.
    """
    node, threads = recipe.launch, recipe.threads
    if not is_launched():
        yield init_ranks(recipe.layout, float(node.timeout), threads), Heartbeat(None)
        return
    folder, rank = Folder.of(run_dir), int(os.environ["RANK"])
    if rank == 0:
        _report_failure(folder, run_dir, int(os.environ["WORLD_SIZE"]), node.max_restarts)
    ranks = init_ranks(recipe.layout, float(node.timeout), threads)
    if rank == 0:  # which alone writes it
        folder.unmet.unlink(missing_ok=True)
    heartbeat = Heartbeat(folder.beats, rank)
    try:
        with _witness(folder, heartbeat):
            yield ranks, heartbeat
    except (Interrupted, UserError, KeyboardInterrupt, SystemExit):
        heartbeat.end("left")
        raise
    except BaseException as error:
        heartbeat.end(classify_error(error), f"{type(error).__name__}: {error}"[:2000], entered_collectives())
        folder.failed.touch()
        _end_the_frozen(folder)
        raise
    heartbeat.end("left")


def _report_failure(folder: Folder, run_dir: Path, size: int, most: int) -> None:
    """By the first rank, before the others can have joined: what broke the last world."""
    beats = read_beats(folder.beats)
    found = diagnose_failure(beats)
    for path in folder.beats.glob("*.json"):
        path.unlink()
    folder.failed.unlink(missing_ok=True)
    if found is None:
        if beats and len(beats) != size:
            with Ledger(run_dir / "ledger.jsonl") as ledger:
                ledger.write("resized", before=len(beats), now=size)
        return
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        in_a_row = 1
        for event in reversed(ledger.read()):
            if event["event"] == "checkpoint":
                break
            in_a_row += event["event"] == "restart"
        ledger.write(
            "restart", step=found.step, ranks=found.ranks, hosts=found.hosts, reason=found.reason,
            before=len(beats), now=size, in_a_row=in_a_row,
        )  # fmt: skip
    console.print(f"started again: {found.reason}", style="yellow")
    if in_a_row > most:
        raise UserError(
            f"the ranks have failed {in_a_row} times in a row without a new checkpoint (launch.max_restarts): {found.reason}; "
            "mend the cause and run the same command again"
        )


def _end_the_frozen(folder: Folder) -> None:
    """Ranks of this machine that do not even end themselves; `torchrun` would give them half a minute."""
    time.sleep(_LAST_WORDS)
    for beat in read_beats(folder.beats):
        if beat.state == "running" and beat.machine == socket.gethostname():
            with suppress(psutil.Error):
                process = psutil.Process(beat.pid)
                if process.environ().get(VARIABLE) == str(folder.path):
                    process.kill()


@contextmanager
def _witness(folder: Folder, heartbeat: Heartbeat) -> Iterator[None]:
    """A thread that keeps the heartbeat fresh and, when another rank has failed, says where this one is and ends it."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK):
            heartbeat.touch()
            if folder.failed.exists():
                heartbeat.record_witness(entered_collectives())
                if not done.wait(_LAST_WORDS):
                    os._exit(1)

    thread = threading.Thread(target=watch, daemon=True, name="witness")
    thread.start()
    try:
        yield
    finally:
        done.set()

