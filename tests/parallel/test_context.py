"""Sequences shared by ranks: equal to one process, in memory that shrinks with the number of ranks.

Losses, all gradients and all updated weights are compared with one process (`parity.compare`, with its tolerances).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from tests.model.flex_on_cpu import flex_on_cpu
from tests.model.test_long_attention import saved_bytes
from torch import Tensor

from lmworks.errors import UserError
from lmworks.model import Transformer, documents
from lmworks.model.documents import first_seen, from_cu_seqlens
from lmworks.model.init import initialize
from lmworks.model.router import Router
from lmworks.parallel import context
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallelize import build
from lmworks.recipe.mixers import cp_problems
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.model import SECTIONS, Model
from parallel.parity import MODELS, Trained, alone, batch_of, compare, recipe_of, train
from rank_pool import RankPool

_DEEP: dict[str, Any] = {"cp": 3, "zero": 3}
_WIDE: dict[str, Any] = {"cp": 2, "dp_shard": 2, "zero": 2}
_FAST: list[tuple[dict[str, Any], str]] = [({"cp": 2}, "mla"), ({"cp": 2}, "mtp"), (_WIDE, "moe")]
CASES = [
    pytest.param(layout, kind, marks=[] if (layout, kind) in _FAST else pytest.mark.slow)
    for layout in ({"cp": 2}, _DEEP, {"cp": 4, "zero": 0}, _WIDE) for kind in MODELS
    if kind != "sinkhorn" and SECTIONS.keys().isdisjoint(MODELS[kind])  # states are refused, which is tested below
]  # fmt: skip


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare(alone(kind), ranks.run(train, layout["cp"] * layout.get("dp_shard", 1), layout, kind))


def test_positions_are_those_of_one_process(ranks: RankPool) -> None:
    """RoPE hides a wrong origin, since it depends on differences alone."""
    expected = from_cu_seqlens((2, 16), _BOUNDS, None, torch.device("cpu")).positions_BT
    for rank, found in enumerate(ranks.run(_positions, 2)):
        assert torch.equal(found, context.slices(expected, 2, rank))


_BOUNDS = torch.tensor([0, 3, 7, 16, 21, 32], dtype=torch.int32)


def _positions() -> Tensor:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return context.split(tokens, tokens, _BOUNDS, Ranks(Layout(cp=2)))[3].begin(8)


@pytest.mark.parametrize("kind", ["mla", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dense", "tied", "sinks"))])
def test_the_way_of_gpus_equals_one_process(ranks: RankPool, kind: str) -> None:
    compare(alone(kind), ranks.run(_train_with_blocks, 2, kind))


def _train_with_blocks(kind: str) -> Trained:
    with pytest.MonkeyPatch.context() as patch:
        used = flex_on_cpu(patch)
        trained = train({"cp": 2}, kind)
    assert used
    return trained


@pytest.mark.slow
def test_also_with_activation_checkpointing(ranks: RankPool) -> None:
    compare(alone("tied"), ranks.run(_train_with, 2, {"activation_checkpointing": "full"}))


def _train_with(options: dict[str, Any]) -> Trained:
    return train({"cp": 2}, "tied", **options)


def _no_sum(whole_BKSW: Tensor, group: str, size: int) -> Tensor:
    return context.slices(whole_BKSW.transpose(1, 2), size, torch.distributed.get_rank()).transpose(1, 2).contiguous()


def _as_if_side_by_side(self: context.Slices, steps: int) -> Tensor:
    first = self.places_BT[:, :1]
    return first + torch.arange(steps) - self.start_BT


def _own_only(grad_key: Tensor, grad_value: Tensor, group: str, size: int) -> tuple[Tensor, Tensor]:
    key, value = (_no_sum(grad, group, size) for grad in (grad_key, grad_value))
    return key, value


def _one_too_many(places_BT: Tensor, window: int | None, start_BT: Tensor) -> Tensor:
    return first_seen(places_BT, window, start_BT).sub(1).clamp_min(0)


def _unordered(key: Tensor, value: Tensor, group: str, size: int) -> tuple[Tensor, Tensor]:
    wholes = [functional.wait_tensor(functional.all_gather_tensor(x.contiguous(), 2, group)) for x in (key, value)]
    return wholes[0], wholes[1]


def _own_load(group: Any, size: int) -> Any:
    """The router looks at a rank's own slices."""
    return Router.mean_load


