"""`lmworks ladder run`: the runs of a ladder file, and the law that is fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from lmworks import machine
from lmworks.ablate.cost import calibrate, cost, training_seconds
from lmworks.ablate.report import cost_text
from lmworks.ablate.run_set import RunSet, require_own_directory, save_arms
from lmworks.ablate.runs import Runner, described, state_of
from lmworks.ablate.sharing import prepare_data
from lmworks.files import write_text
from lmworks.ladder.design import Point
from lmworks.ladder.downstream import fit_downstream, split_benchmarks
from lmworks.ladder.file import FILE
from lmworks.ladder.fit import BOOTSTRAPS, fit_law
from lmworks.ladder.points import UNIT, read_points
from lmworks.ladder.predictions import save_settings
from lmworks.plan.loss_law import LAW_FILE, LossLaw, save_law
from lmworks.progress import bar
from lmworks.run.runner import StageEvent
from lmworks.watch.lock import RunLock


def run_ladder(ladder: RunSet, jobs: int, on_event: Callable[[StageEvent], None], on_note: Callable[[str], None]) -> list[Path]:
    """Run what is open of a ladder, `jobs` processes side by side; returns the directories of the runs that a law is fitted to.

    Raises `UserError`, and `Interrupted` when asked to stop; the same call goes on.
    """
    out = ladder.out
    with RunLock(out):
        require_own_directory(out, "a ladder of runs")
        save_arms(ladder)
        write_text(out / FILE, ladder.text)
        prepare_data(ladder, on_event, on_note)
        seconds = {run.directory: training_seconds(run) for run in ladder.runs if state_of(ladder, run) == "done"}
        if len(seconds) < len(ladder.runs):
            calibrate(ladder, [ladder.baseline], max(1, machine.threads() // jobs))
            on_note(cost_text(cost(ladder, seconds, jobs).to_json()))
        Runner(ladder, ladder.runs, seconds, jobs, lambda run: on_note(f"{run.arm.name}: done"), on_note).work()
    return points_of(ladder)


def list_runs(ladder: RunSet) -> list[dict[str, object]]:
    """Every run with its state, its tokens and the command that it is."""
    return [
        {"name": run.arm.name, "tokens": run.arm.tokens - run.arm.started_at, **described(ladder, run)} for run in ladder.runs
    ]


def points_of(ladder: RunSet) -> list[Path]:
    """The runs whose learning rate decays: those that branch off from the trunks."""
    return [run.directory for run in ladder.runs if run.branch is not None]


def fit_runs(folder: Path, runs: Sequence[Path]) -> tuple[LossLaw, list[Point]]:
    """Fit a law of the loss, and one of each benchmark, to finished runs and write them into `folder`; returns them and the points of the
    runs. Raises `UserError`."""
    points = read_points(list(runs))
    with bar("bootstrap", BOOTSTRAPS * (1 + len(split_benchmarks(points)[0]))) as progress:
        law = fit_law(points, UNIT, f"fitted to {len(points)} runs", bootstraps=BOOTSTRAPS, advance=progress.advance)
        law = replace(law, benchmarks=fit_downstream(points, bootstraps=BOOTSTRAPS, advance=progress.advance))
    folder.mkdir(parents=True, exist_ok=True)
    save_settings(folder, list(runs))
    save_law(law, folder / LAW_FILE)
    return law, points
