"""What a run of tasks of lm-evaluation-harness leaves: our results and outcomes, its own results and samples, and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from lmworks import files
from lmworks.evaluate.found import Found
from lmworks.evaluate.model_report import write_results
from lmworks.evaluate.opening import OpenModel

if TYPE_CHECKING:
    from lmworks.evaluate.harness.running import HarnessResults


def record(opened: OpenModel, found: HarnessResults, out_dir: Path | None) -> dict[str, Any]:
    """The scores as a document like `results.json` of an evaluation; with `out_dir`, everything is written there.

    results.json, outcomes-NAME.jsonl     the metrics that are right or wrong for an item, as for our own scores
    lm-eval-NAME.json                     what lm-evaluation-harness reports: all metrics, task configurations, versions
    lm-eval-NAME.jsonl                    its samples: prompts, answers and marks of every item
    """
    scores, outcomes = found.scores()
    dtype = str(opened.model.compute_dtype).removeprefix("torch.")
    model = {"context": opened.context, "dtype": dtype, "scores": scores, "unavailable": {}}
    results: dict[str, Any] = {"models": {opened.name: model}, "not_clean": {}}
    if out_dir is not None:
        write_results(out_dir, results, Found(scores, outcomes))
        document = {key: value for key, value in found.document.items() if key != "samples"}
        files.write_text(out_dir / f"lm-eval-{opened.name}.json", json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n")
        samples = [{"task": task, **one} for task, of_task in found.document["samples"].items() for one in of_task]
        text = "".join(json.dumps(one, ensure_ascii=False, default=str) + "\n" for one in samples)
        files.write_text(out_dir / f"lm-eval-{opened.name}.jsonl", text)
    return results


def table(name: str, found: HarnessResults) -> Table:
    """All metrics with their standard errors, as lm-evaluation-harness reports them."""
    made = Table(title=f"lm-evaluation-harness {found.document['config']['lm_eval_version']}: {name}", title_justify="left")
    for heading in ("task", "examples", "metric", "items", "value"):
        made.add_column(heading, justify="left" if heading in ("task", "metric", "value") else "right")
    for task, shots, metric, items, value, error in found.rows:
        made.add_row(task, str(shots), metric, f"{items:,}", f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else ""))
    if found.notes:
        made.caption = "; ".join(found.notes)
    return made
