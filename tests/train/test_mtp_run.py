"""A run with latent attention and multi-token prediction: its loss is logged and falls, its weight changes with the phase, its experts are
balanced, and a stopped run ends with the same bits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from lmworks.io.files import write_json
from lmworks.model import Transformer
from lmworks.recipe.changes import as_tree
from lmworks.recipe.phases import final
from lmworks.recipe.schema.model import Mtp
from lmworks.train.build import identity
from lmworks.ui.terminal import Interrupted
from lmworks.weights.run_models import load_model
from tiny_run import FIRST, STEPS, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CHANGES = (
    "model.mtp={num_nextn_predict_layers: 1, loss_weight: 0.3}", "train.phases.long.mtp_loss_weight=0.1", "model.use_qk_norm=false",
        "model.num_key_value_heads=null",
    "model.mla={q_lora_rank: 12, kv_lora_rank: 16, qk_rope_head_dim: 4, qk_nope_head_dim: 8, v_head_dim: 8}",
)  # fmt: skip


def test_a_run_with_both(tiny_copy: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tiny_copy.copy(tmp_path / "stopped")
    weights: dict[int, float] = {}
    honest, now = Transformer.loss, {"step": 0}

    def watched(self: Transformer, *inputs: torch.Tensor) -> object:
        if self.training:
            weights[now["step"]] = self.mtp_loss_weight
        return honest(self, *inputs)

    monkeypatch.setattr(Transformer, "loss", watched)
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: now.update(step=step))
        tiny_copy.pretrain(*CHANGES)
    assert [weights[step] for step in range(STEPS)] == [0.3] * FIRST + [0.1] * (STEPS - FIRST)

    lines = curve(tiny_copy.run_dir)
    losses = [line["train/mtp_loss"] for line in lines]
    assert losses[-1] < losses[0] - 0.8 and lines[0]["train/loss"] == pytest.approx(losses[0], rel=0.1)
    state = checkpoint(tiny_copy.run_dir)
    tokens = 2816 + 2048
    assert state["experts/counts"].sum(-1).tolist() == [2 * tokens] * 2  # the sparse layer and the one that looks ahead
    assert state["model/mtp.0.block.ffn.router.bias"].abs().max() > 0.005  # several updates of 0.001
    assert all(f"experts/load_cv/{layer}" in lines[-1] for layer in (1, 2))
    assert {"optimizer/momentum.mtp.0.projection.weight", "optimizer/momentum.mtp.0.block.attention.kv_up.weight"} <= state.keys()

    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == FIRST + 2 else None)
        with pytest.raises(Interrupted):
            other.pretrain(*CHANGES)
    other.pretrain(*CHANGES)
    assert same_bits(checkpoint(other.run_dir), state) == []

    write_json(tiny_copy.run_dir / "resolved.json", as_tree(tiny_copy.resolve(*CHANGES).recipe))
    model = load_model(tiny_copy.run_dir, "base")
    assert model.config.mtp is not None and torch.equal(model.mtp[0].projection.weight, state["model/mtp.0.projection.weight"])


def test_the_weight_may_change_and_the_layers_may_not(tiny: Tiny) -> None:
    recipe = tiny.resolve(*CHANGES).recipe
    trained = final(recipe).mtp
    assert trained is not None and trained.loss_weight == 0.1 and final(tiny.resolve().recipe).mtp is None
    lighter, deeper = (
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"mtp": mtp})})
        for mtp in (Mtp(loss_weight=0.2), Mtp(num_nextn_predict_layers=2))
    )
    assert identity(lighter) == identity(recipe) != identity(deeper)