def _own_ahead(*args: Any) -> Any:
    *kept, _, weights = split(*args)
    return (*kept, None, weights)


split = context.split
MISTAKES: dict[str, tuple[Any, str, Any, str]] = {
    "gradients of keys are not summed over ranks": (context, "_scatter_sum", _no_sum, "dense"),
    "positions of the second slice follow the first": (context.Slices, "begin", _as_if_side_by_side, "dense"),
    "a query sees a token before its document": (context, "first_seen", _one_too_many, "dense"),
    "keys in the order of the ranks": (context, "_gather", _unordered, "dense"),
    "gradients of gathered keys are a rank's own": (context, "_own_sums", _own_only, "tied"),
    "the auxiliary loss sees slices": (context, "_mean_load", _own_load, "moe"),
    "the next token is looked for in the slices": (context, "split", _own_ahead, "mtp"),
}


_FAST = "gradients of keys are not summed over ranks"


@pytest.mark.parametrize("mistake", [pytest.param(one, marks=[] if one == _FAST else pytest.mark.slow) for one in MISTAKES])
def test_a_planted_mistake_is_caught(ranks: RankPool, mistake: str) -> None:
    found = ranks.run(_train_wrongly, 2, mistake)
    with pytest.raises(AssertionError):
        compare(alone(MISTAKES[mistake][-1]), found)


def _train_wrongly(mistake: str) -> Trained:
    owner, name, wrong, kind = MISTAKES[mistake]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, wrong)
        return train({"cp": 2}, kind)


def test_what_a_rank_keeps_shrinks_with_the_ranks(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes kept between forward and backward are proportional to length / cp.

    Weights and what happens to share its memory make some 5%; keys and values of the whole sequence, were they kept, for 30%.
    """
    lengths = (2048, 4096, 8192)
    monkeypatch.setattr(documents, "_KEPT", 0)
    per_token = [kept / length for length, kept in zip(lengths, _kept({}, lengths), strict=True)]
    for cp in (2, 4):
        for found in ranks.run(_kept, cp, {"cp": cp, "zero": 0}, lengths):
            per_token += [kept / (length / cp) for length, kept in zip(lengths, found, strict=True)]
    assert max(per_token) < 1.1 * min(per_token)


def _kept(layout: dict[str, Any], lengths: tuple[int, ...]) -> list[int]:
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    config = Model.model_validate(MODELS["tied"] | layers | {"num_key_value_heads": 4, "head_dim": 16})
    mesh = Ranks(Layout(**layout))
    model = initialize(Transformer(config), 0)
    found = []
    for length in lengths:
        batch = batch_of(0, 1, length)
        whole = tuple(torch.from_numpy(array) for array in (batch.tokens, batch.labels, batch.cu_seqlens))
        inputs: Any = context.split(*whole, mesh) if mesh.size("cp") > 1 else whole
        found.append(saved_bytes(lambda inputs=inputs: model.loss(*inputs).total))
    return found


def test_what_cannot_be_shared_is_refused(ranks: RankPool) -> None:
    odd, sinkhorn = ranks.run(_refusals, 2)[0]
    assert odd == "layout.cp 2 cannot split sequences of 22 tokens; the length must be a multiple of 4"
    assert sinkhorn == "layout: balance.method sinkhorn needs whole sequences; choose bias, or set layout.cp to 1"
    of = {kind: [*cp_problems(Model.model_validate(MODELS[kind] | change), 2)] for kind, change in _ON_SLICES}
    assert of["dense"] == ["model.attention_dropout cannot be combined with layout.cp above 1; set it to 0"]
    assert of["delta"] == ["the states of model.gated_delta are passed from no rank to the next; set layout.cp to 1"]
    assert of["moe"] == []


_ON_SLICES: list[tuple[str, dict[str, Any]]] = [("dense", {"attention_dropout": 0.1}), ("delta", {}), ("moe", {})]


def _refusals() -> list[str]:
    mesh = Ranks(Layout(cp=2))
    told = []
    for run in (
        lambda: context.split(torch.zeros(1, 22), torch.zeros(1, 22), torch.tensor([0, 22]), mesh),
        lambda: build(recipe_of("sinkhorn"), mesh, torch.device("cpu")),
    ):
        with pytest.raises(UserError) as error:
            run()
        told.append(str(error.value))
    return told
