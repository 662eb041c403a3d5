"""The balancing methods that look at many tokens at once: what they compute depends on neither micro-batches nor layouts.

Losses, gradients, updated weights and tokens per expert are compared with one process (`parity.compare`, with its tolerances). With the
loads of each micro-batch or rank in place of the step's, auxiliary losses are off by more than 1e-2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lmworks.model import Transformer
from lmworks.parallel.mesh import Ranks
from lmworks.recipe.schema.layout import Layout
from parallel.parity import ROWS, STEPS, Trained, alone, batch_of, compare, model_of, train
from rank_pool import RankPool

_LAYOUTS: list[Any] = [
    {"dp_shard": 2, "zero": 2},
    *(pytest.param(layout, marks=pytest.mark.slow) for layout in (
        {"tp": 2}, {"dp_shard": 3, "zero": 3},
        {"dp_shard": 2, "ep": 2, "zero": 0}, {"dp_replicate": 2}, {"dp_shard": 2, "tp": 2, "zero": 1},
    )),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["aux", "sinkhorn"])
@pytest.mark.parametrize("micro_batch_size", [3, ROWS])
def test_micro_batches_do_not_matter(kind: str, micro_batch_size: int) -> None:
    compare(alone(kind), [alone(kind, micro_batch_size)])


@pytest.mark.parametrize("kind", ["aux", "sinkhorn"])
@pytest.mark.parametrize("layout", _LAYOUTS, ids=str)
def test_layouts_do_not_matter(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    world = layout.get("dp_shard", 1) * layout.get("tp", 1) * layout.get("dp_replicate", 1)
    compare(alone(kind), ranks.run(train, world, layout, kind))


def test_one_micro_batch_of_each_rank_is_counted_in_its_own_forward_pass(ranks: RankPool) -> None:
    (both, calls, sums), (other, more, _) = ranks.run(_counted, 2, ROWS // 2)
    compare(alone("aux"), [both, other])
    assert calls == more == STEPS, "a pass in each step"
    assert sums == 3 * STEPS, "of the loads for the loss, and of the losses and loads of the step"
    assert _counted(ROWS)[1] == STEPS
    assert _counted(ROWS // 2)[1] == 4 * STEPS, "two micro-batches, each counted before"


def _counted(micro_batch_size: int) -> tuple[Trained, int, int]:
    """What was trained, how often the loss was computed, and how often ranks summed something over the tokens of a step."""
    calls, sums, loss, all_reduce = [], [], Transformer.loss, Ranks.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "loss", lambda *inputs: calls.append(1) or loss(*inputs))
        patch.setattr(Ranks, "all_reduce", lambda *inputs: sums.extend([1] * (inputs[-1] == "loss")) or all_reduce(*inputs))
        world = {"dp_shard": torch.distributed.get_world_size()} if torch.distributed.is_initialized() else {}
        return train(world, "aux", micro_batch_size), len(calls), len(sums)


@pytest.mark.parametrize("micro_batch_size", [3, ROWS])
def test_after_a_step_the_loss_counts_its_own_tokens(micro_batch_size: int) -> None:
    """A loss outside of a step, as in a profile, has neither the loads of the step before nor an exchange with other ranks."""
    model, _ = model_of("aux", Ranks(Layout()))
    model.train()
    (part,) = model.parts
    tokens, labels = (torch.from_numpy(values).long() for values in (batch_of(1).tokens, batch_of(1).labels))
    before = part.loss(tokens, labels).layers.aux
    with pytest.MonkeyPatch.context() as patch:
        model.forward_backward(batch_of(0), ROWS, micro_batch_size, 1.0)
        patch.setattr(Ranks, "all_reduce", lambda *_: pytest.fail("an exchange outside of a step"))
        after = part.loss(tokens, labels).layers.aux
    assert before is not None and after is not None and torch.equal(before, after)
