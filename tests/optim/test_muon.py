"""Muon equals torch's on each matrix alone, whatever it is stacked with, and experts are matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from lmworks.optim.groups import Group
from lmworks.optim.muon import Muon, orthogonalize, orthogonalize_plain, update_scale

SHAPES = {"square.a": (24, 24), "wide.a": (16, 40), "wide.b": (16, 40), "tall": (40, 16), "square.b": (24, 24), "thin": (4, 64)}
STEPS = 25


def parameters(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, nn.Parameter]:
    torch.manual_seed(seed)
    return {name: nn.Parameter(0.05 * torch.randn(shape)) for name, shape in shapes.items()}


def gradient(weight: Tensor, name: str, step: int) -> Tensor:
    """Noise and a pull that depends on the weight, so that a wrong weight makes the later gradients wrong too."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1000 * step + len(name) + ord(name[-1])))
    return noise + 3 * weight.detach()


def group(named: dict[str, nn.Parameter], rate: float = 0.01, decay: float = 0.1) -> Group:
    return Group("muon", rate, decay, 1.0, named)


def run(muon: Muon, named: dict[str, nn.Parameter], steps: int = STEPS) -> None:
    for step in range(steps):
        for name, weight in named.items():
            weight.grad = gradient(weight, name, step)
        muon.step(0.5 + 0.5 * math.cos(step))


def run_torch(named: dict[str, nn.Parameter], scale: str, nesterov: bool) -> torch.optim.Muon:
    adjust = {"rms": "match_rms_adamw", "spectral": "original"}[scale]
    muon = torch.optim.Muon(named.values(), lr=0.01, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=adjust)
    for step in range(STEPS):
        muon.param_groups[0]["lr"] = 0.01 * (0.5 + 0.5 * math.cos(step))
        for name, weight in named.items():
            weight.grad = gradient(weight, name, step)
        muon.step()
    return muon


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["rms", "spectral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_torch(scale: str, nesterov: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and state after 25 steps, as a share of how far the weights moved."""
    # In bf16 most matrices come out bit-equal; where the norm is added up in another order, its last bit is 2^-8 = 0.4% of the update.
    # In fp32 (torch's own code with its cast to bf16 taken out) only summation order is left, and 25 steps of feedback upon it.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    ours, theirs = parameters(SHAPES), parameters(SHAPES)
    start = {name: weight.detach().clone() for name, weight in ours.items()}
    muon = Muon([group(ours)], scale=scale, nesterov=nesterov, dtype=dtype)
    run(muon, ours)
    if dtype == torch.float32:
        monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.float().clone())
    reference = run_torch(theirs, scale, nesterov)
    for name, weight in theirs.items():
        moved = (weight - start[name]).norm()
        assert (ours[name] - weight).norm() < tolerance * moved, name
        buffer = reference.state[weight]["momentum_buffer"]
        assert (muon.momentum[name] - buffer).norm() < tolerance * buffer.norm(), name


@pytest.mark.parametrize("scale", ["rms", "spectral"])
def test_equal_to_the_plain_twin(scale: str) -> None:
    """fp32 against the update written out for one matrix, experts one by one: 1e-5 of the way, summation order only."""
    shapes = {"experts.up": (3, 16, 24), "experts.down": (3, 24, 16), "alone": (16, 24)}
    ours, theirs = parameters(shapes), {name: weight.detach().clone() for name, weight in parameters(shapes).items()}
    start = {name: weight.clone() for name, weight in theirs.items()}
    momenta = {name: torch.zeros_like(weight) for name, weight in theirs.items()}
    muon = Muon([group(ours)], scale=scale, dtype=torch.float32)
    run(muon, ours)
    for step in range(STEPS):
        rate = 0.01 * (0.5 + 0.5 * math.cos(step))
        for name, weight in theirs.items():
            grad = gradient(weight, name, step)
            momenta[name] = 0.95 * momenta[name] + 0.05 * grad
            for w, m, g in zip(*(t.view(-1, *t.shape[-2:]) for t in (weight, momenta[name], grad)), strict=True):
                update = orthogonalize_plain(0.95 * m + 0.05 * g)
                w.copy_((1 - rate * 0.1) * w - rate * update_scale(*w.shape, scale) * update)
    for name, weight in theirs.items():
        assert (ours[name] - weight).norm() < 1e-5 * (weight - start[name]).norm(), name
        assert (muon.momentum[name] - momenta[name]).norm() < 1e-5 * momenta[name].norm(), name


