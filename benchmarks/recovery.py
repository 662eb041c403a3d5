"""How long a run stands still when a rank is lost: from the signal to the end of the next step, and what the seconds go to.

    python benchmarks/recovery.py [--times 3] [--folder DIR] [--freeze]

The model, batch and optimizer are the quickstart's, on text of the standard library, on two ranks of this machine under `lmworks launch
local`: once compiled, with a compile cache that an earlier run has filled, and once eager. In the middle of a step one rank gets SIGKILL.
With `--freeze` it gets SIGSTOP, and the others notice when `launch.timeout` (`--timeout`) is over. Bar: 20 s (and the time-out), in which
everything counts: noticing it, ending the rest, new processes, loading, compiling, and a step itself. The data is made once per `--folder`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from lmworks.launch.launch_dir import LaunchDir
from lmworks.metrics.log import read
from lmworks.watch.heartbeat import Beat, read_local_beats
from lmworks.watch.ledger import LEDGER, read_ledger

RECIPE = Path(__file__).parent.parent / "recipes" / "quickstart.yaml"
STEPS, SAVE, HIT = 14, 4, 9  # steps in all, between saves, and the one in which the rank is lost
SOURCE = {
    "name": "code",
    "kind": "stdlib",
    "include": "*.py",
    "document_format": "code",
    "domain": "code",
    "language": "code",
    "license": "PSF-2.0",
}
PARTS = {
    "noticed": "the other rank has noticed",
    "ended": "all old processes have ended",
    "begun": "the new processes have begun",
    "joined": "imports; the ranks have found each other",
    "resumed": "model built, checkpoint verified and loaded",
    "stepping": "data checked, first batch read",
    "stepped": "the first step has ended (compiling, where compiled)",
}


def write_recipe(path: Path, run_dir: Path) -> None:
    """The quickstart with one source, one phase of a few steps, and nothing after it."""
    tree = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    train, phase = tree["train"], tree["train"]["phases"][0]
    phase |= {"tokens": f"{8 * STEPS}Ki", "mixture": {"code": 1.0}}
    train |= {"phases": [phase], "validate_every": "100%", "sample_every": "100%", "save_every": f"{SAVE} steps"}
    tree |= {"run_dir": str(run_dir), "corpus": {"max_validation_bytes": "32KB", "sources": [SOURCE | {"max_bytes": "2MB"}]}}
    tree |= {"evaluate": {"references": False}, "export": {"huggingface": False, "gguf": False}}
    del tree["tune"]
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


class Run:
    """One launched run, in a directory that already has its data."""

    def __init__(self, recipe: Path, run_dir: Path, *overrides: str) -> None:
        self.run_dir, self.folder = run_dir, LaunchDir.of(run_dir)
        options = [word for one in (f"run_dir={run_dir}", "layout.dp_shard=2", *overrides) for word in ("--set", one)]
        command = [str(Path(sys.executable).with_name("lmworks")), "launch", "local", str(recipe), "--to", "pretrain", *options]
        self.launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def heartbeats(self) -> list[Beat]:
        return read_local_beats(self.folder.heartbeats)

    def wait_for_step(self, step: int) -> list[Beat]:
        """Both ranks in the middle of an update of this step or a later one."""
        while True:
            beats = self.heartbeats()
            if len(beats) == 2 and all(beat.step >= step and beat.doing == "update" for beat in beats):
                return beats
            assert self.launcher.poll() is None, f"the run has ended before step {step}"
            time.sleep(0.005)

    def finish(self) -> None:
        assert self.launcher.wait() == 0, "the run has failed"
        assert [line["step"] for line in read(self.run_dir)] == list(range(1, STEPS + 1)), "steps are missing or came twice"


def lose(run: Run, by: signal.Signals) -> dict[str, float]:
    """Send one rank the signal; seconds from then to each of `PARTS`."""
    old = run.wait_for_step(HIT)
    time.sleep(0.1)
    hit = time.time()
    os.kill(old[1].pid, by)
    at: dict[str, float] = {}
    pids = {beat.pid for beat in old}
    while "stepped" not in at:
        assert run.launcher.poll() is None, "the launcher has ended"
        time.sleep(0.01)
        if "noticed" not in at and run.folder.failed.exists():
            at["noticed"] = run.folder.failed.stat().st_mtime - hit
        if "ended" not in at and not any(map(alive, pids)):
            at["ended"] = time.time() - hit
        new = [beat for beat in run.heartbeats() if beat.pid not in pids]
        if len(new) == 2 and "joined" not in at:
            at["begun"] = max(psutil.Process(beat.pid).create_time() for beat in new) - hit
            at["joined"] = max(beat.time for beat in new) - hit
        if len(new) == 2 and "stepping" not in at and all(beat.doing == "update" for beat in new):
            at["stepping"] = max(beat.time for beat in new) - hit
        if "stepping" in at:
            resumed = [event["time"] for event in read_ledger(run.run_dir / LEDGER) if event["event"] == "resume"]
            stepped = [line["time"] for line in read(run.run_dir) if line["time"] > hit + at["stepping"]]
            if stepped:
                at |= {"resumed": resumed[-1] - hit, "stepped": stepped[0] - hit}
    return at


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def measure(recipe: Path, data: Path, times: int, by: signal.Signals, *overrides: str) -> dict[str, float]:
    """Medians over `times` runs, after one that warms the caches and is left to itself."""
    found: list[dict[str, float]] = []
    for number in range(times + 1):
        run_dir = data.with_name("hit")
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(data, run_dir)
        run = Run(recipe, run_dir, *overrides)
        try:
            if number:
                found.append(lose(run, by))
            run.finish()
        finally:
            if run.launcher.poll() is None:
                run.launcher.terminate()
                run.launcher.wait()
    return {part: statistics.median(one.get(part, float("nan")) for one in found) for part in PARTS}


def report(arms: dict[str, dict[str, float]]) -> None:
    """A row per part with its own seconds, and the whole."""
    print(f"| | {' | '.join(arms)} |\n|---|{'---|' * len(arms)}")
    before: dict[str, float] = dict.fromkeys(arms, 0.0)
    for part, what in PARTS.items():
        print(f"| {what} | {' | '.join(f'{at[part] - before[name]:.1f}' for name, at in arms.items())} |")
        before = {name: at[part] for name, at in arms.items()}
    print(f"| from the signal to the end of the next step | {' | '.join(f'{at:.1f}' for at in before.values())} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the data is made and kept; a temporary one when left out")
    parser.add_argument("--freeze", action="store_true", help="SIGSTOP instead of SIGKILL")
    parser.add_argument("--timeout", default="10 s", help="launch.timeout with --freeze")
    parser.add_argument("--arms", nargs="+", default=["compiled", "eager"], choices=["compiled", "eager"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recipe, data = folder / "recipe.yaml", folder / "data"
        if not (data / "shards" / "manifest.json").exists():
            write_recipe(recipe, data)
            command = [str(Path(sys.executable).with_name("lmworks")), "shards", "build", str(recipe)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        common: list[Any] = [f"launch.timeout={options.timeout}"] if options.freeze else []
        by = signal.SIGSTOP if options.freeze else signal.SIGKILL
        arms = {
            arm: measure(recipe, data, options.times, by, f"train.compile={str(arm == 'compiled').lower()}", *common)
            for arm in options.arms
        }
        report(arms)


if __name__ == "__main__":
    main()
