"""A trainer on two ranks equals one process: losses, weights, average and penalty, though data-parallel ranks read unequal shares.

The documents of the tiny corpus are uneven, and so are the steps of its ramp: of 5 or 7 sequences one rank reads one more than the other.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lmworks.metrics.log import read
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from lmworks.train.pretrain import pretrain
from lmworks.train.step import StepFlags, all_reduce_flags
from lmworks.watch.ledger import read_ledger
from tiny_run import Tiny, before_each_step, checkpoint, curve, training_context

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# Validation with the average in the middle of the run, a penalty that changes the second phase, an optimizer that keeps rounding small.
OPTIONS = (
    "optimizer.kind=adamw", "optimizer.eps=0.001", "optimizer.adam_learning_rate=null", "optimizer.ema_decay=0.8",
    "train.phases.general.tokens=1600 tokens", "train.phases.general.lr_schedule={warmup: 2 steps, decay: 2 steps}",
    "train.phases.long.tokens=1024 tokens", "train.phases.long.ewc={weight: 1000, sequences: 2}",
    "train.validate_every=3 steps", "train.sample_every=100%", "train.save_every=100%",
)  # fmt: skip


def trained(tiny: Tiny, to: Path, layout: Layout, *overrides: str) -> list[int]:
    """Pretrain as a rank of a layout; the seed of the dropout masks of each step."""
    seeds: list[int] = []
    recipe = tiny.resolve(f"run_dir={to}", *OPTIONS, *layout.overrides(), *overrides).recipe
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmworks.train.observe.detail_lines._LIMIT", math.inf)  # statistics of layers, although the run is short
        before_each_step(patch, lambda step: seeds.append(torch.initial_seed()))
        pretrain(training_context(recipe, to, ranks=Ranks(layout)))
    return seeds


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    run = tiny.copy(tmp_path_factory.mktemp("alone") / "run")
    trained(tiny, run.run_dir, Layout())
    return run


def farthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], kind: str) -> float:
    """The largest difference of a kind of tensors, relative to how far the furthest element of its tensor is from 0."""
    names = [name for name in expected if name.startswith(kind)]
    assert names and found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp_min(1e-6)) for name in names)


def flags() -> StepFlags:
    """As a rank of two that read other sequences, each of which has another beside it that reads the same."""
    ranks = Ranks(Layout(dp_shard=2, cp=2))
    dp, last, first = ranks.rank("dp"), ranks.global_rank == 3, ranks.is_first
    own = StepFlags(10 + dp, 1000 + dp, last, False, first, last, not first, detail=not first, batch_grows=first, sources=(4 + dp, 6))
    return all_reduce_flags(own, ranks)


def test_what_ranks_tell_each_other_before_a_step(ranks: Any) -> None:
    """Tokens, rows and sources once for two ranks that read the same; the clock is that of the first."""
    expected = StepFlags(21, 2001, True, False, True, True, True, detail=False, batch_grows=True, sources=(9, 12))
    assert ranks.run(flags, 4) == [expected] * 4


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, zero=3), Layout(cp=2, zero=1)], ids=("data", "context"))
def test_two_ranks_equal_one_process(ranks: Any, tiny: Tiny, tiny_copy: Tiny, alone: Tiny, layout: Layout) -> None:
    ranks.run(trained, 2, tiny, tiny_copy.run_dir, layout)
    found, expected = curve(tiny_copy.run_dir), curve(alone.run_dir)
    assert {line["train/batch_tokens"] / 32 % 2 for line in expected} == {0.0, 1.0}, "some steps have an odd number of sequences"
    for name in ("train/loss", "optim/grad_norm", "validation/loss", "train/ewc", "optim/learning_rate"):
        values, others = ([line[name] for line in lines if name in line] for lines in (found, expected))
        assert values, name
        np.testing.assert_allclose(values, others, rtol=1e-3, err_msg=name)
    for name in ("optim/update_ratio", "optim/weight_norm", "layers/1/grad_norm", "layers/1/update_ratio"):  # of the steps 1 and 10
        values, others = ([line[name] for line in read(run.run_dir) if name in line] for run in (tiny_copy, alone))
        assert values, name
        np.testing.assert_allclose(values, others, rtol=1e-2, err_msg=name)
    one, other = checkpoint(tiny_copy.run_dir), checkpoint(alone.run_dir)
    for kind in ("model/", "average/"):
        print(kind, farthest(one, other, kind))
        assert farthest(one, other, kind) < 5e-3
    assert [event["event"] for event in read_ledger(tiny_copy.run_dir / "ledger.jsonl")].count("bad_step") == 0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_two_ranks_in_16_bits_learn_what_one_process_does(ranks: Any, tiny: Tiny, tiny_copy: Tiny, alone: Tiny, precision: str) -> None:
    """Losses within 1% of one process in fp32: a sum of tokens or gradients of one rank alone is off by half, an average by two."""
    ranks.run(trained, 2, tiny, tiny_copy.run_dir, Layout(dp_shard=2, zero=3), f"train.precision={precision}")
    found, expected = curve(tiny_copy.run_dir), curve(alone.run_dir)
    for name, tolerance in (("train/loss", 0.01), ("validation/loss", 0.01), ("optim/grad_norm", 0.2)):
        values, others = ([line[name] for line in lines if name in line] for lines in (found, expected))
        np.testing.assert_allclose(values, others, rtol=tolerance, err_msg=name)


def by_clock(tiny: Tiny, to: Path, layout: Layout) -> tuple[list[str], list[int]]:
    """The checkpoints of a run that saves whenever the clock says so, and the seeds of its dropout masks."""
    seeds = trained(tiny, to, layout, "train.save_every_time=0.001 s", "checkpoints.keep_last=99")
    return sorted(path.name for path in (to / "checkpoints").glob("step-*")), seeds


def test_the_clock_of_the_first_rank_decides_for_all_and_each_has_its_dropout(ranks: Any, tiny: Tiny, tiny_copy: Tiny) -> None:
    (one, own), (other, others) = ranks.run(by_clock, 2, tiny, tiny_copy.run_dir, Layout(dp_replicate=2))
    assert one == other and len(one) > 3
    assert len({*own, *others}) == len(own) + len(others), "no two steps and no two ranks have the same masks"
