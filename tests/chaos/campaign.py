"""`make chaos`: runs with a random fault at a random moment, each compared with one that was left alone.

`PYTHONPATH=tests python tests/chaos/campaign.py --runs 200 --seed 0 --out runs/chaos`. The outcome of each run is a line in
OUT/outcomes.jsonl; the same command again does the runs that have none. `--only SEED` does one again. Directories of runs that failed stay.
"""

# mypy: disable-error-code="func-returns-value"
# (calls in an expression, for their effect)
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from judge import Twin, lost_at_most, problems
from plans import DECK, Plan, draw
from running import OutOfTime, Run
from strikes import Missed, strike

import lmworks
import tiny_run
from lmworks.io import jsonl
from lmworks.io.files import sha256_file
from lmworks.recipe.changes import fingerprint
from lmworks.ui.terminal import bar

_PATIENCE = 900.0  # seconds until a run counts as hung: one takes twenty on an idle machine, and many times that on a busy one
_TRIES = 3  # of a run that was over before its fault


class Campaign:
    """`out` holds what all runs share (made once): base/ with recipe and shards, twins/, outcomes.jsonl."""

    def __init__(self, out: Path, kinds: dict[str, int] | None = None) -> None:
        self.out, self.kinds = out.absolute(), kinds or possible(out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.source = source()
        self._twins: dict[str, Twin] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._running: set[Run] = set()
        base = self.out / "base"
        if not (base / "done").exists():
            shutil.rmtree(base, ignore_errors=True)
            base.mkdir()
            tiny_run.prepare(base)
            (base / "done").touch()

    def _run_of(self, plan: Plan, folder: Path) -> Run:
        return Run(plan, self.out / "base" / "tiny.yaml", folder, _PATIENCE)

    def twin(self, plan: Plan) -> Twin:
        """The undisturbed run that a plan is compared with; made when it is first asked for, and kept while the code is the same."""
        still = undisturbed(plan)
        key = name_of(still)
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._twins:
                run = self._run_of(still, self.out / "twins" / key)
                done = run.dir / "chaos" / "done"
                if not done.exists() or done.read_text() != self.source:
                    run.prepare(self.out / "base" / "run")
                    self._guarded(run, lambda: strike(run) if plan.window else (run.start(), run.finish()))
                    done.write_text(self.source)
                self._twins[key] = Twin.of(run)
            return self._twins[key]

    def _guarded(self, run: Run, work: Any) -> None:
        self._running.add(run)
        try:
            work()
        finally:
            run.end()
            self._running.discard(run)

    def play(self, seed: int) -> dict[str, Any]:
        """One run, from its seed to its outcome."""
        plan = draw(seed, self.kinds)
        twin = self.twin(plan)
        for _ in range(_TRIES):
            began = time.monotonic()
            outcome = self._once(plan, twin)
            if outcome["verdict"] != "missed":
                break
            plan = replace(plan, moment=max(1, plan.moment - 2), delay=0.0)
        return {**plan.shown(), **outcome, "seconds": round(time.monotonic() - began, 1), "ended": round(time.time(), 1)}

    def _once(self, plan: Plan, twin: Twin) -> dict[str, Any]:
        run = self._run_of(plan, self.out / f"run-{plan.seed:05d}")
        run.prepare(self.out / "base" / "run")
        verdict, found = "passed", []
        try:
            self._guarded(run, lambda: strike(run))
            found = list(problems(run, twin))
        except Missed as missed:
            verdict, found = "missed", [str(missed)]
        except (AssertionError, OutOfTime) as failure:
            found = [f"{type(failure).__name__}: {failure}"]
        except Exception:
            found = [traceback.format_exc()]
        if found and verdict == "passed":
            verdict = "failed"
        records = {0: run.records(0)}
        restarts = [event for event in run.ledger() if event["event"] == "restart"]
        outcome = {
            "verdict": verdict, "problems": found, "lost": lost_at_most(records), "codes": run.codes, "notes": run.notes,
            "restarts": len({line["life"] for line in records[0]}) - 1, "named": [event["ranks"] for event in restarts],
            "reasons": [event["reason"] for event in restarts],
        }  # fmt: skip
        if verdict != "failed":
            run.clear()
        return outcome

    def run(self, seeds: Sequence[int], jobs: int) -> None:
        """The runs that have no outcome yet, `jobs` at a time."""
        path = self.out / "outcomes.jsonl"
        known = {line["seed"] for line in jsonl.read(path)}
        fd = jsonl.open_append(path)
        todo = [seed for seed in seeds if seed not in known]
        with bar("chaos", len(seeds), len(seeds) - len(todo)) as progress, ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(self.play, seed) for seed in todo]
            try:
                for future in as_completed(running):
                    if (error := future.exception()) is not None:  # no outcome: the next call tries again
                        print(f"not done: {error!r}", flush=True)
                        continue
                    outcome = future.result()
                    jsonl.append(fd, outcome)
                    progress.advance()
                    if outcome["verdict"] != "passed":
                        print(f"{outcome['verdict']}: --only {outcome['seed']} ({outcome['kind']}): {outcome['problems'][0]}", flush=True)
                    progress.note(f"{outcome['kind']}: {outcome['verdict']}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for run in list(self._running):
                    run.deadline = 0.0
                raise
            finally:
                os.close(fd)


def source() -> str:
    """A hash of the code: other code may have other last bits."""
    folder = Path(lmworks.__file__).parent
    return fingerprint({str(path.relative_to(folder)): sha256_file(path) for path in folder.rglob("*.py")})


def possible(out: Path) -> dict[str, int]:
    """The deck, without what this machine forbids: a full disk is a small tmpfs, and mounting one needs root."""
    out.mkdir(parents=True, exist_ok=True)
    probe = out / "probe"
    probe.mkdir(exist_ok=True)
    may = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(probe)], capture_output=True).returncode == 0
    if may:
        subprocess.run(["umount", str(probe)], check=True)
    else:
        print("no full disks: mounting a small tmpfs needs root", flush=True)
    probe.rmdir()
    return {kind: cards for kind, cards in DECK.items() if may or kind != "full disk"}


