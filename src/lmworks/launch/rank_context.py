"""The context manager around the work of a rank: it joins the process group, writes heartbeats, and reports failures."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from lmworks.errors import UserError
from lmworks.interrupt import Interrupted
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.launch.pinning import pin_rank
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.process_group import init_ranks, is_launched
from lmworks.progress import console
from lmworks.recipe.schema.recipe import Recipe
from lmworks.watch.diagnosis import classify_error, diagnose_failure
from lmworks.watch.flight_recorder import entered_collectives, set_defaults, write_record
from lmworks.watch.heartbeat import (
    Heartbeat,
    has_ended,
    read_beats,
    read_local_beats,
    recover_beats,
    shared_interval,
)
from lmworks.watch.ledger import LEDGER, Ledger

_EXIT_SECONDS = 2.0  # that a rank has to exit by itself once another has failed


@contextmanager
def rank_context(recipe: Recipe, run_dir: Path) -> Iterator[tuple[Ranks, Heartbeat]]:
    """Within the block this process is a rank of `recipe.layout`, or the only rank if it was not launched. The process group is kept for
    the next block.

    If the ranks failed last time, rank 0 diagnoses their heartbeats and writes an event `restart` to the ledger: the ranks and hosts
    that caused it, the step, and the reason. When one rank fails, the others exit within seconds instead of waiting for it in a
    collective. Raises `UserError` after more than `launch.max_restarts` failures in a row without a new checkpoint.
    """
    options, threads = recipe.launch, recipe.threads
    if not is_launched():
        yield init_ranks(recipe.layout, float(options.timeout), threads), Heartbeat(None)
        return
    folder, rank = LaunchDir.of(run_dir), int(os.environ["RANK"])
    recover_beats(folder.heartbeats, folder.records)
    if options.pin:
        pin_rank()
    set_defaults(folder.records)
    ranks = init_ranks(recipe.layout, float(options.timeout), threads)
    if rank == 0:  # the only rank that writes these files
        folder.failed_starts.unlink(missing_ok=True)
        refusal = _report_failure(folder, run_dir, ranks.world, options.max_restarts)
        ranks.broadcast(refusal)
    else:
        refusal = ranks.receive_broadcast()
    if refusal is not None:
        raise UserError(refusal)
    heartbeat = Heartbeat(folder.heartbeats, rank)
    try:
        with _monitor(folder, heartbeat, shared_interval(ranks.world)):
            yield ranks, heartbeat
    except (Interrupted, UserError, KeyboardInterrupt, SystemExit):
        heartbeat.end("left")
        raise
    except BaseException as error:
        heartbeat.end(classify_error(error), f"{type(error).__name__}: {error}"[:2000], entered_collectives())
        folder.failed.touch()
        write_record(folder.records, rank)
        _kill_frozen_ranks(folder)
        raise
    else:
        heartbeat.end("left")
    finally:
        recover_beats(folder.heartbeats, folder.records)


def _report_failure(folder: LaunchDir, run_dir: Path, size: int, max_restarts: int) -> str | None:
    """On rank 0, after all ranks have joined and recovered the heartbeats of their machines, and before one begins its own: write to the
    ledger why the ranks were restarted. Returns why the run must end."""
    beats = read_beats(folder.heartbeats)
    found = diagnose_failure(beats)
    for path in folder.heartbeats.glob("*.json"):
        path.unlink()
    folder.failed.unlink(missing_ok=True)
    if any(folder.records.glob("*")):
        shutil.rmtree(folder.last_records, ignore_errors=True)
        folder.records.rename(folder.last_records)
    folder.records.mkdir(parents=True, exist_ok=True)  # NCCL makes no folder
    if found is None:
        if beats and len(beats) != size:
            with Ledger(run_dir / LEDGER) as ledger:
                ledger.write("resized", before=len(beats), now=size)
        return None
    with Ledger(run_dir / LEDGER) as ledger:
        in_a_row = 1
        for event in reversed(ledger.read()):
            if event["event"] == "checkpoint":
                break
            in_a_row += event["event"] == "restart"
        ledger.write(
            "restart", step=found.step, ranks=found.ranks, hosts=found.hosts, reason=found.reason,
            before=len(beats), now=size, in_a_row=in_a_row,
        )  # fmt: skip
    console.print(f"restarted: {found.reason}", style="yellow")
    if in_a_row <= max_restarts:
        return None
    return (
        f"the ranks have failed {in_a_row} times in a row without a new checkpoint (launch.max_restarts): {found.reason}; "
        "fix the cause and run the same command again"
    )


def _kill_frozen_ranks(folder: LaunchDir) -> None:
    """Kill ranks of this machine that do not exit by themselves; `torchrun` would wait half a minute for them."""
    time.sleep(_EXIT_SECONDS)
    killed = []
    for beat in read_local_beats(folder.heartbeats):
        if beat.state == "running" and not has_ended(beat):
            with suppress(psutil.Error):
                process = psutil.Process(beat.pid)
                if process.environ().get(VARIABLE) == str(folder.path):
                    process.kill()
                    killed.append(process)
    psutil.wait_procs(killed, _EXIT_SECONDS)


@contextmanager
def _monitor(folder: LaunchDir, heartbeat: Heartbeat, interval: float) -> Iterator[None]:
    """A thread that refreshes the heartbeat, shares it every `interval` seconds and, when another rank has failed, records where this
    rank is and ends it."""
    done = threading.Event()

    def watch() -> None:
        heartbeat.share()
        while not done.wait(interval):
            heartbeat.touch()
            heartbeat.share()
            if folder.failed.exists():
                heartbeat.record_witness(entered_collectives())
                write_record(folder.records, heartbeat.rank)
                if not done.wait(_EXIT_SECONDS):
                    recover_beats(folder.heartbeats, folder.records)
                    os._exit(1)

    thread = threading.Thread(target=watch, daemon=True, name="monitor")
    thread.start()
    try:
        yield
    finally:
        done.set()

