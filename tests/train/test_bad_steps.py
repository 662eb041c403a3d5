"""Promise 5: a bad value never reaches a weight; it is counted, its batch is kept, and a run that cannot recover stops."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from lmworks.errors import UserError
from lmworks.model import Transformer
from lmworks.model.transformer import Loss
from lmworks.shards.batches import Batches
from lmworks.train.build import build_model
from lmworks.ui.terminal import Interrupted
from lmworks.watch.ledger import read_ledger
from lmworks.watch.policy import load_bad_batch
from tiny_run import STEPS, Tiny, before_each_step, checkpoint, curve, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EVERY = ("train.save_every=1 steps", "checkpoints.keep_last=99")


def nan_loss(loss: Loss) -> Loss:
    return replace(loss, total=loss.total * float("nan"), head=loss.head._replace(cross_entropy=loss.head.cross_entropy * float("nan")))


def infinite_gradient(loss: Loss) -> Loss:
    return replace(loss, total=loss.total * float("inf"))


def poison(patch: pytest.MonkeyPatch, steps: Collection[int], spoil: Callable[[Loss], Loss]) -> None:
    """Spoil the first micro-batch's loss in these steps of training; the others are sound, and must not cover it up."""
    honest, now = Transformer.loss, {"step": -1, "calls": 0}

    def count(step: int) -> None:
        now.update(step=step, calls=0)

    def spoiled(self: Transformer, *inputs: torch.Tensor) -> Any:
        loss = honest(self, *inputs)
        now["calls"] += torch.is_grad_enabled()
        return spoil(loss) if now["step"] in steps and now["calls"] == 1 and torch.is_grad_enabled() else loss

    before_each_step(patch, count)
    patch.setattr(Transformer, "loss", spoiled)


@pytest.mark.parametrize("spoil", [nan_loss, pytest.param(infinite_gradient, marks=pytest.mark.slow)])
def test_a_bad_step_changes_nothing_that_matters(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Loss], Loss]) -> None:
    """Between the checkpoints before and after the step no bit differs: weights, biases, optimizer, counts."""
    poison(monkeypatch, [14], spoil)
    tiny_copy.pretrain(*EVERY, "optimizer.ema_decay=0.9")
    run = tiny_copy.run_dir
    assert same_bits(checkpoint(run, 15), checkpoint(run, 14)) == []
    changed = same_bits(checkpoint(run, 16), checkpoint(run, 15))
    for name in ("model/head.weight", "model/layers.1.ffn.router.bias", "experts/counts", "optimizer/count", "average/head.weight"):
        assert name in changed
    (event,) = [event for event in read_ledger(run / "ledger.jsonl") if event["event"] == "bad_step"]
    assert event["step"] == 14 and event["in_a_row"] == 1
    lines = curve(run)
    assert [line["train/bad_steps"] for line in lines] == [0] * 14 + [1] * (STEPS - 14)
    assert lines[14]["optim/grad_norm"] is None and (lines[14]["train/loss"] is None) == (spoil is nan_loss)
    assert all(line["train/loss"] is not None for line in lines[15:])


def test_the_batch_is_kept_for_replay(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, [8, 17], nan_loss)
    tiny_copy.pretrain()
    monkeypatch.undo()
    recipe = tiny_copy.resolve().recipe
    kept = sorted((tiny_copy.run_dir / "bad_batches").iterdir())
    assert [path.name for path in kept] == ["step-00000008.npz", "step-00000017.npz"]
    batches = Batches(recipe, tiny_copy.run_dir / "shards")
    for path, step in zip(kept, (8, 17), strict=True):
        arrays, batch = load_bad_batch(path), batches.batch(step)
        for name in ("tokens", "labels", "cu_seqlens"):
            assert np.array_equal(arrays[name], getattr(batch, name)) and arrays[name].dtype == getattr(batch, name).dtype
    loss = build_model(recipe).parts[0].loss(*(torch.from_numpy(arrays[name]) for name in ("tokens", "labels", "cu_seqlens")))
    assert torch.isfinite(loss.total)


def test_a_run_that_cannot_recover_stops(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, range(10, 99), infinite_gradient)
    said = r"stopped at step 13: the gradient norm was not finite in 3 steps in a row \(stability.max_bad_steps\); such updates "
    with pytest.raises(UserError, match=said + "change no weight; the saved batches are in .*/bad_batches; lower optimizer.learning_rate"):
        tiny_copy.pretrain(*EVERY, "stability.max_bad_steps=3", "stability.max_rollbacks=0")
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(tiny_copy.run_dir, 10)) == []


def test_the_count_of_bad_steps_survives_a_resume(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted after two of three: the third comes first thing after the resume."""
    poison(monkeypatch, range(10, 99), infinite_gradient)
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 11 else None)
        with pytest.raises(Interrupted, match="saved at step 12"):
            tiny_copy.pretrain("stability.max_bad_steps=3", "stability.max_rollbacks=0")
    with pytest.raises(UserError, match="stopped at step 13: the gradient norm was not finite in 3 steps in a row"):
        tiny_copy.pretrain("stability.max_bad_steps=3", "stability.max_rollbacks=0")
    assert curve(tiny_copy.run_dir)[-1]["train/bad_steps"] == 2


def test_fp16_finds_its_scale_without_being_stopped(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overflows that halving mends are skipped steps, not bad ones; the scale goes on after a resume."""
    from lmworks.optim import clip as scaling

    monkeypatch.setattr(scaling.LossScaler.__init__, "__defaults__", (2.0**24, 4, "cpu"))
    fp16 = ("train.precision=fp16", "stability.max_bad_steps=1", "stability.max_rollbacks=0")
    reference = tiny_copy.copy(tiny_copy.run_dir.parent / "reference")
    reference.pretrain(*fp16)
    lines = curve(reference.run_dir)
    scales = [line["optim/loss_scale"] for line in lines]
    skipped = lines[-1]["train/bad_steps"]
    assert skipped > 1 and min(scales) < 2.0**24 and lines[-1]["train/loss"] < lines[0]["train/loss"]
    assert any(after > before for before, after in pairwise(scales))  # and it grows again
    assert not any(event["event"] == "bad_step" for event in read_ledger(reference.run_dir / "ledger.jsonl"))
    with monkeypatch.context() as patch:
        before_each_step(patch, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 9 else None)
        with pytest.raises(Interrupted):
            tiny_copy.pretrain(*fp16)
    tiny_copy.pretrain(*fp16)
    assert curve(tiny_copy.run_dir) == lines
    assert same_bits(checkpoint(tiny_copy.run_dir), checkpoint(reference.run_dir)) == []


def test_fp16_that_no_scale_mends_is_stopped(tiny_copy: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmworks.optim import clip as scaling

    monkeypatch.setattr(scaling.LossScaler.__init__, "__defaults__", (8.0, 1000, "cpu"))
    poison(monkeypatch, range(99), infinite_gradient)
    # 8, 4, 2, 1: the fourth overflow and the fifth cannot be mended any more
    with pytest.raises(UserError, match=r"stopped at step 5: the gradient norm was not finite in 2 steps in a row"):
        tiny_copy.pretrain("train.precision=fp16", "stability.max_bad_steps=2", "stability.max_rollbacks=0")
