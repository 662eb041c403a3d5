"""One run under fire: real processes, started with the public commands, and what can be seen and done from outside."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from plans import PLANTED, Plan, harmless, overrides

from lmworks.io import jsonl

HOOK = Path(__file__).parent / "hook"
DISK = {"checkpoints": "4m", "run": "8m"}  # some checkpoints of 0.65 MB; with the rest of the run


class OutOfTime(Exception):
    """The run did not come to its end."""


class Run:
    """The directory and the processes of a plan; `patience`: seconds that it may take."""

    def __init__(self, plan: Plan, recipe: Path, folder: Path, patience: float) -> None:
        self.plan, self.recipe, self.dir = plan, recipe, folder
        self.deadline = time.monotonic() + patience
        self.starts = 0
        self.codes: list[int] = []
        self.notes: dict[str, Any] = {}
        self.mounted: Path | None = None
        self._process: psutil.Popen | None = None

    def prepare(self, base: Path) -> None:
        """A new directory for the run, from one that has its shards."""
        plan, folder = self.plan, self.dir
        self.clear()
        if plan.kind == "full disk" and plan.how == "run":
            self._mount(folder)
        shutil.copytree(base, folder, dirs_exist_ok=True)
        if plan.kind == "full disk" and plan.how == "checkpoints":
            self._mount(folder / "checkpoints")
        (folder / "chaos").mkdir()
        plant: dict[str, Any] = {"pace": 0.7} if plan.resized else {}
        if plan.kind in PLANTED:
            plant = {"what": PLANTED[plan.kind], "step": plan.moment, "rank": plan.rank}
        if plan.point is not None:
            plant |= {"point": plan.point, "since": "rollback" if plan.kind in PLANTED else ""}
        (folder / "chaos" / "plant.json").write_text(json.dumps(plant))

    def _mount(self, place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        options = ["-t", "tmpfs", "-o", f"size={DISK[self.plan.how]}", "tmpfs", str(place)]
        subprocess.run(["mount", *options], check=True, capture_output=True)
        self.mounted = place

    def clear(self) -> None:
        """Remove the directory, and the small disk in it."""
        for place in (self.dir / "checkpoints", self.dir):
            if place.is_mount():
                subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(self.dir, ignore_errors=True)
        self._output.unlink(missing_ok=True)
        self.mounted = None

    @property
    def died(self) -> Path:
        """Is there once the first rank has killed itself."""
        return self.dir / "chaos" / "died"

    # Processes.

    def command(self) -> list[str]:
        values = [f"run_dir={self.dir}", *overrides(self.plan), *harmless(self.plan)]
        options = [word for value in values for word in ("--set", value)]
        if not self.plan.supervised:
            return ["pretrain", str(self.recipe), *options]
        least = self.plan.ranks - 1 if self.plan.resized else self.plan.ranks
        return ["launch", "local", str(self.recipe), "--to", "pretrain", "--ranks", f"{least}:{self.plan.ranks}", *options]

    def lmworks(self, *words: str, **options: Any) -> psutil.Popen:
        """A process of the command line, with the campaign's hook in all that are its ranks."""
        paths = [str(HOOK), str(Path(sys.modules["lmworks"].__file__ or "").parents[1])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "LMWORKS_CHAOS": str(self.dir / "chaos")}
        environment["LMWORKS_MACHINE"] = "peak=1e11"  # only perf/mfu depends on it, and measuring it takes a second
        return psutil.Popen(
            [sys.executable, "-m", "lmworks.cli.main", *words], env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )

    def start(self) -> None:
        self.starts += 1
        with open(self._output, "ab") as output:
            self._process = self.lmworks(*self.command(), stdout=output, stderr=subprocess.STDOUT)

    @property
    def _output(self) -> Path:
        return self.dir.with_name(f"{self.dir.name}.log")  # not on the disk that is filled

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    @property
    def process(self) -> psutil.Popen:
        assert self._process is not None
        return self._process

    @property
    def running(self) -> bool:
        return self._process is not None and self.process.poll() is None

    def tree(self) -> list[psutil.Process]:
        """All processes of the present start; without those whose parent is gone."""
        with suppress(psutil.NoSuchProcess):
            return [self.process, *self.process.children(recursive=True)]
        return []

    def ranks(self) -> dict[int, psutil.Process]:
        """The living ranks by their number."""
        if not self.plan.supervised:
            return {0: self.process}
        found = {}
        for process in self.tree():
            with suppress(psutil.Error):
                environment = process.environ()
                if "RANK" in environment and "-m" in (words := process.cmdline()) and "lmworks.cli.rank" in words:
                    found[int(environment["RANK"])] = process
        return found

    def end(self) -> None:
        """SIGKILL to all processes, also those whose parent is gone."""
        self.kill(self.tree())
        self.kill([process for process in psutil.process_iter() if self._is_ours(process)])

    def _is_ours(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            return str(process.environ().get("LMWORKS_CHAOS")) == str(self.dir / "chaos")
        return False

    @staticmethod
    def kill(processes: list[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=120)

    @staticmethod
    def signal(processes: list[psutil.Process], number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def finish(self, mend: Callable[[int], bool] = lambda code: False) -> None:
        """To the end of the run. What was killed, or asks for it with code 75, is started again; so is what `mend` has mended."""
        while True:
            code = self.wait_for_end()
            self.codes.append(code)
            if code == 0:
                return
            if code not in (75, -signal.SIGKILL, -signal.SIGTERM) and not mend(code):
                raise AssertionError(f"ended with code {code}: {self.said()[-600:]}")
            self.start()

    def wait_for_end(self) -> int:
        self.until(lambda: not self.running)
        return int(self.process.returncode)

    def until(self, condition: Callable[[], Any], every: float = 0.02, most: float | None = None) -> Any:
        """Wait for a condition, and return what it is; raises `OutOfTime`, or with `most` seconds returns what it then is."""
        limit = self.deadline if most is None else min(self.deadline, time.monotonic() + most)
        while not (found := condition()):
            if time.monotonic() > limit:
                if most is not None and limit < self.deadline:
                    return found
                raise OutOfTime(f"after start {self.starts}, at step {self.done()}")
            time.sleep(every)
        return found

    # What is on the disk.

    def records(self, rank: int) -> list[dict[str, Any]]:
        """The steps that a rank has trained, in all its lives, as the hook wrote them down."""
        return jsonl.read(self.dir / "chaos" / f"rank-{rank}.jsonl")

    def done(self) -> int:
        """The step that the first rank has trained last, counted from 1."""
        path = self.dir / "chaos" / "rank-0.jsonl"
        lines = path.read_bytes().rsplit(b"\n", 2)[-2:-1] if path.exists() else []
        return int(json.loads(lines[0])["step"]) + 1 if lines and lines[0] else 0

    def reach(self, step: int) -> bool:
        """Wait until so many steps are done; False if the run has ended before."""
        self.until(lambda: self.done() >= step or not self.running, every=0.005)
        return self.running

    def ledger(self) -> list[dict[str, Any]]:
        return jsonl.read(self.dir / "ledger.jsonl")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.ledger() if event["event"] == name]

    def checkpoints(self) -> list[Path]:
        from lmworks.checkpoint import listing

        return listing.directories(self.dir / "checkpoints") if (self.dir / "checkpoints").exists() else []
