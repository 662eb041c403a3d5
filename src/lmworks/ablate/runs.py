"""Runs a set of runs: each is `lmworks pretrain` in a process of its own, several side by side.

The processes are forked from a server that has imported torch, which takes longer than a short run (`multiprocessing`'s forkserver).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from runpy import run_module
from typing import Any, Literal

from lmworks.ablate.run_set import Run, RunSet, link_data
from lmworks.checkpoint import listing, manifest
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.run_layout import final_checkpoint_of
from lmworks.metrics.log import FILE
from lmworks.recipe.schema.layout import world_size
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.run_dir import stage_inputs, stale_reason
from lmworks.run.runner import recorded_files
from lmworks.run.stages import STAGES
from lmworks.ui import terminal
from lmworks.ui.terminal import Interrupted, Preempted
from lmworks.watch.ledger import in_use
from lmworks.watch.stop_signals import Stop, graceful_stop

State = Literal["done", "begun", "open"]
LOG = "ablate.log"
_PROGRAM = "lmworks.cli.main"
_POLL = 0.2
_TAIL = 1 << 14


def seeds_of(run: Run) -> dict[str, int]:
    """The keys of `train` that a run takes from its seed. An arm with a `train.init_seed` draws its initial weights anew for each seed too:
    were they the same for all seeds, the luck of one draw would be a part of the arm, which no number of seeds shows."""
    own = run.arm.recipe.train.init_seed
    if own is None:
        return {"seed": run.seed}
    return {"seed": run.seed, "init_seed": int(hashlib.sha256(f"{own} {run.seed}".encode()).hexdigest()[:12], 16)}


def recipe_of(run: Run) -> Recipe:
    """The recipe of a run: that of its arm with the seed."""
    recipe = run.arm.recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=seeds_of(run)), "run_dir": str(run.directory)})


def state_of(runs: RunSet, run: Run) -> State:
    """How far a run is: `done` if all its stages are up to date. Files of its own that it has read, such as those of a benchmark, count as
    they were: a finished run does not change."""
    wanted = [stage for stage in STAGES if stage.name in ("pretrain", runs.last)]
    recipe, files = recipe_of(run), recorded_files(run.directory)
    for stage in wanted:
        if stale_reason(stage, recipe, run.directory, stage_inputs(stage, recipe, run.directory, files)):
            return "begun" if (run.directory / FILE).exists() else "open"
    return "done"


def command(runs: RunSet, run: Run, threads: int | None = None) -> list[str]:
    """The command of a run, without the name of the program."""
    seeds = [f"train.{key}={value}" for key, value in seeds_of(run).items()]
    options = [*seeds, f"run_dir={run.directory}", *([f"threads={threads}"] if threads else [])]
    words = [word for option in options for word in ("--set", option)]
    allowed = ["threads", *(["shards"] if run.branch else []), *(["train.phases"] if run.arm.grows else [])]
    words += [word for key in allowed for word in ("--allow", key)]
    place, stage = str(runs.directory(run.arm) / "resolved.json"), runs.last
    if ranks_of(run) > 1:
        return ["launch", "local", place, "--to", stage, *words]
    return [stage, place, *words]


def ranks_of(run: Run) -> int:
    """The number of ranks of a run. Several are started by `lmworks launch local`, on the machine of this process."""
    return world_size(run.arm.recipe.layout)


def described(runs: RunSet, run: Run) -> dict[str, Any]:
    """The state of a run, its directory, the command that it is, and its number of ranks."""
    return {
        "state": state_of(runs, run), "directory": str(run.directory), "command": ["lmworks", *command(runs, run)], "ranks": ranks_of(run),
    }  # fmt: skip


@dataclass
class _Active:
    """A run that a process works on."""

    run: Run
    process: BaseProcess
    slot: int
    done: float = 0.0  # tokens that the bar has counted


@dataclass
class Runner:
    """Runs those of `runs` whose directories are not in `finished`, `jobs` at a time. A run that continues a checkpoint of another one
    waits for it. `on_done` is called after each finished run, `on_note` with lines for the user. Runs in `failed`, each with the reason,
    are not begun."""

    set: RunSet
    runs: Sequence[Run]
    finished: Container[Path]
    jobs: int
    on_done: Callable[[Run], None]
    on_note: Callable[[str], None]
    failed: list[tuple[Run, str]] = field(default_factory=list)

    def work(self) -> None:
        """Run everything. Raises `Interrupted` after all processes have saved, and `UserError` if runs have failed."""
        failed = {run for run, _ in self.failed}
        waiting = [run for run in self.runs if run.directory not in self.finished and run not in failed]
        tokens = {run: run.arm.tokens - run.arm.started_at for run in self.runs}
        done = sum(tokens.values()) - sum(tokens[run] for run in waiting)
        told: set[Path] = set()
        active: list[_Active] = []
        threads, devices = max(1, machine.threads() // self.jobs), _devices() if self.jobs > 1 else []
        with graceful_stop() as stop, terminal.bar(self.set.command.removeprefix("lmworks "), sum(tokens.values()), done) as bar:
            try:
                while waiting or active:
                    self._give_up_on_branches_of_failed_runs(waiting)
                    for slot in sorted(set(range(self.jobs)) - {one.slot for one in active}):
                        run = next((run for run in waiting if _is_ready(run) and not in_use(run.directory)), None)
                        if run is None or stop.requested:
                            break
                        waiting.remove(run)
                        if state_of(self.set, run) != "done":  # the process that held it may have finished it
                            active.append(_Active(run, self._start(run, threads, devices[slot % len(devices)] if devices else None), slot))
                    if waiting and not active:
                        for run in waiting:
                            if run.directory not in told and _is_ready(run):
                                self.on_note(f"{run.name} is in use by another process; waiting for it")
                            told.add(run.directory)
                    for one in list(active):
                        code = one.process.exitcode
                        now = tokens[one.run] if code == 0 else self._tokens(one.run)
                        bar.advance(now - one.done)
                        one.done = now
                        if code is not None:
                            active.remove(one)
                            self._ended(one.run, code, stop)
                    bar.note(", ".join(one.run.name for one in active))
                    if stop.requested:
                        break
                    time.sleep(_POLL)
            finally:
                _end([one.process for one in active], stop)
            if stop.requested:
                kind = Preempted if stop.preempted else Interrupted
                raise kind(f"stopped, and every run has saved; go on with: {self.set.command} {self.set.path}")
        if self.failed:
            run, why = self.failed[0]
            log = f"; see {run.directory / LOG}, then" if (run.directory / LOG).exists() else "; then"
            raise UserError(
                f"{len(self.failed)} of {len(self.runs)} runs failed, first {run.name}: {why.rstrip('.')}{log} run the same command again"
            )

    def _start(self, run: Run, threads: int, device: str | None) -> BaseProcess:
        link_data(self.set, run)
        environment = {"CUDA_VISIBLE_DEVICES": device} if device is not None and ranks_of(run) == 1 else {}
        words = ["lmworks", *command(self.set, run, threads)]
        process = server(threads).Process(target=_child, args=(words, str(run.directory / LOG), environment))
        process.start()
        return process

    def _ended(self, run: Run, code: int, stop: Stop) -> None:
        if code == 0:
            if not any(other.branch and other.branch.run_dir == run.directory for other in self.set.runs):
                prune(run)
            self.on_done(run)
        elif not stop.requested:
            why = _last_error(run.directory / LOG) or f"the process ended with exit code {code}"
            self.failed.append((run, why))
            self.on_note(f"{run.name} failed: {why}")

    def _give_up_on_branches_of_failed_runs(self, waiting: list[Run]) -> None:
        failed = {run.directory: run for run, _ in self.failed}
        for run in list(waiting):
            if run.branch and run.branch.run_dir in failed and not _is_ready(run):
                waiting.remove(run)
                self.failed.append((run, f"it continues {failed[run.branch.run_dir].name}, which failed"))

    def _tokens(self, run: Run) -> float:
        """Tokens that a run has trained on, by the last line of its metrics."""
        with suppress(OSError), open(run.directory / FILE, "rb") as handle:
            handle.seek(max(0, os.fstat(handle.fileno()).st_size - _TAIL))
            for line in reversed(handle.read().split(b"\n")[1:-1]):
                with suppress(ValueError, TypeError, KeyError, AttributeError):
                    return float(json.loads(line)["train/tokens"]) - run.arm.started_at
        return 0.0


def _is_ready(run: Run) -> bool:
    """Whether the checkpoint that a run continues is complete."""
    return run.branch is None or (run.branch.checkpoint / manifest.NAME).is_file()


def prune(run: Run) -> None:
    """Remove all checkpoints of a finished run but the one that holds its weights."""
    found = listing.directories(run.directory / "checkpoints")
    if not found:
        return
    final = final_checkpoint_of(found[-1], listing.read_meta(found[-1])["meta"])
    for path in found[:-1]:
        if path != final:
            shutil.rmtree(path)


def _end(processes: Sequence[BaseProcess], stop: Stop) -> None:
    """Ask processes to save and stop, and wait for them. A Ctrl-C of the terminal reaches them twice, which counts as once."""
    for process in processes:
        if process.pid is not None and process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM if stop.preempted or not stop.requested else signal.SIGINT)
    for process in processes:
        process.join()


def server(threads: int) -> ForkServerContext:
    """What forks the processes, with the slow imports done."""
    os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is imported
    context = get_context("forkserver")
    context.set_forkserver_preload(["lmworks.run.runner", "lmworks.train.pretrain", "lmworks.run.start_weights"])
    return context


def _child(words: list[str], log: str, environment: dict[str, str]) -> None:
    """In the new process: one command, whose output goes to a file."""
    end_with_parent()
    with open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), "wb") as handle, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(handle.fileno(), 1)
        os.dup2(handle.fileno(), 2)
    os.environ.update(environment)
    sys.argv = words
    run_module(_PROGRAM, run_name="__main__", alter_sys=True)


def end_with_parent() -> None:
    """In a new process: end it when the one that began it has died."""
    threading.Thread(target=_stop_with_parent, name="parent", daemon=True).start()


def _stop_with_parent() -> None:
    """Wait for the process that began this one to die, then ask this one to save and stop."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _devices() -> list[str]:
    """The GPUs that processes may be given, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    return named or [str(number) for number in range(torch.cuda.device_count())]


def _last_error(log: Path) -> str:
    with suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.removeprefix("error: ")[:400] for line in reversed(lines) if line.startswith("error: ")), "")
    return ""
