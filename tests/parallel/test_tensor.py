"""Matrices and the residual stream shared by ranks: equal to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.checkpoint.checkpoints import Checkpoints
from lmworks.errors import UserError
from lmworks.inference.generate import GenerateOptions, stream
from lmworks.optim.optimizer import Updates, build_optimizer
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.parallel_model import ParallelModel
from lmworks.parallel.parallelize import build
from lmworks.recipe.mixers import tp_problems
from lmworks.recipe.schema.artifacts import Checkpoints as Saving
from lmworks.recipe.schema.layout import Layout, world_size
from parallel.parity import alone, batch_of, compare, hashes, model_of, recipe_of, step_of, train
from rank_pool import RankPool

FAST: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2}, "moe"), ({"tp": 2, "dp_shard": 2, "zero": 3}, "mla"), ({"tp": 2}, "delta"),
    ({"tp": 2}, "moe_blocks"), ({"tp": 2}, "lightning"), ({"tp": 2, "dp_shard": 2, "zero": 3}, "post_norm"),
    ({"tp": 2}, "hybrid"), ({"tp": 2}, "mamba_alone"), ({"tp": 4}, "mamba_pairs"),
    ({"tp": 2}, "conv"),
]  # fmt: skip
SLOW: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2}, "dense"), ({"tp": 2}, "mtp"), ({"tp": 2, "dp_shard": 2, "zero": 0}, "tied"),
    ({"tp": 2}, "tied"), ({"tp": 4}, "mla"), ({"tp": 2, "dp_shard": 2, "zero": 1}, "moe"), ({"tp": 2, "dp_shard": 2, "zero": 2}, "mtp"),
    ({"tp": 2, "dp_replicate": 2}, "dense"), ({"tp": 2}, "sinks"), ({"tp": 2, "dp_shard": 2, "zero": 3}, "sinks"),
    ({"tp": 2}, "mamba"), ({"tp": 2}, "moe_mamba_blocks"), ({"tp": 2, "dp_shard": 2, "zero": 3}, "hybrid"), ({"tp": 4}, "mamba_alone"),
    ({"tp": 2, "dp_shard": 2, "zero": 3}, "mamba_pairs"), ({"tp": 2, "dp_shard": 2, "zero": 1}, "mamba"), ({"tp": 2, "pp": 2}, "mamba"),
    ({"tp": 2, "dp_replicate": 2}, "mamba_alone"), ({"tp": 2, "dp_shard": 2, "ep": 2, "zero": 3}, "moe_mamba_blocks"),
    ({"tp": 2, "dp_shard": 2, "zero": 3}, "conv"), ({"tp": 2, "pp": 2}, "conv"),
]  # fmt: skip


def _name(value: Any) -> str:
    return "-".join(f"{axis}{size}" for axis, size in value.items()) if isinstance(value, dict) else str(value)


def _world(layout: dict[str, Any]) -> int:
    return world_size(Layout(**layout))


@pytest.mark.parametrize(("layout", "kind"), FAST, ids=_name)
def test_equals_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare(alone(kind), ranks.run(train, _world(layout), layout, kind))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), SLOW, ids=_name)
def test_more_layouts_equal_one_process(ranks: RankPool, layout: dict[str, Any], kind: str) -> None:
    compare(alone(kind), ranks.run(train, _world(layout), layout, kind))


@pytest.mark.slow
def test_also_with_activation_checkpointing(ranks: RankPool) -> None:
    compare(alone("moe"), ranks.run(_train, 2, {"tp": 2}, "moe", {"activation_checkpointing": "full"}))


def _train(layout: dict[str, Any], kind: str, options: dict[str, Any]) -> Any:
    return train(layout, kind, **options)


@pytest.mark.parametrize("kind", ["dense", "moe", "mla", "delta", "lightning", "post_norm", "hybrid", "mamba_alone", "conv"])
def test_generates_what_one_process_generates(ranks: RankPool, kind: str) -> None:
    """Prompts of odd lengths and steps of one token, which do not divide: the stream goes whole. fp32 sums in another order: 1e-5."""
    expected = _generated({}, kind)
    for tokens, logprobs in ranks.run(_generated, 2, {"tp": 2}, kind):
        assert tokens == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=1e-5)


def _generated(layout: dict[str, Any], kind: str) -> tuple[list[int], list[float]]:
    ranks = Ranks(Layout(**layout))
    (model,) = build(recipe_of(kind), ranks, torch.device("cpu"))
    steps = stream(model, [[1, 2, 3], [4, 5, 6, 7, 8]], GenerateOptions(max_new_tokens=6))
    found = [token for step in steps for token in step if token is not None]
    return [token.id for token in found], [token.logprob for token in found]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "mamba_pairs" else pytest.mark.slow) for _, kind in FAST]
)
def test_a_checkpoint_is_read_on_another_number_of_ranks(ranks: RankPool, kind: str, tmp_path: Path) -> None:
    """Weights and the state of the optimizer after a step, bit for bit."""
    saved = ranks.run(_saved, 2, {"tp": 2}, kind, tmp_path)
    most = {"tp": 4} if not tp_problems(recipe_of(kind).model, 4) else {"tp": 2, "dp_shard": 2, "zero": 3}
    for held in [*saved, _read({}, kind, tmp_path), *ranks.run(_read, 4, most, kind, tmp_path)]:
        assert held == saved[0]


def _saved(layout: dict[str, Any], kind: str, folder: Path) -> dict[str, str]:
    model, optimizer = _with_optimizer(layout, kind)
    model.train()
    step_of(model, optimizer, batch_of(0), None)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with Checkpoints(folder, Saving(asynchronous=False), {}) as checkpoints:
        checkpoints.save(1, state, {})
    return hashes(state["model"] | state["optimizer"])


def _read(layout: dict[str, Any], kind: str, folder: Path) -> dict[str, str]:
    model, optimizer = _with_optimizer(layout, kind)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with Checkpoints(folder, Saving(), {}) as checkpoints:
        assert checkpoints.load_latest(state) is not None
    return hashes(state["model"] | state["optimizer"])


def _with_optimizer(layout: dict[str, Any], kind: str) -> tuple[ParallelModel, Updates]:
    model, _ = model_of(kind, Ranks(Layout(**layout)))
    return model, build_optimizer(model, recipe_of(kind).optimizer)


def test_callers_of_the_model_see_whole_tensors(ranks: RankPool) -> None:
    expected = _seen({})
    for found in ranks.run(_seen, 2, {"tp": 2}):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=1e-5, atol=1e-5)


def _seen(layout: dict[str, Any]) -> list[Any]:
    (model,) = build(recipe_of("dense"), Ranks(Layout(**layout)), torch.device("cpu"))
    batch = batch_of(0)
    found = []
    with torch.no_grad():
        for length in (24, 23):
            tokens = torch.from_numpy(batch.tokens[:2, :length].copy())
            labels = torch.from_numpy(batch.labels[:2, :length].copy())
            hidden, _ = model.hidden(tokens)
            found += [hidden.numpy(), model.logits(hidden).numpy(), model.loss(tokens, labels).head.cross_entropy.numpy()]
    return found


def test_sizes_that_do_not_divide_are_refused(ranks: RankPool) -> None:
    heads = "layout: tp 4 does not divide model.num_key_value_heads 2"
    assert set(ranks.run(_refused, 4, {"tp": 4}, 24)) == {heads}
    length = "layout.tp 2 does not divide sequences of 23 tokens; use a multiple of 2"
    assert set(ranks.run(_refused, 2, {"tp": 2}, 23)) == {length}
    assert tp_problems(recipe_of("mla").model, 4) == [], "latent attention has no key heads of its own"


def _refused(layout: dict[str, Any], length: int, kind: str = "dense") -> str:
    try:
        train(layout, kind, length=length)
    except UserError as error:
        return str(error)
    return "accepted"
