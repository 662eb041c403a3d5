"""Run folders with given metrics and events, written with the classes that a run writes them with: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmworks.io.jsonl import line
from lmworks.io.run_layout import of_stage
from lmworks.recipe.load import load_recipe_text
from lmworks.watch.ledger import LEDGER

RECIPE = """
name: written
corpus: {sources: [{name: text, kind: jsonl, path: text.jsonl, domain: prose, license: MIT}]}
model: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2}
tokenizer: {vocab_size: 1000}
optimizer: {learning_rate: 0.01}
train:
  phases:
    - {name: main, tokens: 1M, sequence_length: 64 tokens, global_batch_tokens: 1024 tokens, mixture: {text: 1.0}}
"""


def write_run(
    folder: Path, metrics: Mapping[str, Sequence[float | None]] = {}, events: Iterable[Mapping[str, Any]] = (), stage: str = "pretrain",
    overrides: Sequence[str] = (), steps: Sequence[int] | None = None,
) -> Path:  # fmt: skip
    """A run folder: `metrics` by name with a value for each line (of steps 1, 2, ... or `steps`), and `events` of the ledger, after the
    stage's start."""
    folder.mkdir(parents=True, exist_ok=True)
    load_recipe_text(RECIPE, overrides).save(folder)
    count = max((len(values) for values in metrics.values()), default=0)
    at = list(range(1, count + 1)) if steps is None else list(steps)
    place = of_stage(stage).place(folder)
    place.mkdir(exist_ok=True)
    with open(place / "metrics.jsonl", "ab") as file:
        for number, step in enumerate(at):
            values = {name: series[number] for name, series in metrics.items() if number < len(series)}
            file.write(line({"step": step, "time": 1.0e9 + 10.0 * step, **values}))
    with open(folder / LEDGER, "ab") as file:
        file.write(line({"time": 1.0e9, "event": "start", "stage": stage, "steps": max(at, default=0), "tokens": 1}))
        for event in events:
            file.write(line({"time": 1.0e9 + 1, "stage": stage, **event}))
    return folder
