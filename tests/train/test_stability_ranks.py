"""The same policies on several ranks: all decide alike, and the one that is to blame is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_stability import SPIKE, high_loss

import tiny_run
from lmworks.errors import UserError
from lmworks.io import jsonl
from lmworks.model import Transformer
from lmworks.optim.groups import local
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.train import trainer
from lmworks.train.pretrain import pretrain
from lmworks.watch.ledger import read_ledger
from tiny_run import Tiny, curve, training_context


def trained(tiny: Tiny, overrides: list[str], plant: str, rank: int) -> str:
    """Pretrain as one of the copies of the model; what the run ended with. On one rank something goes wrong in step 6."""
    layout = Layout(dp_replicate=dist.get_world_size())
    honest_step, honest_loss, honest_append, now = trainer.train_step, Transformer.loss, jsonl.append, {"step": -1}

    def full(fd: int, record: dict[str, Any]) -> None:
        if now["step"] >= 6:
            raise OSError(28, "No space left on device")
        honest_append(fd, record)

    def step(model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
        now["step"] = batch.step
        result = honest_step(model, optimizer, batch, **options)
        if plant == "flip" and batch.step == 6 and dist.get_rank() == rank:
            weight = dict(model.named_parameters())["layers.1.attention.key.weight"]
            local(weight.data).reshape(-1).view(torch.uint8)[21] ^= 4
        return result

    def loss(self: Transformer, *inputs: Any) -> Any:
        found = honest_loss(self, *inputs)
        return high_loss(found) if plant == "spike" and now["step"] == 10 and torch.is_grad_enabled() and dist.get_rank() == rank else found

    trainer.train_step, Transformer.loss = step, loss  # type: ignore[assignment, method-assign]
    if plant == "full disk" and dist.get_rank() == rank:
        jsonl.append = full  # type: ignore[assignment]
    try:
        recipe = tiny.resolve(f"layout.dp_replicate={layout.dp_replicate}", *overrides).recipe
        pretrain(training_context(recipe, tiny.run_dir, ranks=Ranks(layout)))
        return "finished"
    except UserError as error:
        return str(error)
    finally:
        trainer.train_step, Transformer.loss = honest_step, honest_loss  # type: ignore[method-assign]
        jsonl.append = honest_append


def events(run: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_ledger(run / "ledger.jsonl") if line["event"] == name]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_flipped_bit_in_one_of_four_copies_is_found_and_the_rank_named(ranks, tiny_copy: Tiny, rank: int) -> None:
    told = ranks.run(trained, 4, tiny_copy, ["stability.recheck_every=4 steps"], "flip", rank)
    said = f"stopped at step 8: silent corruption on rank {rank}: its copy of model.layers.1.attention.key.weight differs from the others'"
    assert [line.startswith(said) for line in told] == [True] * 4, told
    (line,) = events(tiny_copy.run_dir, "corruption")
    assert (line["ranks"], line["certain"]) == ([rank], True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sound_copies_and_arithmetic_pass(ranks, tiny_copy: Tiny, precision: str) -> None:
    short = ["train.phases.general.tokens=1728 tokens", "train.phases.long.tokens=1024 tokens"]  # 8 steps and 4
    told = ranks.run(trained, 2, tiny_copy, ["stability.recheck_every=4 steps", f"train.precision={precision}", *short], "", 0)
    assert told == ["finished"] * 2
    assert not events(tiny_copy.run_dir, "corruption")
    assert [line["step"] for line in curve(tiny_copy.run_dir)] == list(range(1, 13))


def test_a_disk_that_is_full_for_one_rank_ends_the_run_on_all(ranks, tiny_copy: Tiny) -> None:
    """The first rank alone writes metrics and events."""
    one, two = ranks.run(trained, 2, tiny_copy, ["stability.max_failed_saves=2"], "full disk", 0)
    assert one == two
    assert "is full" in one and "it failed 2 times in a row: stability.max_failed_saves" in one


def test_a_spike_that_one_rank_sees_is_rolled_back_by_all(ranks, tiny_copy: Tiny) -> None:
    told = ranks.run(trained, 2, tiny_copy, [*SPIKE, "stability.spike.action=rollback"], "spike", 1)
    assert told == ["finished"] * 2
    (line,) = events(tiny_copy.run_dir, "rollback")
    assert (line["step"], line["to_step"], line["skip"]) == (10, 8, [8, 11])
    losses = [line["train/loss"] for line in curve(tiny_copy.run_dir)]
    assert len(losses) == tiny_run.STEPS - 3
    assert np.isfinite(losses).all()
