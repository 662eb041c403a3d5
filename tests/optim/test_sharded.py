"""The optimizer on sharded parameters: the same weights and state as one process, however they are placed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from placing import CASES, SHAPES, Case, Placer, here, stage_mesh
from torch import Tensor, nn

from lmworks.optim import Optimizer, clip_gradients, group_parameters, muon
from lmworks.recipe.schema.train import Optimizer as Options
from rank_pool import RankPool

# The arithmetic is one process' but for the order in which the squares of the gradient norm are added up: its last bit, 6e-8, goes
# through clipping into every gradient and is carried on by the momentum. A wrong part or count is off by 1e-3 and more.
TOLERANCE = 1e-6
OPTIONS = Options(learning_rate=0.01, ema_decay=0.9, weight_decay=0.1)
STEPS, POISONED, LIMIT = 3, 1, 3.0

Arrays = dict[str, np.ndarray]


def weights(names: tuple[str, ...] = tuple(SHAPES)) -> Arrays:
    generator = np.random.default_rng(1)
    made = {name: 0.05 * generator.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    return {name: made[name] for name in names}


def gradients(step: int, names: tuple[str, ...] = tuple(SHAPES)) -> Arrays:
    generator = np.random.default_rng(100 + step)
    made = {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}
    if step == POISONED:
        made["layers.1.experts.up"][3, 2, 5] = np.nan
    return {name: made[name] for name in names}


def build(
    parameters: Mapping[str, nn.Parameter], dtype: torch.dtype = torch.float32, process_groups: Sequence[dist.ProcessGroup] = ()
) -> Optimizer:  # fmt: skip
    """With small stacks, so that several buckets are under way."""
    optimizer = Optimizer(group_parameters(parameters.items(), OPTIONS), OPTIONS)
    groups = [group for group in optimizer.groups if group.kind == "muon"]
    optimizer.muon = muon.Muon(groups, dtype=dtype, stack_elements=500, process_groups=process_groups)
    return optimizer


def take(optimizer: Optimizer, grads: Mapping[str, Tensor], **how: Any) -> float:
    """One step as the trainer makes it; the norm before clipping."""
    for name, parameter in optimizer.parameters.items():
        parameter.grad = grads[name].detach()
    norm, _ = clip_gradients(optimizer.parameters.values(), LIMIT, **how)
    optimizer.step(0.7, torch.isfinite(norm))
    return norm.item()


@cache
def alone(dtype: torch.dtype = torch.float32, names: tuple[str, ...] = tuple(SHAPES)) -> tuple[Arrays, list[float]]:
    """Weights and state of one process after all steps, and the norms."""
    optimizer = build({name: nn.Parameter(torch.from_numpy(array)) for name, array in weights(names).items()}, dtype)
    norms = [take(optimizer, {n: torch.from_numpy(a) for n, a in gradients(step, names).items()}) for step in range(STEPS)]
    return everything(optimizer, lambda tensor: tensor.detach().numpy().copy()), norms


def everything(optimizer: Optimizer, read: Any) -> Arrays:
    tensors = {f"weight.{name}": tensor for name, tensor in optimizer.parameters.items()} | optimizer.state_dict()
    return {name: read(tensor) for name, tensor in tensors.items()}


@dataclass
class Outcome:
    """Of one rank."""

    own: Arrays
    expected: Arrays
    norms: list[float]
    orthogonalized: int  # elements times rows, of all that this rank did
    kept: bool  # whether a step that is selected away on the device left every bit


def _sharded(name: str, expected: Arrays, dtype: torch.dtype) -> Outcome:
    place = Placer(CASES[name])
    work: list[int] = []
    optimizer = build(place(weights()), dtype)
    norms = [take(optimizer, place(gradients(step)), group=dist.group.WORLD) for step in range(STEPS)]
    own = everything(optimizer, here)
    with pytest.MonkeyPatch.context() as patch:
        original = muon.orthogonalize
        patch.setattr(muon, "orthogonalize", lambda stack, steps: work.append(stack.numel() * stack.shape[1]) or original(stack, steps))
        for part in (optimizer.muon, optimizer.adamw):
            part.step(1.0, torch.tensor(False))
    after = everything(optimizer, here)
    placed = {entry: here(place({entry: array})[entry]) if entry != "count" else array for entry, array in expected.items()}
    return Outcome(own, placed, norms, sum(work), all(np.array_equal(own[entry], after[entry]) for entry in own))


def assert_equal(outcomes: list[Outcome], tolerance: float) -> None:
    for name in outcomes[0].own:
        off = sum(float(np.square(o.own[name].astype(np.float64) - o.expected[name]).sum()) for o in outcomes) ** 0.5
        size = sum(float(np.square(o.expected[name].astype(np.float64)).sum()) for o in outcomes) ** 0.5
        assert all(o.own[name].shape == o.expected[name].shape for o in outcomes), name
        assert off <= tolerance * size, f"{name} is off by {off / size:.1e}"


def assert_replicas_same(outcomes: list[Outcome]) -> None:
    """Ranks that should hold the same, as the random numbers tell, do so bit for bit."""
    for name in outcomes[0].own:
        seen: dict[bytes, bytes] = {}
        for outcome in outcomes:
            mine = outcome.own[name].tobytes()
            assert seen.setdefault(outcome.expected[name].tobytes(), mine) == mine, name


# All ranks share each matrix of these, so that none of the work is done twice; elsewhere parameters are plain or on several meshes.
SLOW = ("hsdp 2 x 2", "hsdp 3 x 2", "hsdp 2 x 2 over tp 2", "ep 2, efsdp 4 by rows", "fsdp 4 over tp 2, uneven")  # of a kind with others
SHARED = ("fsdp 3, uneven", "copies on 2", "hsdp 2 x 2", "hsdp 3 x 2", "ep 2 with copies", "ep 2 in fsdp 2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in CASES])
def test_equal_to_one_process(name: str, ranks: RankPool) -> None:
    """Three steps with weight decay, average, clipping and a poisoned one."""
    expected, norms = alone()
    assert np.isnan(norms[POISONED])
    outcomes = ranks.run(_sharded, CASES[name].world, name, expected, torch.float32)
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.norms, norms, rtol=TOLERANCE)
        assert outcome.kept
    assert_equal(outcomes, TOLERANCE)
    assert_replicas_same(outcomes)
    if name in SHARED:
        costs = [int(np.prod(shape)) * min(shape[-2:]) for entry, shape in SHAPES.items() if "layers" in entry and len(shape) > 1]
        work = [outcome.orthogonalized for outcome in outcomes]
        assert sum(work) == sum(costs)
        assert max(work) <= sum(costs) / len(work) + max(costs)


def _unclipped(name: str, expected: Arrays, dtype: torch.dtype) -> Outcome:
    place = Placer(CASES[name])
    optimizer = build(place(weights()), dtype)
    for step in (0, 1):
        for entry, grad in place(gradients(step)).items():
            optimizer.parameters[entry].grad = grad.detach()
        optimizer.step(0.7)
    placed = {entry: here(place({entry: array})[entry]) if entry != "count" else array for entry, array in expected.items()}
    return Outcome(everything(optimizer, here), placed, [], 0, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [pytest.param("hsdp 3 x 2", marks=pytest.mark.slow), "efsdp 2, ep 2, tp 2"])
def test_not_a_bit_is_lost_on_the_way(name: str, dtype: torch.dtype, ranks: RankPool) -> None:
    """Without clipping, whose norm is added up in another order, Muon makes the very bits of one process: parts travel in Newton-Schulz'
    type, to which one process rounds them too. (AdamW's fused kernel ends a tensor in scalar code, whose last bit may differ.)"""
    optimizer = build({entry: nn.Parameter(torch.from_numpy(array)) for entry, array in weights().items()}, dtype)
    for step in (0, 1):
        for entry, array in gradients(step).items():
            optimizer.parameters[entry].grad = torch.from_numpy(array)
        optimizer.step(0.7)
    expected = everything(optimizer, lambda tensor: tensor.detach().numpy().copy())
    for outcome in ranks.run(_unclipped, CASES[name].world, name, expected, dtype):
        for name in optimizer.muon.momentum:
            for entry in (f"momentum.{name}", f"weight.{name}"):
                assert outcome.own[entry].tobytes() == outcome.expected[entry].tobytes(), entry


STAGES = (
    ("embedding.weight", "layers.0.wide", "layers.0.odd", "layers.0.tall", "layers.0.attention.norm"),
    ("layers.1.router", "layers.1.experts.up", "layers.1.experts.down", "layers.1.square", "norm.weight", "embedding.weight"),
)


def _staged(expected: Arrays, given: bool) -> Outcome:
    """Two stages; the second has a copy of the embedding as its head."""
    case = Case({"fsdp": 2, "tp": 2}, CASES["fsdp 2 over tp 2"].rules)
    place = Placer(case, stage_mesh(2, case.mesh))
    stage = dist.get_rank() // 4
    groups = [place.mesh._flatten("stage").get_group()] if given else []
    optimizer = build(place(weights(STAGES[stage])), process_groups=groups)
    copies = [optimizer.parameters["embedding.weight"]] if stage else []
    norms = [
        take(optimizer, place(gradients(step, STAGES[stage])), group=dist.group.WORLD, holders=4, copies=copies) for step in range(STEPS)
    ]
    own = everything(optimizer, here)
    if given:
        assert any(bucket.collect.group is groups[0] for bucket in optimizer.muon._shared)
    return Outcome(own, {e: here(place({e: expected[e]})[e]) if e != "count" else expected[e] for e in own}, norms, 0, True)


@pytest.mark.parametrize("given", [False, True], ids=["new groups", "given groups"])
def test_pipeline_stages_are_clipped_together(given: bool, ranks: RankPool) -> None:
    expected, norms = alone(names=tuple(dict.fromkeys(STAGES[0] + STAGES[1])))
    outcomes = ranks.run(_staged, 8, expected, given)
    for outcome in outcomes:
        np.testing.assert_allclose(outcome.norms, norms, rtol=TOLERANCE)
    for stage in (outcomes[:4], outcomes[4:]):
        assert_equal(stage, TOLERANCE)
    embeddings = [[outcome.own["weight.embedding.weight"] for outcome in stage] for stage in (outcomes[:4], outcomes[4:])]
    assert all(np.array_equal(one, other) for one, other in zip(*embeddings, strict=True))


def _without_a_gradient(name: str) -> tuple[Arrays, Arrays]:
    place = Placer(CASES[name])
    optimizer = build(place(weights()))
    before = everything(optimizer, here)
    grads = place(gradients(0))
    for entry, parameter in optimizer.parameters.items():
        parameter.grad = None if entry in ("layers.0.wide", "layers.1.experts.up", "norm.weight") else grads[entry].detach()
    optimizer.step()
    return before, everything(optimizer, here)


def test_a_parameter_without_a_gradient_is_left_alone(ranks: RankPool) -> None:
    for before, after in ranks.run(_without_a_gradient, 8, "hsdp 2 x 2 over tp 2"):
        changed = {entry for entry in before if not np.array_equal(before[entry], after[entry])}
        touched = {entry.split(".", 1)[1] for entry in changed if entry.startswith(("weight", "momentum", "first"))}
        assert touched == SHAPES.keys() - {"layers.0.wide", "layers.1.experts.up", "norm.weight"}


def _save(name: str, folder: str) -> None:
    place = Placer(CASES[name])
    optimizer = build(place(weights()))
    for step in range(2):
        take(optimizer, place(gradients(step)), group=dist.group.WORLD)
    state = {**optimizer.state_dict(), **{f"weight.{entry}": p for entry, p in optimizer.parameters.items()}}
    dcp.save(state, checkpoint_id=folder)


def _resume(name: str, folder: str, expected: Arrays) -> Outcome:
    """On to the end from a checkpoint of other ranks."""
    place = Placer(CASES[name])
    optimizer = build(place({entry: np.zeros_like(array) for entry, array in weights().items()}))
    loaded = {entry: tensor.clone() for entry, tensor in optimizer.state_dict().items()}
    parameters = {f"weight.{entry}": p.data for entry, p in optimizer.parameters.items()}
    dcp.load({**loaded, **parameters}, checkpoint_id=folder)
    optimizer.load_state_dict(loaded)
    for step in range(2, STEPS):
        take(optimizer, place(gradients(step)), group=dist.group.WORLD)
    placed = {entry: here(place({entry: array})[entry]) if entry != "count" else array for entry, array in expected.items()}
    return Outcome(everything(optimizer, here), placed, [], 0, True)


@pytest.mark.parametrize(("before", "after"), [("fsdp 2 over tp 2", "fsdp 3, uneven"), ("fsdp 3, uneven", "ep 2, efsdp 2")])
def test_state_is_resharded_by_a_checkpoint(before: str, after: str, ranks: RankPool, tmp_path: Path) -> None:
    expected, _ = alone()
    ranks.run(_save, CASES[before].world, before, str(tmp_path))
    outcomes = ranks.run(_resume, CASES[after].world, after, str(tmp_path), expected)
    assert_equal(outcomes, TOLERANCE)
    assert_replicas_same(outcomes)


def _load_whole(name: str, state: Arrays) -> Outcome:
    place = Placer(CASES[name])
    optimizer = build(place(weights()))
    optimizer.load_state_dict({entry: torch.from_numpy(array) for entry, array in state.items()})
    own = {entry: here(tensor) for entry, tensor in optimizer.state_dict().items()}
    return Outcome(own, {e: here(place({e: a})[e]) if e != "count" else a for e, a in state.items()}, [], 0, True)


@pytest.mark.parametrize("name", ["fsdp 8, ranks with nothing", "efsdp 2, ep 2, tp 2"])
def test_whole_state_loads_into_parts(name: str, ranks: RankPool) -> None:
    state = {entry: array for entry, array in alone()[0].items() if not entry.startswith("weight")}
    for outcome in ranks.run(_load_whole, 8, name, state):
        assert all(np.array_equal(outcome.own[entry], outcome.expected[entry]) for entry in outcome.own)


def _average(name: str) -> tuple[Arrays, Arrays, Arrays, Arrays]:
    place = Placer(CASES[name])
    optimizer = build(place(weights()))
    take(optimizer, place(gradients(0)), group=dist.group.WORLD)
    before = everything(optimizer, here)
    assert optimizer.ema
    with optimizer.ema.in_place():
        inside = {entry: here(p) for entry, p in optimizer.parameters.items()}
    average = {entry: here(tensor) for entry, tensor in optimizer.ema.average.items()}
    return before, everything(optimizer, here), inside, average


def test_sharded_parameters_carry_their_average_and_come_back(ranks: RankPool) -> None:
    for before, after, inside, average in ranks.run(_average, 4, "hsdp 2 x 2"):
        assert all(np.array_equal(before[entry], after[entry]) for entry in before)
        assert all(np.array_equal(inside[entry], average[entry]) for entry in inside)
        assert any(not np.array_equal(inside[entry], before[f"weight.{entry}"]) for entry in inside)
