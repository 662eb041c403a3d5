"""Scores of any one model: of a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmworks import files
from lmworks.corpus.contamination import Question
from lmworks.evaluate.forms.measuring import measure
from lmworks.evaluate.opening import OpenModel
from lmworks.evaluate.report import lines, mark
from lmworks.evaluate.sets.loading import check_local
from lmworks.evaluate.sets.registry import check_names
from lmworks.recipe.schema.evaluate import Benchmark


def evaluate_model(
    opened: OpenModel, benchmarks: Sequence[Benchmark], most: int, *, flops: float | None = None, out_dir: Path | None = None,
    doubt: Callable[[str, list[Question]], str | None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Score a model on benchmark sets; a document like `results.json` of the evaluation stage, with `models` and `not_clean`.

    `most` is the number of items per set where a benchmark has none; `flops` what its training took, if known, which decides on the form.
    `doubt` says why the scores of a set may be on trained text. With `out_dir`, results.json, outcomes-NAME.jsonl and items-NAME.jsonl are
    written there; models that are there already are kept. Raises `UserError` for sets that do not exist and data that cannot be read.
    """
    check_names(benchmarks)
    check_local(benchmarks)
    found = measure(opened, benchmarks, most, flops)
    not_clean = {one: why for one, asked in found.asked.items() if (why := doubt(one, asked))} if doubt else {}
    mark(found.scores, not_clean)
    dtype = str(opened.model.compute_dtype).removeprefix("torch.")
    model = {"context": opened.context, "dtype": dtype, "scores": found.scores, "unavailable": found.unavailable}
    results: dict[str, Any] = {"models": {opened.name: model}, "not_clean": not_clean}
    if out_dir is not None:
        out_dir.mkdir(parents=True, exist_ok=True)
        before = files.read_json(out_dir / "results.json") if (out_dir / "results.json").exists() else {}
        whole = {
            "models": {**before.get("models", {}), **results["models"]}, "not_clean": {**before.get("not_clean", {}), **not_clean},
        }  # fmt: skip
        files.write_text(out_dir / f"outcomes-{opened.name}.jsonl", lines(found.outcomes))
        files.write_text(out_dir / f"items-{opened.name}.jsonl", lines(found.items))
        files.write_json(out_dir / "results.json", whole)
    return results
