"""Run folders with given metrics and events, written with the classes that a run writes them with: for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import numpy as np
import pytest

from lmworks.cli import main
from lmworks.io.files import write_json
from lmworks.io.jsonl import line
from lmworks.io.run_layout import of_stage
from lmworks.recipe.load import load_recipe_text
from lmworks.recipe.timeline import Schedules, Timeline
from lmworks.watch.ledger import LEDGER

Values = Sequence[float | EllipsisType | None] | Mapping[int, float]
"""Of a metric, one for each line: None stands for null, which is a value that was not finite, and ... for a line without it. Or by step."""

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
    folder: Path, metrics: Mapping[str, Values] = {}, events: Iterable[Mapping[str, Any]] = (), stage: str = "pretrain",
    overrides: Sequence[str] = (), steps: Sequence[int] | None = None, documents: Mapping[str, Any] = {},
) -> Path:  # fmt: skip
    """A run folder: `metrics` by name with a value for each line (of steps 1, 2, ... or `steps`), `events` of the ledger, after the stage's
    start, and JSON `documents` by their path."""
    folder.mkdir(parents=True, exist_ok=True)
    load_recipe_text(RECIPE, overrides).save(folder)
    count = max((len(values) for values in metrics.values() if not isinstance(values, Mapping)), default=0)
    at = list(range(1, count + 1)) if steps is None else list(steps)
    place = of_stage(stage).place(folder)
    place.mkdir(exist_ok=True)
    with open(place / "metrics.jsonl", "ab") as file:
        for number, step in enumerate(at):
            values = {name: value for name, series in metrics.items() if (value := _value(series, number, step)) is not ...}
            file.write(line({"step": step, "time": 1.0e9 + 10.0 * step, **values}))
    with open(folder / LEDGER, "ab") as file:
        last = max(at, default=0)
        file.write(line({"time": 1.0e9, "event": "start", "stage": stage, "steps": last, "tokens": 1024 * last}))
        for event in events:
            file.write(line({"time": 1.0e9 + 1, "stage": stage, **event}))
    for path, document in documents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / path, document)
    return folder


def _value(series: Values, number: int, step: int) -> float | EllipsisType | None:
    if isinstance(series, Mapping):
        return series.get(step, ...)
    return series[number] if number < len(series) else ...


def healthy(steps: int = 200, overrides: Sequence[str] = ()) -> dict[str, list[Any]]:
    """The metrics of every step of a healthy run of `steps` steps, as measured on small models: the rates of the recipe, a loss that falls
    from ln V, and lines of layers at every tenth of the steps (... elsewhere)."""
    recipe = load_recipe_text(RECIPE, [budget(steps), *overrides]).recipe
    timeline = Timeline(recipe.train.phases)
    factors = Schedules(recipe.train.phases, [phase.steps for phase in timeline.phases], timeline.tokens_before)
    peak = float(recipe.optimizer.learning_rate or 0)
    rates = [peak * factors.lr_factor(step) for step in range(steps)]
    draw, at = np.random.default_rng(0), np.arange(1, steps + 1)
    done = at / steps
    loss = 3.6 + 3.3078 * np.exp(-8 * done) + 0.3 * (1 - done) * (1 - np.exp(-8 * done)) + 0.05 * draw.standard_normal(steps)
    loss[0] = 6.9078
    detailed = [step % max(1, steps // 10) == 0 or step in (1, 10, 100) for step in at]

    def layers(values: Any) -> list[Any]:
        return [float(value) if one else ... for value, one in zip(np.broadcast_to(values, steps), detailed, strict=True)]

    norm = 17.0 + 25 * np.sqrt(done)
    return {
        "train/loss": [float(value) for value in loss], "train/phase": [0.0] * steps, "train/valid_tokens": [1024.0] * steps,
        "train/batch_tokens": [1024.0] * steps, "train/z_loss": [float(value) for value in 47.7 - 4 * done],
        "train/bad_steps": [0.0] * steps, "optim/learning_rate": list(rates), "optim/adam_learning_rate": list(rates),
        "optim/grad_norm": [float(value) for value in np.exp(0.2 * draw.standard_normal(steps)) * 0.7], "optim/clipped": [0.0] * steps,
        "optim/weight_norm": layers(norm), "optim/update_ratio": layers(0.05 * np.array(rates) / peak / (1 + 4 * done)),
        "optim/head_norm": layers(5 + 5 * np.sqrt(done)), "optim/embedding_norm": layers(5 + 10 * np.sqrt(done)),
        "optim/unchanged_weights": layers(0.01),
        **{f"layers/{layer}/activation_rms": layers(0.02 + 0.2 * done) for layer in range(2)},
        **{f"layers/{layer}/attention_logit_max": layers(0.1 + 2.5 * done) for layer in range(2)},
        "perf/save_seconds": [0.05 if step % max(1, steps // 10) == 0 else 0.0 for step in at], "perf/step_seconds": [9.0] * steps,
        "perf/data_wait": [0.01] * steps,
    }  # fmt: skip


def budget(steps: int) -> str:
    """The override for so many steps."""
    return f"train.phases.0.tokens={1024 * steps} tokens"


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """`lmworks ARGUMENTS` in this process: its exit code, standard output and standard error."""
    monkeypatch.setattr("sys.argv", ["lmworks", *map(str, arguments)])
    code = 0
    try:
        main.main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err
