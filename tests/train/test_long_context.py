"""A run of three phases, the last of them in four steps, that extends its context from 256 to 8,192 tokens on real text."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.table import Table

from lmworks.metrics.log import read
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.phases import in_force
from lmworks.recipe.schema.model import Rope
from lmworks.recipe.timeline import Timeline
from lmworks.shards.batch import IGNORE, Batch
from lmworks.shards.batches import Batches
from lmworks.tokenizer import load
from lmworks.train import trainer
from lmworks.train.curriculum import phase_settings
from tiny_run import Tiny

LENGTHS = (256, 512, 2048, 4096, 6144, 8192)
TOKENS = ("1536Ki", "256Ki", "384Ki", "256Ki", "256Ki", "256Ki")
YARN = {"scaling": "yarn", "original_max_position_embeddings": "2048 tokens"}
ROPES: tuple[dict[str, Any] | None, ...] = (
    None, {"theta": 40_000.0}, {"theta": 200_000.0}, YARN | {"factor": 2.0}, YARN | {"factor": 3.0}, YARN | {"factor": 4.0},
)  # fmt: skip
HELD_OUT = 12  # of the files one in so many
LEAST = 60_000  # bytes of a file: only long ones have far positions
MARGIN = 0.05  # nats per token by which the loss falls in each extension, at least

RECIPE = """
name: long
seed: 5
threads: 1
corpus:
  steps: [{{step: clean}}]
  dedup: {{minhash: null}}
  decontaminate: null
  validation_fraction: 0.1
  max_validation_bytes: 200KB
  sources:
    - {{name: code, kind: code, path: {texts}, include: "*.py", domain: code, language: code, license: PSF-2.0}}
tokenizer: {{vocab_size: 768, sample_bytes: 1MB}}
model:
  {{hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 32, intermediate_size: 128,
    use_qk_norm: true}}
optimizer: {{learning_rate: 0.02, adam_learning_rate: 0.02}}
stability: {{spike: null}}
train:
  micro_batch_sequences: 1
  precision: fp32
  compile: false
  validate_every: 100%
  validation_bytes_per_domain: 20000 bytes
  sample_every: 100%
  save_every: 100%
  log_every: 20 steps
  phases:
{phases}
evaluate: {{references: false}}
export: {{huggingface: false, gguf: false}}
"""


def phase(index: int) -> str:
    length = LENGTHS[index]
    lines = {
        "name": f"to-{length}", "tokens": TOKENS[index], "mixture": {"code": 1.0}, "sequence_length": f"{length} tokens",
        "global_batch_tokens": f"{4096 if index == 0 else 8192 // length * length} tokens",
        "lr_schedule": {"kind": "linear", "warmup": "5%", "min_lr_ratio": 0.1}, "learning_rate_scale": 1.0 if index == 0 else 0.5,
        "needle": length == LENGTHS[-1], "rope": ROPES[index],
    }  # fmt: skip
    return f"    - {json.dumps({key: value for key, value in lines.items() if value is not None})}"


def rows_of(texts: list[np.ndarray], length: int, positions: range) -> list[Batch]:
    """How texts that nobody was trained on begin, with labels at these positions."""
    rows = []
    for text in texts:
        labels = np.full((1, length), IGNORE, np.int32)
        labels[:, positions] = text[1:][positions]
        rows.append(Batch(text[None, :length].copy(), labels, np.array([0, length], np.int32), 0, 0))
    return rows


def loss(model: ParallelModel, rows: list[Batch], rope: Rope) -> float:
    """Nats per token under these positions; the model comes back as it was."""
    now = model.config
    model.configure(now.model_copy(update={"rope": rope}))
    model.eval()
    value = sum(map(model.summed_cross_entropy, rows)) / sum(row.valid_tokens for row in rows)
    model.train()
    model.configure(now)
    return value


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_far_positions_become_likelier_with_each_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the length that was trained before: under the old positions, with the new ones at the boundary, and after the phase."""
    library = Path(torch.__file__).parent
    texts = [path.read_text(encoding="utf-8") for path in sorted(library.rglob("*.py")) if path.stat().st_size > LEAST]
    (tmp_path / "code").mkdir()
    for number, text in enumerate(texts):
        if number % HELD_OUT:
            (tmp_path / "code" / f"{number}.py").write_text(text, encoding="utf-8")
    recipe = tmp_path / "long.yaml"
    recipe.write_text(RECIPE.format(texts=tmp_path / "code", phases="\n".join(map(phase, range(len(LENGTHS))))))
    run = Tiny(recipe, tmp_path / "run")
    run.walk(last="shards")

    tokenizer = load(run.run_dir / "tokenizer")
    resolved = run.resolve().recipe
    phases = phase_settings(resolved, Timeline(resolved.train.phases))
    last = Batches(resolved, run.run_dir / "shards").steps - 1
    ropes = [model.rope for model in in_force(resolved)]
    ids = [np.array(tokenizer.encode(text)[: LENGTHS[-1] + 1], np.int32) for text in texts[::HELD_OUT]]
    rows = [rows_of(ids, length, range(before, length)) for before, length in pairwise((0, *LENGTHS))]
    near = [rows_of(ids, length, range(LENGTHS[0])) for length in LENGTHS]
    firsts = {phase.first_step: phase.index for phase in phases}
    found: dict[int, dict[str, float]] = {}

    def ended(model: ParallelModel, index: int) -> None:
        rope, earlier = ropes[index], ropes[max(0, index - 1)]
        assert rope is not None and earlier is not None
        found[index] |= {"after": loss(model, rows[index], rope), "under the old": loss(model, rows[index], earlier)}
        found[index] |= {"near": loss(model, near[index], rope)}

    honest = trainer.train_step

    def observed(model: ParallelModel, optimizer: Any, batch: Batch, **options: Any) -> Any:
        if (index := firsts.get(batch.step)) is not None:
            if index:
                ended(model, index - 1)
            rope, earlier = model.parts[0].rope, ropes[max(0, index - 1)]
            assert earlier is not None
            assert rope == ropes[index], "the phase boundary has changed the positions"
            found[index] = {"near before": loss(model, near[index], earlier)}
            found[index] |= {"before": loss(model, rows[index], earlier), "boundary": loss(model, rows[index], rope)}
        result = honest(model, optimizer, batch, **options)
        if batch.step == last:
            ended(model, len(phases) - 1)
        return result

    monkeypatch.setattr(trainer, "train_step", observed)
    run.pretrain()

    table = Table("context", *found[0], title="nats per token at the positions that each extension adds, and at the first 256")
    for length, values in zip(LENGTHS, found.values(), strict=True):
        table.add_row(f"{length:,}", *(f"{value:.3f}" for value in values.values()))
    Console(width=120).print(table)
    metrics = read(run.run_dir)[-1]
    print({name: value for name, value in metrics.items() if name.startswith(("needle", "validation/position"))})
    assert metrics["needle/chance"] == 0.25 and 0 <= metrics["needle/accuracy"] <= 1
    assert f"needle/{LENGTHS[-1]}/10" in metrics and "validation/position/4096" in metrics
    for index, length in enumerate(LENGTHS[1:], start=1):
        values = found[index]
        assert values["after"] < values["before"] - MARGIN, length
        assert values["after"] < values["under the old"], f"{length}: it was trained under the new positions"
