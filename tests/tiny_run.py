"""A whole run in seconds: some of the standard library's text, a mixture of experts of 60k parameters, two phases."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint import listing
from lmworks.checkpoint.tensor_files import Reader
from lmworks.evaluate.generation import replies
from lmworks.evaluate.in_loop import make_evaluation
from lmworks.metrics.log import read
from lmworks.optim.optimizer import Optimizer
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.recipe.load import Resolved, load_recipe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.run.runner import run_stages
from lmworks.shards.batch import Batch
from lmworks.train import trainer
from lmworks.train.observe import sampling
from lmworks.train.pretrain import pretrain
from lmworks.train.stage import TrainingContext
from lmworks.train.step import StepResult

# Nobody reads what a model of 60k parameters says; samples of the length that users get took a fifth of a run.
sampling._TOKENS = replies._SAMPLE_TOKENS = 8

MODULES = ("bisect", "calendar", "cmd", "colorsys", "copy", "csv", "fnmatch", "glob", "graphlib", "heapq", "json.decoder", "keyword",
           "linecache", "numbers", "queue", "reprlib", "sched", "shlex", "string", "textwrap", "timeit", "types")  # fmt: skip
# Steps of the two phases below: 6 of a ramp from 4 to 8 sequences and 7 whole ones; 8 of 4 sequences.
FIRST, SECOND = 13, 8
STEPS = FIRST + SECOND
# The same in 5 steps and 2, for what does not depend on how long it trains.
BRIEF = ("train.phases.general.tokens=1280 tokens", "train.phases.general.batch_ramp=null", "train.phases.long.tokens=512 tokens",
         "train.phases.general.lr_schedule={warmup: 1 steps, decay: 1 steps}",
         "train.phases.long.lr_schedule={kind: linear, warmup: 1 steps}")  # fmt: skip

RECIPE = """
name: tiny
seed: 5
threads: 1
corpus:
  max_validation_bytes: 6KB
  validation_fraction: 0.2
  dedup: {{minhash: null}}
  sources:
    - {{name: code, kind: code, path: {texts}/code, include: "*.py", domain: code, language: code, license: PSF-2.0}}
    - {{name: docs, kind: jsonl, path: {texts}/docs.jsonl, domain: docs, license: PSF-2.0}}
tokenizer: {{vocab_size: 512, sample_bytes: 200kB}}
model:
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 1
  intermediate_size: 64
  use_qk_norm: true
  z_loss_weight: 0.0001
  moe: {{n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, balance: {{bias_update_rate: 0.01}}}}
optimizer: {{learning_rate: 0.01, adam_learning_rate: 0.01}}
train:
  micro_batch_sequences: 4
  precision: fp32
  compile: false
  validate_every: 8 steps
  validation_bytes_per_domain: 600 bytes
  sample_every: 100%
  save_every: 4 steps
  phases:
    - name: general
      tokens: 3008 tokens
      mixture: {{code: 0.7, docs: 0.3}}
      sequence_length: 32 tokens
      global_batch_tokens: 256 tokens
      batch_ramp: {{start_tokens: 128 tokens, over: 6 steps}}
      lr_schedule: {{warmup: 4 steps, decay: 4 steps}}
    - name: long
      tokens: 2048 tokens
      mixture: {{docs: 1.0}}
      sequence_length: 64 tokens
      global_batch_tokens: 256 tokens
      learning_rate_scale: 0.5
      lr_schedule: {{kind: linear, warmup: 2 steps, min_lr_ratio: 0.1}}
      rope: {{theta: 50000.0}}
      bias_update_rate: 0.001
tune:
  data: [{{name: sums, kind: files, path: {texts}/chats.jsonl, max_rows: 100}}]
  tokens: 2Ki
  sequence_length: 64 tokens
  global_batch_tokens: 256 tokens
evaluate: {{references: false}}
export: {{huggingface: false, gguf: false}}
"""


@dataclass(frozen=True)
class Tiny:
    """A recipe file and the run directory that goes with it."""

    recipe: Path
    run_dir: Path

    @property
    def texts(self) -> Path:
        """Where the raw text lies: code/*.py, docs.jsonl, chats.jsonl."""
        return self.recipe.parent / "texts"

    def resolve(self, *overrides: str) -> Resolved:
        return load_recipe(self.recipe, [f"run_dir={self.run_dir}", *overrides])

    def copy(self, to: Path) -> Tiny:
        shutil.copytree(self.run_dir, to)
        return replace(self, run_dir=to)

    def walk(self, *overrides: str, last: str | None = None, allow: Sequence[str] = ()) -> list[tuple[str, str]]:
        """Walk the stages; returns what was told, as (stage, what)."""
        told: list[tuple[str, str]] = []
        resolved = self.resolve(*overrides)
        run_stages(
            resolved, last=last, allow=allow, on_event=lambda event: told.append((event.stage, event.kind)), resume_command="lmworks run"
        )
        return told

    def pretrain(self, *overrides: str) -> None:
        """The stage alone, without lock, stamp and comparison of recipes."""
        recipe = self.resolve(*overrides).recipe
        pretrain(training_context(recipe, self.run_dir, make_evaluation=make_evaluation))


def training_context(recipe: Recipe, run_dir: Path, **given: Any) -> TrainingContext:
    """The context of a stage that is run without the others."""
    return TrainingContext(recipe, run_dir, "lmworks run tiny.yaml", flops_per_token=lambda model, length, frozen: 1e6, **given)


def write_texts(folder: Path) -> Path:
    """Code, reference pages and conversations."""
    from pydoc_data.topics import topics

    (folder / "code").mkdir(parents=True)
    for name in MODULES:
        (folder / "code" / f"{name}.py").write_text(inspect.getsource(import_module(name)))
    lines = [json.dumps({"text": topics[name]}) for name in sorted(topics)[:60]]
    (folder / "docs.jsonl").write_text("\n".join(lines) + "\n")
    chats = [
        {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": f"{a} + {b} is {a + b}."}]}
        for a in range(18) for b in range(18)
    ]  # fmt: skip
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)) + "\n")
    return folder


def prepare(folder: Path) -> Tiny:
    """Texts, recipe, and a run directory up to its shards."""
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE.format(texts=write_texts(folder / "texts")))
    made = Tiny(recipe, folder / "run")
    made.walk(last="shards")
    return made


def before_each_step(patch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Call `act` with the step's number whenever the trainer of this process begins one."""
    honest = trainer.train_step

    def observed(model: ParallelModel, optimizer: Optimizer, batch: Batch, **options: Any) -> StepResult:
        act(batch.step)
        return honest(model, optimizer, batch, **options)

    patch.setattr(trainer, "train_step", observed)


def checkpoint(run_dir: Path, step: int | None = None, folder: str = "checkpoints") -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by path: model, optimizer, experts."""
    path = run_dir / folder / listing.name_of(step) if step is not None else listing.directories(run_dir / folder)[-1]
    reader = Reader(path)
    return {name: reader.read_slice(name, (0,) * len(record.shape), record.shape) for name, record in reader.table.items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(_bits(one[name]), _bits(other[name]))]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def curve(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what a clock or the machine decides, or what depends on where a process began: there it knows no
    rows yet, and writes a line of details."""
    details = ("layers/", "optim/weight_norm", "optim/update_ratio", "optim/unchanged_weights")
    of_process = ("perf/", "system/", "train/repeated_rows", *details)
    keep: Callable[[str], bool] = lambda name: name != "time" and not name.startswith(of_process)  # noqa: E731
    lines = [{name: value for name, value in line.items() if keep(name)} for line in read(run_dir)]
    return [line for line in lines if line.keys() > {"step"}]