def test_stacking_changes_nothing() -> None:
    """However the matrices are cut into stacks, inside an expert tensor too, the result is the same bits."""
    shapes = {**SHAPES, "experts": (5, 16, 40), "experts.down": (5, 40, 16)}
    results = []
    for elements in (1, 1300, 1 << 27):
        named = parameters(shapes)
        run(Muon([group(named)], stack_elements=elements), named, steps=4)
        results.append({name: weight.detach() for name, weight in named.items()})
    for other in results[1:]:
        for name, weight in results[0].items():
            assert torch.equal(weight, other[name]), name


def test_groups_have_their_own_rate_and_decay() -> None:
    named = parameters({"still": (16, 40), "slow": (16, 40), "fast": (16, 40)})
    start = {name: weight.detach().clone() for name, weight in named.items()}
    groups = [group({name: named[name]}, rate, 0.0) for name, rate in (("still", 0.0), ("slow", 0.001), ("fast", 0.003))]
    muon = Muon(groups)
    for weight in named.values():
        weight.grad = torch.eye(16, 40)
    muon.step()
    moved = {name: (weight - start[name]).norm().item() for name, weight in named.items()}
    assert moved["still"] == 0
    assert moved["fast"] == pytest.approx(3 * moved["slow"], rel=1e-4)


def test_orthogonalize_brings_singular_values_near_one() -> None:
    """The quintic does not converge to 1 but into a band around it; Jordan gives 0.7 to 1.2 for singular values that are not tiny."""
    torch.manual_seed(1)
    stack = torch.randn(4, 32, 48) * torch.tensor([1e-6, 1.0, 30.0, 1e4])[:, None, None]
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.linalg.svdvals(orthogonalize(stack.to(dtype)).float())
        assert values.min() > 0.6
        assert values.max() < 1.3


def test_rms_scale_makes_updates_of_adamw_size() -> None:
    torch.manual_seed(1)
    for rows, cols in ((64, 64), (32, 128), (128, 32)):
        update = orthogonalize_plain(torch.randn(rows, cols)) * update_scale(rows, cols, "rms")
        assert 0.15 < update.square().mean().sqrt() < 0.25


def test_an_expert_that_saw_nothing_stays_finite_and_put() -> None:
    named = parameters({"experts": (3, 16, 24)})
    before = named["experts"].detach().clone()
    named["experts"].grad = torch.randn(3, 16, 24)
    named["experts"].grad[1] = 0
    Muon([group(named, decay=0.0)]).step()
    assert torch.equal(named["experts"][1], before[1])
    assert not torch.equal(named["experts"][0], before[0])
    assert named["experts"].isfinite().all()


def test_a_parameter_without_gradient_is_left_alone() -> None:
    named = parameters({"used": (16, 24), "unused": (16, 24)})
    before = named["unused"].detach().clone()
    named["used"].grad = torch.randn(16, 24)
    Muon([group(named)]).step()
    assert torch.equal(named["unused"], before)


@pytest.mark.parametrize(("device", "stacks"), [("cpu", 3), ("meta", 1)])
def test_stacks_fit_the_cache_of_a_cpu_and_are_large_elsewhere(device: str, stacks: int) -> None:
    matrices = {f"m{number}": nn.Parameter(torch.empty(512, 512, device=device)) for number in range(12)}
    assert len(Muon([group(matrices)])._alone) == stacks
