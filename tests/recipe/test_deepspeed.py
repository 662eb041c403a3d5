"""What does not combine with DeepSpeed is refused in one line that says what to do."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from lmworks.errors import UserError
from lmworks.parallel.mesh import alone
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.load import load_recipe
from lmworks.recipe.schema.recipe import Recipe
from lmworks.train.build import with_optimizer
from parallel.parity import recipe_of

RECIPE = """
name: few
corpus: {sources: [{name: web, kind: jsonl, path: web.jsonl, license: CC0-1.0}]}
optimizer: {kind: adamw}
layout: {dp_shard: 2, zero: 3}
train:
  compile: false
  deepspeed: {offload: cpu}
  phases: [{name: all, tokens: 1M tokens, mixture: {web: 1.0}, sequence_length: 256 tokens, global_batch_tokens: 4Ki tokens}]
size: 10M
"""


@pytest.fixture
def recipe(tmp_path) -> Any:
    path = tmp_path / "few.yaml"
    path.write_text(RECIPE)
    return path


@pytest.mark.parametrize(
    ("overrides", "key", "advice"),
    [
        (["layout.pp=2"], "layout.pp", "ZeRO-3 cannot be combined with a pipeline"),
        (["layout.pp=2", "layout.zero=1"], "layout.pp", "set pp=1"),
        (["layout.tp=2"], "layout.tp", "set tp=1"),
        (["layout.cp=2"], "layout.cp", "set cp=1"),
        (["layout.ep=2"], "layout.ep", "set ep=1"),
        (["layout.dp_replicate=2"], "layout.dp_replicate", "set dp_replicate=1"),
        (["layout.zero=0"], "layout.zero", "set zero to 1, 2 or 3"),
        (["layout.zero=2", "train.deepspeed.offload=nvme", "train.deepspeed.path=/fast"], "train.deepspeed.offload", "set layout.zero=3"),
        (["train.deepspeed.offload=nvme"], "train.deepspeed", "nvme needs path"),
        (["layout.zero=2", "train.deepspeed.offload_weights=cpu"], "train.deepspeed.offload_weights", "set layout.zero=3"),
        (["optimizer.kind=muon"], "optimizer.kind", "set optimizer.kind=adamw"),
        (["optimizer.ema_decay=0.9"], "optimizer.ema_decay", "set ema_decay=0"),
        (["train.precision=fp16"], "train.precision", "set bf16 or fp32"),
        (["train.compile=true"], "train.compile", "set train.compile=false"),
        (["stability.recheck_every=10 steps"], "stability.recheck_every", "leave recheck_every out"),
        (["stability.detect_anomaly=true"], "stability.detect_anomaly", "leave detect_anomaly out"),
        (["tune.ewc.weight=1"], "tune.ewc", "leave ewc out"),
        (["metrics.detail_every=10 steps"], "metrics.detail_every", "leave detail_every out"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refused(recipe, overrides: list[str], key: str, advice: str) -> None:
    with pytest.raises(UserError) as refused:
        load_recipe(recipe, overrides)
    assert key in str(refused.value) and advice in str(refused.value), refused.value
    assert "\n" not in str(refused.value)


def test_what_combines_is_taken(recipe) -> None:
    assert load_recipe(recipe).recipe.train.deepspeed is not None
    load_recipe(recipe, ["layout.zero=1", "train.compile=true"])
    load_recipe(recipe, ["train.deepspeed.offload=nvme", "train.deepspeed.offload_weights=cpu", "train.deepspeed.path=/fast"])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    tree = recipe_of("dense").model_dump(mode="json")
    tree["train"]["deepspeed"] = {"offload": "cpu"}
    recipe = Recipe.model_validate(tree)
    with pytest.raises(UserError, match=r"pip install 'lmworks\[deepspeed\]'"):
        with_optimizer(recipe, ParallelModel(build(recipe, alone(), torch.device("cpu"))))
