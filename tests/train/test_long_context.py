"""A run of three phases, the last of them in four steps, that extends its context from 256 to 8,192 tokens on real text."""

from __future__ import annotations

import json
import sysconfig
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from lmworks.parallel.model import ParallelModel
from lmworks.shards.batch import Batch, Batches
from lmworks.shards.packing import IGNORE
from lmworks.tokenizer import load
from lmworks.train import trainer
from lmworks.train.far import Far, positions
from lmworks.train.pretrain import stages
from tiny_run import Tiny, know_the_peak

LENGTHS = (256, 512, 2048, 4096, 6144, 8192)
TOKENS = ("384Ki", "128Ki", "128Ki", "96Ki", "72Ki", "96Ki")

RECIPE = """
name: long
seed: 5
threads: 1
corpus:
  validation_bytes: 400KB
  validation_fraction: 0.1
  dedup: {{minhash: null}}
  sources:
    - {{name: code, kind: code, path: {texts}, include: "*.py", domain: code, language: code, licence: PSF-2.0}}
tokenizer: {{vocab_size: 1024, sample_bytes: 1MB}}
model: {{hidden_size: 96, layers: 3, heads: 3, kv_heads: 1, head_dim: 32, ffn_size: 256, qk_norm: true}}
optimizer: {{learning_rate: 0.006, adam_learning_rate: 0.006}}
train:
  micro_batch: 1
  precision: fp32
  compile: false
  validate_every: 100%
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
        "batch": f"{length * max(1, 8192 // length)} tokens", "learning_rate_scale": 1.0 if index == 0 else 0.5,
        "schedule": {"kind": "constant", "warmup": "5%"}, "needle": length == LENGTHS[-1],
    }  # fmt: skip
    if length == 2048:
        lines["rope"] = {"theta": 100_000.0}
    return f"    - {json.dumps(lines)}"


@torch.no_grad()
def losses(model: ParallelModel, rows: list[Batch]) -> dict[tuple[int, int], float]:
    """Mean loss in each stretch of positions between two of the lengths."""
    whole = model.whole
    assert whole is not None
    found = []
    for row in rows:
        hidden, _ = whole.hidden(torch.from_numpy(row.tokens).long(), torch.from_numpy(row.cu_seqlens))
        labels = torch.from_numpy(row.labels[0]).long()
        parts = [F.cross_entropy(whole.logits(h), t, ignore_index=IGNORE, reduction="none") for h, t in
                 zip(hidden[0].split(1024), labels.split(1024), strict=True)]  # fmt: skip
        found.append(torch.cat(parts).numpy())
    loss = np.concatenate(found)
    place = np.concatenate([positions(row)[0] for row in rows])
    valid = np.concatenate([row.labels[0] for row in rows]) != IGNORE
    return {(a, b): float(loss[valid & (a <= place) & (place < b)].mean()) for a, b in pairwise((0, *LENGTHS))}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_far_positions_become_likelier_with_each_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each extension the loss of the new positions falls, and comes nearer to that of the first 256."""
    know_the_peak()
    (tmp_path / "texts").mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if path.stat().st_size > 60_000 and not {"site-packages", "test", "tests", "pydoc_data"} & set(path.parts):
            name = "_".join(path.relative_to(library).parts)
            (tmp_path / "texts" / name).write_text(path.read_text(encoding="utf-8", errors="replace"), encoding="utf-8")
    recipe = tmp_path / "long.yaml"
    recipe.write_text(RECIPE.format(texts=tmp_path / "texts", phases="\n".join(map(phase, range(len(LENGTHS))))))
    run = Tiny(recipe, tmp_path / "run")
    run.walk(last="shards")

    resolved = run.resolve().recipe
    batches = Batches(resolved, run.run_dir / "shards")
    rows = Far(batches, resolved, load(run.run_dir / "tokenizer"))._furthest(LENGTHS[-1])
    courses = stages(resolved, batches)
    measured: list[dict[tuple[int, int], float]] = []

    def measure(model: ParallelModel, index: int) -> None:
        """As the phase left the model, under its own positions."""
        now = model.parts[0].rope
        rope = courses[index].rope
        assert rope is not None
        model.set_rope(rope)
        model.eval()
        measured.append(losses(model, rows))
        model.train()
        model.set_rope(now)

    honest = trainer.train_step
    firsts = {stage.first_step: stage.index for stage in courses[1:]}

    def observed(model: ParallelModel, optimizer: Any, batch: Batch, **options: Any) -> Any:
        if batch.step in firsts:
            measure(model, firsts[batch.step] - 1)
        result = honest(model, optimizer, batch, **options)
        if batch.step == batches.steps - 1:
            measure(model, len(courses) - 1)
        return result

    monkeypatch.setattr(trainer, "train_step", observed)
    run.pretrain()

    table = Table("trained to", *(f"{a:,}-{b:,}" for a, b in measured[0]), title="loss by position, nats per token")
    for length, found in zip(LENGTHS, measured, strict=True):
        table.add_row(f"{length:,}", *(f"{value:.3f}" for value in found.values()))
    Console(width=120).print(table)
    near = (0, LENGTHS[0])
    for (before, after), stretch in zip(pairwise(measured), list(measured[0])[1:], strict=True):
        assert after[stretch] < before[stretch]
        assert after[stretch] - after[near] < before[stretch] - before[near]