def undisturbed(plan: Plan) -> Plan:
    """The plan of the twin: the same layout, started the same way; where the world changes, one process."""
    still = replace(plan, seed=-1, moment=0, delay=0.0, rank=0, how="", save_every=4, asynchronous=True, point=None)
    if plan.window is not None:
        still = replace(still, how="end", save_every=1)
    still = still if plan.resized or plan.window else replace(still, kind="none")
    return replace(still, ranks=1, layout={}, supervised=False) if plan.resized else replace(still, supervised=plan.ranks > 1)


def name_of(plan: Plan) -> str:
    window = [] if plan.window is None else [f"without{plan.window[0]}to{plan.window[1]}"]
    return "-".join([f"{plan.steps}", *window, *(f"{axis}{size}" for axis, size in plan.layout.items())])


def table(outcomes: Sequence[dict[str, Any]]) -> str:
    """Per fault: runs, passed, median restarts, most steps lost, median seconds; as Markdown."""
    lines = ["| fault | runs | passed | restarts, median | most steps lost | seconds, median |", "|---|---|---|---|---|---|"]
    for kind in [*DECK, "all"]:
        if found := [one for one in outcomes if kind in ("all", one["kind"])]:
            passed = sum(one["verdict"] == "passed" for one in found)
            restarts, seconds = (median(one[what] for one in found) for what in ("restarts", "seconds"))
            lines.append(f"| {kind} | {len(found)} | {passed} | {restarts:g} | {max(one['lost'] for one in found)} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others follow")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--kinds", nargs="*", default=list(DECK), metavar="KIND", help="only the runs of these kinds among them")
    parser.add_argument("--only", type=int, metavar="SEED", help="this run alone, again")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was started is ended
    campaign = Campaign(given.out)
    if given.only is not None:
        print(json.dumps(outcome := campaign.play(given.only), indent=2))
        return int(outcome["verdict"] != "passed")
    seeds = [seed for seed in range(given.seed, given.seed + given.runs) if draw(seed, campaign.kinds).kind in given.kinds]
    campaign.run(seeds, given.jobs)
    outcomes = [line for line in jsonl.read(campaign.out / "outcomes.jsonl") if line["seed"] in set(seeds)]
    print(table(outcomes))
    return int(any(one["verdict"] != "passed" for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
