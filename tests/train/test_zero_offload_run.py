"""A whole run that begins with DeepSpeed, is stopped, and goes on with other stages and with our own engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tiny_run
from lmworks.metrics.log import read
from lmworks.parallel.mesh import Ranks
from lmworks.train import trainer
from lmworks.train.pretrain import pretrain
from lmworks.ui.terminal import Preempted
from lmworks.watch.ledger import read_ledger
from rank_pool import RankPool
from tiny_run import Tiny, curve, training_context

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (extra: deepspeed)")

# A larger eps: with 1e-8, first updates are signs of rounding. Saved where it is stopped.
ADAMW = ["optimizer.kind=adamw", "optimizer.eps=1e-4", "train.save_every=100%", "checkpoints.asynchronous=false"]
SEGMENTS = [
    (["layout.zero=3", "train.deepspeed.offload=cpu"], 9),
    (["layout.zero=1", "train.deepspeed.offload=cpu"], 18),
    (["layout.zero=2"], 25),
    (["layout.zero=3", "train.deepspeed.offload=none"], None),
]  # fmt: skip


def segments(tiny: Tiny) -> list[str]:
    """The run, stopped by SIGTERM on one rank before the given steps; what each part of it ended with."""
    honest, said = trainer.train_step, []
    for overrides, stop in SEGMENTS:

        def step(model: Any, optimizer: Any, batch: Any, stop: int | None = stop, **options: Any) -> Any:
            if batch.step == stop and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return honest(model, optimizer, batch, **options)

        trainer.train_step = step
        recipe = tiny.resolve(*ADAMW, "layout.dp_shard=2", *overrides).recipe
        try:
            pretrain(training_context(recipe, tiny.run_dir, ranks=Ranks(recipe.layout)))
            said.append("finished")
        except Preempted as stopped:
            said.append(str(stopped))
        finally:
            trainer.train_step = honest
    return said


def losses(run: Path) -> list[float]:
    return [line["train/loss"] for line in read(run)]


def test_a_run_that_changes_its_engine_equals_one_that_does_not(tiny: Tiny, tmp_path: Path) -> None:
    """The same batches in the same order, the same figures; losses of the two differ by rounding (2e-7 in 26 steps; norms 1e-5),
    which more steps of AdamW at a high rate may let grow."""
    plain, mixed = tiny.copy(tmp_path / "plain"), tiny.copy(tmp_path / "mixed")
    plain.pretrain(*ADAMW)
    pool = RankPool()
    try:
        told = pool.run(segments, 2, mixed, seconds=1500)
    finally:
        pool.close()
    for said in told:
        assert [f"saved at step {step}" in one for one, step in zip(said, (10, 19, 26), strict=False)] == [True] * 3, told
        assert said[3:] == ["finished"], told
    found, expected = curve(mixed.run_dir), curve(plain.run_dir)
    assert [line["step"] for line in found] == list(range(1, tiny_run.STEPS + 1))
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    for name in ("train/valid_tokens", "train/tokens", "train/batch_tokens", "optim/adam_learning_rate", "optim/learning_rate"):
        assert [line[name] for line in found] == [line[name] for line in expected], name
    for name, tolerance in (("train/loss", 1e-4), ("optim/grad_norm", 1e-3), ("train/z_loss", 1e-4)):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=tolerance), name
    measured = [(line["step"], line["validation/bits_per_byte"]) for line in found if "validation/bits_per_byte" in line]
    assert [step for step, _ in measured] == [8, 16, 21]
    events = [line["event"] for line in read_ledger(mixed.run_dir / "ledger.jsonl")]
    assert events.count("resume") == 3 and events.count("start") == 1 and events.count("finish") == 1
