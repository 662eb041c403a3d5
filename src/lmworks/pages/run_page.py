"""The run page: one static HTML file that shows a run from its records, at any moment.

Without a script all of it is there but the charts, of which it has the last values and a table. Nothing is loaded from anywhere.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmworks.errors import UserError
from lmworks.io.destinations import require_file
from lmworks.io.files import write_text
from lmworks.io.run_layout import BASE, MODEL_STAGES
from lmworks.pages import overview, tables
from lmworks.pages.charts import Chart
from lmworks.pages.curves import Curves
from lmworks.pages.frame import StepAxes, page
from lmworks.pages.read_run import read_run, require_records
from lmworks.pages.run_records import Run, Training
from lmworks.pages.timeline import timeline
from lmworks.recipe.schema.layout import Cluster

FILE, COMPARISON = "report.html", "comparison.html"


def write_page(run_dir: Path, cluster: Cluster | None = None, others: Sequence[Path] = (), out: Path | None = None) -> Path:
    """Write `run_dir/report.html` from what the run has recorded so far; returns its path. `cluster` gives the price of an hour and the
    power. With `others`, runs to compare with, the page is `run_dir/comparison.html`. `out` is another file, or a directory, for the page.

    Any part may be missing, and a line may be half-written. Time and reading grow with the records, memory and the page do not.
    Raises `UserError` if one of them has no records of a run, or if `run_dir` cannot be written.
    """
    run_dir = Path(run_dir)
    for one in (run_dir, *others):
        require_records(Path(one))
    name = COMPARISON if others else FILE
    path = run_dir / name if out is None else out / name if out.is_dir() else out
    if out is None and run_dir.is_dir() and not os.access(run_dir, os.W_OK):
        raise UserError(f"{run_dir} cannot be written, as where it is mounted to be read; name a file for the page with --out")
    require_file(path)
    run, *rest = _named_apart([read_run(one) for one in (run_dir, *others)])
    write_text(path, render(run, cluster, rest))
    return path


def _named_apart(runs: list[Run]) -> list[Run]:
    """Runs of one recipe have one name: those that share it are named by their directories too, by whole paths where these are equal."""
    shared = Counter(run.name for run in runs)
    folders = Counter((run.name, run.directory.resolve().name) for run in runs)

    def apart(run: Run) -> Run:
        folder = run.directory.resolve()
        where = folder.name if folders[run.name, folder.name] == 1 else str(folder)
        return run if shared[run.name] == 1 else replace(run, name=f"{run.name} ({where})")

    return [apart(run) for run in runs]


def render(run: Run, cluster: Cluster | None = None, others: Sequence[Run] = ()) -> str:
    """The page as text."""
    curves = {stage: Curves(run.training[stage], stage, [(one.name, one.training[stage]) for one in others]) for stage in run.training}
    main = curves[BASE.stage]
    sample = run.recipe.train.validation_bytes_per_domain if run.recipe else 0
    charts: dict[str, list[Chart]] = {
        "loss": [*main.loss(), *main.benchmarks()],
        "held_out": main.held_out(tables.references(run), tables.sizes(run), sample),
        "optimizer": main.optimizer(),
        "experts": main.experts(),
        "machine": main.machine(),
    }
    later = []
    for stage in MODEL_STAGES[1:]:
        one = curves[stage.stage]
        objective = [*one.preferences(), *one.rewards()]
        charts[stage.stage] = [*objective, *one.loss(), *one.benchmarks(), *one.validation_loss(), *one.optimizer()[:2]]
        samples = tables.samples(run.training[stage.stage])
        if charts[stage.stage] or samples:
            later.append({"stage": stage.stage, "title": stage.title, "charts": charts[stage.stage], "samples": samples})
    return page(
        "page.html",
        [chart for part in charts.values() for chart in part],
        {stage: [_axes(one.training[stage]) for one in (run, *others)] for stage in run.training},
        run.state == "running",
        heading=overview.heading(run),
        comparison=overview.comparison([run, *others], cluster),
        findings=run.findings,
        stale={stage: run.stale(stage) for stage in ("evaluate", "export")},
        tiles=overview.tiles(run, cluster),
        charts=charts,
        samples=tables.samples(run.pretrain),
        later=later,
        bits=tables.bits(run),
        scores=tables.scores(run),
        corpus=tables.corpus(run),
        tokenizer=tables.tokenizer(run),
        parity=tables.parity(run),
        predictions=tables.predictions(run),
        timeline=timeline(run),
        recipe=json.dumps(run.tree, indent=2, ensure_ascii=False) if run.tree else "",
    )


def _axes(training: Training) -> StepAxes:
    tokens = training.series.get("train/tokens")
    hours = [(step, seconds / 3600) for step, seconds in training.elapsed.means()]
    return StepAxes(tokens.means() if tokens else (), hours, max(training.step, 2))
