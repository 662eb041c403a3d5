"""The run page: one static HTML file that shows a run from its records, at any moment.

All of it is there without a script: the charts are drawn here, in SVG. The script adds the cursor that all charts share, axes, zoom and
smoothing at the reader's choice, and the switch between light and dark. Nothing is loaded from anywhere, and a policy in the page lets the
browser run nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from lmworks import __version__
from lmworks.io.files import write_text
from lmworks.io.run_layout import BASE, MODEL_STAGES
from lmworks.pages import overview, tables
from lmworks.pages.charts import Chart, Grid, Heatmap
from lmworks.pages.curves import Curves
from lmworks.pages.read_run import read_run
from lmworks.pages.run_records import Run, Training
from lmworks.pages.tables import source, template
from lmworks.pages.timeline import timeline
from lmworks.recipe.schema.layout import Cluster

FILE, COMPARISON = "report.html", "comparison.html"


def write_page(run_dir: Path, cluster: Cluster | None = None, others: Sequence[Path] = ()) -> Path:
    """Write `run_dir/report.html` from what the run has recorded so far; returns its path. `cluster` gives the price of an hour and the
    power. With `others`, runs to compare with, the page is `run_dir/comparison.html`.

    Any part may be missing, and a line may be half-written. Time and reading grow with the records, memory and the page do not.
    Raises `UserError` if `run_dir` is no directory or cannot be written.
    """
    run_dir = Path(run_dir)
    path = run_dir / (COMPARISON if others else FILE)
    text = render(read_run(run_dir), cluster, [read_run(other) for other in others])
    write_text(path, text.encode("utf-8", "replace").decode())  # a record may hold half a surrogate pair
    return path


def render(run: Run, cluster: Cluster | None = None, others: Sequence[Run] = ()) -> str:
    """The page as text."""
    curves = {stage: Curves(run.training[stage], stage, [(one.name, one.training[stage]) for one in others]) for stage in run.training}
    main = curves[BASE.stage]
    sample = run.recipe.train.validate_bytes_per_domain if run.recipe else 0
    charts: dict[str, list[Any]] = {
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
            later.append({"stage": stage.stage, "title": stage.title, "charts": _views(charts[stage.stage]), "samples": samples})
    grid = Grid()
    data: dict[str, Any] = {"charts": {chart.id: chart.data(grid) for part in charts.values() for chart in part}}
    data["axes"] = {stage: [_axes(one.training[stage], grid) for one in (run, *others)] for stage in run.training}
    data |= {"steps": grid.steps, "running": run.state == "running"}
    style, script = source("page.css"), source("page.js")
    return template("page.html").render(
        heading=overview.heading(run),
        comparison=overview.comparison([run, *others]),
        stale={stage: run.stale(stage) for stage in ("evaluate", "export")},
        tiles=overview.tiles(run, cluster),
        charts={name: _views(part) for name, part in charts.items()},
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
        data=Markup(_json_for_html(data)),
        style=style,
        script=script,
        script_hash=_hash(script),
        written=time.strftime("%d %B %Y, %H:%M", time.localtime()),
        written_at=int(time.time()),
        version=__version__,
    )


def _axes(training: Training, grid: Grid) -> dict[str, Any]:
    """What may stand on the x axis for steps, and the last step."""
    tokens, hours = training.series.get("train/tokens"), [(step, seconds / 3600) for step, seconds in training.elapsed.means()]
    return {
        "tokens": grid.line(tokens.means()) if tokens else None, "time": grid.line(hours) if hours else None, "last": max(training.step, 2),
    }  # fmt: skip


def _views(charts: list[Chart | Heatmap]) -> list[tuple[str, dict[str, Any]]]:
    """Shape and view of each; where two stand side by side, a last one without a partner gets the whole width."""
    narrow = [chart for chart in charts if not getattr(chart, "wide", False)]
    alone = narrow[-1] if len(narrow) % 2 else None
    return [("heat" if isinstance(chart, Heatmap) else "lines", chart.view() | {"alone": chart is alone}) for chart in charts]


def _json_for_html(value: Any) -> str:
    """JSON that cannot close the HTML element that contains it."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return (
        text.replace("&", "\\u0026")
        .replace("<", "\\u003c")
        .replace(">", "\\u003e")
        .replace("\u2028", "\\u2028")
        .replace("\u2029", "\\u2029")
    )


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
