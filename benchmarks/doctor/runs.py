"""Makes the run folders of the plants, one after the other, in children of a process that has imported everything once.

    python benchmarks/doctor/runs.py [--out runs/doctor] [--slice K/N] [--until SECONDS] [--only TEXT] [--seeds 0,2,4] [--doses clear]

What `results.jsonl` records under the same sources is not repeated. A
child has one thread, a limit of processor time and of wall time, and ends with all processes that it started.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("LMWORKS_MACHINE", "peak=1e11,memory=16e9")  # what takes time to measure, and no plant depends on

import argparse
import hashlib
import inspect
import json
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import hooks
import scenarios
from plants import DOSES, PLANTS, Dose, Plant
from scenarios import Case

from recipe import DATA, MOE, SIZES, base, prepare

ROOT = Path(__file__).parents[2]
_MADE_BY = (
    "train/**", "shards/*", "optim/*", "model/*", "metrics/*", "checkpoint/*", "parallel/*", "watch/ledger", "watch/policy",
    "watch/monitors", "watch/heartbeat", "launch/*",
)  # fmt: skip
_CPU, _WALL = 90, 240  # seconds that a run may take; beside other programs --wall gives it more
_LATE = "failed: out of time"
HEALTHY_SEEDS, STARRED_SEEDS, SEEDS = 22, 10, 6  # with the odd runs, 302 healthy runs are published
_MOE_OF_WARM = f"model.moe={json.dumps(MOE)}"


def cases(plants: Sequence[Plant] | None = None) -> Iterator[Case]:
    """All runs, the most useful first: seed by seed, within a seed the clear dose of every plant, then the others."""
    chosen = list(PLANTS.values()) if plants is None else list(plants)
    order = [*range(0, HEALTHY_SEEDS, 2), *range(1, HEALTHY_SEEDS, 2)]
    for number in order:
        for dose in ("clear", "weak", "strong"):
            for size in SIZES:
                for one in chosen:
                    more = dose == "clear" and (one.starred or len(one.sizes) == 1)
                    most = HEALTHY_SEEDS if one.name.startswith("H-") else STARRED_SEEDS if more else SEEDS
                    if dose in one.doses and size in one.sizes and number < most:
                        yield Case(one, dose, size, one.first_seed + number)


def key_of(case: Case, sources: str) -> str:
    """Names what a run depends on: the sources of lmworks, the recipe, the plant, and the functions that plant it."""
    dose, change = case.dose, DATA[case.dose.data]
    functions = [getattr(hooks, name) for name, _ in dose.hooks] + [getattr(hooks, name) for name, _ in dose.options.get("hooks", ())]
    parts = [
        sources, case.name, json.dumps(base(case.size), sort_keys=True), json.dumps(dose.sets(case.size)), json.dumps(dose.hooks),
        json.dumps(dose.options, sort_keys=True), "" if change is None else inspect.getsource(change), *map(inspect.getsource, functions),
        inspect.getsource(scenarios.SCENARIOS[case.plant.scenario]), *_of_scenario(case),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _of_scenario(case: Case) -> list[str]:
    if case.plant.scenario == "ranks":
        return [Path(__file__).with_name("faulty_rank.py").read_text(encoding="utf-8")]
    if case.plant.scenario != "later":
        return []
    later = (scenarios._tune, scenarios._dpo, scenarios._grpo, scenarios._files)
    return [json.dumps(scenarios.ANSWERS), *(inspect.getsource(one) for one in later)]


def sources_digest() -> str:
    digest = hashlib.sha256()
    for pattern in _MADE_BY:
        for path in sorted((ROOT / "src" / "lmworks").glob(f"{pattern}.py" if not pattern.endswith("**") else f"{pattern}/*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def warm(out: Path) -> None:
    """Import and run what every child needs, once. No thread may be left, since children are forks."""
    import lmworks.evaluate.in_loop
    import lmworks.export.huggingface
    import lmworks.launch.launcher
    import lmworks.plan.counts
    import lmworks.run.start_weights
    import lmworks.train.dpo
    import lmworks.train.grpo
    import lmworks.train.pretrain
    import lmworks.train.tune
    assert lmworks.train.tune and lmworks.train.dpo and lmworks.train.grpo and lmworks.train.pretrain and lmworks.evaluate.in_loop
    assert lmworks.plan.counts and lmworks.export.huggingface and lmworks.run.start_weights and lmworks.launch.launcher
    prepare(out, SIZES["small"], "base")
    folder = out / "warm"
    shutil.rmtree(folder, ignore_errors=True)
    first = Case(Plant("warm", "", "five steps", {"clear": Dose(lambda size: [size.budget(5), _MOE_OF_WARM])}), "clear", "small", 0)
    assert scenarios.carry_out(first, out, folder) == "finished"
    shutil.rmtree(folder)


def run_case(case: Case, out: Path, wall: int = _WALL) -> dict[str, Any]:
    """Make one run in a child; returns its record."""
    folder = out / "runs" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    note = folder.with_name(f".{folder.name}.json")
    note.unlink(missing_ok=True)
    scenarios.in_child(lambda: prepare(out, case.size, case.dose.data))
    if case.plant.scenario == "later":
        scenarios.start_of(case, out)
    before, began = _children(), time.time()
    child = os.fork()
    if child == 0:
        _child(case, out, folder, note)
    outcome, usage = _wait(child, began, wall, before)
    if note.exists() and not outcome.startswith(_LATE):
        outcome = json.loads(note.read_text())["outcome"]
    note.unlink(missing_ok=True)
    if outcome.startswith("refused") and not case.plant.code:
        outcome = f"failed: {outcome}"  # a healthy run that was none says nothing of false alarms
    _slim(folder, case)
    seconds = usage.ru_utime + usage.ru_stime
    elapsed = time.time() - began
    return {
        "plant": case.plant.name, "code": case.plant.code, "dose": case.dose_name, "size": case.size_name, "seed": case.seed,
        "folder": str(folder.relative_to(out)), "outcome": outcome, "cpu_seconds": round(seconds, 2), "wall_seconds": round(elapsed, 2),
        "cpu_share": round(seconds / elapsed, 3),
    }  # fmt: skip


def _child(case: Case, out: Path, folder: Path, note: Path) -> None:
    from lmworks.run import runner

    runner.write_page = lambda *given, **more: None  # type: ignore[assignment]  # the page is drawn from files that stay
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU, _CPU + 5))
    output = os.open(folder.with_name(f".{folder.name}.txt"), os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        outcome = scenarios.carry_out(case, out, folder)
    except BaseException as error:
        traceback.print_exc()
        outcome = f"failed: {type(error).__name__}: {str(error)[:300]}"
    note.write_text(json.dumps({"outcome": outcome}), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def _wait(child: int, began: float, wall: int, before: set[int]) -> tuple[str, resource.struct_rusage]:
    outcome, late = "ended without a word", False
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code < 0 and not late:
                outcome = f"killed by signal {-code}"
            break
        if time.time() - began > wall:
            late, outcome = True, f"{_LATE} after {wall:,} s"  # which says nothing of the plant
            _end_children(before)
        time.sleep(0.05)
    _end_children(before)
    for group in Path("/sys/fs/cgroup").glob("*/lmworks-doctor-*"):
        time.sleep(0.1)  # until its last process is gone
        with suppress(OSError):
            group.rmdir()
    return outcome, usage


def _adopt() -> None:
    """Become the parent of what a child leaves behind, such as the agents and ranks of a launch, so that it can be ended."""
    import ctypes

    subreaper = 36  # PR_SET_CHILD_SUBREAPER
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(subreaper, 1, 0, 0, 0)


def _children() -> set[int]:
    """All that this process has started, and what that has started."""
    import psutil

    return {process.pid for process in psutil.Process().children(recursive=True)}


def _end_children(before: set[int]) -> None:
    """End all children but those of `before`. The child of the run is waited for elsewhere."""
    for process in _children() - before:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _slim(folder: Path, case: Case) -> None:
    """Keep what a doctor reads. Weights are kept where the plant is in them."""
    output = folder.with_name(f".{folder.name}.txt")
    if not folder.exists():
        folder.mkdir(parents=True)
    output.rename(folder / "output.txt")
    if case.plant.name == "E1":
        return
    for stage in ("", "tune", "dpo", "grpo"):
        for step in (folder / stage / "checkpoints").glob("step-*"):
            shutil.rmtree(step)
        shutil.rmtree(folder / stage / "reference", ignore_errors=True)


def read_results(out: Path) -> dict[str, dict[str, Any]]:
    """The newest record of each run, by its folder."""
    path = out / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {row["folder"]: row for row in rows}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    found, sources = read_results(out), sources_digest()
    piece, pieces = map(int, options.slice.split("/"))
    wanted = [one for one in cases() if _is_wanted(one, options)]
    todo = [(case, key_of(case, sources)) for number, case in enumerate(wanted) if number % pieces == piece]
    known = {case.name: found.get(f"runs/{case.name}") for case, _ in todo}
    left = [
        (case, key) for case, key in todo
        if (row := known[case.name]) is None or row["outcome"].startswith(_LATE) or (row["key"] != key and not options.keep_stale)
    ]  # fmt: skip
    print(f"{len(todo)} runs, {len(todo) - len(left)} of them recorded before", flush=True)
    if left:
        _adopt()
        warm(out)
    began, spent = time.time(), 0.0
    for number, (case, key) in enumerate(left, 1):
        if options.until and time.time() > options.until:
            print("the time is over", flush=True)
            break
        record = {"key": key} | run_case(case, out, options.wall)
        with open(out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        spent += record["cpu_seconds"]
        print(
            f"{number}/{len(left)} {case.name}: {record['outcome'][:90]}, {record['cpu_seconds']} s of {record['wall_seconds']}", flush=True
        )
    print(f"{spent:,.0f} s of processor time in {time.time() - began:,.0f} s", flush=True)


def _is_wanted(case: Case, options: argparse.Namespace) -> bool:
    names = not options.only or any(word == case.plant.name or f"{case.plant.name}/" == word for word in options.only)
    return (
        names and (options.seeds is None or case.seed in options.seeds) and case.dose_name in options.doses
        and (options.sizes is None or case.size_name in options.sizes)
    )  # fmt: skip


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    numbers = lambda text: [int(one) for one in text.split(",")]  # noqa: E731
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--slice", default="0/1", metavar="K/N")
    parser.add_argument("--until", type=float, metavar="SECONDS", help="when to end, in seconds since 1970")
    parser.add_argument("--only", nargs="*", default=[], metavar="PLANT")
    parser.add_argument("--seeds", type=numbers, metavar="N,N")
    parser.add_argument("--sizes", type=lambda text: text.split(","))
    parser.add_argument("--doses", type=lambda text: text.split(","), default=DOSES)
    parser.add_argument("--wall", type=int, default=_WALL, metavar="SECONDS", help="limit of a run, for a machine that is shared")
    parser.add_argument("--keep-stale", action="store_true", help="do not repeat runs that other sources have made")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
