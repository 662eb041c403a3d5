"""Presets of published hybrids have their published numbers of parameters, states of constant size, and costs that count them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from lmworks.model import Transformer
from lmworks.model.init import initialize
from lmworks.optim.groups import decays, is_matrix, local
from lmworks.parallel.mesh import Ranks
from lmworks.parallel.tensor import shard_tensors
from lmworks.plan.counts import count_by_component, flops_per_token
from lmworks.plan.memory import kv_cache_bytes, layer_activations, rank_parameters
from lmworks.recipe.parameters import parameters
from lmworks.recipe.schema.layout import Layout
from lmworks.recipe.schema.mixers import Lightning, Mamba, ShortConv
from lmworks.recipe.schema.model import Model
from made_up_ranks import made_up_ranks
from saved_bytes import saved_bytes

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48,
}  # fmt: skip
MODELS = {
    "hybrid": Model(**_SMALL, layer_types=("hybrid",), mamba=Mamba(num_heads=4, head_dim=8, state_size=16, n_groups=2, norm_groups=2)),
    "mamba": Model(**_SMALL, layer_types=("linear_attention", "full_attention"), mamba=Mamba(num_heads=4, head_dim=8, state_size=16)),
    "lightning": Model(**_SMALL, layer_types=("linear_attention", "full_attention"), lightning=Lightning()),
    "conv": Model(**_SMALL, layer_types=("conv", "full_attention"), short_conv=ShortConv()),
}


def preset(name: str) -> Model:
    file = Path(__file__).parents[2] / "recipes" / "models" / f"{name}.yaml"
    return Model.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))


def test_active_parameters_of_minimax() -> None:
    """Published: 45.9 billion, without the embedding and the head, as of the report's other models."""
    counts = count_by_component(preset("minimax-01-456b-a46b"))
    assert counts.active - 2 * counts.embedding == pytest.approx(45.9e9, rel=0.01)


def test_parameters_of_qwen3_next_outside_of_the_embedding_and_the_head() -> None:
    """Published: 79 billion in total, 3 billion active."""
    counts = count_by_component(preset("qwen3-next-80b-a3b"))
    assert counts.total - 2 * counts.embedding == pytest.approx(79e9, rel=0.01)
    assert round((counts.active - 2 * counts.embedding) / 1e9) == 3


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_module(name: str) -> None:
    model = MODELS[name]
    with torch.device("meta"):
        built = {key: tuple(parameter.shape) for key, parameter in Transformer(model).named_parameters()}
    assert {parameter.name: parameter.shape for parameter in parameters(model)} == built


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_of_tensor_parallelism_holds_what_the_plan_says(name: str) -> None:
    model, layout = MODELS[name], Layout(tp=2)
    with torch.device("meta"):
        part = Transformer(model)
    with made_up_ranks(1, 2):
        shard_tensors(part, Ranks(layout))
        held = {key: local(parameter).numel() for key, parameter in part.named_parameters()}
        assert sum(held.values()) == rank_parameters(model, layout)[0]
    whole = {parameter.name: parameter.size for parameter in parameters(model)}
    replicated = [key for key, size in held.items() if size == whole[key] and ".attention." in key]
    assert all(".conv." in key for key in replicated) and bool(replicated) == (name in ("hybrid", "mamba"))


def test_activations_of_ranks_that_share_a_group_by_hand() -> None:
    """Two groups on four ranks: each rank has B and C of a whole group, in its projection, before and after SiLU."""
    model = MODELS["hybrid"]
    one, four = (layer_activations(model, 0, Layout(tp=tp), 2)["none"] for tp in (1, 4))
    assert four - one / 4 == 2 * 3 * (2 * 16 - 2 * 2 * 16 / 4)
    assert [tuple(state) for state in model.states(0, 4)] == [((3, 8 + 2 * 16), True), ((1, 16, 8), False)]


@pytest.mark.parametrize("name", MODELS)
def test_states_do_not_grow_with_the_length(name: str) -> None:
    model, found = MODELS[name], {length: kv_cache_bytes(MODELS[name], length, 4) for length in (8, 16, 24)}
    assert found[24] - found[16] == found[16] - found[8] > 0
    cache = Transformer(model).cache(3, 16)
    assert cache.bytes == 3 * found[16]
    recurrent = flops_per_token(model, 16).attention - flops_per_token(model, 8).attention
    assert 0 < recurrent < flops_per_token(model, 16).attention


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("width", [3, 5])
def test_a_plan_knows_what_a_layer_of_short_convolutions_saves(compiled: bool, width: int) -> None:
    """Bytes per token of a layer by the plan and by autograd; they differ by less than 2 in 100, for marks of documents."""
    sizes, length = [], 64
    model = MODELS["conv"].model_copy(update={"layer_types": ("conv",), "short_conv": ShortConv(conv_kernel=width)})
    for layers in (1, 2):
        one = initialize(Transformer(model.model_copy(update={"num_hidden_layers": layers})), seed=1)
        if compiled:
            one.compile()
        tokens, cu_seqlens = torch.randint(64, (2, length)), torch.tensor([0, length, 2 * length])
        sizes.append(saved_bytes(partial(one.loss, tokens, tokens.roll(-1, 1), cu_seqlens), without=one))
    planned = layer_activations(model, 0, Layout(), 4, length, eager=not compiled)["none"]
    assert (sizes[1] - sizes[0]) / (2 * length) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("name", MODELS)
def test_initial_values_and_optimizers(name: str) -> None:
    """Time steps are within 0.001 and 0.1, decays too; filters and vectors are trained by AdamW without weight decay."""
    model = initialize(Transformer(MODELS[name]), seed=1)
    seen = set()
    for key, parameter in model.named_parameters():
        last = key.rpartition(".")[2]
        seen.add(last)
        if last == "dt_bias":
            steps = torch.nn.functional.softplus(parameter)
            assert float(steps.min()) > 0.9e-3 and float(steps.max()) < 0.11
        if last == "A_log":
            assert float(parameter.exp().min()) > 0 and float(parameter.exp().max()) <= 16.01
        if last == "skip":
            assert (parameter == 1).all()
        if "conv" in key or last in ("dt_bias", "A_log", "skip"):
            assert not is_matrix(key, parameter) and not decays(key, parameter)
        elif key.startswith("layers.") and parameter.ndim == 2:
            assert is_matrix(key, parameter) and float(parameter.std()) < 0.05
    assert ("A_log" in seen) == (name in ("hybrid", "mamba"))
    loss = model.loss(torch.arange(16)[None], torch.arange(1, 17)[None]).total / 16
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
