"""The whole optimizer on a real model: learning, resuming, and promise 5, a bad value never reaches a weight."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from lmworks.errors import UserError
from lmworks.model.init import initialize
from lmworks.model.transformer import Transformer
from lmworks.optim import Optimizer, build_optimizer, clip_gradients
from lmworks.recipe.schema.model import Model, Moe
from lmworks.recipe.schema.train import Optimizer as Options
from small_config import small_config

MODEL = Model(
    **small_config(num_attention_heads=2, num_key_value_heads=1, head_dim=16),
    use_qk_norm=True, attention_bias=True,
    moe=Moe(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
)  # fmt: skip
OPTIONS = {
    "muon": Options(learning_rate=0.01, ema_decay=0.9),
    "spectral": Options(learning_rate=0.02, adam_learning_rate=0.01, update_scale="spectral"),
    "adamw": Options(kind="adamw", learning_rate=0.01, ema_decay=0.9),
}


def build(kind: str = "muon") -> tuple[Transformer, Optimizer]:
    model = initialize(Transformer(MODEL), 1)
    return model, build_optimizer(model, OPTIONS[kind])


def backward(model: Transformer, step: int) -> Tensor:
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(step % 4))
    labels = tokens[:, 1:].clone()
    model.zero_grad()
    loss = model.loss(tokens[:, :-1].int(), labels.int()).total / labels.numel()
    loss.backward()
    return loss.detach()


def everything(model: Transformer, optimizer: Optimizer) -> dict[str, Tensor]:
    """A copy of all weights and all state."""
    return {name: tensor.detach().clone() for name, tensor in [*model.state_dict().items(), *optimizer.state_dict().items()]}


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        # As bytes, so that NaN equals itself and the sign of zero counts.
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), right[name].reshape(-1).view(torch.uint8)), name


def select_step(optimizer: Optimizer, factor: float, finite: Tensor) -> None:
    """What `Optimizer.step` does where `finite` lives on an accelerator; on CPU it would branch."""
    optimizer.muon.step(factor, finite)
    optimizer.adamw.step(factor, finite)
    if optimizer.ema:
        optimizer.ema.step(finite)


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_it_learns(kind: str) -> None:
    model, optimizer = build(kind)
    first = backward(model, 0)
    for step in range(40):
        backward(model, step)
        finite = torch.isfinite(clip_gradients(model.parameters(), 1.0)[0])
        optimizer.step(1.0, finite)
    assert backward(model, 0) < 0.5 * first


@pytest.mark.parametrize("path", ["branch", "select"])
@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_poisoned_step_changes_no_bit(kind: str, path: str, poison: float) -> None:
    model, optimizer = build(kind)
    apply = optimizer.step if path == "branch" else lambda factor, finite: select_step(optimizer, factor, finite)
    for step in range(3):
        backward(model, step)
        apply(1.0, torch.tensor(True))
    # A negative zero must keep its sign, which multiplication by zero or addition of zero would take.
    with torch.no_grad():
        optimizer.parameters["layers.1.ffn.experts.up"][0, 0, 0] = -0.0
        optimizer.parameters["norm.weight"][0] = -0.0
    before = everything(model, optimizer)
    backward(model, 3)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        parameter.grad.view(-1)[0] = poison
    clip_gradients(model.parameters(), 1.0)
    apply(1.0, torch.tensor(False))
    assert_same_bits(everything(model, optimizer), before)
    backward(model, 4)
    apply(1.0, torch.tensor(True))
    after = everything(model, optimizer)
    assert all(tensor.isfinite().all() for tensor in after.values())
    assert after["count"] == 4
    for name in ("layers.1.ffn.experts.up", "norm.weight", "embedding.weight"):
        assert not torch.equal(after[name], before[name]), name


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_selecting_a_good_step_equals_taking_it(kind: str) -> None:
    (model, optimizer), (other_model, other) = build(kind), build(kind)
    for step in range(5):
        backward(model, step)
        backward(other_model, step)
        optimizer.step(0.5, True)
        select_step(other, 0.5, torch.tensor(True))
    assert_same_bits(everything(model, optimizer), everything(other_model, other))


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_state_loads_into_a_fresh_optimizer(kind: str) -> None:
    model, optimizer = build(kind)
    for step in range(3):
        backward(model, step)
        optimizer.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    resumed_model, resumed = build(kind)
    resumed_model.load_state_dict(weights)
    live = resumed.state_dict()
    resumed.load_state_dict(state)
    assert all(live[name] is tensor for name, tensor in resumed.state_dict().items())  # in place: what the checkpoint was given stays true
    for step in range(3, 6):
        for one, its in ((model, optimizer), (resumed_model, resumed)):
            backward(one, step)
            its.step()
    assert_same_bits(everything(model, optimizer), everything(resumed_model, resumed))


def test_state_is_whole_before_the_first_step_and_named_by_parameter() -> None:
    model, optimizer = build("muon")
    state = optimizer.state_dict()
    keys = set(state)
    for name, parameter in model.named_parameters():
        kinds = [kind for kind in ("momentum", "first", "second", "average") if f"{kind}.{name}" in state]
        assert kinds in (["momentum", "average"], ["first", "second", "average"]), name
        assert all(state[f"{kind}.{name}"].shape == parameter.shape for kind in kinds)
    backward(model, 0)
    optimizer.step()
    assert set(optimizer.state_dict()) == keys
    assert all(optimizer.state_dict()[name] is tensor for name, tensor in state.items())


def test_foreign_state_is_refused_by_name() -> None:
    _, optimizer = build("muon")
    state = dict(optimizer.state_dict())
    state["momentum.layers.7.attention.query.weight"] = torch.zeros(2, 2)
    with pytest.raises(UserError, match=r"does not fit.*momentum\.layers\.7\.attention\.query\.weight"):
        optimizer.load_state_dict(state)
    del state["momentum.layers.7.attention.query.weight"]
    state["first.norm.weight"] = torch.zeros(3)
    with pytest.raises(UserError, match=r"first\.norm\.weight"):
        optimizer.load_state_dict(state)


def test_reported_rates() -> None:
    _, optimizer = build("spectral")
    assert optimizer.learning_rates() == {"adamw": 0.01, "muon": 0.02}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_on_a_gpu_the_host_never_waits(kind: str) -> None:
    model = initialize(Transformer(MODEL), 1).cuda()
    optimizer = build_optimizer(model, OPTIONS[kind])
    good, bad = torch.tensor(True, device="cuda"), torch.tensor(False, device="cuda")
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(1.0, good)
    before = everything(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        clip_gradients(model.parameters(), 1.0)
        optimizer.step(1.0, bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same_bits(everything(model, optimizer), before)
