"""Scores of any one model: of a run, a checkpoint or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmworks import files
from lmworks.corpus.contamination import Question
from lmworks.evaluate.bits_per_byte import DocumentBits, by_domain
from lmworks.evaluate.forms.measuring import measure
from lmworks.evaluate.found import Found
from lmworks.evaluate.opening import OpenModel
from lmworks.evaluate.records import write_records
from lmworks.evaluate.report import mark
from lmworks.evaluate.sets.loading import check_local
from lmworks.evaluate.sets.registry import check_names
from lmworks.recipe.schema.evaluate import Benchmark


def evaluate_model(
    opened: OpenModel, benchmarks: Sequence[Benchmark], most: int, *, flops: float | None = None, out_dir: Path | None = None,
    doubt: Callable[[str, list[Question]], str | None] | None = None, documents: Sequence[DocumentBits] = (),
) -> dict[str, Any]:  # fmt: skip
    """Score a model on benchmark sets; a document like `results.json` of the evaluation stage, with `models` and `not_clean`.

    `most` is the number of items per set where a benchmark has none; `flops` what its training took, if known, which decides on the form.
    `doubt` says why the scores of a set may be on trained text. `documents` are the bits of held-out documents, if they were measured.
    With `out_dir`, results.json and the records (`evaluate/records.py`) are written there; models that are there already are kept.
    Raises `UserError` for sets that do not exist and data that cannot be read.
    """
    check_names(benchmarks)
    check_local(benchmarks)
    found = measure(opened, benchmarks, most, flops)
    not_clean = {one: why for one, asked in found.asked.items() if (why := doubt(one, asked))} if doubt else {}
    mark(found.scores, not_clean)
    dtype = str(opened.model.compute_dtype).removeprefix("torch.")
    found.documents = list(documents)
    model: dict[str, Any] = {"context": opened.context, "dtype": dtype, "scores": found.scores, "unavailable": found.unavailable}
    if documents:
        model["bits_per_byte"] = {domain: value.to_json() for domain, value in by_domain(documents).items()}
    results: dict[str, Any] = {"models": {opened.name: model}, "not_clean": not_clean}
    if out_dir is not None:
        write_results(out_dir, results, found)
    return results


def write_results(out_dir: Path, results: dict[str, Any], found: Found) -> None:
    """Write the results of one model and its records into `out_dir`; models that are there already are kept."""
    [name] = results["models"]
    out_dir.mkdir(parents=True, exist_ok=True)
    before = files.read_json(out_dir / "results.json") if (out_dir / "results.json").exists() else {}
    whole = {key: {**before.get(key, {}), **results[key]} for key in ("models", "not_clean")}
    write_records(out_dir, name, found, add=True)
    files.write_json(out_dir / "results.json", whole)
