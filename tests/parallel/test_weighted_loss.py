"""An objective of token log-probabilities by weights on the loss of its labels: equal to plain autograd, on every kind of layout.

The objective couples tokens of different rows (a preference of each even row over the next one), as preference optimization does: its
gradient is right only if every token gets the weight that the whole step decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from lmworks.model import Transformer
from lmworks.optim.optimizer import build_optimizer
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.schema.layout import Layout, world_size
from lmworks.shards.batch import IGNORE
from lmworks.train.step import train_step
from parallel.parity import ROWS, batch_of, model_of, recipe_of, whole
from rank_pool import RankPool

PAIRS = ROWS // 2
LAYOUTS: list[tuple[dict[str, Any], str]] = [
    ({"dp_shard": 2, "zero": 2}, "moe"), ({"tp": 2}, "tied"), ({"cp": 2}, "moe"), ({"pp": 2, "pipeline_schedule": "zero-bubble"}, "mtp"),
    ({"dp_shard": 2, "zero": 3}, "lora-mtp"),
]  # fmt: skip
SLOW: list[tuple[dict[str, Any], str]] = [
    ({"dp_replicate": 3}, "dense"), ({"pp": 2}, "dense"), ({"dp_shard": 2, "ep": 2}, "mtp"), ({"dp_shard": 2, "zero": 0}, "mtp"),
    ({"dp_shard": 2, "zero": 3}, "mtp"), ({"pp": 2}, "lora-dense"), ({"tp": 2}, "lora-moe"),
    ({"dp_shard": 2, "tp": 2, "zero": 3}, "mla"), ({"cp": 2, "tp": 2}, "moe"), ({"pp": 2, "cp": 2}, "mtp"),
    ({"pp": 2, "dp_shard": 2}, "tied"),
    ({"pp": 2, "dp_shard": 2, "tp": 2, "ep": 2}, "moe"), ({"dp_shard": 2, "zero": 2}, "aux"),
]  # fmt: skip


@dataclass
class Stepped:
    """The score of every label, the objective, its gradients, and the weights after a step, by name and whole."""

    scores_BT: np.ndarray
    loss: float
    grads: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def preference(cross_entropy_BT: torch.Tensor) -> torch.Tensor:
    """The mean over pairs of rows of -log sigmoid of the difference of their summed log-probabilities."""
    logp_B = -cross_entropy_BT.sum(1)
    return -F.logsigmoid(0.1 * (logp_B[0::2] - logp_B[1::2])).mean()


def step(layout: dict[str, Any], kind: str, micro_batch_size: int) -> Stepped:
    """Score a batch, weigh its labels, and take a step on this rank of a layout."""
    recipe = recipe_of(kind.removeprefix("lora-"))
    model, _ = model_of(kind, Ranks(Layout(**layout)))  # neither dropout nor the losses of multi-token prediction and of routers
    optimizer = build_optimizer(model, recipe.optimizer)  # type: ignore[arg-type]
    batch = batch_of(0)
    scores_BT = model.token_cross_entropy(batch, micro_batch_size).requires_grad_()
    loss = preference(scores_BT) * PAIRS
    (weights_BT,) = torch.autograd.grad(loss, scores_BT)
    weighted = replace(batch, weights=weights_BT.numpy())
    result = train_step(
        model, optimizer, weighted.rows(*model.rank_sequences(ROWS)), sequences=ROWS, valid_tokens=PAIRS,
        micro_batch_size=micro_batch_size, lr_factor=1.0, max_grad_norm=recipe.optimizer.max_grad_norm, bias_update_rate=0.0,
    )  # fmt: skip
    expected = float((weights_BT * scores_BT.detach()).sum()) / PAIRS
    assert float(result.loss) == pytest.approx(expected, abs=1e-5), "the summed loss is the weighted one"
    grads = {name: whole(parameter.grad) for name, parameter in model.named_parameters() if parameter.grad is not None}
    return Stepped(scores_BT.detach().numpy(), loss.item() / PAIRS, grads, {n: whole(value) for n, value in model.state_dict().items()})


@cache
def alone(kind: str, micro_batch_size: int) -> Stepped:
    return step({}, kind, micro_batch_size)


@pytest.mark.parametrize("kind", ["dense", "tied", "moe", "mla", "mtp"])
def test_gradients_equal_plain_autograd(kind: str) -> None:
    """The gradient of the objective through plain logits, computed by autograd in one graph and clipped as the step clips it.

    Both in fp32 in other orders of summation: gradients differ by some 1e-6 of the largest in their tensor.
    """
    (model,) = build(recipe_of(kind), Ranks(Layout()), torch.device("cpu"))
    assert isinstance(model, Transformer)
    model.eval().plain()
    batch = batch_of(0)
    tokens, labels, cu_seqlens = (torch.from_numpy(array) for array in (batch.tokens, batch.labels, batch.cu_seqlens))
    logits = model(tokens, cu_seqlens)
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten().long(), ignore_index=IGNORE, reduction="none").view(labels.shape)
    loss = preference(nats)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe_of(kind).optimizer.max_grad_norm)
    found = alone(kind, 3)
    assert norm > 0
    assert found.loss == pytest.approx(loss.item(), abs=1e-6)
    np.testing.assert_allclose(found.scores_BT, nats.detach().numpy(), atol=1e-5)
    expected = {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.grads.keys() == expected.keys()
    assert any(name.startswith("mtp") for name, _ in model.named_parameters()) == (kind == "mtp")
    assert not any(name.startswith("mtp") for name in expected)
    for name, grad in expected.items():
        np.testing.assert_allclose(found.grads[name], grad, atol=1e-5 * np.abs(grad).max() + 1e-9, rtol=0, err_msg=name)


def test_weights_leave_out_the_z_loss_and_ones_change_nothing_else() -> None:
    """Weights of one and a model without z-loss: the same gradients as without weights."""
    recipe = recipe_of("dense")
    batch = batch_of(1)
    grads = []
    for weights, z_weight in ((np.ones(batch.tokens.shape, np.float32), 1e-3), (None, 0.0)):
        config = recipe.model_copy(update={"model": recipe.model.model_copy(update={"z_loss_weight": z_weight})})
        model = ParallelModel(build(config, Ranks(Layout()), torch.device("cpu")))
        model.forward_backward(replace(batch, weights=weights), ROWS, 2, 1.0)
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name in grads[1]:
        assert torch.equal(grads[0][name], grads[1][name]), name


def check(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    """Tolerances as in `parity.compare`: fp32 sums in another order."""
    expected = alone(kind, 2)
    for one in ranks.run(step, world_size(Layout(**layout)), layout, kind, 2):
        np.testing.assert_allclose(one.scores_BT, expected.scores_BT, atol=1e-5)
        assert one.loss == pytest.approx(expected.loss, rel=1e-5)
        for name, grad in one.grads.items():
            theirs = expected.grads[name]
            np.testing.assert_allclose(grad, theirs, atol=1e-5 * np.abs(theirs).max() + 1e-9, rtol=0, err_msg=name)
        for name, value in one.weights.items():
            np.testing.assert_allclose(value, expected.weights[name], atol=0.02 * 2e-3, rtol=0, err_msg=name)


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS, ids=str)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    check(ranks, layout, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), SLOW, ids=str)
def test_more_layouts_equal_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    check(ranks, layout, kind)
