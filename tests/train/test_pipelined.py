"""Training on pipeline stages, from the recipe to the checkpoint, is training in one process."""

from __future__ import annotations

import pytest

import tiny_run
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.train.pretrain import pretrain
from rank_pool import RankPool
from tiny_run import Tiny, curve, training_context

DECAY, RATES = "optimizer.layer_lr_decay=0.5", ("optim/learning_rate", "optim/adam_learning_rate")


def trained(tiny: Tiny, overrides: list[str]) -> None:
    recipe = tiny.resolve(*overrides).recipe
    layout = Layout.model_validate(recipe.layout.model_dump())
    pretrain(training_context(recipe, tiny.run_dir, ranks=Ranks(layout)))


def test_losses_and_validation_are_those_of_one_process(ranks: RankPool, tiny: Tiny, tmp_path) -> None:
    """fp32 sums in another order, and the steps after them: 1e-4 of each figure. The first stage has none of the layers with the largest
    rates."""
    one, two = tiny.copy(tmp_path / "one"), tiny.copy(tmp_path / "two")
    trained(one, [DECAY])
    ranks.run(trained, 2, two, [DECAY, "layout.pp=2"])
    expected, found = curve(one.run_dir), curve(two.run_dir)
    assert [line["step"] for line in found] == [line["step"] for line in expected] == list(range(1, tiny_run.STEPS + 1))
    for here, there in zip(found, expected, strict=True):
        for name in ("train/loss", "optim/grad_norm", "train/valid_tokens", "validation/loss", "validation/bits_per_byte", *RATES):
            assert here.get(name) == (pytest.approx(there[name], rel=1e-4) if name in there else None), (name, here["step"])
    # the checkpoint of two stages is that of one process: it has nothing left to do there
    trained(two, [DECAY])
    assert len(curve(two.run_dir)) == tiny_run.STEPS
