"""The context manager around the work of a rank: it joins the process group, writes heartbeats, and reports failures.

The ranks of one machine are pinned: they compute on cores of their own, near their GPUs.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.launch.agent import report_exits
from lmworks.launch.launch_dir import VARIABLE, LaunchDir
from lmworks.launch.rank import stop_behind
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.process_group import init_ranks, is_launched
from lmworks.recipe.schema.recipe import Recipe
from lmworks.ui.terminal import Interrupted, console
from lmworks.watch.flight_recorder import entered_collectives, set_defaults, write_record
from lmworks.watch.heartbeat import (
    Heartbeat,
    classify_error,
    diagnose_failure,
    has_ended,
    read_beats,
    read_local_beats,
    recover_beats,
    shared_interval,
)
from lmworks.watch.ledger import LEDGER, Ledger

_CPUS, _PCI = Path("/sys/devices/system/cpu"), Path("/sys/bus/pci/devices")


def pin_rank() -> None:
    """Bind all threads of this rank to its part of the processors that the ranks of its machine share.

    Threads and processes that it starts later inherit them. Nothing is changed where the system has no such call, where a launcher such as
    Slurm has already given this rank other processors than the process that started it, or where there are fewer processors than ranks.
    """
    place, here = machine.ranks_here()
    allowed = machine.processors()
    if here == 1 or not allowed or allowed != machine.processors(os.getppid()):
        return
    gpus = torch.cuda.device_count()
    near = [_cpus_near(other % gpus) & allowed or allowed if gpus else allowed for other in range(here)]
    if share := share_of(place, near, allowed, _core):
        machine.pin(share)


def share_of(
    place: int, near: Sequence[frozenset[int]], allowed: frozenset[int], core: Callable[[int], tuple[int, int]]
) -> frozenset[int]:
    """The processors of rank `place` of a machine, disjoint from those of its other ranks; empty if there are not enough.

    `near[i]`: the processors that rank i would best have. Ranks with the same ones share them evenly; if two ranks have different ones
    that overlap, all share `allowed`. `core(cpu)`: (package, core) of a processor; both threads of a core go to one rank if there
    are as many cores as ranks.
    """
    if any(one != other and one & other for one in near for other in near):
        near = [allowed] * len(near)
    together = [other for other, cpus in enumerate(near) if cpus == near[place]]
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(near[place]):
        cores.setdefault(core(cpu), []).append(cpu)
    units = [cores[key] for key in sorted(cores)]
    if len(units) < len(together):
        units = [[cpu] for unit in units for cpu in unit]
    if len(units) < len(together):
        return frozenset()
    first, last = (len(units) * (together.index(place) + step) // len(together) for step in (0, 1))
    return frozenset(cpu for unit in units[first:last] for cpu in unit)


def _core(cpu: int) -> tuple[int, int]:
    """The package and the core of a processor; where the system does not say, each is a core of its own."""
    try:
        package, core = (int((_CPUS / f"cpu{cpu}/topology" / name).read_text()) for name in ("physical_package_id", "core_id"))
    except (OSError, ValueError):
        return 0, cpu
    return package, core


def _cpus_near(device: int) -> frozenset[int]:
    """The processors of the memory node that a GPU is attached to; empty if the system does not say."""
    found: Any = torch.cuda.get_device_properties(device)  # whose stubs omit the address
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        return parse_cpus((_PCI / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()


def parse_cpus(text: str) -> frozenset[int]:
    """Processors in the notation of Linux, such as 0-3,8-11."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


_EXIT_SECONDS = 2.0  # that a rank has to exit by itself once another has failed


@contextmanager
def rank_context(recipe: Recipe, run_dir: Path) -> Iterator[tuple[Ranks, Heartbeat]]:
    """Within the block this process is a rank of `recipe.layout`, or the only rank if it was not launched. The process group is kept for
    the next block.

    If the ranks failed last time, rank 0 diagnoses their heartbeats and writes an event `restart` to the ledger: the ranks and hosts
    that caused it, the step, and the reason; not if the launcher had them leave (`LaunchDir.give_up_group`). When one rank fails, the
    others exit within seconds instead of waiting for it in a collective. Raises `UserError` after more than `launch.max_restarts` failures
    in a row without a new checkpoint.
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
    with _stopped_quietly():
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
        with _stopped_quietly(), _monitor(folder, heartbeat, shared_interval(ranks.world)):
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


@contextmanager
def _stopped_quietly() -> Iterator[None]:
    """Within the block a collective that fails because the ranks were asked to stop is no failure."""
    try:
        yield
    except Exception as error:
        if (stopped := stop_behind(error)) is None:
            raise
        raise stopped from error


def _report_failure(folder: LaunchDir, run_dir: Path, size: int, max_restarts: int) -> str | None:
    """On rank 0, after all ranks have joined and recovered the heartbeats of their machines, and before one begins its own: write to the
    ledger why the ranks were restarted. Returns why the run must end."""
    beats = read_beats(folder.heartbeats)
    exits = report_exits(folder, run_dir)
    given_up = folder.is_group_given_up()
    found = None if given_up else diagnose_failure(beats, {(one["rank"], one["pid"]) for one in exits if one.get("asked")})
    for path in folder.heartbeats.glob("*.json"):
        path.unlink()
    folder.failed.unlink(missing_ok=True)
    if given_up:
        shutil.rmtree(folder.records, ignore_errors=True)  # of no failure: those of the last one are kept
    elif any(folder.records.glob("*")):
        shutil.rmtree(folder.last_records, ignore_errors=True)
        folder.records.rename(folder.last_records)
    folder.records.mkdir(parents=True, exist_ok=True)  # NCCL makes no folder
    folder.record_announcements(run_dir)
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
