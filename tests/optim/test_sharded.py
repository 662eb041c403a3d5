"""The optimizer on sharded parameters: the same weights and state as one process, however they are placed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from placing import CASES, SHAPES, Placer, here
from torch import Tensor, nn

from lmworks.optim import Optimizer, clip_gradients, group_parameters, muon
from lmworks.recipe.training import Optimizer as Options
from rank_pool import RankPool

# The arithmetic is one process' but for the order in which the squares of the gradient norm are added up: its last bit, 6e-8, goes
# through clipping into every gradient and is carried on by the momentum. A wrong part or count is off by 1e-3 and more.
TOLERANCE = 1e-6
OPTIONS = Options(learning_rate=0.01, ema=0.9, weight_decay=0.1)
STEPS, POISONED, LIMIT = 5, 2, 3.0

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


def build(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype = torch.float32, stack: int = 500) -> Optimizer:
    """With small stacks, so that several buckets are under way."""
    optimizer = Optimizer(group_parameters(parameters.items(), OPTIONS), OPTIONS)
    groups = [group for group in optimizer.groups if group.kind == "muon"]
    optimizer.muon = muon.Muon(groups, dtype=dtype, stack_elements=stack)
    return optimizer


def take(optimizer: Optimizer, grads: Mapping[str, Tensor], **how: Any) -> float:
    """One step as the trainer makes it; the norm before clipping."""
    for name, parameter in optimizer.parameters.items():
        parameter.grad = grads[name].detach()
    norm = clip_gradients(optimizer.parameters.values(), LIMIT, **how)
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


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(name: str, ranks: RankPool) -> None:
    """Five steps with weight decay, average, clipping and a poisoned one."""
    expected, norms = alone()
    assert np.isnan(norms[POISONED])
    outcomes = ranks.run(_sharded, CASES[name].world, name, expected, torch.float32)
    for outcome in outcomes:
        # What is plain on several ranks counts there as often, in one process once: `clip` divides by the holders.
        np.testing.assert_allclose(outcome.norms, norms, rtol=TOLERANCE)
        assert outcome.kept
    assert_equal(outcomes, TOLERANCE)
    assert_replicas_same(outcomes)
