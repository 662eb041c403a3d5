"""`lmworks ablate`: the whole of an ablation, from the file to the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmworks.ablate import cost as costs
from lmworks.ablate.document import cost_text, save
from lmworks.ablate.resolve import RESULTS, Experiment, resolve
from lmworks.ablate.results import Results
from lmworks.ablate.run_set import Run, prepare_data, save_arms, take_directory
from lmworks.ablate.runs import Runner, described
from lmworks.errors import UserError
from lmworks.host import machine
from lmworks.io.destinations import require_folder
from lmworks.io.files import only_one, write_text
from lmworks.pages.ablation_page import write_ablation_page
from lmworks.run.runner import StageEvent
from lmworks.watch.ledger import RunLock


@dataclass(frozen=True)
class Options:
    """How to run: `jobs` processes side by side; with `index` (i, n) only the runs i, i + n, i + 2n, ..."""

    out: Path | None = None
    jobs: int = 1
    index: tuple[int, int] | None = None


def parse_index(text: str) -> tuple[int, int]:
    """`I/N` as two numbers. Raises `UserError`."""
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and int(first) < int(second)):
        raise UserError(f"--index: {text!r} is not of the form I/N with I from 0 to N - 1, such as 0/8")
    return int(first), int(second)


def open_experiment(path: str, options: Options) -> Experiment:
    """Resolve the file; for `equal: time` with the speeds that were measured, if they were."""
    experiment = resolve(path, options.out)
    if experiment.ablation.equal == "time":
        known = costs.speeds(experiment.out)
        if experiment.baseline.name in known:
            return resolve(path, options.out, known)
    return experiment


def list_runs(experiment: Experiment, options: Options) -> list[dict[str, Any]]:
    """The runs with their states and the commands that they are; of a job of an array, its own."""
    chosen = _chosen(experiment, options)
    return [
        {"index": index, "arm": run.arm.name, "seed": run.seed, **described(experiment, run)}
        for index, run in enumerate(experiment.runs)
        if run in chosen
    ]


def _chosen(experiment: Experiment, options: Options) -> list[Run]:
    """The runs that this process does."""
    return experiment.runs if options.index is None else experiment.runs[options.index[0] :: options.index[1]]


def run_ablation(
    path: str, options: Options, on_event: Callable[[StageEvent], None], on_note: Callable[[str], None]
) -> tuple[dict[str, Any], Path, UserError | None]:
    """Run what is open of an ablation and write its results, `ablation.json` and `ablation.html`; returns the results, their directory, and
    the error of runs that have failed, of which the results have none.

    Raises `UserError` for what concerns all runs, and `Interrupted` when asked to stop; the same call goes on.
    """
    experiment = open_experiment(path, options)
    require_folder(experiment.out)
    with _lock(experiment, options):
        take_directory(experiment.out, "an ablation")
        if experiment.ablation.equal == "tokens":
            save_arms(experiment)
        write_text(experiment.out / "ablation.yaml", experiment.text)
        prepare_data(experiment, on_event, on_note)
        threads = max(1, machine.threads() // options.jobs)
        results = Results(experiment, options.jobs)
        results.update()
        failures: dict[str, str] = {}
        if len(results.seconds) < len(experiment.runs):
            by_time = experiment.ablation.equal == "time"
            arms = list(experiment.arms.values()) if by_time else [experiment.baseline]
            costs.calibrate(experiment, arms, threads, lambda: on_note("another process measures the speed of the arms; waiting for it"))
            for name, why in costs.failures(experiment.out).items():
                on_note(f"arm {name} has no speed: {why}")
            if by_time:
                failures = costs.failures(experiment.out)
                if (base := experiment.baseline.name) in failures:
                    raise UserError(f"arm {base}, whose time all arms get, has no speed: {failures[base]}")
                experiment = open_experiment(path, options)
                save_arms(experiment, failures)
                results = Results(experiment, options.jobs)
                results.update()
            on_note(cost_text(costs.cost(experiment, results.seconds, options.jobs).to_json()))

        def on_done(run: Run) -> None:
            on_note(f"{run.name}: done")
            write_results(results)

        chosen, failure = _chosen(experiment, options), None
        failed = [(run, failures[run.arm.name]) for run in chosen if run.arm.name in failures and run.directory not in results.seconds]
        try:
            Runner(experiment, chosen, results.seconds, options.jobs, on_done, on_note, failed).work()
        except UserError as error:
            failure = error
        finally:
            document = write_results(results)
    return document, experiment.out, failure


def write_results(results: Results) -> dict[str, Any]:
    """Read what has finished and write `ablation.json` and `ablation.html`. One process at a time does so: the last of an array, which has
    read most, also writes last."""
    with only_one(results.experiment.out / RESULTS):
        results.update()
        document = save(results)
        write_ablation_page(results.experiment.out)
    return document


@contextmanager
def _lock(experiment: Experiment, options: Options) -> Iterator[None]:
    """One process per ablation, unless each has an index of its own."""
    if options.index is not None:
        experiment.out.mkdir(parents=True, exist_ok=True)
        yield
    else:
        with RunLock(experiment.out):
            yield
