"""Benchmark scores of a quantized model beside the original's, over the same items."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmworks.evaluate.compare.comparison import NothingInCommon, compare
from lmworks.evaluate.compare.results import Results, read_results
from lmworks.evaluate.model_report import evaluate_model
from lmworks.model import Transformer
from lmworks.quantize.certificate import not_measured
from lmworks.quantize.source import Source
from lmworks.recipe.schema.evaluate import Benchmark

HOW = "our model with dequantized weights; differences with 95% intervals by paired bootstrap, p corrected by Holm"


class Comparison:
    """Scores models on `benchmarks`; the original is scored once, when it is first needed."""

    def __init__(self, source: Source, benchmarks: Sequence[Benchmark], items: int) -> None:
        self.source, self.benchmarks, self.items = source, benchmarks, items
        self._original: Results | None = None

    def against(self, model: Transformer, name: str) -> dict[str, Any]:
        """The differences of `model` from the original, or why there are none. Raises `UserError` for sets that do not exist."""
        if not self.benchmarks:
            return not_measured("no benchmark sets were named (--tasks)")
        if self._original is None:
            self._original = self._scored(self.source.model, "original")
        try:
            document = compare([self._original, self._scored(model, name)], examples=0)
        except NothingInCommon as error:
            return not_measured(str(error))
        found = document["comparisons"][0]
        keys = ("score", "a", "b", "difference", "interval", "adjusted_p", "verdict", "n", "lost", "gained")
        rows = [{key: row[key] for key in keys if key in row} for row in found["scores"]]
        return {"how": HOW, "scores": rows, "not_comparable": found["not_comparable"]}

    def _scored(self, model: Transformer, name: str) -> Results:
        opened = replace(self.source.opened, model=model, name=name)
        with tempfile.TemporaryDirectory() as folder:
            evaluate_model(opened, self.benchmarks, self.items, out_dir=Path(folder))
            return read_results(Path(folder), name, name)
